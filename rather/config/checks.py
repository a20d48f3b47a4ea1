"""Combinations of keys that are impossible: one pass yields (key, sentence) for every problem.

A check that involves an invalid key is skipped: load.py looks for the key in the sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from rather.config.compat import ALIASES, Problems, clippings, lora_file
from rather.config.inherit import value_at
from rather.config.plugins import did_you_mean
from rather.config.schema import DETAILS_OF_ADAPTER, DataArgs, RunConfig
from rather.config.strategies import (
    SCHEDULES,
    data_parallel,
    possible_layout,
    reference_is_policy,
    strategy_problems,
)
from rather.config.values import FORGETTING, WIN_RATE

FLOOR = ("min_lr", "min_lr_rate")
SCHEDULE_NUMBERS = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": FLOOR,
    "cosine": (*FLOOR, "num_cycles"),
    "cosine_with_min_lr": (*FLOOR, "num_cycles"),
    "inverse_sqrt": ("timescale",),
    "wsd": (*FLOOR, "num_decay_steps"),
}
TRACKER_SETTINGS = {
    "log_dir": "tensorboard, wandb, swanlab",
    "project": "wandb, trackio, mlflow, swanlab",
    "name": "wandb, trackio, mlflow, swanlab",
    "tags": "wandb, mlflow, swanlab",
    "notes": "wandb, mlflow, swanlab",
    "mode": "wandb, swanlab",
    "uri": "mlflow",
}
ARGS, TRAINING = "actor_train.model_args", "actor_train.training_args"
DTYPE, DETAILS = f"{ARGS}.dtype", "actor_train.strategy_args.strategy_config"
BEST = "metric_for_best_model"
ANSWERS_AT_END = (
    "needs answers, and on several devices the model answers only after training; choose "
    "eval/loss, or eval/forgetting/loss"
)
EVAL_PAIRS = ("validation.data_args.file_name", "validation.data_args.split")
NEW_ADAPTER = (f"{ARGS}.lora_rank", f"{ARGS}.lora_target")
OLD_ADAPTER = f"{ARGS}.adapter_name_or_path"
OF_ADAPTER = (*(f"{ARGS}.{name}" for name in DETAILS_OF_ADAPTER), f"{ARGS}.lora_config")

# A condition is a key that is set (not null, not its default), or key=beginning of its value.
# Each of the first keys needs one of the second.
NEEDS = [
    (("save_best", "early_stopping_patience"), EVAL_PAIRS),
    (("eval_steps",), (*EVAL_PAIRS, "eval_prompts")),
    (("metric_for_best_model",), ("save_best", "early_stopping_patience")),
    (("ref_model_mixup_alpha", "ref_model_sync_steps"), ("sync_ref_model",)),
    (("num_nodes",), ("num_gpus_per_node",)),
    ((*OF_ADAPTER, f"{ARGS}.quantization"), (*NEW_ADAPTER, OLD_ADAPTER)),
    (("eval_prompts",), ("eval_prompts.prompts", "eval_prompts.file")),
    (("eval_prompts.judge",), ("eval_prompts.judge.with",)),
]
# None of the first conditions can be combined with one of the second.
EXCLUDES = [
    (EVAL_PAIRS[1:], EVAL_PAIRS[:1]),
    (("eval_prompts.prompts",), ("eval_prompts.file",)),
    (("precision=lean",), (f"{DTYPE}=fp16", f"{DTYPE}=fp32")),
    ((*NEW_ADAPTER, *OF_ADAPTER), (OLD_ADAPTER,)),  # which has its own settings
    (("sync_ref_model",), (*NEW_ADAPTER, OLD_ADAPTER)),  # no second model to update
    (("reference.offload=on",), ("sync_ref_model",)),
    ((f"{ARGS}.use_dora", f"{ARGS}.quantization"), (f"{ARGS}.init_lora_weights=pissa",)),
    ((f"{ARGS}.quantization",), (f"{ARGS}.use_dora",)),  # needs the norms of whole weights
    (
        (f"{ARGS}.disable_gradient_checkpointing=True",),
        (f"{DETAILS}.recompute_granularity",),
    ),
    (  # compiled layers keep their activations, and have one backward pass
        (f"{DETAILS}.offload_activations", *(f"{DETAILS}.pipeline_schedule={name}"
         for name, schedule in SCHEDULES.items() if schedule.splits_backward)),
        ("compile=on",),
    ),
    (  # what the seam of an engine does not carry
        ("actor_train.engine",),
        (
            *NEW_ADAPTER, OLD_ADAPTER, f"{ARGS}.quantization", "precision=lean", "compile=on",
            f"{DTYPE}=fp16", f"{DETAILS}.offload_activations", "actor_train.worker_cls",
            f"{TRAINING}.log_num_zeros_in_grad", "eval_prompts",
        ),
    ),
    (
        ("reference.cache.path",),
        ("reference.cache.enabled=False", "sync_ref_model", "reference.worker_cls"),
    ),
]  # fmt: skip


def _is_set(config: RunConfig, condition: str) -> bool:
    path, _, beginning = condition.partition("=")
    setting = value_at(config, path)
    if beginning:
        return str(setting).startswith(beginning)
    if setting is None:
        return False
    parent, _, name = path.rpartition(".")
    section = value_at(config, parent)
    return isinstance(section, dict) or bool(setting != type(section).model_fields[name].default)


def _set_ones(config: RunConfig, conditions: tuple[str, ...]) -> list[str]:
    return [condition for condition in conditions if _is_set(config, condition)]


def problems(config: RunConfig) -> Problems:
    """Yield everything that cannot be combined, with the user's word for a key."""
    for key, text in _problems(config):
        source = config.followed.get(key, "")
        if source in ALIASES:
            yield source, text
        elif source == f"{ARGS}.lora_config":
            file = config.actor_train.model_args.lora_config
            yield source, f"{key.rpartition('.')[2]} in {file}: {text}"
        else:
            yield key, text


