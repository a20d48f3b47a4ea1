"""ms-swift: the arguments of `swift rlhf --rlhf_type dpo`."""

from __future__ import annotations

from typing import Any

from rather.migrate.engine import Peer
from rather.migrate.peers.shared import (
    DATA,
    DTYPES,
    HF,
    HF_DEFAULTS,
    MACHINERY,
    MODEL,
    adapter,
    dataset,
    length,
    loss_name,
)
from rather.migrate.peers.trl import DIVERGENCES
from rather.migrate.rules import (
    NOT_NEEDED,
    RENAMED,
    Given,
    Outcome,
    Rule,
    Unsupported,
    each,
    if_set,
    needless,
    never,
    only,
    to,
)

KINDS = {"dpo": None, "orpo": "orpo", "simpo": "simpo", "cpo": "cpo"}
CUTS = {"delete": "drop", "left": "truncate_prompt", "right": "truncate_response"}


def kind(value: Any, given: Given) -> Outcome:
    if value not in KINDS:
        raise Unsupported(f"not preference training on pairs; supported: {', '.join(KINDS)}")
    ours = KINDS[value]
    return Outcome(RENAMED, {"pref_loss": ours}) if ours else NOT_NEEDED


def loss_type(value: Any, given: Given) -> Outcome:
    dpo = value and given.get("rlhf_type") == "dpo"
    return loss_name(kto_pair=None)(value, given) if dpo else NOT_NEEDED


def cut(value: Any, given: Given) -> Outcome:
    note = "" if value == "delete" else "left cuts the prompt, right the answers"
    return to(DATA + "overlong", CUTS, note=note)(value, given)


RULES: dict[str, Rule] = {
    **HF,
    **adapter("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save",
              off=("train_type", ("full",))),
    **each("train_type tuner_type", only("lora", "full", why="weights are trained whole or by a LoRA adapter")),
    "rlhf_type": kind,
    "model": to("pretrain"),
    "model_revision": to(MODEL + "revision"),
    "adapters": to(MODEL + "adapter_name_or_path", lambda value: value[0] if isinstance(value, list) else value),
    "ref_model": to("reference.model_args.model_name_or_path"),
    "ref_adapters": never("the reference has the policy's starting adapter, or none"),
    "torch_dtype": to(MODEL + "dtype", DTYPES),
    "quant_bits": to(MODEL + "quantization", {4: "4bit"}),
    "dataset": dataset(),
    "val_dataset": dataset("validation.data_args.file_name"),
    "split_dataset_ratio": if_set("validation.data_args.split"),
    "template": never("name one of ours: global_template"),
    "system": never("write the system message into the rows"),
    "max_length": length(),
    "truncation_strategy": cut,
    "loss_scale": to(DATA + "score", {"last_round": "last", "default": "assistant", "all": "all"}),
    "loss_type": loss_type,
    "loss_weights": to("loss_weights"),
    "beta": to("beta"),
    "label_smoothing": to("label_smoothing"),
    "rpo_alpha": to("rpo_alpha"),
    "simpo_gamma": to("gamma"),
    "cpo_alpha": to("rpo_alpha", note="in simpo the NLL has this weight"),
    "ld_alpha": to("ld_alpha"),
    "f_divergence_type": to("f_divergence_type", DIVERGENCES),
    "reference_free": to("reference_free"),
    "sequence_parallel_size": to("actor_train.strategy_args.cp_size"),
    "columns": to(DATA + "columns", note="swift writes its name first: {theirs: ours}; turn the entries round"),
    **each("packing padding_free", needless("pairs are always packed")),
    "attn_impl": needless("Rather has its own attention"),
    **each("freeze_vit freeze_llm freeze_aligner", needless("language models only")),
    **each("use_hf model_type task_type add_version dataset_shuffle lazy_tokenize load_from_cache_file "
           "create_checkpoint_symlink dataloader_num_workers model_author model_name strict ignore_args_error "
           "max_pixels streaming num_labels ddp_timeout save_only_model", needless(MACHINERY)),
}  # fmt: skip

SWIFT = Peer(
    "swift",
    RULES,
    defaults={
        **{key: value for key, value in HF_DEFAULTS.items() if key != "learning_rate"},
        "rlhf_type": "dpo", "train_type": "lora", "lora_rank": 8, "lora_alpha": 32, "logging_steps": 5,
        "lr_scheduler_type": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95, "per_device_train_batch_size": 1,
    },
    marks=("rlhf_type", "train_type", "tuner_type", "split_dataset_ratio", "loss_scale", "ref_adapters",
           "truncation_strategy", "attn_impl", "quant_bits"),
    words=("swift rlhf", "megatron rlhf"),
    whole=("lr_scheduler_kwargs", "columns", "deepspeed"),
    always=(
        "swift computes label_smoothing, LD and the divergences as TRL before 0.29 did.",
        "Where learning_rate or gradient_accumulation_steps is not written, swift chooses by the kind of training: "
        "write them.",
    ),
)  # fmt: skip
