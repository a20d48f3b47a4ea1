"""strategy_name and strategy_config of a role -> its layout: the degrees dp, tp, pp, cp, and recomputation.

Sizes may be written as `tp_size` in `strategy_args` or `strategy_config`, or with Megatron's long names. This
version runs on one device; a layout of more is read and shown, and refused where training would start.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig, RoleConfig, StrategyArgs

TRAIN_STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "fsdp2_train",
    "megatron_train",
    "deepspeed_train",
    "3d",
    "gemini",
)
INFER_STRATEGIES = ("hf_infer", "fsdp2_infer", "megatron_infer", "deepspeed_infer")
STRATEGIES = TRAIN_STRATEGIES + INFER_STRATEGIES

# Every spelling of a degree that may stand in strategy_config.
DEGREES = {
    "tp": ("tp_size", "tensor_model_parallel_size"),
    "pp": ("pp_size", "pipeline_model_parallel_size"),
    "cp": ("cp_size", "context_parallel_size"),
}
SWITCHES = ("use_distributed_optimizer", "sequence_parallel", "offload_activations")
RECOMPUTED = ("half", "selective", "full")
STRATEGY_KEYS = (
    *(name for names in DEGREES.values() for name in names),
    "expert_model_parallel_size",
    "recompute_granularity",
    *SWITCHES,
)


@dataclass(frozen=True)
class Layout:
    """How a role lies on its dp x tp x pp x cp devices, and what becomes of its activations.

    `recompute` trades time for memory; None leaves the choice to what fits. `offload` moves activations to the host.
    """

    dp: int
    tp: int
    pp: int
    cp: int
    recompute: Literal["none", "half", "selective", "full"] | None
    offload: bool
    name: str


def did_you_mean(word: str, known: tuple[str, ...] | list[str]) -> str:
    """'; did you mean ...?' when something near is known, otherwise the whole list."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"


def strategy_problems(args: StrategyArgs, *, trains: bool, devices: int) -> list[tuple[str, str]]:
    """(key inside strategy_args, sentence) for everything that cannot be laid out on so many devices."""
    found = _name_problems(args.strategy_name, trains)
    for key, value in args.strategy_config.items():
        text = _key_problem(key, value)
        if text:
            found.append((f"strategy_config.{key}", text))
    if found:
        return found
    for axis in DEGREES:
        given = _given(args, axis)
        if len(set(given.values())) > 1:
            listing = ", ".join(f"{key}={size}" for key, size in given.items())
            found.append((list(given)[-1], f"the same degree has two values ({listing}); keep one of them"))
    if not found:
        tp, pp, cp = (_degree(args, axis) for axis in DEGREES)
        if devices % (tp * pp * cp):
            sizes = f"tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp}"
            text = f"{sizes} does not divide the {devices} devices of device_mapping"
            found.append(("strategy_config" if args.strategy_config else "tp_size", text))
    return found


def _name_problems(name: str | None, trains: bool) -> list[tuple[str, str]]:
    if name is None or name in (TRAIN_STRATEGIES if trains else STRATEGIES):
        return []
    if name in STRATEGIES:
        return [("strategy_name", f"'{name}' cannot train; choose one of {', '.join(TRAIN_STRATEGIES)}")]
    known = TRAIN_STRATEGIES if trains else STRATEGIES
    return [("strategy_name", f"unknown strategy '{name}'{did_you_mean(name, known)}")]


def _key_problem(key: str, value: Any) -> str | None:
    if key not in STRATEGY_KEYS:
        return f"unknown key{did_you_mean(str(key), STRATEGY_KEYS)}"
    if key in SWITCHES:
        return None if isinstance(value, bool) else f"{value!r} is not true or false"
    if key == "recompute_granularity":
        return None if value in (*RECOMPUTED, None) else f"{value!r} is not 'full', 'selective', 'half' or null"
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return f"{value!r} is not a whole number >= 1"
    if key == "expert_model_parallel_size" and value != 1:
        return f"{value} experts in parallel are not offered; set it to 1"
    return None


def _given(args: StrategyArgs, axis: str) -> dict[str, int]:
    """Every place that states this degree, by its key inside strategy_args."""
    short = f"{axis}_size"
    own = getattr(args, short)
    given = {} if own is None else {short: own}
    return given | {
        f"strategy_config.{key}": args.strategy_config[key]
        for key in DEGREES[axis]
        if key in args.strategy_config
    }


def _degree(args: StrategyArgs, axis: str) -> int:
    return next(iter(_given(args, axis).values()), 1)


def layout(role: RoleConfig, devices: int | None = None) -> Layout:
    """The layout a role asks for on `devices` devices (those of its device_mapping when not given)."""
    args, count = role.strategy_args, devices or len(role.device_mapping or [0])
    found = strategy_problems(args, trains=role.trains, devices=count)
    if found:
        raise ConfigError([f"strategy_args.{key}: {text}" for key, text in found])
    tp, pp, cp = (_degree(args, axis) for axis in DEGREES)
    recompute = args.strategy_config.get("recompute_granularity")
    told = role.model_args.disable_gradient_checkpointing
    if recompute is None and role.trains and told is not None:
        recompute = "none" if told else "full"
    offload = bool(args.strategy_config.get("offload_activations"))
    return Layout(count // (tp * pp * cp), tp, pp, cp, recompute, offload, args.strategy_name or "ddp")


def single_device_problem(config: DPOConfig) -> str | None:
    """The sentence that refuses to train where more than one device is asked for, or None."""
    actor = config.actor_train.device_mapping or [0]
    reference = config.reference.device_mapping or [0]
    here = "this version trains on one device"
    if len(actor) > 1:
        return (
            f"actor_train.device_mapping names {len(actor)} devices {actor}; {here}: set "
            f"actor_train.device_mapping=[{actor[0]}] reference.device_mapping=[{actor[0]}]"
        )
    if reference != actor:
        return (
            f"reference.device_mapping is {reference}, actor_train.device_mapping is {actor}; {here}: "
            f"set reference.device_mapping={actor}, or leave it out"
        )
    if config.num_nodes > 1:
        return f"num_nodes is {config.num_nodes}; {here}: set num_nodes=1"
    return None
