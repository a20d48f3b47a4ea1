"""Unset keys that inherit from other keys.

`reference` inherits from `actor_train`, `validation.data_args` from `actor_train.data_args`, the
policy's model from `pretrain`, templates from `global_template`; `train_batch_size` determines its
parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rather.config.adapters import settings_in_file
from rather.config.deepspeed import deepspeed_clipping
from rather.config.parity import PRESETS
from rather.config.strategies import data_parallel

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

log = logging.getLogger(__name__)
TP_SPELLINGS = ("tp_size", "tensor_model_parallel_size")
LAYOUT = ("strategy_name", "strategy_config", "tp_size", "pp_size", "cp_size")
ARGS, DATA = "actor_train.model_args", "actor_train.data_args"


def complete(config: DPOConfig) -> dict[str, str]:
    """Fill unset keys of a config that is being built. Return key path -> the key that it
    inherits from."""
    followed: dict[str, str] = {}
    for path, value, source in _values(config):
        if _set(config, path, value):
            followed[path] = followed.get(source, source)
    return followed


def value_at(config: Any, path: str) -> Any:
    """Return the value of a key path, in models and mappings; None in a section that is null."""
    for name in path.split("."):
        if config is None:
            return None
        config = config.get(name) if isinstance(config, dict) else getattr(config, name)
    return config


def _values(config: DPOConfig) -> Iterator[tuple[str, Any, str]]:
    """Return (key, value, source) for unset keys. Lazy: a source is filled in before what
    inherits from it."""
    actor, args = config.actor_train, config.actor_train.model_args
    presets = {f"{DATA}.score": "all"} if not config.apply_loss_mask else {}
    yield from _unset(config, presets, "apply_loss_mask")
    in_file = {f"{ARGS}.{name}": value for name, value in settings_in_file(args).items()}
    yield from _unset(config, in_file, f"{ARGS}.lora_config")
    yield from _unset(config, PRESETS if config.parity else {}, "parity")
    for path, source in _followers(config):
        yield path, value_at(config, source), source
    yield from _reference_tp(config)
    clipping = {
        "actor_train.training_args.max_grad_norm": actor.training_args.max_grad_norm,
        "actor_train.strategy_args.strategy_config": deepspeed_clipping(actor.strategy_args),
    }
    for source, value in clipping.items():
        yield from _unset(config, {"max_grad_norm": value} if value is not None else {}, source)
    yield from _batch_sizes(config)


def _unset(
    config: DPOConfig, values: dict[str, Any], source: str
) -> Iterator[tuple[str, Any, str]]:
    for path, value in values.items():
        parent, _, name = path.rpartition(".")
        if name not in (value_at(config, parent) if parent else config).model_fields_set:
            yield path, value, source


def _followers(config: DPOConfig) -> Iterator[tuple[str, str]]:
    """Return (key, the key that it inherits from) for every unset key; sources come first."""
    validation = config.validation.data_args
    if config.actor_train.model_args.model_name_or_path is None:
        yield f"{ARGS}.model_name_or_path", "pretrain"
    if config.actor_train.data_args.template is None:
        yield f"{DATA}.template", "global_template"
    for path in _reference_keys(config):
        yield f"reference.{path}", f"actor_train.{path}"
    for name in type(validation).model_fields:
        if name not in ("file_name", "split") and name not in validation.model_fields_set:
            yield f"validation.data_args.{name}", f"{DATA}.{name}"


def _reference_keys(config: DPOConfig) -> Iterator[str]:
    own, args = config.reference, config.reference.model_args
    names = ["dtype", "model_type", "trust_remote_code", "tokenizer_name_or_path"]
    if args.model_name_or_path in (None, config.actor_train.model_args.model_name_or_path):
        names += ["model_name_or_path", "revision", "adapter_name_or_path", "quantization"]
    yield from (f"model_args.{name}" for name in names if name not in args.model_fields_set)
    names = ["device_mapping", "infer_batch_size", "max_tokens_per_microbatch_in_infer"]
    yield from (name for name in names if name not in own.model_fields_set)
    if not own.strategy_args.model_fields_set & set(LAYOUT):  # a layout is inherited as a whole
        yield from (f"strategy_args.{name}" for name in LAYOUT)


def _reference_tp(config: DPOConfig) -> Iterator[tuple[str, Any, str]]:
    """ColossalChat's ref_tp replaces a degree that was only inherited."""
    own, path = config.reference.strategy_args, "reference.strategy_args"
    if config.ref_tp is None or "tp_size" in own.model_fields_set:
        return
    if not own.model_fields_set & set(LAYOUT):
        kept = {key: value for key, value in own.strategy_config.items() if key not in TP_SPELLINGS}
        yield (
            f"{path}.strategy_config",
            kept,
            f"actor_train.{path.partition('.')[2]}.strategy_config",
        )
    yield f"{path}.tp_size", config.ref_tp, "ref_tp"


def _batch_sizes(config: DPOConfig) -> Iterator[tuple[str, Any, str]]:
    """The size that is left to train_batch_size; whether it divides evenly is checked
    afterwards."""
    training, source = config.actor_train.training_args, "train_batch_size"
    if config.train_batch_size is None:
        return
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    size, steps = (getattr(training, name) for name in names)
    paths = [f"actor_train.training_args.{name}" for name in names]
    share = config.train_batch_size // data_parallel(config.actor_train)
    if config.val_batch_size and size * steps == 2 * share and size % 2 == 0:
        log.warning(
            "%s: %d counts answers, two per pair: read as %d pairs", paths[0], size, size // 2
        )
        yield paths[0], size // 2, source
    elif names[0] not in training.model_fields_set:
        yield paths[0], share // steps, source
    elif names[1] not in training.model_fields_set:
        yield paths[1], share // size, source


def _set(config: DPOConfig, path: str, value: Any) -> bool:
    """Set a value in the frozen config, and return whether this changed it."""
    parent, _, name = path.rpartition(".")
    owner = value_at(config, parent) if parent else config
    is_new = getattr(owner, name) != value
    if is_new:
        owner.__dict__[name] = value
    return bool(is_new)
