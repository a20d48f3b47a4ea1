"""Keys that follow another key when nobody wrote them.

`reference` follows `actor_train`, `validation.data_args` follows `actor_train.data_args`, a policy without a
model takes `pretrain`, data without a template `global_template`; `train_batch_size` gives its parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rather.config import checks
from rather.config.adapters import settings_in_file
from rather.config.deepspeed import deepspeed_problems, deepspeed_settings, is_deepspeed
from rather.config.parity import PRESETS

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

log = logging.getLogger(__name__)
TP_SPELLINGS = ("tp_size", "tensor_model_parallel_size")
LAYOUT = ("strategy_name", "strategy_config", "tp_size", "pp_size", "cp_size")


def complete(config: DPOConfig) -> dict[str, str]:
    """Fills a config in the making, before it is frozen for good. Returns key path -> the one it follows."""
    followed: dict[str, str] = {}
    score_is_free = "score" not in config.actor_train.data_args.model_fields_set
    if (
        not config.apply_loss_mask
        and score_is_free
        and _put(config, "actor_train.data_args.score", "all")
    ):
        followed["actor_train.data_args.score"] = "apply_loss_mask"
    args = config.actor_train.model_args
    for name, value in settings_in_file(args).items():
        if name not in args.model_fields_set and _put(
            config, f"actor_train.model_args.{name}", value
        ):
            followed[f"actor_train.model_args.{name}"] = "actor_train.model_args.lora_config"
    for path, value in PRESETS[config.parity].items() if config.parity else ():
        if not _said(config, path) and _put(config, path, value):
            followed[path] = "parity"
    for path, source in _followers(config):
        if _put(config, path, value_at(config, source)):
            followed[path] = followed.get(source, source)
    if _take_ref_tp(config):
        followed["reference.strategy_args.tp_size"] = "ref_tp"
    clipping, said = _deepspeed_clipping(config), "max_grad_norm" in config.model_fields_set
    if clipping is not None and not said and _put(config, "max_grad_norm", clipping):
        followed["max_grad_norm"] = "actor_train.strategy_args.strategy_config"
    for path, size in _batch_sizes(config):
        if _put(config, path, size):
            followed[path] = "train_batch_size"
    return followed


def value_at(config: Any, path: str) -> Any:
    """The value of a key path, in models and mappings; None in a section that is not there."""
    for name in path.split("."):
        if config is None:
            return None
        config = config.get(name) if isinstance(config, dict) else getattr(config, name)
    return config


def _followers(config: DPOConfig) -> Iterator[tuple[str, str]]:
    """(key, the key it follows) for every key that nobody wrote; sources come before their followers."""
    actor, validation = config.actor_train, config.validation.data_args
    if actor.model_args.model_name_or_path is None:
        yield "actor_train.model_args.model_name_or_path", "pretrain"
    if actor.data_args.template is None:
        yield "actor_train.data_args.template", "global_template"
    if (
        actor.training_args.max_grad_norm is not None
        and "max_grad_norm" not in config.model_fields_set
    ):
        yield "max_grad_norm", "actor_train.training_args.max_grad_norm"
    for path in _reference_keys(config):
        yield f"reference.{path}", f"actor_train.{path}"
    for name in type(validation).model_fields:
        if name not in ("file_name", "split") and name not in validation.model_fields_set:
            yield f"validation.data_args.{name}", f"actor_train.data_args.{name}"


def _reference_keys(config: DPOConfig) -> Iterator[str]:
    said, actor = config.reference, config.actor_train
    names = ["dtype", "model_type", "trust_remote_code", "tokenizer_name_or_path"]
    if said.model_args.model_name_or_path in (None, actor.model_args.model_name_or_path):
        names += [
            "model_name_or_path",
            "revision",
            "adapter_name_or_path",
            "quantization",
        ]  # of one model
    yield from (
        f"model_args.{name}" for name in names if name not in said.model_args.model_fields_set
    )
    names = ["device_mapping", "infer_batch_size", "max_tokens_per_microbatch_in_infer"]
    yield from (name for name in names if name not in said.model_fields_set)
    if not said.strategy_args.model_fields_set & set(LAYOUT):  # one description, followed as one
        yield from (f"strategy_args.{name}" for name in LAYOUT)


def _deepspeed_clipping(config: DPOConfig) -> float | None:
    args = config.actor_train.strategy_args
    problems = is_deepspeed(args.strategy_name) and list(deepspeed_problems(args.strategy_config))
    return deepspeed_settings(args.strategy_config).clipping if problems == [] else None


def _take_ref_tp(config: DPOConfig) -> bool:
    """ColossalChat's ref_tp takes the place of a degree that was only followed."""
    said = config.reference.strategy_args
    if config.ref_tp is None or "tp_size" in said.model_fields_set:
        return False
    if not said.model_fields_set & set(LAYOUT):
        details = {
            key: value for key, value in said.strategy_config.items() if key not in TP_SPELLINGS
        }
        _put(config, "reference.strategy_args.strategy_config", details)
    return _put(config, "reference.strategy_args.tp_size", config.ref_tp)


def _batch_sizes(config: DPOConfig) -> Iterator[tuple[str, int]]:
    """The size that the user left to train_batch_size; whether it comes out even is checked afterwards."""
    training, prefix = config.actor_train.training_args, "actor_train.training_args"
    if config.train_batch_size is None:
        return
    share = config.train_batch_size // checks.data_parallel(config)
    sizes = training.per_device_train_batch_size, training.gradient_accumulation_steps
    if config.val_batch_size and sizes[0] * sizes[1] == 2 * share and sizes[0] % 2 == 0:
        log.warning("%s.per_device_train_batch_size: %d counts answers, as train_batch_size says: read as %d pairs",
                    prefix, sizes[0], sizes[0] // 2)  # fmt: skip
        yield f"{prefix}.per_device_train_batch_size", sizes[0] // 2
        return
    if "per_device_train_batch_size" not in training.model_fields_set:
        yield f"{prefix}.per_device_train_batch_size", share // training.gradient_accumulation_steps
    elif "gradient_accumulation_steps" not in training.model_fields_set:
        yield f"{prefix}.gradient_accumulation_steps", share // training.per_device_train_batch_size


def _said(config: DPOConfig, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    return name in (value_at(config, parent) if parent else config).model_fields_set


def _put(config: DPOConfig, path: str, value: Any) -> bool:
    """Whether this changed anything."""
    parent, _, name = path.rpartition(".")
    owner = value_at(config, parent) if parent else config
    if getattr(owner, name) == value:
        return False
    owner.__dict__[name] = value  # frozen for everybody else
    return True
