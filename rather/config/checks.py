"""Impossible combinations of keys. Each check is a small generator, so that one pass names every problem."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from rather.config.adapters import adapter_problems
from rather.config.canonical import canonical_device_problems, canonical_problems
from rather.config.deepspeed import deepspeed_problems, deepspeed_settings, is_deepspeed
from rather.config.parity import parity_problems
from rather.config.pipelines import SCHEDULES
from rather.config.plugins import did_you_mean
from rather.config.strategies import layout, strategy_problems
from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

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


NAMED = ("wandb", "trackio", "mlflow", "swanlab")
TRACKER_SETTINGS = {
    "log_dir": ("tensorboard", "wandb", "swanlab"),
    "project": NAMED,
    "name": NAMED,
    "tags": ("wandb", "mlflow", "swanlab"),
    "notes": ("wandb", "mlflow", "swanlab"),
    "mode": ("wandb", "swanlab"),
    "uri": ("mlflow",),
}


class Problem(NamedTuple):
    """What is wrong at a key, and the other keys that it depends on."""

    key: str
    text: str
    others: tuple[str, ...] = ()


def problems(config: DPOConfig) -> Iterator[Problem]:
    """Everything that cannot be done together, in the order of a YAML file."""
    for check in (
        _resume, _evaluation, _eval_prompts, _loss, _clipping, _precision, _tracking, _columns,
        _adapters, _files, _schedule, _layouts, _devices, _batch, _reference, _reference_cache, _environments,
        _determinism, _parity,
    ):  # fmt: skip
        yield from check(config)


def missing(config: DPOConfig) -> Iterator[Problem]:
    """What a run cannot be without, and a config of the Python API can: that one is given models and pairs."""
    own = "actor_train.model_args.model_name_or_path"
    if config.actor_train.model_args.model_name_or_path is None:
        yield Problem(
            "pretrain", f"no model is named; set pretrain or {own} to a folder or hub name", (own,)
        )
    if not config.actor_train.data_args.files:
        text = "no training pairs are named; set it to a file or a list of files"
        yield Problem("actor_train.data_args.file_name", text)


def device_problems(config: DPOConfig, kind: str) -> list[str]:
    """Settings that the device kind ("cpu" or "cuda") cannot honour; asked once the device is known."""
    roles = {"actor_train": config.actor_train, "reference": config.reference}
    shares = {name: role.strategy_args.gpu_memory_utilization for name, role in roles.items()}
    given = {name: share for name, share in shares.items() if share is not None}
    if kind != "cpu":
        key = f"{next(iter(given), '')}.strategy_args.gpu_memory_utilization"
        alone = (
            [f"{key}: both roles share one GPU here; give each a share"] if len(given) == 1 else []
        )
        return alone + canonical_device_problems(config)
    found = [
        f"{name}.strategy_args.gpu_memory_utilization: {share} is a share of a GPU, and this run is on the CPU; "
        "remove the key"
        for name, share in given.items()
    ]
    if config.reference.offload == "on":
        found.append(
            "reference.offload: on is for a GPU, and this run is on the CPU; set reference.offload=auto"
        )
    if config.compile == "on":
        found.append("compile: on is for a GPU, and this run is on the CPU; set compile=auto")
    if config.precision == "lean" and config.actor_train.model_args.dtype is None:
        key = "actor_train.model_args.dtype"
        found.append(
            f"precision: lean keeps weights in bf16, and a CPU run has fp32 unless told; type {key}=bf16"
        )
    return found


def data_parallel(config: DPOConfig) -> int:
    """The dp degree of the policy; 1 where its layout is impossible, which is reported by itself."""
    try:
        return layout(config.actor_train).dp
    except ConfigError:
        return 1


def _resume(config: DPOConfig) -> Iterator[Problem]:
    resume = config.resume_from_checkpoint
    if config.overwrite and resume not in (False, "auto"):
        text = f"starts anew, and resume_from_checkpoint is {resume!r}; keep one of them"
        yield Problem("overwrite", text, ("resume_from_checkpoint",))


def _evaluation(config: DPOConfig) -> Iterator[Problem]:
    data = config.validation.data_args
    others = ("validation.data_args.file_name", "validation.data_args.split")
    if data.file_name and data.split is not None:
        yield Problem(
            others[1],
            "evaluation pairs come from validation.data_args.file_name already; keep one of them",
            others,
        )
    asked = {
        "save_best": config.save_best,
        "early_stopping_patience": config.early_stopping_patience is not None,
        "eval_steps": config.eval_steps is not None,
    }
    if not data.given:
        for key in (
            key
            for key, on in asked.items()
            if on and not (key == "eval_steps" and config.eval_prompts)
        ):
            text = "needs evaluation pairs; set validation.data_args.file_name or validation.data_args.split"
            yield Problem(key, text, others)
    prefixes = (
        ["eval/"]
        if "" in data.sets or data.split is not None
        else [f"eval/{name}/" for name in data.sets]
    )
    metric = config.metric_for_best_model
    if (
        (asked["save_best"] or asked["early_stopping_patience"])
        and prefixes
        and not _measured(metric, prefixes)
    ):
        text = f"'{metric}' is not measured; there are {', '.join(prefix + 'loss' for prefix in prefixes)} and so on"
        yield Problem("metric_for_best_model", text, others)
    if config.metric_for_best_model != "eval/loss" and not (
        asked["save_best"] or asked["early_stopping_patience"]
    ):
        text = "nothing uses it; set save_best: true or early_stopping_patience"
        yield Problem("metric_for_best_model", text, ("save_best", "early_stopping_patience"))


def _eval_prompts(config: DPOConfig) -> Iterator[Problem]:
    asked = config.eval_prompts
    if asked is None:
        return
    if (asked.prompts is None) == (asked.file is None):
        yield Problem(
            "eval_prompts",
            "give either prompts or file",
            ("eval_prompts.prompts", "eval_prompts.file"),
        )
    if asked.prompts == []:
        yield Problem("eval_prompts.prompts", "names no prompt; remove eval_prompts, or write some")
    mapping, other = (
        config.actor_train.device_mapping or [0],
        config.reference.device_mapping or [0],
    )
    if (
        len(mapping) > 1
        or other != mapping
        or config.num_nodes > 1
        or config.ray.address is not None
    ):
        text = "eval_prompts needs one device per policy, its reference on the same one; remove it on several"
        yield Problem(
            "eval_prompts", text, ("actor_train.device_mapping", "reference.device_mapping")
        )


def _measured(metric: str, prefixes: list[str]) -> bool:
    """Whether a metric belongs to an evaluation set. `rewards/...` and the like have a slash of their own."""
    own = ("rewards", "logps", "lengths")
    rests = [metric.removeprefix(prefix) for prefix in prefixes if metric.startswith(prefix)]
    return any("/" not in rest or rest.partition("/")[0] in own for rest in rests)


def _loss(config: DPOConfig) -> Iterator[Problem]:
    if config.ipo and config.pref_loss not in ("sigmoid", "ipo"):
        yield Problem(
            "ipo",
            f"asks for the loss ipo, pref_loss for '{config.pref_loss}'; keep one of them",
            ("pref_loss",),
        )
    if config.loss_type and (config.ipo or config.pref_loss not in ("sigmoid", *config.loss_names)):
        text = f"'{config.loss_type}' and pref_loss or ipo are two ways to name the loss; keep one of them"
        yield Problem("loss_type", text, ("pref_loss", "ipo"))
    if config.loss_weights is not None and len(config.loss_weights) != len(config.loss_names):
        text = f"{len(config.loss_weights)} weights for {len(config.loss_names)} losses; give one for each"
        yield Problem("loss_weights", text, ("pref_loss",))
    if config.use_ref_model is not None and config.use_ref_model is config.disable_reference_model:
        text = f"{config.use_ref_model} contradicts disable_reference_model: {config.disable_reference_model}"
        yield Problem("use_ref_model", text, ("disable_reference_model",))
    if not config.sync_ref_model:
        for key in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
            if getattr(config, key) != type(config).model_fields[key].default:
                yield Problem(key, "nothing uses it; set sync_ref_model: true", ("sync_ref_model",))
    for key, data in (
        ("actor_train", config.actor_train.data_args),
        ("validation", config.validation.data_args),
    ):
        if not config.apply_loss_mask and data.score != "all" and "score" in data.model_fields_set:
            text = "apply_loss_mask: false scores every token; keep one of them"
            yield Problem(f"{key}.data_args.score", text, ("apply_loss_mask",))


def _clipping(config: DPOConfig) -> Iterator[Problem]:
    own = config.actor_train.training_args.max_grad_norm
    if own is not None and own != config.max_grad_norm:
        text = f"{own} differs from max_grad_norm at the top level ({config.max_grad_norm}); keep one of them"
        yield Problem("actor_train.training_args.max_grad_norm", text, ("max_grad_norm",))

    args = config.actor_train.strategy_args
    if is_deepspeed(args.strategy_name) and not list(deepspeed_problems(args.strategy_config)):
        clipping = deepspeed_settings(args.strategy_config).clipping
        if clipping is not None and clipping != config.max_grad_norm:
            path = "actor_train.strategy_args.strategy_config"
            text = f"{config.max_grad_norm} differs from DeepSpeed's gradient_clipping ({clipping}); keep one of them"
            yield Problem("max_grad_norm", text, (path,))


def _precision(config: DPOConfig) -> Iterator[Problem]:
    key, dtype = "actor_train.model_args.dtype", config.actor_train.model_args.dtype
    if config.precision == "lean" and dtype not in (None, "bf16"):
        text = (
            f"lean keeps weights in bf16, and {key} is {dtype}; type {key}=bf16 or precision=exact"
        )
        yield Problem("precision", text, (key,))
    if config.precision == "lean" and len(config.actor_train.device_mapping or [0]) > 1:
        text = "lean rounds weights at random on one device; set precision=exact on several"
        yield Problem("precision", text, ("actor_train.device_mapping",))


def _tracking(config: DPOConfig) -> Iterator[Problem]:
    if len(set(config.trackers)) < len(config.trackers):
        yield Problem("track_with", f"{config.track_with} names a tracker twice")
    for name, takers in TRACKER_SETTINGS.items():
        if getattr(config.tracker_kwargs, name) and not set(takers) & set(config.trackers):
            text = f"is for {', '.join(takers)}, and track_with names none of them"
            yield Problem(f"tracker_kwargs.{name}", text, ("track_with",))
    if re.search(r"://[^/\s]*:[^/\s]*@", config.tracker_kwargs.uri or ""):
        yield Problem(
            "tracker_kwargs.uri",
            "holds a password; put the address into MLFLOW_TRACKING_URI instead",
        )


def _columns(config: DPOConfig) -> Iterator[Problem]:
    for side in ("chosen", "rejected"):
        top = getattr(config, f"{side}_key")
        for role, data in (
            ("actor_train", config.actor_train.data_args),
            ("validation", config.validation.data_args),
        ):
            path = f"{role}.data_args.columns"
            if path not in config.followed and top != side and data.columns.get(side, top) != top:
                text = f"{side}: {data.columns[side]} differs from {side}_key ({top}); keep one of them"
                yield Problem(path, text, (f"{side}_key",))
    if config.chosen_key == config.rejected_key:
        yield Problem(
            "rejected_key",
            f"'{config.rejected_key}' is also the chosen_key; the two answers need two columns",
            ("chosen_key",),
        )


def _adapters(config: DPOConfig) -> Iterator[Problem]:
    for key, text, others in adapter_problems(config):
        yield Problem(key, text, others)


def _files(config: DPOConfig) -> Iterator[Problem]:
    key, data = "actor_train.data_args.file_name", config.actor_train.data_args
    files = data.files
    if data.weights is not None and files and len(data.weights) != len(files):
        text = f"{len(data.weights)} weights for {len(files)} files; give one number per file"
        yield Problem("actor_train.data_args.weights", text, (key,))
    for name, paths in config.validation.data_args.sets.items():
        if not paths:
            yield Problem("validation.data_args.file_name", f"the set '{name}' names no file")
        if name and not all(part.isidentifier() or part.isalnum() for part in name.split("-")):
            yield Problem(
                "validation.data_args.file_name",
                f"the set name '{name}' goes into metric names: letters, digits, _ and -",
            )


def _schedule(config: DPOConfig) -> Iterator[Problem]:
    path, training = "actor_train.training_args", config.actor_train.training_args
    if config.max_steps is not None and training.warmup_steps > config.max_steps:
        text = f"{training.warmup_steps} is more than max_steps ({config.max_steps}); warm up for fewer steps"
        yield Problem(f"{path}.warmup_steps", text, ("max_steps",))
    known, kind = SCHEDULE_NUMBERS[training.lr_scheduler_type], training.lr_scheduler_type
    for name in training.lr_scheduler_kwargs:
        if name not in known:
            hint = did_you_mean(name, known) if known else "; it takes none"
            key = f"{path}.lr_scheduler_kwargs.{name}"
            yield Problem(
                key,
                f"unknown number of the schedule '{kind}'{hint}",
                (f"{path}.lr_scheduler_type",),
            )
    if all(name in training.lr_scheduler_kwargs for name in FLOOR):
        yield Problem(
            f"{path}.lr_scheduler_kwargs.min_lr_rate", "min_lr is given too; keep one of them"
        )
    if kind == "cosine_with_min_lr" and not any(
        name in training.lr_scheduler_kwargs for name in FLOOR
    ):
        yield Problem(
            f"{path}.lr_scheduler_type",
            "cosine_with_min_lr needs lr_scheduler_kwargs.min_lr or min_lr_rate",
        )
    limits = {"min_lr": training.learning_rate, "min_lr_rate": 1.0}
    for name, most in limits.items():
        if training.lr_scheduler_kwargs.get(name, 0.0) > most:
            text = f"{training.lr_scheduler_kwargs[name]} is above {most}: the rate would rise at the end"
            yield Problem(f"{path}.lr_scheduler_kwargs.{name}", text, (f"{path}.learning_rate",))
    if training.lr_scheduler_kwargs.get("timescale") == 0:
        yield Problem(f"{path}.lr_scheduler_kwargs.timescale", "0 is not a number > 0")


def _layouts(config: DPOConfig) -> Iterator[Problem]:
    for name, role in (("actor_train", config.actor_train), ("reference", config.reference)):
        if role is config.reference and _same_layout(config):
            continue  # said once, at actor_train
        count = len(role.device_mapping or [0])
        for key, text in strategy_problems(role.strategy_args, trains=role.trains, devices=count):
            yield Problem(
                f"{name}.strategy_args.{key}",
                text,
                (f"{name}.strategy_args", f"{name}.device_mapping"),
            )
    actor = config.actor_train
    details = actor.strategy_args.strategy_config
    if details.get("offload_activations") and config.compile == "on":
        key = "actor_train.strategy_args.strategy_config.offload_activations"
        yield Problem(
            key, "compiled layers keep their activations on the GPU; set compile=off", ("compile",)
        )
    yield from _split_backward(config)
    if details.get("recompute_granularity") and actor.model_args.disable_gradient_checkpointing:
        text = "true keeps activations, strategy_config.recompute_granularity recomputes them; keep one of them"
        yield Problem(
            "actor_train.model_args.disable_gradient_checkpointing",
            text,
            ("actor_train.strategy_args.strategy_config",),
        )


def _split_backward(config: DPOConfig) -> Iterator[Problem]:
    """Zero-bubble schedules take a layer's gradients in two passes, which a compiled layer does not know."""
    schedule = config.actor_train.strategy_args.strategy_config.get("pipeline_schedule")
    if config.compile == "on" and schedule in SCHEDULES and SCHEDULES[schedule].splits_backward:
        text = (
            f"'{schedule}' divides the backward pass, and compiled layers cannot; set compile=off"
        )
        yield Problem(
            "actor_train.strategy_args.strategy_config.pipeline_schedule", text, ("compile",)
        )


