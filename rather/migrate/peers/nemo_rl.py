"""NeMo-RL: the YAML of run_dpo.py, with the files that it inherits from, and overrides.

Facts of 0.6 (examples/configs/dpo.yaml, nemo_rl/utils/config.py). All settings are in its files:
the code has no defaults.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rather.errors import ConfigError
from rather.migrate.engine import PROGRAM, Peer
from rather.migrate.peers.shared import (
    ADAMW,
    DETAILS,
    DTYPES,
    MACHINERY,
    MODEL,
    STRATEGY,
    TRAINING,
    dataset,
    length,
    positive,
    run_folder,
    tracker,
)
from rather.migrate.rules import (
    CHANGED,
    NOT_NEEDED,
    OPEN,
    RENAMED,
    UNSET,
    Given,
    Outcome,
    Rule,
    Unsupported,
    algorithm,
    each,
    if_set,
    left_out,
    needless,
    never,
    only,
    to,
    when,
)
from rather.migrate.source import read_mapping

REFERENCE = re.compile(r"\$\{(\.?)([\w.]+)\}")
MOST_PARENTS = 8
OTHER_ALGORITHMS = ("grpo", "sft", "rm", "distillation", "ppo")


def recipe(path: Path) -> dict[str, Any]:
    """Read a file over its parents (`defaults:`), and fill in ${a.b} and ${.b}."""
    values = inherited(path, 0)
    algorithms = [name for name in OTHER_ALGORITHMS if name in values]
    if "dpo" not in values and algorithms:
        raise ConfigError(f"{path}: {algorithms[0]} is not training on preference pairs.")
    return {key: _filled(item, values, values, 0) for key, item in values.items()}


def inherited(path: Path, depth: int) -> dict[str, Any]:
    if not path.is_file() or depth > MOST_PARENTS:
        raise ConfigError(f"{path}: this parent of a recipe (defaults:) does not exist; fetch it.")
    own = read_mapping(path)
    parents = own.pop("defaults", [])
    values: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        values = _merged(values, inherited(path.parent / str(parent), depth + 1))
    return _merged(values, own)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge mappings, unless the upper one says `_override_: true`; replace all other values."""
    result = {} if above.get("_override_") else dict(below)
    for key, value in above.items():
        old = result.get(key)
        is_section = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merged(old, value) if is_section and old is not None else value
    result.pop("_override_", None)
    return result


def _filled(value: Any, owner: Any, root: Any, depth: int) -> Any:
    """Replace a text that is one reference; what cannot be found stays, and is reported."""
    if isinstance(value, dict):
        return {key: _filled(item, value, root, depth) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, owner, root, depth) for item in value]
    found = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if not found or depth > MOST_PARENTS:
        return value
    place = owner if found[1] else root
    for name in found[2].split("."):
        place = place.get(name, UNSET) if isinstance(place, dict) else UNSET
    if place is UNSET or isinstance(place, dict | list):
        return value
    return _filled(place, owner, root, depth + 1)


def enabled(section: str, rule: Rule) -> Rule:
    """Use a key of a backend only if that backend is on."""

    return when(lambda value, given: given.get(f"policy.{section}.enabled"), rule)


def lora(key: str, path: str, convert: Any = None) -> dict[str, Rule]:
    """Return the rules of a key of the adapters of both backends."""

    def of(backend: str, section: str) -> Rule:
        switch = f"policy.{backend}.{section}.enabled"
        is_on = when(lambda value, given: given.get(switch), to(MODEL + path, convert))
        return enabled(backend, is_on)

    sections = (("dtensor_cfg", "lora_cfg"), ("megatron_cfg", "peft"))
    return {f"policy.{backend}.{name}.{key}": of(backend, name) for backend, name in sections}


def whole_model(section: str) -> Rule:
    """Without an adapter all weights are trained."""
    return enabled(
        section,
        lambda value, given: NOT_NEEDED if value else Outcome(RENAMED, {MODEL + "lora_rank": None}),
    )


def with_validation(value: Any, given: Given) -> Outcome:
    """Older files name one data set, and evaluate on its other split."""
    found = dataset()(value, given)
    if found.status != OPEN or "data.val_data_path" in given:
        return found
    held_out = {"validation.data_args.file_name": f"{value}-validation.jsonl"}
    return Outcome(OPEN, {**found.values, **held_out}, found.note)


def backend(strategy: str) -> Rule:
    return when(lambda value, given: value, to(STRATEGY, lambda _: strategy))


def degree(path: str) -> Rule:
    return when(lambda value, given: value and value > 1, to(path))


def betas(value: Any, given: Given) -> Outcome:
    return Outcome(RENAMED, {TRAINING + "adam_beta1": value[0], TRAINING + "adam_beta2": value[1]})


