"""Files and keys of other systems: ROLL, DeepSpeed, ColossalChat's adapter files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rather import files
from rather.config.schema import ActorConfig, ActorModelArgs, RunConfig, StrategyArgs
from rather.config.values import section_problems
from rather.errors import ConfigError
from rather.files import JsonObject

Names = tuple[str, ...]  # a key path in parts: names in a mapping may contain dots
Problems = Iterator[tuple[str, str]]

# --- other tools' words for a key of Rather: one table, applied before anything is inherited ---


class Alias(NamedTuple):
    """What another tool's key means here. Its other values say nothing."""

    key: str
    meanings: Mapping[Any, Any] | None = None  # its value -> that of the key; None: the same value
    yields: Any = None  # a value of the key that does not contradict: runs write every key down
    takes: type = object  # values of strategy_config are checked after they are inherited

    def meaning(self, setting: Any) -> Any:
        if self.meanings is not None:
            return self.meanings.get(setting)
        return setting if isinstance(setting, self.takes) else None


# Degrees of strategy_args, and Megatron's words for them in strategy_config.
DEGREES = {
    "tp_size": "tensor_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
    "cp_size": "context_parallel_size",
    "ep_size": "expert_model_parallel_size",
}


def _degrees_in_details() -> dict[str, Alias]:
    """Return the aliases of degrees that are written in strategy_config."""
    aliases = {}
    for role in ("actor_train", "reference"):
        for name, megatron_name in DEGREES.items():
            alias = Alias(f"{role}.strategy_args.{name}", takes=int)
            aliases[f"{role}.{CONFIG}.{name}"] = alias
            aliases[f"{role}.{CONFIG}.{megatron_name}"] = alias
    return aliases


CONFIG = "strategy_args.strategy_config"
ALIASES = {
    "ipo": Alias("pref_loss", {True: "ipo"}, yields="sigmoid"),
    "loss_type": Alias("pref_loss", {"dpo_loss": "sigmoid", "simpo_loss": "simpo"}, "sigmoid"),
    "disable_reference_model": Alias("use_ref_model", {True: False, False: True}),
    "apply_loss_mask": Alias("actor_train.data_args.score", {False: "all"}),
    "ref_tp": Alias("reference.strategy_args.tp_size"),
    "actor_train.model_args.additional_target": Alias("actor_train.model_args.modules_to_save"),
    **_degrees_in_details(),
}

# --- ROLL's keys without a counterpart: ignored with a warning if they change no result of
# preference training, otherwise refused with the key to use instead ---