def _same_layout(config: DPOConfig) -> bool:
    one, other = config.actor_train, config.reference
    layouts = [
        role.strategy_args.model_dump(exclude={"gpu_memory_utilization"}) for role in (one, other)
    ]
    return layouts[0] == layouts[1] and one.device_mapping == other.device_mapping


def _devices(config: DPOConfig) -> Iterator[Problem]:
    if config.num_nodes > 1 and config.num_gpus_per_node is None:
        text = f"num_nodes is {config.num_nodes}; say how many devices each has"
        yield Problem("num_gpus_per_node", text, ("num_nodes",))
    if config.ref_tp is not None and config.reference.strategy_args.tp_size not in (
        None,
        config.ref_tp,
    ):
        text = f"{config.ref_tp} differs from reference.strategy_args.tp_size; keep one of them"
        yield Problem("ref_tp", text, ("reference.strategy_args.tp_size",))
    if config.num_gpus_per_node is not None:
        there = config.num_nodes * config.num_gpus_per_node
        for name, role in (("actor_train", config.actor_train), ("reference", config.reference)):
            key, last = f"{name}.device_mapping", max(role.device_mapping or [0])
            if last >= there and key not in config.followed:
                sizes = (
                    f"num_nodes {config.num_nodes} x num_gpus_per_node {config.num_gpus_per_node}"
                )
                text = f"names device {last}; {sizes} gives devices 0 to {there - 1}"
                yield Problem(key, text, ("num_nodes", "num_gpus_per_node"))
    shares = [
        role.strategy_args.gpu_memory_utilization or 0
        for role in (config.actor_train, config.reference)
    ]
    together = set(config.actor_train.device_mapping or [0]) & set(
        config.reference.device_mapping or [0]
    )
    if together and all(shares) and sum(shares) > 1:
        text = f"{shares[1]} and actor_train's {shares[0]} are more than the whole of a GPU that both use"
        yield Problem(
            "reference.strategy_args.gpu_memory_utilization",
            text,
            ("actor_train.strategy_args.gpu_memory_utilization",),
        )


