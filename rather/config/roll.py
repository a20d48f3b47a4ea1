"""ROLL's keys without a counterpart in Rather: ignored with a warning, or refused with the key to
use instead.

A key is ignored if it changes no result of preference training; whatever would change one is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Names = tuple[str, ...]

ROLES = ("actor_train", "reference", "validation")
GROUPS = ["deepspeed_zero", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_cpuoffload"]

# For generation, rewards and Ray's plumbing: ROLL's own preference training ignores them as well.
FOREIGN = "is not used in preference training; it is ignored"
TOP_FOREIGN = """
    generate_opt_level is_num_return_sequences_expand max_running_requests
    is_use_additional_prompts max_additional_running_prompts user_defined_rollout_loop_cls
    router_args base_dir rollout_dump_dir rollout_batch_size rollout_mock local_rank prompt_length
    val_prompt_length val_sequence_length report_length_and_rewards length_profiler_dir
    otlp_output_dir model_update_buffer_size_mb transfer_backend
""".split()  # noqa: SIM905 - a table of names
ROLE_FOREIGN = """
    generating_args pg_variant opd_kl_coef tag_included model_update_frequency max_concurrency
    backend_timeout offload_nccl apply_loss_scale sequence_packing_args
    sequence_length_round_in_train sequence_length_round_in_infer data_args.dataset_type
    data_args.prompt data_args.response data_args.messages data_args.tag data_args.id
    data_args.eval_file_name
""".split()  # noqa: SIM905 - a table of names

MEGATRON = "is for Megatron's own kernels, buffers or files; it is ignored"
MEGATRON_KEYS = """
    overlap_p2p_comm overlap_grad_reduce overlap_param_gather delay_grad_reduce ddp_bucket_size
    ddp_average_in_collective accumulate_allreduce_grads_in_fp32 check_for_nan_in_loss_and_grad
    bias_activation_fusion apply_rope_fusion cross_entropy_loss_fusion variable_seq_lengths
    transformer_impl cuda_graph_impl cuda_graph_scope compile_warmup ckpt_format
    ckpt_d2h_non_blocking distrib_optim_fully_reshardable
    distrib_optim_fully_reshardable_mem_efficient save_hf_model bf16 async_save_ckpt wrap_policy
    reduce_scatter_during_grad_accumulation