def _problems(config: RunConfig) -> Problems:
    for keys, requirements in NEEDS:
        if not _set_ones(config, requirements):
            for key in _set_ones(config, keys):
                yield key, f"needs {' or '.join(requirements)}"
    for conditions, excluded in EXCLUDES:
        for rival in _set_ones(config, excluded):
            for condition in _set_ones(config, conditions):
                path, _, word = condition.partition("=")
                yield path, f"{word} cannot be combined with {rival}; keep one of them".strip()
    for check in (
        _aliases, _evaluation, _loss, _tracking, _data, _batch_size, _adapter, _quantization,
        _schedule, _layouts, _devices, _reference,
    ):  # fmt: skip
        yield from check(config)


def missing(config: RunConfig) -> Problems:
    """Yield what `rather train` requires and the Python API is given as objects."""
    if config.actor_train.model_args.model_name_or_path is None:
        keys = f"set pretrain or {ARGS}.model_name_or_path"
        yield "pretrain", f"no model is named; {keys} to a folder or hub name"
    names = config.actor_train.data_args.file_name
    if not names or not all(names):
        text = "no training pairs are named; set it to a file or files"
        yield "actor_train.data_args.file_name", text


def device_problems(config: RunConfig, kind: str) -> list[str]:
    """Return settings that the device kind ("cpu" or "cuda") does not support."""
    memory_shares = []
    for name, role in config.roles.items():
        share = role.strategy_args.gpu_memory_utilization
        if share is not None:
            memory_shares.append(f"{name}.strategy_args.gpu_memory_utilization: {share}")
    if kind != "cpu":
        if len(memory_shares) == 1:
            return [f"{memory_shares[0]}: both roles share one GPU; set it for each"]
        return []
    for_a_gpu = memory_shares
    if config.reference.offload == "on":
        for_a_gpu.append("reference.offload: on")
    if config.compile == "on":
        for_a_gpu.append("compile: on")
    problems = [f"{key} is for a GPU, and this is a CPU; remove the key" for key in for_a_gpu]
    if config.precision == "lean" and config.actor_train.model_args.dtype is None:
        problems.append(
            f"precision: lean needs bf16 weights, and a CPU uses fp32; set {DTYPE}=bf16"
        )
    return problems


