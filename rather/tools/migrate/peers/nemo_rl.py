"""NeMo-RL: the YAML of run_dpo.py, with the files that it inherits from, and overrides.

Facts of 0.6 (examples/configs/dpo.yaml, nemo_rl/utils/config.py). All settings are in its files:
the code has no defaults.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from rather.config.schema import as_list
from rather.errors import ConfigError
from rather.files import JsonObject
from rather.tools.migrate.engine import Peer, nested_keys
from rather.tools.migrate.peers.shared import (
    ADAMW,
    DTYPES,
    HELD_OUT,
    READABLE,
    SAMPLES,
    address,
    betas,
    dataset,
    devices,
    length,
    run_folder,
    switches,
)
from rather.tools.migrate.rules import (
    IMPOSSIBLE,
    NOT_NEEDED,
    OPEN,
    UNSET,
    Given,
    Outcome,
    Rule,
    Rules,
    Unsupported,
    algorithm,
    all_of,
    facts,
    gives,
    keys,
    never,
    only,
    rounds_instead,
    to,
    when,
)
from rather.tools.migrate.source import read_mapping

REFERENCE = re.compile(r"\$\{(\.?)([\w.]+)\}")
MOST_PARENTS = 8
BUILT_IN = ("HelpSteer3",)  # data sets of its own classes
HUB = {"Tulu3Preference": "allenai/llama-3.1-tulu-3-8b-preference-mixture"}
OTHER_ALGORITHMS = ("grpo", "sft", "rm", "distillation", "ppo")


def recipe(path: Path, flags: JsonObject) -> JsonObject:
    """Read a file over its parents (`defaults:`) and under flags; fill in ${a.b} and ${.b}."""
    values = _merged(inherited(path, 0), nested_keys(flags))
    algorithms = [name for name in OTHER_ALGORITHMS if name in values]
    if "dpo" not in values and algorithms:
        raise ConfigError(
            f"{path.name}: {algorithms[0]} is not training on preference pairs."
            f"{rounds_instead(algorithms[0])}"
        )
    return {key: _filled(section, values, values, 0) for key, section in values.items()}


def inherited(path: Path, depth: int) -> JsonObject:
    if not path.is_file() or depth > MOST_PARENTS:
        raise ConfigError(f"{path}: this parent of a recipe (defaults:) does not exist; fetch it.")
    settings = read_mapping(path)
    values: JsonObject = {}
    for parent in as_list(settings.pop("defaults", [])):
        values = _merged(values, inherited(path.parent / str(parent), depth + 1))
    return _merged(values, settings)


def _merged(below: JsonObject, above: JsonObject) -> JsonObject:
    """Merge mappings, unless the upper one says `_override_: true`; replace all other values."""
    merged = {} if above.get("_override_") else dict(below)
    for key, setting in above.items():
        old: Any = merged.get(key)
        is_section = isinstance(old, dict) and isinstance(setting, dict)
        merged[key] = _merged(old, setting) if is_section else setting
    merged.pop("_override_", None)
    return merged


def _filled(value: Any, owner: Any, root: Any, depth: int) -> Any:
    """Replace a text that is one reference; what cannot be found stays, and is reported."""
    if isinstance(value, dict):
        return {key: _filled(entry, value, root, depth) for key, entry in value.items()}
    if isinstance(value, list):
        return [_filled(entry, owner, root, depth) for entry in value]
    reference = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if not reference or depth > MOST_PARENTS:
        return value
    target = owner if reference[1] else root
    for name in reference[2].split("."):
        target = target.get(name, UNSET) if isinstance(target, dict) else UNSET
    if target is UNSET or isinstance(target, dict | list):
        return value
    return _filled(target, owner, root, depth + 1)


def of(backend: str, rules: Rules) -> Rules:
    """Return the rules of a backend's keys, which are used only if the backend is on."""
    is_on = all_of([f"policy.{backend}.enabled=true"])
    return {f"policy.{backend}.{key}": when(is_on, rule) for key, rule in rules.items()}


