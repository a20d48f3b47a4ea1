"""A DeepSpeed configuration, given as `strategy_config` of deepspeed_train or deepspeed_infer, or as a JSON file.

Read are the sharding stage, offloading and clipping. What tunes DeepSpeed's own buffers and prints has no counterpart
and changes no result; everything else is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = "config_file"
# Of DeepSpeed's own machinery: buckets, buffers, prints.
UNUSED = {
    "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter",
    "zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size",
    "zero_optimization.allgather_partitions", "zero_optimization.sub_group_size",
    "zero_optimization.round_robin_gradients", "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold", "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance", "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory",
}  # fmt: skip
ELSEWHERE = {
    "train_batch_size": "train_batch_size at the top level",
    "train_micro_batch_size_per_gpu": "actor_train.training_args.per_device_train_batch_size",
    "gradient_accumulation_steps": "actor_train.training_args.gradient_accumulation_steps",
    "bf16.enabled": "model_args.dtype: bf16",
    "fp16.enabled": "model_args.dtype: fp16",
}
READ = ("zero_optimization.stage", "gradient_clipping")
OFFLOADS = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")


class DeepSpeedSettings(NamedTuple):
    """What of a DeepSpeed configuration has a meaning here."""

    stage: int
    host: bool  # optimizer or weights are offloaded to the CPU
    clipping: float | None


def is_deepspeed(name: str | None) -> bool:
    return bool(name) and str(name).startswith("deepspeed_")


def deepspeed_settings(details: Mapping[str, Any]) -> DeepSpeedSettings:
    flat = _flat(_content(details))
    clipping = flat.get("gradient_clipping")
    return DeepSpeedSettings(
        flat.get("zero_optimization.stage", 0),
        any(flat.get(key) == "cpu" for key in OFFLOADS),
        None if clipping in (None, "auto") else float(clipping),
    )


def deepspeed_problems(details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key inside strategy_config, sentence) for everything in it that cannot be honoured."""
    if FILE in details and len(details) > 1:
        yield FILE, "names the whole configuration; remove the keys beside it"
        return
    try:
        content = _content(details)
    except (OSError, ValueError) as error:
        yield FILE, f"{details[FILE]} cannot be read as JSON: {error}"
        return
    prefix = f"{FILE}: {details[FILE]}: " if FILE in details else ""
    for key, value in _flat(content).items():
        if text := _problem(key, value):
            yield (FILE, f"{prefix}{key} {text}") if prefix else (key, text)


def _problem(key: str, value: Any) -> str | None:
    if key in UNUSED or value == "auto":
        return None
    if key in ELSEWHERE:
        off = value is False
        return None if off else f"is said by {ELSEWHERE[key]}; remove it here or set it to 'auto'"
    if key in OFFLOADS:
        return (
            None if value in ("cpu", "none", None) else f"{value!r} is not offered; use cpu or none"
        )
    if key == "zero_optimization.stage":
        return (
            None
            if value in (0, 1, 2, 3) and not isinstance(value, bool)
            else f"{value!r} is not 0, 1, 2 or 3"
        )
    if key == "gradient_clipping":
        number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        return None if number else f"{value!r} is not a number >= 0 or 'auto'"
    return "is not offered; remove it"


def _content(details: Mapping[str, Any]) -> Mapping[str, Any]:
    if FILE not in details:
        return details
    found = json.loads(Path(str(details[FILE])).expanduser().read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"zero_optimization": {"stage": 3}} -> {"zero_optimization.stage": 3}"""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
