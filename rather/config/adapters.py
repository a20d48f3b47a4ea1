"""LoRA adapters: ColossalChat's file of settings, impossible settings, and whether the policy is
its own reference."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rather.config.plugins import did_you_mean
from rather.config.strategies import layout
from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.schema import ActorModelArgs, DPOConfig, RoleConfig

Problems = Iterator[tuple[str, ...]]
ARGS = "actor_train.model_args"
PISSA = re.compile(r"pissa(_niter_[1-9]\d*)?")
ADAPTER_SETTINGS = (  # of a new adapter; an existing one brings its own
    "lora_rank", "lora_alpha", "lora_target", "modules_to_save", "additional_target", "use_rslora", "use_dora",
    "init_lora_weights",
)  # fmt: skip
OF_BASE = ("model_name_or_path", "revision", "dtype", "quantization")
FILE_KEYS = {  # keys of a lora_config file, ColossalChat's and PEFT's -> Rather's
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target",
    "linear_lora_dropout": "lora_dropout",
    "lora_dropout": "lora_dropout",
    "modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "init_lora_weights": "init_lora_weights",
    "lora_initialization_method": "init_lora_weights",
    "embedding_lora_dropout": "",
    "lora_train_bias": "",
}
INITIALIZATIONS = {"kaiming_uniform": True, "PiSSA": "pissa_niter_4"}  # ColossalChat's -> PEFT's


def changes_base(args: ActorModelArgs) -> bool:
    """Whether the adapter's initialization takes a part out of the base weights."""
    return bool(PISSA.fullmatch(str(args.init_lora_weights)))


def reference_is_policy(config: DPOConfig) -> bool:
    """Whether the policy without its adapter, or with its initial one, is the reference: no
    second model."""
    actor, reference = config.actor_train, config.reference
    own, other = actor.model_args, reference.model_args
    return (
        own.has_adapter
        and reference.worker_cls is None
        and actor.devices == reference.devices
        and _degrees(actor) == _degrees(reference)
        and all(getattr(own, name) == getattr(other, name) for name in OF_BASE)
        and other.adapter_name_or_path in (None, own.adapter_name_or_path)
    )


def keeps_start(config: DPOConfig) -> bool:
    """Whether the reference is the initial adapter, of which the policy keeps a frozen copy."""
    own = config.actor_train.model_args
    started = config.reference.model_args.adapter_name_or_path is not None or changes_base(own)
    return started and reference_is_policy(config)


def _degrees(role: RoleConfig) -> tuple[int, ...] | None:
    try:
        found = layout(role)
    except ConfigError:  # reported elsewhere
        return None
    return found.dp, found.tp, found.pp, found.cp


def settings_in_file(args: ActorModelArgs) -> dict[str, Any]:
    """Return the settings of the lora_config file by Rather's keys; empty if there is none or it
    is unreadable."""
    values = _read(args)
    if isinstance(values, str):
        return {}
    found = {
        FILE_KEYS[key]: value
        for key, value in values.items()
        if FILE_KEYS.get(key) and value is not None
    }
    init = found.get("init_lora_weights")
    return found | ({"init_lora_weights": INITIALIZATIONS[init]} if init in INITIALIZATIONS else {})


def _read(args: ActorModelArgs) -> Mapping[str, Any] | str:
    """Return the content of the file, or why it cannot be used."""
    file = args.lora_config
    try:
        values = json.loads(Path(file).expanduser().read_text(encoding="utf-8")) if file else {}
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    except ValueError as error:
        return f"{file} is not JSON ({error})"
    return (
        values if isinstance(values, dict) else f"{file} is not a JSON object with keys such as r"
    )


def _file_problems(args: ActorModelArgs) -> Iterator[str]:
    values, file = _read(args), args.lora_config
    if isinstance(values, str):
        yield values
        return
    for name in values:
        if name not in FILE_KEYS:
            yield f"unknown key '{name}' in {file}{did_you_mean(name, FILE_KEYS)}"
    if values.get("embedding_lora_dropout"):
        yield "embedding_lora_dropout: dropout is off in preference training; set it to 0"
    if values.get("lora_train_bias", "none") != "none":
        yield "lora_train_bias: biases are not trained; set it to none"
    try:
        type(args).model_validate(settings_in_file(args))
    except ValidationError as error:
        for each in error.errors():
            yield f"{each['loc'][0]} is {each['input']!r} in {file}: {each['msg']}"


