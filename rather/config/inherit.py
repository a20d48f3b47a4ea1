"""Unset keys that inherit from other keys.

`reference` inherits from `actor_train`, `validation.data_args` from `actor_train.data_args`, the
policy's model from `pretrain`, templates from `global_template`; `train_batch_size` determines its
parts.
"""

from __future__ import annotations

import logging
from typing import Any

from rather.config.compat import (
    ALIASES,
    DEGREES,
    answers_per_device,
    clippings,
    lora_file,
    roll_nodes,
)
from rather.config.schema import RunConfig
from rather.config.strategies import data_parallel

log = logging.getLogger(__name__)
LAYOUT = ("strategy_name", "strategy_config", *DEGREES)
ARGS, DATA = "actor_train.model_args", "actor_train.data_args"
TRAINING = "actor_train.training_args"
DETAILS = "actor_train.strategy_args.strategy_config"
PER_DEVICE = f"{TRAINING}.per_device_train_batch_size"
OF_REFERENCE = (
    "device_mapping",
    "infer_batch_size",
    "max_tokens_per_microbatch_in_infer",
    "model_args.dtype",
    "model_args.model_type",
    "model_args.trust_remote_code",
    "model_args.tokenizer_name_or_path",
)
# Losses that belong to one task, which then need not be set.
TASK_OF_LOSS = {
    "kto": "unpaired",
    "bco": "unpaired",
    "apo_zero_unpaired": "unpaired",
    "bradley_terry": "reward",
    "regression": "reward",
    "reward_rpo": "scored",
    "listwise": "scored",
    "advantage": "scored",
}
LOSS_OF_TASK = {
    "unpaired": "kto",
    "reward": "bradley_terry",
    "scored": "listwise",
    "sft": "sft",
}
OF_SAME_WEIGHTS = (
    "model_args.model_name_or_path",
    "model_args.revision",
    "model_args.adapter_name_or_path",
    "model_args.quantization",
    "model_args.config_from",
)


def value_at(config: Any, path: str) -> Any:
    """Return the value of a key path, in models and mappings; None in a section that is null."""
    for name in path.split(".") if path else ():
        if config is None:
            return None
        config = config.get(name) if isinstance(config, dict) else getattr(config, name)
    return config