def sft_weight(value: Any, given: Given) -> Outcome:
    if not value:
        return NOT_NEEDED
    average = given.get("dpo.sft_average_log_probs")
    key = "pref_ftx" if average else "rpo_alpha"
    note = "NeMo-RL sums the log-probs of an answer; Rather averages over tokens: tune it again"
    return to(key, note="" if average else note)(value, given)


def devices(value: Any, given: Given) -> Outcome:
    count = value * given.get("cluster.num_nodes", 1)
    mapping = {"actor_train.device_mapping": f"0-{count - 1}"} if count > 1 else {}
    return Outcome(RENAMED, {"num_gpus_per_node": value, **mapping})


def schedule(value: Any, given: Given) -> Outcome:
    """Translate a list of torch schedulers: a linear warm-up and what follows it."""
    parts = value if isinstance(value, list) else [value]
    named = {str(part.get("name", "")).rpartition(".")[2]: part.get("kwargs", {}) for part in parts}
    values: dict[str, Any] = {TRAINING + "lr_scheduler_type": "constant"}
    if "CosineAnnealingLR" in named:
        floor = named["CosineAnnealingLR"].get("eta_min")
        values = {TRAINING + "lr_scheduler_type": "cosine"}
        values |= {TRAINING + "lr_scheduler_kwargs": {"min_lr": floor}} if floor else {}
    kinds = [str(part.get("name", "")).rpartition(".")[2] for part in parts if part.get("name")]
    if set(kinds) - {"LinearLR", "ConstantLR", "CosineAnnealingLR"} or kinds.count("LinearLR") > 2:
        raise Unsupported(f"a schedule of {', '.join(kinds)}")
    if kinds[1:] == ["LinearLR"]:
        falls = parts[1].get("kwargs", {})
        if falls.get("end_factor"):
            raise Unsupported("a linear schedule ends at 0 here")
        values = {TRAINING + "lr_scheduler_type": "linear"}
        named["LinearLR"] = parts[0].get("kwargs", {})
    if kinds[:1] == ["LinearLR"]:
        values[TRAINING + "warmup_steps"] = int(named["LinearLR"].get("total_iters", 0))
    return Outcome(CHANGED, values, "warm-up starts at 0, and a cosine ends with the run")


def megatron_schedule(value: Any, given: Given) -> Outcome:
    styles = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    return to(TRAINING + "lr_scheduler_type", styles)(value, given)