def adapter_problems(config: DPOConfig) -> Problems:
    """Return adapter settings that are impossible."""
    args, adapter = (
        config.actor_train.model_args,
        config.actor_train.model_args.adapter_name_or_path,
    )
    yield from ((f"{ARGS}.lora_config", text) for text in _file_problems(args))
    if args.lora_dropout:
        yield (
            f"{ARGS}.lora_dropout",
            f"{args.lora_dropout}: dropout is off in preference training; set 0",
        )
    fields = type(args).model_fields
    given = [
        name
        for name in (*ADAPTER_SETTINGS, "lora_config")
        if name in args.model_fields_set and getattr(args, name) != fields[name].default
    ]
    for name in given:
        if adapter is not None:
            text = f"the adapter in {adapter} has its own settings; remove one of them"
            yield f"{ARGS}.{name}", text, f"{ARGS}.adapter_name_or_path"
        elif not args.has_adapter and not isinstance(_read(args), str):
            yield f"{ARGS}.{name}", "is for adapters; set lora_rank as well, or remove it"
    yield from _initialization_problems(args)
    yield from _layout_problems(config)
    yield from _quantization_problems(config)
    if args.has_adapter and config.sync_ref_model:
        text = "needs a second model, and with adapters there is none; remove it or the adapter"
        yield "sync_ref_model", text, f"{ARGS}.lora_rank", f"{ARGS}.adapter_name_or_path"
    if config.reference.offload == "on" and reference_is_policy(config):
        text = "the reference is the policy without its adapter: there is nothing to move; set auto"
        yield "reference.offload", text, f"{ARGS}.lora_rank"


def _initialization_problems(args: ActorModelArgs) -> Problems:
    key, init = f"{ARGS}.init_lora_weights", args.init_lora_weights
    if init not in (True, "gaussian") and not changes_base(args):
        yield key, f"{init} is not one of true, gaussian, pissa, pissa_niter_4 (any number)"
    if changes_base(args) and args.use_dora:
        text = f"{init} and use_dora both redefine the base weights; keep one of them"
        yield key, text, f"{ARGS}.use_dora"
    if args.modules_to_save is not None and args.additional_target is not None:
        text = "is ROLL's name for modules_to_save, which is set as well; keep one of them"
        yield f"{ARGS}.additional_target", text, f"{ARGS}.modules_to_save"


def _layout_problems(config: DPOConfig) -> Problems:
    args, degrees = config.actor_train.model_args, _degrees(config.actor_train)
    unsupported = {
        "use_dora": args.use_dora,
        "init_lora_weights": changes_base(args),
        "modules_to_save": args.modules_to_save is not None,
        "additional_target": args.additional_target is not None,
    }
    for name in (name for name, is_set in unsupported.items() if is_set):
        if degrees is not None and degrees[1] > 1:
            text = f"{getattr(args, name)} needs whole weights, which tensor parallelism splits; set tp_size to 1"
            yield f"{ARGS}.{name}", text, "actor_train.strategy_args"


def _quantization_problems(config: DPOConfig) -> Problems:
    args, key = config.actor_train.model_args, f"{ARGS}.quantization"
    if config.reference.model_args.quantization is not None and not reference_is_policy(config):
        text = "only a policy with an adapter that is its own reference can be quantised; remove it"
        yield "reference.model_args.quantization", text, key
    if args.quantization is None:
        return
    if not args.has_adapter:
        yield key, "4-bit weights cannot be trained; set lora_rank to train an adapter on them"
    if changes_base(args):
        text = (
            f"init_lora_weights: {args.init_lora_weights} changes weights before they are rounded"
        )
        yield key, f"{text}; keep one of them", f"{ARGS}.init_lora_weights"
    if args.use_dora:
        text = "use_dora starts from the norms of the unrounded weights; keep one of them"
        yield key, text, f"{ARGS}.use_dora"
    if len(config.actor_train.devices) > 1:
        yield key, "4-bit weights cannot be sharded; use one device", "actor_train.device_mapping"