def _batch(config: DPOConfig) -> Iterator[Problem]:
    total, training, dp = (
        config.train_batch_size,
        config.actor_train.training_args,
        data_parallel(config),
    )
    sizes = dp * training.per_device_train_batch_size * training.gradient_accumulation_steps
    if total is not None and sizes != total:
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        keys = tuple(f"actor_train.training_args.{name}" for name in names)
        said = [name for name, key in zip(names, keys, strict=True) if key not in config.followed]
        sum_of = " x ".join([f"dp {dp}", *(f"{name} {getattr(training, name)}" for name in said)])
        verb = "is not" if len(said) == 2 else "is not a multiple of"
        text = f"{total} pairs {verb} {sum_of}; change one of them, or leave the sizes to train_batch_size"
        yield Problem(
            "train_batch_size",
            text,
            (*keys, "actor_train.strategy_args", "actor_train.device_mapping"),
        )


def _reference(config: DPOConfig) -> Iterator[Problem]:
    said, actor = config.reference.model_args, config.actor_train
    key = "reference.model_args.tokenizer_name_or_path"
    if (
        said.tokenizer_name_or_path is not None
        and said.tokenizer_name_or_path != actor.model_args.tokenizer_name_or_path
    ):
        own = "actor_train.model_args.tokenizer_name_or_path"
        yield Problem(key, f"both roles read the same tokens; set {own} instead", (own,))
    if config.reference.offload == "on" and len(config.reference.device_mapping or [0]) > 1:
        text = "a divided reference goes to the host by its strategy_name: take gemini_auto there, and auto here"
        yield Problem("reference.offload", text, ("reference.strategy_args",))
    if config.reference.offload == "on" and config.sync_ref_model:
        text = "sync_ref_model moves the reference, which must lie on the GPU for it; remove one of them"
        yield Problem("reference.offload", text, ("sync_ref_model",))
    if said.disable_gradient_checkpointing is False:
        key = "reference.model_args.disable_gradient_checkpointing"
        yield Problem(key, "the reference has no backward pass; set it to true or remove it")