""".split()  # noqa: SIM905 - a table of names

TOP_IGNORED = {
    **dict.fromkeys(TOP_FOREIGN, FOREIGN),
    "rpc_timeout": "each kind of call has its own limit; see the keys of `timeouts`",
    "is_offload_states": "reference.offload controls the reference; the policy stays on its device",
    "is_offload_optimizer_states_in_train_step": "use strategy_name zero2_cpu to keep the optimizer state on the host",
    "model_download_type": "models come from a folder or from the Hugging Face hub",
    "profiler_timeline": "use `trace: true` to write the run's timeline",
    "profiler_output_dir": "the timeline of `trace: true` is in the run folder",
    "checkpoint_config.async_upload": "checkpoints are copied before the run continues",
    "checkpoint_config.keep_local_file": "the run folder always keeps its checkpoints; see max_ckpt_to_keep",
    "reference.data_args": "both roles read the same tokens, made by actor_train.data_args",
}
ROLE_IGNORED = {
    **dict.fromkeys(ROLE_FOREIGN, FOREIGN),
    **{f"strategy_args.strategy_config.{name}": MEGATRON for name in MEGATRON_KEYS},
    "name": "the roles have fixed names",
    "use_sequence_packing": "pairs are always packed, which changes no result",
    "use_dynamic_batching_in_train": "micro-batches always have a token budget: max_tokens_per_microbatch_in_train",
    "use_dynamic_batching_in_infer": "micro-batches always have a token budget: max_tokens_per_microbatch_in_infer",
    "logits_in_fp32": "log-probs are always summed in float32 or better",
    "model_args.attn_implementation": "Rather uses its own attention, with shared prompts",
    "model_args.device_map": "device_mapping and strategy_args place the model",
    "model_args.gradient_checkpointing_use_reentrant": "changes no result; set disable_gradient_checkpointing",
    "training_args.output_dir": "output_dir at the top level is used",
    "training_args.dataloader_num_workers": "steps are always packed ahead in the background",
    "training_args.tf32": "`deterministic` and model_args.dtype control the precision",
    "training_args.save_hf_model": "the result is always a folder that from_pretrained opens",
}
TOP_REFUSED = {
    "profiler_memory": "is not supported; remove it",
    "response_length": "set sequence_length, the length of prompt and response",
}
ROLE_REFUSED = {
    "world_size": "device_mapping sets the number of workers; remove it",
    "num_gpus_per_worker": "each worker has one device; remove it",
    "router_replay": "is for mixtures of experts, which are not supported; remove it",
    "mtp_training_mode": "is not supported; remove it",
    "model_args.ulysses_size": "set strategy_args.cp_size instead",
    "model_args.moe_aux_loss_coef": "is for mixtures of experts, which are not supported; remove it",
    "model_args.freeze_module_prefix": "all weights are trained; remove it",
    "model_args.model_config_kwargs": "edit the model's config.json instead",
    "training_args.max_steps": "set max_steps at the top level instead",
    "training_args.seed": "set seed at the top level instead",
    "training_args.bf16": "set model_args.dtype: bf16 instead",
    "training_args.fp16": "set model_args.dtype: fp16 instead",
    "strategy_args.strategy_config.additional_configs": "Megatron's own settings are not supported; remove it",
    "strategy_args.strategy_config.recompute_modules": "recompute_granularity: selective chooses the modules; remove it",
    "strategy_args.strategy_config.calculate_per_token_loss": "a preference loss counts pairs; remove it",
    "strategy_args.strategy_config.fsdp_size": "set strategy_name: hsdp with shard_size instead",
    "strategy_args.strategy_config.ep_size": "expert parallelism is not supported; remove it",
}


def _for_roles(top: Mapping[str, str], of_role: Mapping[str, str]) -> dict[str, str]:
    return {**top, **{f"{role}.{path}": text for role in ROLES for path, text in of_role.items()}}


# Key path -> warning, or reason.
IGNORED, REFUSED = _for_roles(TOP_IGNORED, ROLE_IGNORED), _for_roles(TOP_REFUSED, ROLE_REFUSED)
EXPERTS = "expert parallelism is not supported; remove it, or set it to 1"


def roll_keys(data: Mapping[str, Any]) -> tuple[dict[Names, str], dict[Names, str]]:
    """Return (ignored key path -> warning, refused key path -> reason) for keys that only ROLL has.

    A value that requests nothing (false, 0, null, empty) is ignored without a warning.
    """
    ignored = dict(IGNORED)
    if "sequence_length" in data:
        ignored["response_length"] = FOREIGN
    if "train_batch_size" not in data:
        ignored["val_batch_size"] = "evaluation does not depend on batches; see infer_batch_size"
    # The groups are the targets of `${deepspeed_zero3}`.
    warnings: dict[Names, str] = {(name,): "" for name in GROUPS if name in data}
    errors: dict[Names, str] = {}
    for names, value in _paths(data):
        path = ".".join(names)
        why = EXPERTS if _needs_experts(names, value) else REFUSED.get(path)
        if path in ignored or (why and not value):
            warnings[names] = ignored[path] if value else ""
        elif why:
            errors[names] = why
    return warnings, errors


def _needs_experts(names: tuple[str, ...], value: Any) -> bool:
    """Whether a key is one of Megatron's switches for experts, or puts experts on several
    devices."""
    name, several = names[-1], value not in (None, 1)
    return names[1:-1] == ("strategy_args", "strategy_config") and (
        name.startswith("moe_") or (name == "expert_model_parallel_size" and several)
    )


def _paths(
    data: Mapping[str, Any], before: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return every key, groups included, with its value."""
    for name, value in data.items():
        yield (*before, name), value
        if isinstance(value, Mapping):
            yield from _paths(value, (*before, name))