def of_adapter(backend: str, section: str) -> Rules:
    """Return the rules of the adapter of a backend; without one all weights are trained."""
    is_on = all_of([f"policy.{backend}.{section}.enabled=true"])
    rules = facts("""
        dim = model.lora_rank
        alpha = model.lora_alpha
        match_all_linear = model.lora_target: true=all-linear
    """) | dict.fromkeys(
        keys("target_modules exclude_modules dropout dropout_position lora_A_init "
             "lora_A_init_method lora_B_init_method a2a_experimental lora_dtype use_triton"),
        never("not an option of adapters here", off=("post", "xavier", "zero", True)),
    )  # fmt: skip
    no_adapter = gives({"model.lora_rank": None})
    without_adapter = when(lambda value, given: not value, lambda *_: no_adapter)
    adapter = {f"{section}.{key}": when(is_on, rule) for key, rule in rules.items()}
    return of(backend, {**adapter, f"{section}.enabled": without_adapter})


COLUMNS = ("prompt_key", "chosen_key", "rejected_key")
OF_ENTRY = {"dataset_name", "data_path", "subset", "split", *COLUMNS}


def file_of(entry: JsonObject) -> tuple[str, bool]:
    """Return the file or the address of a data set, and whether its rows are still to be saved."""
    name, split = str(entry.get("dataset_name") or ""), entry.get("split") or "train"
    if name in HUB:
        return f"hf://datasets/{HUB[name]}", False
    if name in BUILT_IN:
        return f"{name}-{split}.jsonl", True  # its class makes pairs of the rows
    path = str(entry.get("data_path") or "")
    if name not in ("PreferenceDataset", "BinaryPreferenceDataset", "") or not path:
        raise Unsupported(f"{name or 'a data set without data_path'} is not read; save its pairs")
    if path.endswith(READABLE):
        return path, False
    hub = address(path, split, entry.get("subset"))
    if hub is None:
        raise Unsupported(f"{path} is neither a data file nor a name of Hugging Face's hub")
    return hub, False


def data_set(path: str) -> Rule:
    """Translate data.train or data.validation, over what data.default says."""

    def rule(value: Any, given: Given) -> Outcome:
        if not value:
            return NOT_NEEDED
        if not isinstance(value, dict):
            raise Unsupported("several data sets are merged there; save their pairs to a file")
        defaults = given.get("data.default") or {}
        entry = {key: v for key, v in {**defaults, **value}.items() if v is not None}
        if unread := entry.keys() - OF_ENTRY:
            raise Unsupported(f"Rather has no rule for {', '.join(sorted(unread))}")
        file, is_open = file_of(entry)
        columns = {key.removesuffix("_key"): entry[key] for key in COLUMNS if key in entry}
        values: JsonObject = {path: file}
        if renamed := {column: name for column, name in columns.items() if name != column}:
            values[path.replace("file_name", "columns")] = renamed
        note = f"save the pairs of {entry.get('dataset_name')} there, as JSON lines"
        return Outcome(OPEN, values, note) if is_open else gives(values)

    return rule


def named_sets(value: Any, given: Given) -> Outcome:
    sets = {name: file_of({"data_path": path})[0] for name, path in (value or {}).items()}
    return gives({HELD_OUT: sets}) if sets else NOT_NEEDED


def with_validation(value: Any, given: Given) -> Outcome:
    """Set the data. Older files name one data set, and evaluate on its other split."""
    if value not in (*BUILT_IN, *HUB):
        return dataset(value, given)
    values = {SAMPLES: file_of({"dataset_name": value})[0]}
    if value in HUB:
        return gives(values)
    if "data.val_data_path" not in given:
        values[HELD_OUT] = file_of({"dataset_name": value, "split": "validation"})[0]
    return Outcome(OPEN, values, f"save the pairs of {value} there, as JSON lines")


def sft_weight(value: Any, given: Given) -> Outcome:
    if value and not given.get("dpo.sft_average_log_probs"):
        why = "NeMo-RL adds the summed NLL of an answer, Rather its mean over tokens"
        raise Unsupported(f"{why}; choose a weight: pref_ftx")
    return gives({"pref_ftx": value}) if value else NOT_NEEDED