def _reference_cache(config: DPOConfig) -> Iterator[Problem]:
    cache = config.reference.cache
    off = {
        "reference.cache.enabled is false": not cache.enabled,
        "sync_ref_model moves the reference, so that no log-prob of it lasts": config.sync_ref_model,
        "reference.worker_cls may compute anything, so that its log-probs are not cached": config.reference.worker_cls,
    }
    for why in [why for why, holds in off.items() if holds][:1]:
        for name in ("path", "per_token", "recheck"):
            if getattr(cache, name) != type(cache).model_fields[name].default:
                others = ("reference.cache.enabled", "sync_ref_model", "reference.worker_cls")
                yield Problem(
                    f"reference.cache.{name}", f"nothing uses it: {why}; remove one of them", others
                )
    if cache.enabled and cache.per_token is False and config.ld_alpha not in (None, 1):
        text = "ld_alpha reads the log-probs of tokens; set it to true or remove it"
        yield Problem("reference.cache.per_token", text, ("ld_alpha",))


def _environments(config: DPOConfig) -> Iterator[Problem]:
    """Equal device mappings share one process, and a process has one environment."""
    one, other = config.actor_train, config.reference
    if (one.device_mapping or [0]) == (other.device_mapping or [0]):
        for name, value in other.system_envs.items():
            if config.envs(one).get(name) != value:
                text = "both roles share one process; set it once, in system_envs at the top level"
                yield Problem(
                    f"reference.system_envs.{name}",
                    text,
                    ("actor_train.system_envs", "system_envs"),
                )


def _parity(config: DPOConfig) -> Iterator[Problem]:
    for key, text, others in parity_problems(config, data_parallel(config)):
        yield Problem(key, text, others)


def _determinism(config: DPOConfig) -> Iterator[Problem]:
    for key, text, others in canonical_problems(config):
        yield Problem(key, text, others)