def _aliases(config: RunConfig) -> Problems:
    """Yield other tools' words that contradict the key that they mean."""
    for name, alias in ALIASES.items():
        setting = value_at(config, name)
        meaning, actual = alias.meaning(setting), value_at(config, alias.key)
        if meaning not in (None, actual):
            other = config.followed.get(alias.key, alias.key)
            text = f"{json.dumps(setting)} means {alias.key}: {meaning}, and {other} says {actual}"
            yield name, f"{text}; keep one of them"


def _evaluation(config: RunConfig) -> Problems:
    resume = config.resume_from_checkpoint
    if config.overwrite and resume not in (False, "auto"):
        yield "overwrite", f"starts from scratch, and resume_from_checkpoint is {resume!r}"
    if config.selects_a_step:
        yield from ((BEST, f"'{config.metric_for_best_model}' {text}") for text in _metric(config))
    for name, files in config.validation.data_args.names().items():
        if _metric_prefix(name) == FORGETTING:
            yield EVAL_PAIRS[0], f"the name '{name}' is taken by metrics; choose another"
        if not files or not re.fullmatch(r"\w+(-\w+)*|", name):
            text = f"the set '{name}' needs a file, and a name of letters, digits, _ and -"
            yield EVAL_PAIRS[0], text
    if config.task == "reward":
        if config.eval_prompts:
            yield "eval_prompts", "a reward model writes no answers; remove it"
        if config.forgetting not in ("auto", "off"):
            yield "forgetting", "a reward model writes no text; remove it"


def _metric(config: RunConfig) -> Iterator[str]:
    """Yield why the metric of the best model cannot be measured."""
    metric = config.metric_for_best_model
    prefixes = tuple(map(_metric_prefix, config.validation.data_args.names()))
    if metric.startswith(FORGETTING):
        if config.forgetting == "off" or config.task == "reward":
            yield "needs forgetting: auto, or a file of texts"
        if metric not in (f"{FORGETTING}loss", f"{FORGETTING}right"):
            yield f"is not measured; examples: {FORGETTING}loss, {FORGETTING}right"
        elif metric.endswith("right") and _has_several_devices(config):
            yield ANSWERS_AT_END
    elif metric == WIN_RATE:
        if not config.eval_prompts or not config.eval_prompts.judge:
            yield "needs eval_prompts.judge"
        if _has_several_devices(config):
            yield ANSWERS_AT_END
    elif prefixes and not metric.startswith(prefixes):
        examples = ", ".join(f"{prefix}loss" for prefix in prefixes)
        yield f"is not measured; examples: {examples}"


def _has_several_devices(config: RunConfig) -> bool:
    devices = {*config.actor_train.devices, *config.reference.devices}
    return len(devices) > 1 or config.num_nodes > 1 or config.ray.address is not None


def _metric_prefix(evaluation_set: str) -> str:
    return f"eval/{evaluation_set}/" if evaluation_set else "eval/"


def _loss(config: RunConfig) -> Problems:
    names = config.loss_names
    weights = config.loss_weights
    if weights is not None and len(weights) != len(names):
        yield "loss_weights", f"{len(weights)} weights for {len(names)} losses in pref_loss"
    for key, max_norm in clippings(config.actor_train).items():
        if max_norm not in (None, config.max_grad_norm):
            top = config.max_grad_norm
            yield key, f"{max_norm} differs from max_grad_norm at the top level ({top})"
    if config.precision == "lean" and len(config.actor_train.devices) > 1:
        yield "precision", "lean is for one device in actor_train.device_mapping; set exact"


def _tracking(config: RunConfig) -> Problems:
    if len(set(config.trackers)) < len(config.trackers):
        yield "track_with", f"{config.track_with} names a tracker twice"
    for name, users in TRACKER_SETTINGS.items():
        is_used = any(user in config.trackers for user in users.split(", "))
        if getattr(config.tracker_kwargs, name) and not is_used:
            yield f"tracker_kwargs.{name}", f"track_with names none of {users}, which use it"
    if re.search(r"://[^/\s]*:[^/\s]*@", config.tracker_kwargs.uri or ""):
        yield "tracker_kwargs.uri", "contains a password; set MLFLOW_TRACKING_URI instead"