ROLES = ("actor_train", "reference", "validation")
GROUPS = ["deepspeed_zero", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_cpuoffload"]

# For generation, rewards and Ray's plumbing: ROLL's own preference training ignores them as well.
FOREIGN = "is not used in preference training; it is ignored"
TOP_FOREIGN = """
    generate_opt_level is_num_return_sequences_expand max_running_requests
    is_use_additional_prompts max_additional_running_prompts user_defined_rollout_loop_cls
    router_args base_dir rollout_dump_dir rollout_batch_size rollout_mock local_rank prompt_length
    val_prompt_length val_sequence_length report_length_and_rewards length_profiler_dir
    otlp_output_dir model_update_buffer_size_mb transfer_backend custom_env
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
    reduce_scatter_during_grad_accumulation moe_token_dispatcher_type moe_grouped_gemm
    moe_shared_expert_overlap moe_permute_fusion moe_router_fusion moe_use_grouped_mm
    apply_expert_patch
""".split()  # noqa: SIM905 - a table of names

TOP_IGNORED = {
    **dict.fromkeys(TOP_FOREIGN, FOREIGN),
    "rpc_timeout": "each kind of call has its own limit; see the keys of `timeouts`",
    "is_offload_states": "reference.offload controls the reference; the policy stays on its device",
    "is_offload_optimizer_states_in_train_step": "strategy_name zero2_cpu keeps it on the host",
    "model_download_type": "models come from a folder or from the Hugging Face hub",
    "profiler_timeline": "metrics.jsonl and the report say where the time of a step goes",
    "profiler_output_dir": "metrics and report are in the run folder",
    "checkpoint_config.async_upload": "checkpoints are uploaded in the background",
    "checkpoint_config.keep_local_file": "the run folder keeps checkpoints; see max_ckpt_to_keep",
    "reference.model_args.moe_aux_loss_coef": "only the policy has a router loss",
    "reference.data_args": "both roles read the same tokens, made by actor_train.data_args",
}
ROLE_IGNORED = {
    **dict.fromkeys(ROLE_FOREIGN, FOREIGN),
    **{f"strategy_args.strategy_config.{name}": MEGATRON for name in MEGATRON_KEYS},
    "strategy_args.strategy_config.recompute_modules": "recompute_granularity decides",
    "strategy_args.strategy_config.moe_layer_recompute": "recompute_granularity decides",
    "name": "the roles have fixed names",
    "use_sequence_packing": "pairs are always packed, which changes no result",
    "use_dynamic_batching_in_train": "see max_tokens_per_microbatch_in_train",
    "use_dynamic_batching_in_infer": "see max_tokens_per_microbatch_in_infer",
    "logits_in_fp32": "log-probs are always summed in float32 or better",
    "model_args.attn_implementation": "Rather uses its own attention, with shared prompts",
    "model_args.device_map": "device_mapping and strategy_args place the model",
    "model_args.gradient_checkpointing_use_reentrant": "set disable_gradient_checkpointing",
    "training_args.output_dir": "output_dir at the top level is used",
    "training_args.dataloader_num_workers": "steps are always packed ahead in the background",
    "training_args.tf32": "`deterministic` and model_args.dtype control the precision",
    "training_args.save_hf_model": "the result is always a folder that from_pretrained opens",
}
DROPS = "no token of an expert is dropped or padded; remove it"
REPLAY = "every pass chooses experts itself (docs: Mixture of experts); remove it"
MORE = "additional_configs"
# Keys of earlier versions of Rather.
REMOVED = {
    "parity": "was removed; `from rather.trl import DPOConfig, DPOTrainer` trains on TRL's tokens "
    "(docs: Coming from TRL); remove it",
    "determinism": "was removed; runs on the same devices are reproducible, on GPUs with "
    "deterministic: true; remove it",
    "trace": "was removed; metrics.jsonl and the report say where the time of a step goes; "
    "remove it",
    "reference.cache.per_token": "was removed; what ld_alpha needs is stored if the loss has it; "
    "remove it",
    "reference.cache.recheck": "was removed; entries are found by the weights and tokens that they "
    "belong to, and to compute all of them again, delete reference.cache.path; remove it",
    "timeouts.adaptive": "was removed; every call may take as long as the other keys of timeouts "
    "say; remove it",
}
REMOVED_VALUES = {"report_html=auto": "`auto` was removed; write true, the default, or false"}
TOP_REFUSED = {
    **REMOVED,
    "profiler_memory": "is not supported; remove it",
    "response_length": "set sequence_length, the length of prompt and response",
}
ROLE_REFUSED = {
    "world_size": "device_mapping sets the number of workers; remove it",
    "num_gpus_per_worker": "each worker has one device; remove it",
    "router_replay": REPLAY,
    "mtp_training_mode": "is not supported; remove it",
    "model_args.ulysses_size": "set strategy_args.cp_size instead",
    "model_args.freeze_module_prefix": "all weights are trained; remove it",
    "model_args.model_config_kwargs": "edit the model's config.json instead",
    "training_args.max_steps": "set max_steps at the top level instead",
    "training_args.seed": "set seed at the top level instead",
    "training_args.bf16": "set model_args.dtype: bf16 instead",
    "training_args.fp16": "set model_args.dtype: fp16 instead",
    "strategy_args.strategy_config.calculate_per_token_loss": "a preference loss counts pairs",
    "strategy_args.strategy_config.fsdp_size": "set strategy_name: hsdp with shard_size instead",
    f"{CONFIG}.moe_aux_loss_coeff": "Megatron adds it up over layers; choose actor_train.model_args.moe_aux_loss_coef",
    f"{CONFIG}.moe_enable_routing_replay": REPLAY,
    f"{CONFIG}.moe_router_dtype": "routers compute as the model's code does; remove it",
    f"{CONFIG}.moe_expert_capacity_factor": DROPS,
    f"{CONFIG}.moe_pad_expert_input_to_capacity": DROPS,
    f"{CONFIG}.moe_token_drop_policy": DROPS,
}


def _for_roles(top: Mapping[str, str], of_role: Mapping[str, str]) -> dict[str, str]:
    texts = dict(top)
    for role in ROLES:
        texts |= {f"{role}.{path}": text for path, text in of_role.items()}
    return texts


# Key path -> warning, or reason.
IGNORED = _for_roles(TOP_IGNORED, ROLE_IGNORED)
REFUSED = _for_roles(TOP_REFUSED, ROLE_REFUSED)


def roll_keys(data: JsonObject) -> tuple[dict[Names, str], dict[Names, str]]:
    """Return (ignored key path -> warning, refused key path -> reason) for keys that only ROLL has,
    or that Rather had once.

    A value that requests nothing (false, 0, null, empty) is ignored without a warning.
    """
    ignored = IGNORED | dict.fromkeys(GROUPS, "")  # targets of `${deepspeed_zero3}`
    if "sequence_length" in data:
        ignored["response_length"] = FOREIGN
    if "train_batch_size" not in data:
        ignored["val_batch_size"] = "evaluation does not depend on batches; see infer_batch_size"
    warnings: dict[Names, str] = {}
    errors: dict[Names, str] = {}
    for names, setting in _paths(data):
        # additional_configs holds further keys of strategy_config.
        path = ".".join(name for name in names if name != MORE)
        why = REFUSED.get(path)
        if MORE in names[:-1] and path not in IGNORED:
            why = why or "is not supported; remove it"
        elif names[-1] == MORE:
            warnings[names] = ""
        if path in ignored or (why and not setting):
            warnings[names] = ignored[path] if setting else ""
        elif why:
            errors[names] = why
    return warnings, errors


def _paths(data: Mapping[str, Any], before: Names = ()) -> Iterator[tuple[Names, Any]]:
    """Return every key, groups included, with its value."""
    for name, setting in data.items():
        yield (*before, name), setting
        if isinstance(setting, Mapping):
            yield from _paths(setting, (*before, name))


def roll_nodes(config: RunConfig) -> int:
    """Return num_nodes, or the machines of device_mapping: ROLL's file has 16 GPUs on "1" node."""
    strategy = config.actor_train.strategy_args.strategy_name or ""
    gpus_per_node = config.num_gpus_per_node
    if not strategy.startswith("megatron") or not gpus_per_node or config.num_nodes > 1:
        return config.num_nodes
    nodes, gpus_over = divmod(max(config.actor_train.devices) + 1, gpus_per_node)
    return config.num_nodes if gpus_over else max(nodes, config.num_nodes)


def answers_per_device(config: RunConfig, pairs_per_rank: int) -> bool:
    """Whether per_device_train_batch_size counts answers, two per pair, as in older ROLL files."""
    training = config.actor_train.training_args
    size = training.per_device_train_batch_size
    rows_per_rank = size * training.gradient_accumulation_steps
    is_double = rows_per_rank == 2 * pairs_per_rank
    return config.val_batch_size is not None and is_double and size % 2 == 0


# --- a DeepSpeed configuration as strategy_config, or in a JSON file that it names: sharding stage,
# offloading and clipping are read; what only tunes DeepSpeed's buffers and prints is ignored ---

FILE, STAGE, CLIPPING = "config_file", "zero_optimization.stage", "gradient_clipping"
UNUSED = """
    steps_per_print wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization.overlap_comm zero_optimization.contiguous_gradients
    zero_optimization.reduce_scatter zero_optimization.reduce_bucket_size
    zero_optimization.allgather_bucket_size zero_optimization.allgather_partitions
    zero_optimization.sub_group_size zero_optimization.round_robin_gradients
    zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
    zero_optimization.stage3_gather_16bit_weights_on_model_save
    zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_param.pin_memory
    fp16.loss_scale_window fp16.initial_scale_power fp16.hysteresis fp16.min_loss_scale
""".split()  # noqa: SIM905 - a table of names
ELSEWHERE = {
    "train_batch_size": "train_batch_size at the top level",
    "train_micro_batch_size_per_gpu": "actor_train.training_args.per_device_train_batch_size",
    "gradient_accumulation_steps": "actor_train.training_args.gradient_accumulation_steps",
    "bf16.enabled": "model_args.dtype: bf16",
    "fp16.enabled": "model_args.dtype: fp16",
}
OFFLOADS = [f"zero_optimization.offload_{what}.device" for what in ("optimizer", "param")]
ALLOWED: dict[str, tuple[Any, ...]] = {
    STAGE: (0, 1, 2, 3),
    "fp16.loss_scale": (0, "auto"),  # 0: dynamic
    **dict.fromkeys(OFFLOADS, ("cpu", "none", None, "auto")),
    **dict.fromkeys(ELSEWHERE, ("auto", False)),
}


def is_deepspeed(name: str | None) -> bool:
    return (name or "").startswith("deepspeed_")


def deepspeed_settings(details: JsonObject) -> JsonObject:
    """Return dotted key -> value, of strategy_config or of the file that it names."""
    content = read_object(Path(str(details[FILE]))) if FILE in details else details
    return {
        ".".join(names): setting
        for names, setting in _paths(content)
        if not isinstance(setting, Mapping)
    }


def deepspeed_sharding(details: JsonObject) -> tuple[int, bool]:
    """Return the sharding stage, and whether optimizer or weights are offloaded to the CPU."""
    settings = deepspeed_settings(details)
    return settings.get(STAGE, 0), any(settings.get(key) == "cpu" for key in OFFLOADS)


def deepspeed_clipping(args: StrategyArgs) -> float | None:
    """Return the gradient clipping of a valid DeepSpeed configuration, if it has one."""
    details = args.strategy_config
    if not is_deepspeed(args.strategy_name) or any(deepspeed_problems(details)):
        return None
    max_norm = deepspeed_settings(details).get(CLIPPING, "auto")
    return None if max_norm == "auto" else float(max_norm)


def clippings(actor: ActorConfig) -> dict[str, float | None]:
    """Return key path -> gradient clipping, of the keys that mean max_grad_norm."""
    return {
        "actor_train.training_args.max_grad_norm": actor.training_args.max_grad_norm,
        "actor_train.strategy_args.strategy_config": deepspeed_clipping(actor.strategy_args),
    }


def deepspeed_problems(details: JsonObject) -> Problems:
    """Yield (key inside strategy_config, sentence) for every setting that is not supported."""
    if FILE in details and len(details) > 1:
        yield FILE, "is a whole configuration; remove the other keys"
        return
    try:
        settings = deepspeed_settings(details)
    except ConfigError as error:
        yield FILE, str(error)
        return
    for key, setting in settings.items():
        allowed = ALLOWED.get(key, ("auto",))
        if key in UNUSED or setting in allowed or (key == CLIPPING and _is_norm(setting)):
            continue
        advice = f"set {ELSEWHERE[key]} instead" if key in ELSEWHERE else "remove it"
        text = f"{setting!r} is not supported, only {allowed}; {advice}"
        yield (FILE, f"{details[FILE]}: {key}: {text}") if FILE in details else (key, text)


def _is_norm(setting: Any) -> bool:
    is_number = isinstance(setting, int | float) and not isinstance(setting, bool)
    return is_number and setting >= 0


def read_object(file: Path) -> JsonObject:
    """Return the object in a JSON file, or raise a ConfigError that says why it is unusable."""
    try:
        return files.read_object(file.expanduser())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({getattr(error, 'strerror', error)})") from None


# --- lora_config: a JSON file of ColossalChat's or PEFT's settings -> Rather's keys ---

LORA_KEYS = {
    "r": "lora_rank",
    "target_modules": "lora_target",
    "linear_lora_dropout": "lora_dropout",
    "lora_initialization_method": "init_lora_weights",
}
INITIALIZATIONS = {"kaiming_uniform": True, "PiSSA": "pissa_niter_4"}  # ColossalChat's -> PEFT's
NOT_SUPPORTED = {"embedding_lora_dropout": 0, "lora_train_bias": "none"}  # other than these values


def lora_file(args: ActorModelArgs) -> tuple[JsonObject, list[str]]:
    """Return the settings of the lora_config file by Rather's keys, and what is wrong with it."""
    try:
        values = read_object(Path(args.lora_config)) if args.lora_config else {}
    except ConfigError as error:
        return {}, [str(error)]
    settings = {
        LORA_KEYS.get(key, key): INITIALIZATIONS.get(str(setting), setting)
        for key, setting in values.items()
        if setting is not None and key not in NOT_SUPPORTED
    }
    wrong = [(key, f"must be {off}") for key, off in NOT_SUPPORTED.items()
             if values.get(key, off) != off]  # fmt: skip
    wrong += section_problems(type(args), settings)
    problems = [f"{key} in {args.lora_config}: {text}" for key, text in wrong]
    return {} if problems else settings, problems
