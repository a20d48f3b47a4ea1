"""NeMo-RL: the YAML of run_dpo.py, with overrides."""

from __future__ import annotations

from typing import Any

from rather.migrate.engine import Peer
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
    RENAMED,
    Given,
    Outcome,
    Rule,
    each,
    if_set,
    needless,
    never,
    only,
    to,
    when,
)


def enabled(section: str, rule: Rule) -> Rule:
    """Use a key of a backend only if that backend is on."""

    return when(lambda value, given: given.get(f"policy.{section}.enabled"), rule)


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
    if "LinearLR" in named:
        values[TRAINING + "warmup_steps"] = int(named["LinearLR"].get("total_iters", 0))
    return Outcome(CHANGED, values, "warm-up starts at 0, and a cosine ends with the run")


RULES: dict[str, Rule] = {
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
    "policy.dtensor_cfg.cpu_offload": never("strategy_name: zero2_cpu or gemini_auto keeps it on the host"),
    "policy.dtensor_cfg.enabled": backend("fsdp2_train"),
    "policy.megatron_cfg.enabled": backend("megatron_train"),
    "policy.megatron_cfg.tensor_model_parallel_size": enabled("megatron_cfg", degree(DETAILS + "tp_size")),
    "policy.megatron_cfg.pipeline_model_parallel_size": enabled("megatron_cfg", degree(DETAILS + "pp_size")),
    "policy.megatron_cfg.context_parallel_size": enabled("megatron_cfg", degree(DETAILS + "cp_size")),
    "policy.megatron_cfg": enabled("megatron_cfg", needless(MACHINERY)),
    "data.train_data_path": dataset(),
    "data.val_data_path": dataset("validation.data_args.file_name"),
    "data.dataset_name": dataset(),
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
