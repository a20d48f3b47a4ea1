"""Adapter settings: ColossalChat's file of them, what cannot be done with them, and where the reference then is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from rather.config.plugins import did_you_mean
from rather.config.strategies import layout
from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.schema import ActorModelArgs, DPOConfig, RoleConfig

ARGS = "actor_train.model_args"
PISSA = re.compile(r"pissa(_niter_[1-9]\d*)?")
ADAPTER_SETTINGS = (  # of a new adapter; one that is there already brings its own
    "lora_rank", "lora_alpha", "lora_target", "modules_to_save", "additional_target", "use_rslora", "use_dora",
    "init_lora_weights",
)  # fmt: skip
OF_BASE = ("model_name_or_path", "revision", "dtype", "quantization")
FILE_KEYS = {  # keys of a lora_config file, ColossalChat's and PEFT's -> ours
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


class AdapterProblem(NamedTuple):
    """What is wrong at a key, and the other keys that it depends on."""

    key: str
    text: str
    others: tuple[str, ...] = ()


def changes_base(args: ActorModelArgs) -> bool:
    """Whether the adapter's start takes something out of the base, so that adapters off are not where it began."""
    return isinstance(args.init_lora_weights, str) and bool(PISSA.fullmatch(args.init_lora_weights))


def reference_is_policy(config: DPOConfig) -> bool:
    """Whether the policy, with its adapters off or as they began, is the reference: then there is no second model."""
    actor, reference = config.actor_train, config.reference
    own, other = actor.model_args, reference.model_args
    return (
        own.has_adapter
        and reference.worker_cls is None
        and (actor.device_mapping or [0]) == (reference.device_mapping or [0])
        and _degrees(actor) == _degrees(reference)
        and all(getattr(own, name) == getattr(other, name) for name in OF_BASE)
        and other.adapter_name_or_path in (None, own.adapter_name_or_path)
    )


def keeps_start(config: DPOConfig) -> bool:
    """Whether the reference is the starting adapter, of which the policy keeps a frozen copy."""
    own = config.actor_train.model_args
    started = config.reference.model_args.adapter_name_or_path is not None or changes_base(own)
    return started and reference_is_policy(config)


def _degrees(role: RoleConfig) -> tuple[int, ...] | None:
    try:
        found = layout(role)
    except ConfigError:  # reported by itself
        return None
    return found.dp, found.tp, found.pp, found.cp


# --- a file of settings ---


def settings_in_file(args: ActorModelArgs) -> dict[str, Any]:
    """Settings by our keys; empty without a file, or where it cannot be read: `file_problems` tells why."""
    values = _read(args)
    if isinstance(values, str):
        return {}
    found = {
        FILE_KEYS[key]: value
        for key, value in values.items()
        if FILE_KEYS.get(key) and value is not None
    }
    if found.get("init_lora_weights") in INITIALIZATIONS:
        found["init_lora_weights"] = INITIALIZATIONS[found["init_lora_weights"]]
    return found