def set_at(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a key path in nested mappings."""
    *parents, name = path.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[name] = value


def is_written(config: RunConfig, path: str) -> bool:
    """Return whether the user has set a key."""
    parent, _, name = path.rpartition(".")
    return name in value_at(config, parent).model_fields_set


class UnsetKeys:
    """The keys of a config that is being built. Sources are filled before keys that inherit."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.followed: dict[str, str] = {}  # key path -> the key path that it inherits from

    def fill(self, path: str, source: str, value: Any) -> None:
        """Set a key that is not written in the config to a value that the key `source` implies."""
        if path not in self.followed and not is_written(self.config, path):
            self.replace(path, source, value)

    def copy(self, path: str, source: str) -> None:
        """Set a key that is not written in the config to the value of the key `source`."""
        self.fill(path, source, value_at(self.config, source))

    def replace(self, path: str, source: str, value: Any) -> None:
        """Set a key, also one that is written in the config."""
        parent, _, name = path.rpartition(".")
        section = value_at(self.config, parent)
        if getattr(section, name) != value:
            section.__dict__[name] = value  # sections are frozen for users
            self.followed[path] = self.followed.get(source, source)


def complete(config: RunConfig) -> dict[str, str]:
    """Fill unset keys of a config that is being built.

    Return key path -> the key path that it inherits from.
    """
    keys = UnsetKeys(config)
    _complete_aliases(config, keys)
    _complete_task(config, keys)
    _complete_policy(config, keys)
    _complete_reference(config, keys)
    _complete_validation(config, keys)
    _complete_nodes(config, keys)
    _complete_clipping(config, keys)
    _complete_batch_size(config, keys)
    return keys.followed


def _complete_aliases(config: RunConfig, keys: UnsetKeys) -> None:
    for name, alias in ALIASES.items():
        meaning = alias.meaning(value_at(config, name))
        is_free = not is_written(config, alias.key) or value_at(config, alias.key) == alias.yields
        if meaning is not None and is_free:
            keys.replace(alias.key, name, meaning)


def _complete_task(config: RunConfig, keys: UnsetKeys) -> None:
    if isinstance(config.pref_loss, str) and config.pref_loss in TASK_OF_LOSS:
        keys.fill("task", "pref_loss", TASK_OF_LOSS[config.pref_loss])
    if config.task in LOSS_OF_TASK:
        keys.fill("pref_loss", "task", LOSS_OF_TASK[config.task])
    if config.task != "preference":
        keys.fill("pair_ledger", "task", False)


def _complete_policy(config: RunConfig, keys: UnsetKeys) -> None:
    actor = config.actor_train
    adapter_settings, _ = lora_file(actor.model_args)
    for name, setting in adapter_settings.items():
        keys.fill(f"{ARGS}.{name}", f"{ARGS}.lora_config", setting)
    if actor.model_args.model_name_or_path is None:
        keys.replace(f"{ARGS}.model_name_or_path", "pretrain", config.pretrain)
    if actor.data_args.template is None:
        keys.replace(f"{DATA}.template", "global_template", config.global_template)


def _complete_reference(config: RunConfig, keys: UnsetKeys) -> None:
    reference = config.reference
    inherited = list(OF_REFERENCE)
    policy_model = config.actor_train.model_args.model_name_or_path
    if reference.model_args.model_name_or_path in (None, policy_model):
        inherited += OF_SAME_WEIGHTS
    if not reference.strategy_args.model_fields_set & set(LAYOUT):
        # A layout is inherited as a whole; degrees by their own keys, which ref_tp may have set.
        details = dict(config.actor_train.strategy_args.strategy_config)
        for word in (*DEGREES, *DEGREES.values()):
            details.pop(word, None)
        keys.fill("reference.strategy_args.strategy_config", DETAILS, details)
        inherited += [f"strategy_args.{name}" for name in LAYOUT if name != "strategy_config"]
    for name in inherited:
        keys.copy(f"reference.{name}", f"actor_train.{name}")


def _complete_validation(config: RunConfig, keys: UnsetKeys) -> None:
    for name in type(config.validation.data_args).model_fields:
        if name not in ("file_name", "split"):
            keys.copy(f"validation.data_args.{name}", f"{DATA}.{name}")


def _complete_nodes(config: RunConfig, keys: UnsetKeys) -> None:
    nodes = roll_nodes(config)
    if nodes > config.num_nodes:
        log.warning("num_nodes is 1, but device_mapping spans %d nodes; using %d", nodes, nodes)
        keys.replace("num_nodes", "actor_train.device_mapping", nodes)


def _complete_clipping(config: RunConfig, keys: UnsetKeys) -> None:
    for source, max_norm in clippings(config.actor_train).items():
        if max_norm is not None:
            keys.fill("max_grad_norm", source, max_norm)


def _complete_batch_size(config: RunConfig, keys: UnsetKeys) -> None:
    """Derive the size or the steps per device from train_batch_size."""
    if config.train_batch_size is None:
        return
    source = "train_batch_size"
    training = config.actor_train.training_args
    size = training.per_device_train_batch_size
    pairs_per_rank = config.train_batch_size // data_parallel(config.actor_train)
    if answers_per_device(config, pairs_per_rank):
        text = "%s: %d looks like a count of answers (two per pair); using %d pairs"
        log.warning(text, PER_DEVICE, size, size // 2)
        keys.replace(PER_DEVICE, source, size // 2)
    elif "per_device_train_batch_size" not in training.model_fields_set:
        keys.fill(PER_DEVICE, source, pairs_per_rank // training.gradient_accumulation_steps)
    else:
        keys.fill(f"{TRAINING}.gradient_accumulation_steps", source, pairs_per_rank // size)