MEGATRON = "policy.megatron_cfg."
RULES: dict[str, Rule] = {
    PROGRAM: algorithm({"run_dpo": "sigmoid"}),
    "(section)": algorithm({"dpo": "sigmoid"}),
    **lora("dim", "lora_rank"),
    **lora("alpha", "lora_alpha", float),
    **lora("match_all_linear", "lora_target", {True: "all-linear"}),
    "policy.dtensor_cfg.lora_cfg.enabled": whole_model("dtensor_cfg"),
    "policy.megatron_cfg.peft.enabled": whole_model("megatron_cfg"),
    "policy.dtensor_cfg.lora_cfg.*": when(lambda value, given: given.get("policy.dtensor_cfg.lora_cfg.enabled"),
                                          never("not an option of adapters here", unless=(0.0, "post", "xavier", True))),
    "policy.dtensor_cfg.expert_parallel_size": never("mixtures of experts are not supported", unless=(1,)),
    MEGATRON + "optimizer.lr": enabled("megatron_cfg", to(TRAINING + "learning_rate")),
    MEGATRON + "optimizer.weight_decay": enabled("megatron_cfg", to(TRAINING + "weight_decay")),
    MEGATRON + "optimizer.adam_beta1": enabled("megatron_cfg", to(TRAINING + "adam_beta1")),
    MEGATRON + "optimizer.adam_beta2": enabled("megatron_cfg", to(TRAINING + "adam_beta2")),
    MEGATRON + "optimizer.adam_eps": enabled("megatron_cfg", to(TRAINING + "adam_epsilon")),
    MEGATRON + "optimizer.optimizer": enabled("megatron_cfg", only(*ADAMW, why="the optimizer is AdamW")),
    MEGATRON + "optimizer.min_lr": enabled("megatron_cfg", when(
        lambda value, given: given.get(MEGATRON + "scheduler.lr_decay_style") != "constant" and value,
        never("a least learning rate; set lr_scheduler_kwargs"))),
    MEGATRON + "scheduler.lr_decay_style": enabled("megatron_cfg", megatron_schedule),
    MEGATRON + "scheduler.lr_warmup_iters": enabled("megatron_cfg", to(TRAINING + "warmup_steps")),
    MEGATRON + "scheduler.weight_decay_incr_style": enabled("megatron_cfg", only("constant", why="it is constant here")),
    MEGATRON + "activation_checkpointing": enabled(
        "megatron_cfg", to(MODEL + "disable_gradient_checkpointing", {True: False, False: True})),
    MEGATRON + "expert_model_parallel_size": enabled(
        "megatron_cfg", never("mixtures of experts are not supported", unless=(1,))),
    MEGATRON + "fp8_cfg.enabled": enabled("megatron_cfg", never("fp8 is not supported")),
    **each(" ".join(MEGATRON + key for key in ["checkpoint.*", "use_fused_linear_logprobs", "fused_linear_logprobs_chunk_size", "force_reconvert_from_hf", "empty_unused_memory_level", "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_warmup_steps", "offload_modules", "fine_grained_activation_offloading", "recompute_granularity", "recompute_modules", "expert_tensor_parallel_size", "pipeline_dtype", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "sequence_parallel", "apply_rope_fusion", "bias_activation_fusion", "defer_fp32_logits", "use_gloo_process_groups", "attention_backend", "gradient_accumulation_fusion", "use_fused_weighted_squared_relu", "optimizer.bf16", "optimizer.fp16", "optimizer.params_dtype", "optimizer.sgd_momentum", "optimizer.use_distributed_optimizer", "optimizer.use_precision_aware_optimizer", "optimizer.clip_grad", "optimizer.optimizer_cpu_offload", "optimizer.optimizer_offload_fraction", "optimizer.overlap_cpu_optimizer_d2h_h2d", "scheduler.start_weight_decay", "scheduler.end_weight_decay", "scheduler.lr_warmup_init", "scheduler.lr_decay_iters", "distributed_data_parallel_config.*", "fp8_cfg.*", "env_vars.*", "freeze_moe_router", "moe_router_dtype", "moe_router_load_balancing_type", "moe_router_bias_update_rate", "moe_permute_fusion", "moe_per_layer_logging", "moe_enable_deepep", "moe_token_dispatcher_type", "moe_shared_expert_overlap", "peft.*"]), needless(MACHINERY)),
    "policy.megatron_cfg.*": enabled("megatron_cfg", never("not known to change no result")),
    **each("policy.dtensor_cfg.env_vars.* policy.dtensor_cfg.clear_cache_every_n_steps policy.offload_optimizer_for_logprob "
           "policy.dtensor_cfg.automodel_kwargs.* policy.dtensor_cfg.env_vars policy.dtensor_cfg.automodel_kwargs "
           "checkpointing.save_optimizer cluster.segment_size policy.optimizer policy.megatron_cfg.env_vars",
           needless(MACHINERY)),
    "policy.hf_config_overrides.*": never("change the config.json of the model instead"),
    "policy.tokenizer.chat_template_kwargs": never("name a template or a Jinja file: global_template"),
    "data.train.dataset_name": dataset(),
    "data.train.data_path": dataset(),
    "data.validation.dataset_name": dataset("validation.data_args.file_name"),
    "data.validation.data_path": dataset("validation.data_args.file_name"),
    **each("data.train.split data.validation.split data.train.subset data.validation.subset data.validation",
           needless("name the files of the split you want")),
    "dpo.max_num_epochs": to(TRAINING + "num_train_epochs", float),
    "dpo.max_num_steps": positive("max_steps"),
    "dpo.val_period": positive("eval_steps"),
    "dpo.seed": to("seed"),
    "dpo.reference_policy_kl_penalty": to("beta"),
    "dpo.preference_average_log_probs": if_set("length_normalization"),
    "dpo.preference_loss_weight": only(1, 1.0, why="the preference loss has weight 1; change rpo_alpha instead"),
    "dpo.sft_loss_weight": sft_weight,
    "dpo.sft_average_log_probs": needless("sft_loss_weight says it"),
    **each("dpo.val_batches dpo.val_global_batch_size dpo.val_micro_batch_size dpo.val_at_start dpo.val_at_end",
           needless("evaluation is on all pairs, before the first step, after each epoch and at the end")),
    "checkpointing.checkpoint_dir": run_folder,
    "checkpointing.save_period": positive("save_steps"),
    "checkpointing.keep_top_k": to("max_ckpt_to_keep", note="the newest are kept; save_best keeps the best model"),
    **each("checkpointing.enabled checkpointing.metric_name checkpointing.higher_is_better "
           "checkpointing.checkpoint_must_save_by checkpointing.model_save_format "
           "checkpointing.save_consolidated", needless(MACHINERY)),
    "policy.model_name": to("pretrain"),
    "policy.tokenizer.name": to(MODEL + "tokenizer_name_or_path"),
    "policy.tokenizer.chat_template": never("name a template or a Jinja file: global_template"),
    "policy.train_global_batch_size": to("train_batch_size"),
    "policy.train_micro_batch_size": needless("micro-batches follow a token budget"),
    "policy.logprob_batch_size": to("actor_train.infer_batch_size"),
    "policy.max_total_sequence_length": length(note="longer pairs are dropped and counted; NeMo-RL keeps them with "
                                               "weight 0"),
    "policy.precision": to(MODEL + "dtype", DTYPES),
    "policy.max_grad_norm": to("max_grad_norm"),
    "policy.optimizer.name": only(*ADAMW, why="the optimizer is AdamW"),
    "policy.optimizer.kwargs.lr": to(TRAINING + "learning_rate"),
    "policy.optimizer.kwargs.weight_decay": to(TRAINING + "weight_decay"),
    "policy.optimizer.kwargs.betas": betas,
    "policy.optimizer.kwargs.eps": to(TRAINING + "adam_epsilon"),
    "policy.scheduler": schedule,
    "policy.dtensor_cfg.tensor_parallel_size": enabled("dtensor_cfg", degree(DETAILS + "tp_size")),
    "policy.dtensor_cfg.context_parallel_size": enabled("dtensor_cfg", degree(DETAILS + "cp_size")),
    "policy.dtensor_cfg.sequence_parallel": enabled("dtensor_cfg", degree(DETAILS + "sequence_parallel")),
    "policy.dtensor_cfg.activation_checkpointing": enabled(
        "dtensor_cfg", to(MODEL + "disable_gradient_checkpointing", {True: False, False: True})),
    "policy.dtensor_cfg.cpu_offload": left_out("strategy_name: zero2_cpu or gemini_auto keeps it on the host"),
    "policy.dtensor_cfg.enabled": backend("fsdp2_train"),
    "policy.megatron_cfg.enabled": backend("megatron_train"),
    "policy.megatron_cfg.tensor_model_parallel_size": enabled("megatron_cfg", degree(DETAILS + "tp_size")),
    "policy.megatron_cfg.pipeline_model_parallel_size": enabled("megatron_cfg", degree(DETAILS + "pp_size")),
    "policy.megatron_cfg.context_parallel_size": enabled("megatron_cfg", degree(DETAILS + "cp_size")),
    "data.train_data_path": dataset(),
    "data.val_data_path": dataset("validation.data_args.file_name"),
    "data.dataset_name": with_validation,
    "data.max_input_seq_length": needless("policy.max_total_sequence_length counts"),
    "logger.log_dir": to("logging_dir"),
    "logger.wandb_enabled": tracker("wandb"),
    "logger.tensorboard_enabled": tracker("tensorboard"),
    "logger.mlflow_enabled": tracker("mlflow"),
    "logger.swanlab_enabled": tracker("swanlab"),
    "cluster.gpus_per_node": devices,
    "cluster.num_nodes": to("num_nodes"),
    **each("policy.dynamic_batching policy.sequence_packing policy.dtensor_cfg.custom_parallel_plan "
           "policy.optimizer.kwargs.foreach policy.optimizer.kwargs.fused "
           "policy.make_sequence_length_divisible_by policy.generation policy.refit_buffer_size_gb data.shuffle "
           "data.num_workers data.add_bos data.add_eos logger.wandb logger.tensorboard logger.mlflow logger.swanlab "
           "logger.monitor_gpus logger.gpu_monitoring logger.num_val_samples_to_print policy.dtensor_cfg._v2",
           needless(MACHINERY)),
}  # fmt: skip

NEMO_RL = Peer(
    "nemo-rl",
    RULES,
    version="0.6",
    programs=("run_dpo",),
    reader=recipe,
    defaults={
        "(section)": lambda given: "dpo" if any(key.startswith("dpo.") for key in given) else UNSET,
        "policy.dtensor_cfg.lora_cfg.enabled": False, "policy.megatron_cfg.peft.enabled": False,
    },
    marks=("dpo.reference_policy_kl_penalty", "policy.train_global_batch_size", "policy.max_total_sequence_length",
           "policy.model_name", "dpo.max_num_steps", "checkpointing.checkpoint_dir", "cluster.gpus_per_node"),
    words=("run_dpo.py", "nemo_rl"),
    whole=("policy.scheduler", "policy.dynamic_batching", "policy.sequence_packing", "policy.generation",
           "logger.wandb", "logger.tensorboard", "logger.mlflow", "logger.swanlab", "logger.gpu_monitoring"),
    always=(
        "Rows of the shape context + completions are read as they are.",
        "NeMo-RL moves weights between policy and reference each step; here the reference is computed once and kept.",
    ),
)  # fmt: skip
