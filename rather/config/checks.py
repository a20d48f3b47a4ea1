"""Combinations of keys that are impossible. One pass reports every problem.

A problem is a tuple: the key, a sentence, and the other keys that it depends on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rather.config.adapters import adapter_problems
from rather.config.deepspeed import deepspeed_clipping
from rather.config.parity import parity_problems
from rather.config.pipelines import SCHEDULES
from rather.config.plugins import did_you_mean
from rather.config.strategies import LANES, data_parallel, layout, strategy_problems
from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig, RoleConfig

Problems = Iterator[tuple[str, ...]]

FLOOR = ("min_lr", "min_lr_rate")
SCHEDULE_NUMBERS: dict[str, tuple[str, ...]] = {
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
DTYPE = "actor_train.model_args.dtype"
TRAINING = "actor_train.training_args"
STRATEGY = "actor_train.strategy_args"
DETAILS = f"{STRATEGY}.strategy_config"
DEVICES = ("actor_train.device_mapping", "reference.device_mapping")
EVAL_PAIRS = ("validation.data_args.file_name", "validation.data_args.split")


def problems(config: DPOConfig) -> Problems:
    """Return everything that cannot be combined, in the order of a YAML file."""
    for check in (
        _evaluation, _eval_prompts, _loss, _optimizer, _tracking, _data, adapter_problems, _schedule,
        _layouts, _devices, _batch, _reference, _reference_cache, _environments, _determinism, parity_problems,
    ):  # fmt: skip
        yield from check(config)


def missing(config: DPOConfig) -> Problems:
    """Return what `rather train` requires. A config of the Python API need not name models and
    pairs."""
    own = "actor_train.model_args.model_name_or_path"
    if config.actor_train.model_args.model_name_or_path is None:
        yield "pretrain", f"no model is named; set pretrain or {own} to a folder or hub name", own
    if not config.actor_train.data_args.files:
        yield (
            "actor_train.data_args.file_name",
            "no training pairs are named; set it to a file or files",
        )


def device_problems(config: DPOConfig, kind: str) -> list[str]:
    """Return settings that the device kind ("cpu" or "cuda") does not support."""
    shares = {
        f"{name}.strategy_args.gpu_memory_utilization": role.strategy_args.gpu_memory_utilization
        for name, role in config.roles.items()
    }
    given = {key: share for key, share in shares.items() if share is not None}
    canonical = config.determinism is not None
    no_dtype = config.actor_train.model_args.dtype is None
    if kind == "cpu":
        found = [f"{key}: {share} is a share of a GPU" for key, share in given.items()]
        found += ["reference.offload: on is for a GPU"] * (config.reference.offload == "on")
        found += ["compile: on is for a GPU"] * (config.compile == "on")
        found = [f"{text}, and this run is on the CPU; remove the key" for text in found]
        if config.precision == "lean" and no_dtype:
            found.append(
                f"precision: lean needs bf16 weights, and a CPU uses fp32; set {DTYPE}=bf16"
            )
        return found
    found = [f"{key}: both roles share one GPU here; set it for each role" for key in given]
    found = found if len(given) == 1 else []
    if canonical and not config.deterministic:
        found.append(
            "determinism: canonical needs deterministic GPU kernels; set deterministic=true"
        )
    if canonical and no_dtype:
        found.append(f"determinism: canonical needs fp32, and a GPU uses bf16; set {DTYPE}=fp32")
    return found


def _is_changed(section: Any, name: str) -> bool:
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def _evaluation(config: DPOConfig) -> Problems:
    resume, data = config.resume_from_checkpoint, config.validation.data_args
    if config.overwrite and resume not in (False, "auto"):
        text = f"starts from scratch, and resume_from_checkpoint is {resume!r}; keep one of them"
        yield "overwrite", text, "resume_from_checkpoint"
    if data.file_name and data.split is not None:
        yield EVAL_PAIRS[1], f"{EVAL_PAIRS[0]} is set as well; keep one of them", *EVAL_PAIRS
    needs_pairs = {
        "save_best": config.save_best,
        "early_stopping_patience": config.early_stopping_patience is not None,
        "eval_steps": config.eval_steps is not None and not config.eval_prompts,
    }
    for key in (key for key, is_set in needs_pairs.items() if is_set and not data.given):
        yield key, f"needs evaluation pairs; set {EVAL_PAIRS[0]} or {EVAL_PAIRS[1]}", *EVAL_PAIRS
    users, metric = ("save_best", "early_stopping_patience"), config.metric_for_best_model
    has_unnamed = "" in data.sets or data.split is not None
    prefixes = ["eval/"] if has_unnamed else [f"eval/{name}/" for name in data.sets]
    if not any(needs_pairs[key] for key in users):
        if metric != "eval/loss":
            text = "nothing uses it; set save_best: true or early_stopping_patience"
            yield "metric_for_best_model", text, *users
    elif prefixes and not _is_measured(metric, prefixes):
        known = ", ".join(f"{prefix}loss" for prefix in prefixes)
        yield "metric_for_best_model", f"'{metric}' is not measured; examples: {known}", *EVAL_PAIRS


def _is_measured(metric: str, prefixes: list[str]) -> bool:
    """Whether a metric belongs to an evaluation set. Names such as `rewards/...` contain a slash
    themselves."""
    rests = [metric.removeprefix(prefix) for prefix in prefixes if metric.startswith(prefix)]
    return any(re.fullmatch(r"(rewards/|logps/|lengths/)?[^/]*", rest) for rest in rests)


def _eval_prompts(config: DPOConfig) -> Problems:
    asked, devices = config.eval_prompts, config.actor_train.devices
    if asked is None:
        return
    if (asked.prompts is None) == (asked.file is None):
        yield (
            "eval_prompts",
            "set either prompts or file",
            "eval_prompts.prompts",
            "eval_prompts.file",
        )
    if asked.prompts == []:
        yield "eval_prompts.prompts", "is empty; add prompts, or remove eval_prompts"
    is_one_device = len(devices) == 1 and config.reference.devices == devices
    if not is_one_device or config.num_nodes > 1 or config.ray.address is not None:
        yield "eval_prompts", "needs policy and reference on one device; remove it", *DEVICES


def _loss(config: DPOConfig) -> Problems:
    names, weights = config.loss_names, config.loss_weights
    if config.ipo and config.pref_loss not in ("sigmoid", "ipo"):
        text = f"selects the loss ipo, and pref_loss is '{config.pref_loss}'; keep one of them"
        yield "ipo", text, "pref_loss"
    if config.loss_type and (config.ipo or config.pref_loss not in ("sigmoid", *names)):
        text = f"'{config.loss_type}' and pref_loss or ipo both name the loss; keep one of them"
        yield "loss_type", text, "pref_loss", "ipo"
    if weights is not None and len(weights) != len(names):
        yield (
            "loss_weights",
            f"{len(weights)} weights for {len(names)} losses; set one each",
            "pref_loss",
        )
    if config.use_ref_model is not None and config.use_ref_model is config.disable_reference_model:
        text = f"{config.use_ref_model} contradicts disable_reference_model: {config.use_ref_model}"
        yield "use_ref_model", text, "disable_reference_model"
    for key in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
        if not config.sync_ref_model and _is_changed(config, key):
            yield key, "nothing uses it; set sync_ref_model: true", "sync_ref_model"


def _optimizer(config: DPOConfig) -> Problems:
    clipping, dtype = config.max_grad_norm, config.actor_train.model_args.dtype
    own = config.actor_train.training_args.max_grad_norm
    if own not in (None, clipping):
        text = f"{own} differs from max_grad_norm at the top level ({clipping}); keep one of them"
        yield f"{TRAINING}.max_grad_norm", text, "max_grad_norm"
    other = deepspeed_clipping(config.actor_train.strategy_args)
    if other not in (None, clipping):
        text = f"{clipping} differs from DeepSpeed's gradient_clipping ({other}); keep one of them"
        yield "max_grad_norm", text, DETAILS
    if config.precision == "lean" and dtype not in (None, "bf16"):
        text = (
            f"lean needs bf16 weights, and {DTYPE} is {dtype}; set {DTYPE}=bf16 or precision=exact"
        )
        yield "precision", text, DTYPE
    if config.precision == "lean" and len(config.actor_train.devices) > 1:
        yield "precision", "lean supports one device only; set precision=exact", DEVICES[0]


def _tracking(config: DPOConfig) -> Problems:
    if len(set(config.trackers)) < len(config.trackers):
        yield "track_with", f"{config.track_with} names a tracker twice"
    for name, users in TRACKER_SETTINGS.items():
        if getattr(config.tracker_kwargs, name) and not set(users.split(", ")) & set(
            config.trackers
        ):
            yield (
                f"tracker_kwargs.{name}",
                f"track_with names none of {users}, which use it",
                "track_with",
            )
    if re.search(r"://[^/\s]*:[^/\s]*@", config.tracker_kwargs.uri or ""):
        yield "tracker_kwargs.uri", "contains a password; set MLFLOW_TRACKING_URI instead"


def _data(config: DPOConfig) -> Problems:
    train, held_out = config.actor_train.data_args, config.validation.data_args
    for role, data in (("actor_train", train), ("validation", held_out)):
        if not config.apply_loss_mask and data.score != "all" and "score" in data.model_fields_set:
            text = "apply_loss_mask: false scores every token; keep one of them"
            yield f"{role}.data_args.score", text, "apply_loss_mask"
        for side in ("chosen", "rejected"):
            top, path = getattr(config, f"{side}_key"), f"{role}.data_args.columns"
            column = data.columns.get(side, top)
            if path not in config.followed and top != side and column != top:
                text = f"{side}: {column} differs from {side}_key ({top}); keep one of them"
                yield path, text, f"{side}_key"
    if config.chosen_key == config.rejected_key:
        text = f"'{config.rejected_key}' is also the chosen_key; use two columns"
        yield "rejected_key", text, "chosen_key"
    files, weights = train.files, train.weights
    if weights is not None and files and len(weights) != len(files):
        text = f"{len(weights)} weights for {len(files)} files; set one per file"
        yield "actor_train.data_args.weights", text, "actor_train.data_args.file_name"
    for name, paths in held_out.sets.items():
        if not paths:
            yield EVAL_PAIRS[0], f"the set '{name}' has no file"
        if not re.fullmatch(r"\w+(-\w+)*|", name):
            yield EVAL_PAIRS[0], f"the set name '{name}' may contain only letters, digits, _ and -"


def _schedule(config: DPOConfig) -> Problems:
    training, path = config.actor_train.training_args, f"{TRAINING}.lr_scheduler_kwargs"
    numbers, kind = training.lr_scheduler_kwargs, training.lr_scheduler_type
    if config.max_steps is not None and training.warmup_steps > config.max_steps:
        text = f"{training.warmup_steps} is more than max_steps ({config.max_steps}); warm up for fewer"
        yield f"{TRAINING}.warmup_steps", text, "max_steps"
    known = SCHEDULE_NUMBERS[kind]
    for name in numbers:
        if name not in known:
            hint = did_you_mean(name, known) if known else "; it has none"
            text = f"unknown parameter of the schedule '{kind}'{hint}"
            yield f"{path}.{name}", text, f"{TRAINING}.lr_scheduler_type"
    floors = [name for name in FLOOR if name in numbers]
    if len(floors) == 2:
        yield f"{path}.min_lr_rate", "min_lr is set as well; keep one of them"
    if kind == "cosine_with_min_lr" and not floors:
        text = "cosine_with_min_lr needs lr_scheduler_kwargs.min_lr or min_lr_rate"
        yield f"{TRAINING}.lr_scheduler_type", text
    for name, most in (("min_lr", training.learning_rate), ("min_lr_rate", 1.0)):
        if numbers.get(name, 0.0) > most:
            text = f"{numbers[name]} is above {most}: the rate would rise at the end"
            yield f"{path}.{name}", text, f"{TRAINING}.learning_rate"
    if numbers.get("timescale") == 0:
        yield f"{path}.timescale", "0 is not a number > 0"


def _layouts(config: DPOConfig) -> Problems:
    layouts = [
        (role.strategy_args.model_dump(exclude={"gpu_memory_utilization"}), role.device_mapping)
        for role in config.roles.values()
    ]
    roles = config.roles if layouts[0] != layouts[1] else {"actor_train": config.actor_train}
    for name, role in roles.items():
        for key, text in strategy_problems(role):
            path = f"{name}.strategy_args"
            yield f"{path}.{key}", text, path, f"{name}.device_mapping"
    details = config.actor_train.strategy_args.strategy_config
    schedule = details.get("pipeline_schedule")
    if config.compile == "on" and details.get("offload_activations"):
        text = "compiled layers keep their activations on the GPU; set compile=off"
        yield f"{DETAILS}.offload_activations", text, "compile"
    # Zero-bubble schedules compute a layer's gradients in two passes, which a compiled layer
    # cannot.
    if config.compile == "on" and schedule in SCHEDULES and SCHEDULES[schedule].splits_backward:
        text = f"'{schedule}' splits the backward pass, and compiled layers cannot; set compile=off"
        yield f"{DETAILS}.pipeline_schedule", text, "compile"
    keeps_activations = config.actor_train.model_args.disable_gradient_checkpointing
    if details.get("recompute_granularity") and keeps_activations:
        text = "contradicts strategy_config.recompute_granularity; keep one of them"
        yield "actor_train.model_args.disable_gradient_checkpointing", text, DETAILS


def _devices(config: DPOConfig) -> Problems:
    per_node, tp = config.num_gpus_per_node, config.reference.strategy_args.tp_size
    if per_node is None and config.num_nodes > 1:
        yield "num_gpus_per_node", "num_nodes is above 1; set the devices per node", "num_nodes"
    if config.ref_tp is not None and tp not in (None, config.ref_tp):
        text = f"{config.ref_tp} differs from reference.strategy_args.tp_size; keep one of them"
        yield "ref_tp", text, "reference.strategy_args.tp_size"
    for key, role in zip(DEVICES, config.roles.values(), strict=True):
        last, count = max(role.devices), config.num_nodes * (per_node or 0)
        if per_node is not None and last >= count and key not in config.followed:
            sizes = f"num_nodes {config.num_nodes} x num_gpus_per_node {per_node}"
            text = f"names device {last}; {sizes} gives devices 0 to {count - 1}"
            yield key, text, "num_nodes", "num_gpus_per_node"
    shares = [role.strategy_args.gpu_memory_utilization or 0 for role in config.roles.values()]
    is_shared = set(config.actor_train.devices) & set(config.reference.devices)
    if is_shared and all(shares) and sum(shares) > 1:
        key = "strategy_args.gpu_memory_utilization"
        text = f"{shares[1]} and actor_train's {shares[0]} add up to more than a whole GPU"
        yield f"reference.{key}", text, f"actor_train.{key}"


def _batch(config: DPOConfig) -> Problems:
    total, training = config.train_batch_size, config.actor_train.training_args
    dp = data_parallel(config.actor_train)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    sizes = {name: getattr(training, name) for name in names}
    if total is None or total == dp * sizes[names[0]] * sizes[names[1]]:
        return
    given = [name for name in names if f"{TRAINING}.{name}" not in config.followed]
    product = " x ".join([f"dp {dp}", *(f"{name} {sizes[name]}" for name in given)])
    verb = "is not" if len(given) == 2 else "is not a multiple of"
    text = f"{total} pairs {verb} {product}; change one of them, or remove the sizes"
    yield "train_batch_size", text, *(f"{TRAINING}.{name}" for name in names), STRATEGY, DEVICES[0]


def _reference(config: DPOConfig) -> Problems:
    args, own = config.reference.model_args, config.actor_train.model_args
    key = "model_args.tokenizer_name_or_path"
    if args.tokenizer_name_or_path not in (None, own.tokenizer_name_or_path):
        text = f"both roles use the same tokenizer; set actor_train.{key} instead"
        yield f"reference.{key}", text, f"actor_train.{key}"
    if config.reference.offload == "on" and len(config.reference.devices) > 1:
        text = "is for one device; set strategy_name: gemini_auto instead, and offload: auto"
        yield "reference.offload", text, "reference.strategy_args"
    if config.reference.offload == "on" and config.sync_ref_model:
        text = "sync_ref_model needs the reference on the GPU; remove one of them"
        yield "reference.offload", text, "sync_ref_model"
    if args.disable_gradient_checkpointing is False:
        key = "reference.model_args.disable_gradient_checkpointing"
        yield key, "the reference has no backward pass; set it to true or remove it"


def _reference_cache(config: DPOConfig) -> Problems:
    cache = config.reference.cache
    unused = {
        "reference.cache.enabled": "is false" if not cache.enabled else "",
        "sync_ref_model": "changes the reference" if config.sync_ref_model else "",
        "reference.worker_cls": "can compute anything" if config.reference.worker_cls else "",
    }
    why = next((f"{key} {reason}" for key, reason in unused.items() if reason), None)
    for name in ("path", "per_token", "recheck"):
        if why and _is_changed(cache, name):
            text = f"nothing is cached: {why}; remove one of them"
            yield f"reference.cache.{name}", text, *unused
    if cache.enabled and cache.per_token is False and config.ld_alpha not in (None, 1):
        text = "ld_alpha needs the log-probs of tokens; set it to true or remove it"
        yield "reference.cache.per_token", text, "ld_alpha"


def _environments(config: DPOConfig) -> Problems:
    """Roles with equal device mappings share one process, and a process has one environment."""
    actor, other = config.actor_train, config.reference
    for name, value in other.system_envs.items() if actor.devices == other.devices else ():
        if config.envs(actor).get(name) != value:
            text = "both roles share one process; set it in system_envs at the top level"
            yield f"reference.system_envs.{name}", text, "actor_train.system_envs", "system_envs"


def _determinism(config: DPOConfig) -> Problems:
    """Return everything that would make the bits of `determinism: canonical` depend on the
    layout."""
    if config.determinism is None:
        return
    for name, role in config.roles.items():
        if text := _canonical_layout_problem(role):
            path = f"{name}.strategy_args"
            yield "determinism", f"canonical: {name} {text}", path, f"{name}.device_mapping"
            break  # the reference inherits its layout
    if config.actor_train.model_args.dtype not in (None, "fp32"):
        yield DTYPE, "determinism: canonical sums gradients in fp32; set it to fp32", "determinism"
    variable = "OMP_NUM_THREADS"
    threads = {config.envs(role).get(variable, "1") for role in config.roles.values()}
    if len(threads) > 1 or not all(text.isdecimal() and int(text) for text in threads):
        text = (
            f"determinism: canonical needs one whole number for both roles, not {sorted(threads)}"
        )
        others = ("determinism", "actor_train.system_envs", "reference.system_envs")
        yield f"system_envs.{variable}", text, *others


def _canonical_layout_problem(role: RoleConfig) -> str | None:
    try:
        found = layout(role)
    except ConfigError:
        return None  # reported by _layouts
    degrees = [
        f"{axis} {size}" for axis in ("tp", "pp", "cp") if (size := getattr(found, axis)) > 1
    ]
    if degrees:
        return f"has {' x '.join(degrees)}; only data-parallel layouts are supported: ddp or zero1"
    if LANES % found.dp:
        return f"has {found.dp} devices; it supports 1, 2 or {LANES}"
    return f"is {found.name}; set strategy_name to ddp or zero1" if found.stage > 1 else None