def _data(config: RunConfig) -> Problems:
    train = config.actor_train.data_args
    yield from _role_data(config, "actor_train", train)
    yield from _role_data(config, "validation", config.validation.data_args)
    if not config.apply_loss_mask and config.validation.data_args.score != "all":
        text = "apply_loss_mask: false scores every token; keep one of them"
        yield "validation.data_args.score", text
    if config.chosen_key == config.rejected_key:
        yield "rejected_key", f"'{config.rejected_key}' is also the chosen_key; use two columns"
    if train.corrections and config.task != "preference":
        yield "actor_train.data_args.corrections", f"belongs to pairs, and task is {config.task}"
    if config.pair_ledger and config.task != "preference":
        yield "pair_ledger", f"belongs to task: preference, and task is {config.task}; remove it"
    for name in ("min_gap", "max_length_gap"):
        if getattr(config, name) is not None and config.rows != "pairs":
            yield name, f"belongs to pairs, and task is {config.task}; remove it"
    if config.task == "scored" and not config.group_responses:
        yield "group_responses", "task: scored needs all answers to a prompt in one step; remove it"
    files = train.files
    if train.weights is not None and files and len(train.weights) != len(files):
        text = f"{len(train.weights)} weights for {len(files)} files in file_name"
        yield "actor_train.data_args.weights", text


def _role_data(config: RunConfig, role: str, args: DataArgs) -> Problems:
    if args.label_threshold is not None and config.task != "unpaired":
        text = f"belongs to task: unpaired, and task is {config.task}; remove it"
        yield f"{role}.data_args.label_threshold", text
    for name in ("image_max_pixels", "image_min_pixels"):
        if getattr(args, name) != getattr(config.actor_train.data_args, name):
            text = "differs from actor_train.data_args; a model sees all images in the same way"
            yield f"{role}.data_args.{name}", text
    path = f"{role}.data_args.columns"
    if path in config.followed:
        return
    for side in ("chosen", "rejected"):
        top = getattr(config, f"{side}_key")
        column = args.columns.get(side, top)
        if top != side and column != top:
            yield path, f"{side}: {column} differs from {side}_key ({top}); keep one of them"


def _batch_size(config: RunConfig) -> Problems:
    training = config.actor_train.training_args
    size = training.per_device_train_batch_size
    steps = training.gradient_accumulation_steps
    dp = data_parallel(config.actor_train)
    if config.train_batch_size not in (None, dp * size * steps):
        sizes = f"per_device_train_batch_size {size} x gradient_accumulation_steps {steps}"
        text = f"{config.train_batch_size} pairs is not dp {dp} x {sizes}"
        yield "train_batch_size", f"{text}; change one of them, or remove the sizes"


def _adapter(config: RunConfig) -> Problems:
    args = config.actor_train.model_args
    layout = possible_layout(config.actor_train)
    _, file_problems = lora_file(args)
    for text in file_problems:
        yield f"{ARGS}.lora_config", text
    if layout and layout.tp > 1:
        yield from _split_adapter(config)
    if config.reference.offload == "on" and reference_is_policy(config):
        yield "reference.offload", "the reference is the policy without its adapter; set auto"


def _split_adapter(config: RunConfig) -> Problems:
    """Yield settings of an adapter that tensor parallelism does not support."""
    args = config.actor_train.model_args
    if config.task == "reward" and args.has_adapter:
        text = "the head of a reward model needs whole weights; set tp_size to 1"
        yield f"{ARGS}.lora_rank", text
    need_whole_weights = {
        "use_dora": args.use_dora,
        "init_lora_weights": args.changes_base,
        "modules_to_save": args.modules_to_save,
    }
    for name, is_set in need_whole_weights.items():
        if is_set:
            text = "needs whole weights, which tensor parallelism splits; set tp_size to 1"
            yield f"{ARGS}.{name}", f"{getattr(args, name)} {text}"