def gpus(value: Any, given: Given) -> Outcome:
    return gives({"num_gpus_per_node": value, **devices(value * given.get("cluster.num_nodes", 1))})


SCHEDULES = {"ConstantLR": "constant", "LinearLR": "linear", "CosineAnnealingLR": "cosine"}


def stages_of(value: Any) -> tuple[int, list[tuple[str, JsonObject]]]:
    """Return the steps of a linear warm-up, and name and arguments of the schedulers after it."""
    schedulers = value if isinstance(value, list) else [value]
    stages = [
        (str(scheduler["name"]).rpartition(".")[2], scheduler.get("kwargs") or {})
        for scheduler in schedulers
        if scheduler.get("name")
    ]
    warmup = 0
    if stages and stages[0][0] == "LinearLR" and stages[0][1].get("end_factor", 1.0) == 1:
        _, arguments = stages.pop(0)
        warmup = int(arguments.get("total_iters", 5))
    return warmup, stages or [("ConstantLR", {"factor": 1.0})]


def schedule(value: Any, given: Given) -> Outcome:
    """Translate a list of torch schedulers: a linear warm-up and what follows it, to the end."""
    warmup, stages = stages_of(value)
    if len(stages) > 1 or not reaches_end(*stages[0], given.get("dpo.max_num_steps"), warmup):
        raise Unsupported(
            "not a warm-up and a constant, linear or cosine schedule until max_num_steps"
        )
    kind, numbers = stages[0]
    floors = {"min_lr": numbers.get("eta_min"), "min_lr_rate": numbers.get("end_factor")}
    floor = {key: number for key, number in floors.items() if number and kind != "ConstantLR"}
    values = {"training.lr_scheduler_type": SCHEDULES[kind], "training.warmup_steps": warmup}
    values |= {"training.lr_scheduler_kwargs": floor} if floor else {}
    return gives(values, "the warm-up starts at 0" if warmup else "")


def reaches_end(kind: str, numbers: JsonObject, last_step: Any, warmup: int) -> bool:
    """Return whether a schedule is constant, or falls from its peak until the last step."""
    if kind == "ConstantLR":
        return bool(numbers.get("factor", 1 / 3) == 1)
    falls = kind == "CosineAnnealingLR" or (kind == "LinearLR" and numbers.get("start_factor") == 1)
    steps: Any = numbers.get("T_max", numbers.get("total_iters", 5))
    return falls and bool(warmup + steps == last_step)


def same_as(key: str) -> Rule:
    """Accept a key that repeats another one."""
    return lambda value, given: (
        NOT_NEEDED if value == given.get(key) else Outcome(IMPOSSIBLE, note=f"differs from {key}")
    )


