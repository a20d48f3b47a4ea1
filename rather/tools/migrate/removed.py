"""What `rather migrate` no longer converts, how to recognise it, and what to do instead."""

from __future__ import annotations

PAGE = "docs/coming_from/index.md"
SCRIPT = (
    "Python scripts are not converted; change the import to `from rather.trl import ...` and run "
    "the script (docs/coming_from/trl.md)."
)
LINE = (
    "command lines and shell scripts are not converted; pass the YAML or JSON file that the "
    f"command reads, or write its flags as keys into one. {PAGE} has the keys of tools without "
    "such files."
)
TOOL = f"is not converted; write a YAML with `rather init` and the table of its keys in {PAGE}."
FILES = {".py": SCRIPT, ".ipynb": SCRIPT}  # others than YAML and JSON: LINE
# Tools, and parts of keys that only their files have.
MARKS = {
    "openrlhf": "micro_train_batch_size nll_loss_coef lr_warmup_ratio ref_pretrain zero_stage "
    "packing_samples max_ckpt_num adam_offload",
    "nemo-rl": "reference_policy_kl_penalty train_global_batch_size max_total_sequence_length "
    "megatron_cfg dtensor_cfg checkpoint_dir gpus_per_node",
    "swift": "rlhf_type train_type tuner_type split_dataset_ratio loss_scale ref_adapters "
    "truncation_strategy attn_impl quant_bits",
    "colossalchat": "plugin accumulation_steps grad_clip disable_loss_mask ref_tp save_dir "
    "save_interval disable_reference_model microbatch_size zero_cpu_offload",
}