def _quantization(config: RunConfig) -> Problems:
    args = config.actor_train.model_args
    if args.quantization and config.task == "reward":
        yield f"{ARGS}.quantization", "a reward model is trained from whole weights; remove it"
    if args.quantization and len(config.actor_train.devices) > 1:
        yield f"{ARGS}.quantization", "4-bit weights cannot be sharded; set one device_mapping"
    if config.reference.model_args.quantization and not reference_is_policy(config):
        text = "only a policy with an adapter that is its own reference can be quantised; remove it"
        yield "reference.model_args.quantization", text


def _schedule(config: RunConfig) -> Problems:
    path = f"{TRAINING}.lr_scheduler_kwargs"
    training = config.actor_train.training_args
    numbers = training.lr_scheduler_kwargs
    kind = training.lr_scheduler_type
    parameters = SCHEDULE_NUMBERS[kind]
    for name in numbers:
        if name not in parameters:
            hint = did_you_mean(name, parameters)
            yield f"{path}.{name}", f"unknown parameter of the schedule '{kind}'{hint}"
    floors = [name for name in FLOOR if name in numbers]
    if len(floors) > 1:
        yield path, "has min_lr and min_lr_rate; keep one of them"
    if kind == "cosine_with_min_lr" and not floors:
        yield f"{TRAINING}.lr_scheduler_type", f"{kind} needs lr_scheduler_kwargs.min_lr"
    for name, highest in (("min_lr", training.learning_rate), ("min_lr_rate", 1.0)):
        if numbers.get(name, 0.0) > highest:
            yield f"{path}.{name}", f"{numbers[name]} is above {highest}: the rate would rise"
    if numbers.get("timescale") == 0:
        yield f"{path}.timescale", "0 is not a number > 0"


def _layouts(config: RunConfig) -> Problems:
    policy_problems = list(strategy_problems(config.actor_train))
    yield from ((f"actor_train.strategy_args.{key}", text) for key, text in policy_problems)
    for key, text in strategy_problems(config.reference):
        if (key, text) not in policy_problems:  # not inherited
            yield f"reference.strategy_args.{key}", text


def _devices(config: RunConfig) -> Problems:
    actor = config.actor_train
    reference = config.reference
    if config.num_gpus_per_node is not None:
        yield from _missing_devices(config, config.num_nodes * config.num_gpus_per_node)
    shares = [role.strategy_args.gpu_memory_utilization or 0 for role in config.roles.values()]
    if set(actor.devices) & set(reference.devices) and all(shares) and sum(shares) > 1:
        text = f"{shares[1]} and actor_train's {shares[0]} add up to more than a whole GPU"
        yield "reference.strategy_args.gpu_memory_utilization", text
    # Roles with equal device mappings share one process, and a process has one environment.
    if config.shares_devices:
        policy_variables = config.envs(actor)
        for name, variable in reference.system_envs.items():
            if policy_variables.get(name) != variable:
                text = "both roles share one process; set it in system_envs at the top level"
                yield f"reference.system_envs.{name}", text


def _missing_devices(config: RunConfig, devices: int) -> Problems:
    sizes = f"num_nodes {config.num_nodes} x num_gpus_per_node {config.num_gpus_per_node}"
    for name, role in config.roles.items():
        key = f"{name}.device_mapping"
        last = max(role.devices)
        if last >= devices and key not in config.followed:
            yield key, f"names device {last}; {sizes} gives devices 0 to {devices - 1}"


def _reference(config: RunConfig) -> Problems:
    reference = config.reference
    args = reference.model_args
    tokenizer = config.actor_train.model_args.tokenizer_name_or_path
    if args.tokenizer_name_or_path not in (None, tokenizer):
        key = "model_args.tokenizer_name_or_path"
        yield f"reference.{key}", f"both roles use the same tokenizer; set actor_train.{key}"
    if reference.offload == "on" and len(reference.devices) > 1:
        text = "is for one device; set strategy_name: gemini_auto instead, and offload: auto"
        yield "reference.offload", text
    if args.disable_gradient_checkpointing is False:
        key = "reference.model_args.disable_gradient_checkpointing"
        yield key, "the reference has no backward pass; set it to true or remove it"