IS_ADAMW = only(*ADAMW, why="the optimizer is AdamW")
PARALLEL = facts("""
    activation_checkpointing = model.disable_gradient_checkpointing: true=false false=true
    context_parallel_size = strategy.cp_size if >1
""")
RULES: Rules = {
    "(section)": algorithm({"dpo": "sigmoid"}),
    **of(
        "dtensor_cfg",
        PARALLEL
        | facts("""
        tensor_parallel_size = strategy.tp_size if >1
        sequence_parallel = strategy.sequence_parallel if set
        expert_parallel_size = strategy.ep_size if >1
        cpu_offload ? strategy_name: zero2_cpu or gemini_auto keeps it on the host
    """),
    ),
    **of(
        "megatron_cfg",
        PARALLEL
        | facts("""
        expert_model_parallel_size = strategy.ep_size if >1
        tensor_model_parallel_size = strategy.tp_size if >1
        pipeline_model_parallel_size = strategy.pp_size if >1
        scheduler.lr_decay_style = training.lr_scheduler_type: constant=constant_with_warmup \
            linear=linear cosine=cosine
        scheduler.weight_decay_incr_style @ constant; it is constant here
        optimizer.min_lr if set if policy.megatron_cfg.scheduler.lr_decay_style!=constant ! a \
            least learning rate; set lr_scheduler_kwargs
        optimizer.lr = training.learning_rate
        optimizer.clip_grad = max_grad_norm
        optimizer.weight_decay = training.weight_decay
        optimizer.adam_beta1 = training.adam_beta1
        optimizer.adam_beta2 = training.adam_beta2
        optimizer.adam_eps = training.adam_epsilon
        scheduler.lr_warmup_iters = training.warmup_steps
        fp8_cfg.enabled ! fp8 is not supported
        checkpoint.* use_fused_linear_logprobs fused_linear_logprobs_chunk_size
        force_reconvert_from_hf empty_unused_memory_level cuda_graph_impl cuda_graph_modules
        cuda_graph_warmup_steps offload_modules fine_grained_activation_offloading
        recompute_granularity recompute_modules expert_tensor_parallel_size pipeline_dtype
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage sequence_parallel
        apply_rope_fusion bias_activation_fusion defer_fp32_logits use_gloo_process_groups
        attention_backend gradient_accumulation_fusion use_fused_weighted_squared_relu
        optimizer.bf16 optimizer.fp16 optimizer.params_dtype optimizer.sgd_momentum
        optimizer.use_distributed_optimizer optimizer.use_precision_aware_optimizer
        optimizer.optimizer_cpu_offload optimizer.optimizer_offload_fraction
        optimizer.overlap_cpu_optimizer_d2h_h2d scheduler.lr_warmup_init
        distributed_data_parallel_config.* fp8_cfg.fp8 fp8_cfg.fp8_recipe fp8_cfg.fp8_param
        env_vars.* env_vars freeze_moe_router moe_router_dtype moe_router_load_balancing_type
        moe_router_bias_update_rate moe_permute_fusion moe_per_layer_logging moe_enable_deepep
        moe_token_dispatcher_type
        moe_shared_expert_overlap ~
    """)
        | {
            "optimizer.optimizer": IS_ADAMW,
            "scheduler.lr_decay_iters": when(
                all_of(["policy.megatron_cfg.scheduler.lr_decay_style!=constant"]),
                same_as("dpo.max_num_steps"),
            ),
            **dict.fromkeys(
                ("scheduler.start_weight_decay", "scheduler.end_weight_decay"),
                same_as("policy.megatron_cfg.optimizer.weight_decay"),
            ),
        },
    ),
    **of_adapter("dtensor_cfg", "lora_cfg"),
    **of_adapter("megatron_cfg", "peft"),
    **facts("""
        dpo.seed = seed
        dpo.max_num_epochs = training.num_train_epochs
        dpo.max_num_steps = max_steps if >0
        dpo.val_period = eval_steps if >0
        dpo.preference_average_log_probs = length_normalization if set
        dpo.preference_loss_weight @ 1; the preference loss has weight 1; change rpo_alpha instead
        checkpointing.save_period = save_steps if >0
        policy.max_grad_norm = max_grad_norm if policy.megatron_cfg.enabled!=true
        policy.optimizer.kwargs.lr = training.learning_rate if policy.megatron_cfg.enabled!=true
        policy.optimizer.kwargs.weight_decay = training.weight_decay \
            if policy.megatron_cfg.enabled!=true
        policy.optimizer.kwargs.eps = training.adam_epsilon if policy.megatron_cfg.enabled!=true
        policy.dtensor_cfg.enabled = actor_train.strategy_args.strategy_name: true=fsdp2_train \
            if set
        policy.megatron_cfg.enabled = actor_train.strategy_args.strategy_name: true=megatron_train \
            if set
        dpo.reference_policy_kl_penalty = beta
        checkpointing.keep_top_k = max_ckpt_to_keep; the newest are kept; save_best keeps the best \
            model
        policy.model_name = pretrain
        policy.tokenizer.name = model.tokenizer_name_or_path
        policy.train_global_batch_size = train_batch_size
        policy.logprob_batch_size = actor_train.infer_batch_size
        logger.log_dir = logging_dir
        cluster.num_nodes = num_nodes
        policy.hf_config_overrides.* ! change the config.json of the model instead
        policy.tokenizer.chat_template_kwargs policy.tokenizer.chat_template ! name a template or \
            a Jinja file: global_template
        data.default ~ it fills in data.train and data.validation
        dpo.sft_average_log_probs ~ sft_loss_weight says it
        dpo.val_batches dpo.val_global_batch_size dpo.val_micro_batch_size dpo.val_at_start
        dpo.val_at_end ~ evaluation is on all pairs, before the first step, after each epoch and \
            at the end
        policy.train_micro_batch_size ~ micro-batches follow a token budget
        data.max_input_seq_length ~ policy.max_total_sequence_length counts
        checkpointing.enabled checkpointing.metric_name checkpointing.higher_is_better
        checkpointing.checkpoint_must_save_by checkpointing.model_save_format
        checkpointing.save_consolidated checkpointing.save_optimizer cluster.segment_size
        policy.dtensor_cfg.env_vars.* policy.dtensor_cfg.clear_cache_every_n_steps
        policy.dtensor_cfg.automodel_kwargs.* policy.dtensor_cfg.env_vars policy.dtensor_cfg._v2
        policy.dtensor_cfg.automodel_kwargs policy.dtensor_cfg.custom_parallel_plan policy.optimizer
        policy.offload_optimizer_for_logprob policy.dynamic_batching policy.sequence_packing
        policy.optimizer.kwargs.foreach policy.optimizer.kwargs.fused
        policy.make_sequence_length_divisible_by policy.generation policy.refit_buffer_size_gb
        data.shuffle data.num_workers data.add_bos data.add_eos logger.wandb logger.tensorboard
        logger.mlflow logger.swanlab logger.monitor_gpus logger.gpu_monitoring
        logger.num_val_samples_to_print ~
    """),
    "data.train": data_set(SAMPLES),
    "data.validation": data_set(HELD_OUT),
    "data.val_data_paths": named_sets,
    "data.train_data_path": dataset,
    "data.val_data_path": partial(dataset, path=HELD_OUT),
    **switches(
        "logger.wandb_enabled logger.tensorboard_enabled logger.mlflow_enabled "
        "logger.swanlab_enabled"
    ),
    "dpo.sft_loss_weight": sft_weight,
    "checkpointing.checkpoint_dir": run_folder,
    "policy.max_total_sequence_length": partial(
        length, note="longer pairs are dropped and counted; NeMo-RL keeps them with weight 0"
    ),
    "policy.precision": to("model.dtype", DTYPES),
    **{
        f"policy.{key}": when(all_of(["policy.megatron_cfg.enabled!=true"]), rule)
        for key, rule in {
            "optimizer.name": IS_ADAMW,
            "optimizer.kwargs.betas": betas,
            "scheduler": schedule,
        }.items()
    },
    "data.dataset_name": with_validation,
    "cluster.gpus_per_node": gpus,
}

PEER = Peer(
    "nemo-rl",
    RULES,
    version="0.6",
    programs={"run_dpo": "sigmoid"},
    reader=recipe,
    config="configs/dpo.yaml",
    defaults={
        "(section)": lambda given: "dpo" if any(key.startswith("dpo.") for key in given) else UNSET,
        "policy.dtensor_cfg.lora_cfg.enabled": False, "policy.megatron_cfg.peft.enabled": False,
    },
    marks="dpo.reference_policy_kl_penalty policy.train_global_batch_size "
          "policy.max_total_sequence_length policy.model_name dpo.max_num_steps "
          "checkpointing.checkpoint_dir cluster.gpus_per_node",
    words=("run_dpo.py", "nemo_rl"),
    whole="data.train data.validation data.default data.val_data_paths policy.scheduler "
          "policy.dynamic_batching policy.sequence_packing policy.generation logger.wandb "
          "logger.tensorboard logger.mlflow logger.swanlab logger.gpu_monitoring",
    always=(
        "Rows of the shape context + completions are read as they are.",
        "NeMo-RL moves weights between policy and reference each step; here the reference is "
        "computed once and kept.",
    ),
)  # fmt: skip
