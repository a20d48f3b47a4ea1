"""Unset keys that inherit from other keys.

`reference` inherits from `actor_train`, `validation.data_args` from `actor_train.data_args`, the
policy's model from `pretrain`, templates from `global_template`; `train_batch_size` determines its
parts.
"""

from __future__ import annotations

import logging
from typing import Any

from rather.config.compat import PRESETS, clippings, lora_file
from rather.config.schema import RunConfig
from rather.config.strategies import DEGREES, data_parallel

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
}
LOSS_OF_TASK = {"unpaired": "kto", "reward": "bradley_terry", "sft": "sft"}
OF_SAME_WEIGHTS = (
    "model_args.model_name_or_path",
    "model_args.revision",
    "model_args.adapter_name_or_path",
    "model_args.quantization",
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


def complete(config: RunConfig) -> dict[str, str]:
    """Fill unset keys of a config that is being built, sources before what inherits from them.

    Return key path -> the key path that it inherits from.
    """
    followed: dict[str, str] = {}

    def inherit(path: str, source: str, value: Any, *, replace: bool = False) -> None:
        parent, _, name = path.rpartition(".")
        owner = value_at(config, parent)
        is_free = replace or name not in owner.model_fields_set
        if is_free and getattr(owner, name) != value:
            owner.__dict__[name] = value  # sections are frozen for users
            followed[path] = followed.get(source, source)

    actor, reference = config.actor_train, config.reference
    if isinstance(config.pref_loss, str) and config.pref_loss in TASK_OF_LOSS:
        inherit("task", "pref_loss", TASK_OF_LOSS[config.pref_loss])
    if config.task in LOSS_OF_TASK and not config.loss_type:
        inherit("pref_loss", "task", LOSS_OF_TASK[config.task])
    if config.task != "preference":
        inherit("pair_ledger", "task", False)
    if not config.apply_loss_mask:
        inherit(f"{DATA}.score", "apply_loss_mask", "all")
    for name, value in lora_file(actor.model_args)[0].items():
        inherit(f"{ARGS}.{name}", f"{ARGS}.lora_config", value)
    for path, value in PRESETS.items() if config.parity else ():
        inherit(path, "parity", value)
    if actor.model_args.model_name_or_path is None:
        inherit(f"{ARGS}.model_name_or_path", "pretrain", config.pretrain, replace=True)
    if actor.data_args.template is None:
        inherit(f"{DATA}.template", "global_template", config.global_template, replace=True)
    names = list(OF_REFERENCE)
    own_model = reference.model_args.model_name_or_path
    if own_model in (None, actor.model_args.model_name_or_path):
        names += OF_SAME_WEIGHTS
    has_layout = reference.strategy_args.model_fields_set & set(LAYOUT)
    if not has_layout:  # a layout is inherited as a whole
        names += [f"strategy_args.{name}" for name in LAYOUT]
    for name in names:
        source = f"actor_train.{name}"
        inherit(f"reference.{name}", source, value_at(config, source))
    if config.ref_tp is not None:  # replaces a degree that was only inherited
        details = dict(reference.strategy_args.strategy_config)
        for name in () if has_layout else ("tp_size", DEGREES["tp_size"]):
            details.pop(name, None)
        inherit("reference.strategy_args.strategy_config", DETAILS, details)
        inherit("reference.strategy_args.tp_size", "ref_tp", config.ref_tp)
    for name in type(config.validation.data_args).model_fields:
        if name not in ("file_name", "split"):
            inherit(
                f"validation.data_args.{name}", f"{DATA}.{name}", getattr(actor.data_args, name)
            )
    name, per_node = actor.strategy_args.strategy_name or "", config.num_gpus_per_node or 0
    if name.startswith("megatron") and per_node and config.num_nodes == 1:
        nodes = (max(actor.devices) + 1) // per_node  # ROLL's own file has 16 devices on "1" node
        if nodes > 1 and (max(actor.devices) + 1) % per_node == 0:
            log.warning(
                "num_nodes: 1, but device_mapping has GPUs of %d nodes; read as that", nodes
            )
            inherit("num_nodes", "actor_train.device_mapping", nodes, replace=True)
    for source, value in clippings(actor).items():
        if value is not None:
            inherit("max_grad_norm", source, value)
    if config.train_batch_size is not None:
        training, share = actor.training_args, config.train_batch_size // data_parallel(actor)
        size, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
        source, counts_answers = "train_batch_size", size * steps == 2 * share and size % 2 == 0
        if config.val_batch_size and counts_answers:
            log.warning("%s: %d counts answers: read as %d pairs", PER_DEVICE, size, size // 2)
            inherit(PER_DEVICE, source, size // 2, replace=True)
        elif "per_device_train_batch_size" not in training.model_fields_set:
            inherit(PER_DEVICE, source, share // steps)
        else:
            inherit(f"{TRAINING}.gradient_accumulation_steps", source, share // size)
    return followed
