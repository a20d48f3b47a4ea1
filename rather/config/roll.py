"""ROLL's keys without a counterpart: told in one line and set aside, or refused with the key to take instead.

Set aside is what changes no result of preference training; whatever would change one is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

GROUPS = ("deepspeed_zero", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_cpuoffload")
ROLES = ("actor_train", "reference", "validation")

# Of generation, rewards and Ray's plumbing: ROLL's own preference training reads none of them.
FOREIGN = "has no part in preference training; it is not read"
TOP_FOREIGN = (
    "generate_opt_level", "is_num_return_sequences_expand", "max_running_requests", "is_use_additional_prompts",
    "max_additional_running_prompts", "user_defined_rollout_loop_cls", "router_args", "base_dir", "rollout_dump_dir",
    "rollout_batch_size", "rollout_mock", "local_rank", "prompt_length", "val_prompt_length", "val_sequence_length",
    "report_length_and_rewards", "length_profiler_dir", "otlp_output_dir", "model_update_buffer_size_mb",
    "transfer_backend",
)  # fmt: skip
ROLE_FOREIGN = (
    "generating_args", "pg_variant", "opd_kl_coef", "tag_included", "model_update_frequency", "max_concurrency",
    "backend_timeout", "offload_nccl", "apply_loss_scale", "sequence_packing_args", "sequence_length_round_in_train",
    "sequence_length_round_in_infer",
)  # fmt: skip
DATA_FOREIGN = ("dataset_type", "prompt", "response", "messages", "tag", "id", "eval_file_name")

# Of Megatron's kernels, buffers and files.
MEGATRON = "is about Megatron's own kernels, buffers or files; it is not read"
MEGATRON_KEYS = (
    "overlap_p2p_comm", "overlap_grad_reduce", "overlap_param_gather", "delay_grad_reduce", "ddp_bucket_size",
    "ddp_average_in_collective", "accumulate_allreduce_grads_in_fp32", "check_for_nan_in_loss_and_grad",
    "bias_activation_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion", "variable_seq_lengths",
    "transformer_impl", "cuda_graph_impl", "cuda_graph_scope", "compile_warmup", "ckpt_format",
    "ckpt_d2h_non_blocking", "distrib_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient",
    "save_hf_model", "bf16", "async_save_ckpt", "wrap_policy", "reduce_scatter_during_grad_accumulation",
)  # fmt: skip

TOLD = {
    "rpc_timeout": "each kind of call has its own limit; see the keys of `timeouts`",
    "is_offload_states": "the reference waits on the host as reference.offload says; the policy stays on its device",
    "is_offload_optimizer_states_in_train_step": "is not done by itself; strategy_name zero2_cpu keeps the "
    "optimizer's state on the host",
    "model_download_type": "models come from a folder or from the Hugging Face hub",
    "profiler_timeline": "`trace: true` draws the run's timeline",
    "profiler_output_dir": "the timeline of `trace: true` lies in the run folder",
    "checkpoint_config.async_upload": "checkpoints are copied before the run goes on",
    "checkpoint_config.keep_local_file": "the run folder always keeps its checkpoints; see max_ckpt_to_keep",
    "reference.data_args": "both roles read the same tokens, made as actor_train.data_args says",
}
ROLE_TOLD = {
    "name": "the roles have fixed names",
    "use_sequence_packing": "pairs are always packed, which changes no result",
    "use_dynamic_batching_in_train": "micro-batches always follow a token budget: max_tokens_per_microbatch_in_train",
    "use_dynamic_batching_in_infer": "micro-batches always follow a token budget: max_tokens_per_microbatch_in_infer",
    "logits_in_fp32": "log-probs are always summed in float32 or better",
    "model_args.attn_implementation": "attention is Rather's own, with shared prompts",
    "model_args.device_map": "device_mapping and strategy_args say where a model lies",
    "model_args.gradient_checkpointing_use_reentrant": "changes no result; disable_gradient_checkpointing is read",
    "training_args.output_dir": "output_dir at the top level says where a run is written",
    "training_args.dataloader_num_workers": "steps are packed ahead in the background by themselves",
    "training_args.tf32": "`deterministic` and model_args.dtype say how numbers are computed",
    "training_args.save_hf_model": "the result is always a folder that from_pretrained opens",
}
REFUSED = {
    "profiler_memory": "is not offered; remove it",
    "response_length": "say the length of prompt and response together: sequence_length",
}
ROLE_REFUSED = {
    "world_size": "device_mapping says how many workers there are; remove it",
    "num_gpus_per_worker": "each worker has one device; remove it",
    "router_replay": "is for mixtures of experts, which are not offered; remove it",
    "mtp_training_mode": "is not offered; remove it",
    "model_args.ulysses_size": "is written strategy_args.cp_size here",
    "model_args.moe_aux_loss_coef": "is for mixtures of experts, which are not offered; remove it",
    "model_args.freeze_module_prefix": "all weights are trained; remove it",
    "model_args.model_config_kwargs": "edit the model's config.json instead",
    "training_args.max_steps": "is written at the top level: max_steps",
    "training_args.seed": "is written at the top level: seed",
    "training_args.bf16": "is written model_args.dtype: bf16",
    "training_args.fp16": "is written model_args.dtype: fp16",
    "strategy_args.strategy_config.additional_configs": "Megatron's own settings are not offered; remove it",
    "strategy_args.strategy_config.recompute_modules": "recompute_granularity: selective picks what is recomputed by "
    "itself; remove it",
    "strategy_args.strategy_config.calculate_per_token_loss": "a preference loss counts pairs; remove it",
    "strategy_args.strategy_config.fsdp_size": "is written strategy_name: hsdp with shard_size here",
    "strategy_args.strategy_config.ep_size": "needs expert parallelism for a mixture of experts, which is not offered",
}
EXPERTS = "needs expert parallelism for a mixture of experts, which is not offered; remove it, or set it to 1"

Names = tuple[str, ...]


def strangers(data: Mapping[str, Any]) -> tuple[dict[Names, str], dict[Names, str]]:
    """(key path -> what is told of it, key path -> why it is refused) for keys of ROLL that the schema lacks.

    A value that asks for nothing (false, 0, null, empty) is set aside without a word.
    """
    told, refused = dict(_told()), dict(_refused())
    if "sequence_length" in data:
        told[("response_length",)] = FOREIGN
    if "train_batch_size" not in data:
        told[("val_batch_size",)] = (
            "evaluation does not depend on its batches; infer_batch_size limits them"
        )
    aside: dict[Names, str] = {
        (name,): "" for name in GROUPS if name in data
    }  # what `${deepspeed_zero3}` points at
    found: dict[Names, str] = {}
    for names, value in _paths(data):
        why = EXPERTS if _of_experts(names, value) else refused.get(names)
        if names in told or (why and not value):
            aside[names] = told[names] if value else ""
        elif why:
            found[names] = why
    return aside, found


def _told() -> Iterator[tuple[Names, str]]:
    yield from (((name,), FOREIGN) for name in TOP_FOREIGN)
    yield from ((tuple(path.split(".")), text) for path, text in TOLD.items())
    for role in ROLES:
        yield from (((role, name), FOREIGN) for name in ROLE_FOREIGN)
        yield from (((role, "data_args", name), FOREIGN) for name in DATA_FOREIGN)
        yield from (((role, *path.split(".")), text) for path, text in ROLE_TOLD.items())
        yield from (
            ((role, "strategy_args", "strategy_config", name), MEGATRON) for name in MEGATRON_KEYS
        )


def _refused() -> Iterator[tuple[Names, str]]:
    yield from ((tuple(path.split(".")), text) for path, text in REFUSED.items())
    for role in ROLES:
        yield from (((role, *path.split(".")), text) for path, text in ROLE_REFUSED.items())


def _of_experts(names: Names, value: Any) -> bool:
    """Megatron's own switches of experts, and experts on several devices."""
    if names[1:-1] != ("strategy_args", "strategy_config"):
        return False
    return names[-1].startswith("moe_") or (
        names[-1] == "expert_model_parallel_size" and value not in (None, 1)
    )


def _paths(data: Mapping[str, Any], before: Names = ()) -> Iterator[tuple[Names, Any]]:
    """Every key, groups too, with its value."""
    for name, value in data.items():
        yield (*before, name), value
        if isinstance(value, Mapping):
            yield from _paths(value, (*before, name))