def _read(args: ActorModelArgs) -> Mapping[str, Any] | str:
    """What the file holds, or why it cannot be had."""
    if args.lora_config is None:
        return {}
    try:
        values = json.loads(Path(args.lora_config).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        return f"{args.lora_config} cannot be read ({error.strerror})"
    except ValueError as error:
        return f"{args.lora_config} is not JSON ({error})"
    return (
        values
        if isinstance(values, dict)
        else f"{args.lora_config} is not a JSON object with keys such as r"
    )


def _file_problems(args: ActorModelArgs) -> Iterator[AdapterProblem]:
    key, values = f"{ARGS}.lora_config", _read(args)
    if isinstance(values, str):
        yield AdapterProblem(key, values)
        return
    for name in values:
        if name not in FILE_KEYS:
            text = (
                f"unknown key '{name}' in {args.lora_config}{did_you_mean(name, tuple(FILE_KEYS))}"
            )
            yield AdapterProblem(key, text)
    if values.get("embedding_lora_dropout"):
        yield AdapterProblem(
            key, "embedding_lora_dropout: dropout is off in preference training; set it to 0"
        )
    if values.get("lora_train_bias", "none") != "none":
        yield AdapterProblem(key, "lora_train_bias: biases stay as they are; set it to none")
    try:
        type(args).model_validate(settings_in_file(args))
    except ValidationError as error:
        for each in error.errors():
            where = ".".join(map(str, each["loc"][:1]))
            yield AdapterProblem(
                key, f"{where} is {each['input']!r} in {args.lora_config}: {each['msg']}"
            )


# --- what cannot be done ---


def adapter_problems(config: DPOConfig) -> Iterator[AdapterProblem]:
    args = config.actor_train.model_args
    yield from _file_problems(args)
    if args.lora_dropout:
        text = f"{args.lora_dropout}: dropout is off in preference training, whose two sides must see one model; set 0"
        yield AdapterProblem(f"{ARGS}.lora_dropout", text)
    names = (*ADAPTER_SETTINGS, "lora_config")
    said = [name for name in names if name in args.model_fields_set and _changed(args, name)]
    if args.adapter_name_or_path is not None:
        for name in said:
            text = f"the adapter in {args.adapter_name_or_path} brings its own; remove one of them"
            yield AdapterProblem(f"{ARGS}.{name}", text, (f"{ARGS}.adapter_name_or_path",))
    elif not args.has_adapter:
        for name in said if not isinstance(_read(args), str) else []:
            yield AdapterProblem(
                f"{ARGS}.{name}", "is for adapters; set lora_rank as well, or remove it"
            )
    yield from _initialization(args)
    yield from _layout(config)
    yield from _quantization(config)
    yield from _reference(config)


def _changed(args: ActorModelArgs, name: str) -> bool:
    return bool(getattr(args, name) != type(args).model_fields[name].default)


def _initialization(args: ActorModelArgs) -> Iterator[AdapterProblem]:
    key, init = f"{ARGS}.init_lora_weights", args.init_lora_weights
    if init is False or (
        isinstance(init, str) and init != "gaussian" and not PISSA.fullmatch(init)
    ):
        yield AdapterProblem(
            key, f"{init} is not one of true, gaussian, pissa, pissa_niter_4 (any number)"
        )
    if changes_base(args) and args.use_dora:
        text = f"{init} and use_dora each change what the base means; keep one of them"
        yield AdapterProblem(key, text, (f"{ARGS}.use_dora",))
    if args.modules_to_save is not None and args.additional_target is not None:
        text = "is ROLL's name of modules_to_save, which is given too; keep one of them"
        yield AdapterProblem(f"{ARGS}.additional_target", text, (f"{ARGS}.modules_to_save",))


def _layout(config: DPOConfig) -> Iterator[AdapterProblem]:
    args, degrees = config.actor_train.model_args, _degrees(config.actor_train)
    if degrees is None or degrees[1] == 1:
        return
    others = ("actor_train.strategy_args",)
    if args.use_dora:
        text = "its norms run over weights that tensor parallel cuts; set tp_size to 1"
        yield AdapterProblem(f"{ARGS}.use_dora", text, others)
    if changes_base(args):
        text = f"{args.init_lora_weights} decomposes weights that tensor parallel cuts; set tp_size to 1"
        yield AdapterProblem(f"{ARGS}.init_lora_weights", text, others)
    for name in ("modules_to_save", "additional_target"):
        if getattr(args, name) is not None:
            text = "modules that are trained whole are not cut by tensor parallel; set tp_size to 1"
            yield AdapterProblem(f"{ARGS}.{name}", text, others)


def _quantization(config: DPOConfig) -> Iterator[AdapterProblem]:
    actor, reference = config.actor_train, config.reference
    args, key = actor.model_args, f"{ARGS}.quantization"
    if reference.model_args.quantization is not None and not reference_is_policy(config):
        text = "only a policy with adapters that is its own reference may be quantised; remove it"
        yield AdapterProblem("reference.model_args.quantization", text, (key,))
    if args.quantization is None:
        return
    if not args.has_adapter:
        yield AdapterProblem(
            key, "4-bit weights cannot be trained; set lora_rank to train an adapter on them"
        )
    if changes_base(args):
        text = f"init_lora_weights: {args.init_lora_weights} takes a part out of the weights before they are rounded"
        yield AdapterProblem(key, f"{text}; keep one of them", (f"{ARGS}.init_lora_weights",))
    if args.use_dora:
        text = "use_dora begins with the norms of the weights as they were, not of what 4 bits hold; keep one of them"
        yield AdapterProblem(key, text, (f"{ARGS}.use_dora",))
    if len(actor.device_mapping or [0]) > 1:
        yield AdapterProblem(
            key, "4-bit weights are not divided; use one device", ("actor_train.device_mapping",)
        )


def _reference(config: DPOConfig) -> Iterator[AdapterProblem]:
    if not config.actor_train.model_args.has_adapter:
        return
    if config.sync_ref_model:
        text = "moves the weights of a second model; with adapters there is none. Remove it, or train without adapters"
        yield AdapterProblem(
            "sync_ref_model", text, (f"{ARGS}.lora_rank", f"{ARGS}.adapter_name_or_path")
        )
    if config.reference.offload == "on" and reference_is_policy(config):
        text = (
            "the reference is the policy without its adapters: there is nothing to move; set auto"
        )
        yield AdapterProblem("reference.offload", text, (f"{ARGS}.lora_rank",))
