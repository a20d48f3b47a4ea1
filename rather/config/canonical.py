"""determinism: canonical: what it asks of a run, so that 1, 2 and 4 devices give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rather.config.strategies import LANES, layout
from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig, RoleConfig

THREADS = "OMP_NUM_THREADS"


def threads_of(config: DPOConfig, role: RoleConfig) -> int:
    """Of every worker of a role: sums of one and of several threads differ in their last bit."""
    return int(config.envs(role).get(THREADS, "1"))


def canonical_problems(config: DPOConfig) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(key, sentence, keys it depends on) for everything on which bits would depend."""
    if config.determinism is None:
        return
    for name, role in (("actor_train", config.actor_train), ("reference", config.reference)):
        if text := _layout_problem(role):
            yield (
                "determinism",
                f"canonical: {name} {text}",
                (f"{name}.strategy_args", f"{name}.device_mapping"),
            )
            break  # the reference follows
    key, dtype = "actor_train.model_args.dtype", config.actor_train.model_args.dtype
    if dtype not in (None, "fp32"):
        yield (
            key,
            f"determinism: canonical adds up gradients in fp32, not in {dtype}; set it to fp32",
            ("determinism",),
        )
    yield from _thread_problems(config)


def canonical_device_problems(config: DPOConfig) -> list[str]:
    """What a GPU, whose defaults are others, has to be told."""
    if config.determinism is None:
        return []
    found = []
    if not config.deterministic:
        found.append(
            "determinism: canonical needs kernels that repeat on a GPU; type deterministic=true"
        )
    if config.actor_train.model_args.dtype is None:
        key = "actor_train.model_args.dtype"
        found.append(
            f"determinism: canonical is for fp32, and a GPU has bf16 unless told; type {key}=fp32"
        )
    return found


def _layout_problem(role: RoleConfig) -> str | None:
    try:
        found = layout(role)
    except ConfigError:
        return None  # is told by itself
    degrees = [
        f"{axis} {size}" for axis in ("tp", "pp", "cp") if (size := getattr(found, axis)) > 1
    ]
    if degrees:
        return f"has {' x '.join(degrees)}; only data-parallel ranks can be as one, to the bit: ddp or zero1"
    if LANES % found.dp:
        return f"has {found.dp} devices; it takes 1, 2 or {LANES}"
    if found.stage > 1:
        return f"is {found.name}; set strategy_name to ddp or zero1"
    return None


def _thread_problems(config: DPOConfig) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    given = [config.envs(role).get(THREADS, "1") for role in (config.actor_train, config.reference)]
    key, others = (
        f"system_envs.{THREADS}",
        ("determinism", "actor_train.system_envs", "reference.system_envs"),
    )
    if not all(text.isdecimal() and int(text) for text in given):
        yield (
            key,
            f"determinism: canonical needs a whole number of threads, not {' and '.join(given)}",
            others,
        )
    elif len(set(given)) > 1:
        told = f"actor_train has {given[0]} and reference {given[1]}"
        yield (
            key,
            f"determinism: canonical needs one number of threads in all workers; {told}; set it once",
            others,
        )
