"""A DeepSpeed configuration as `strategy_config` of deepspeed_train or deepspeed_infer, or as a
JSON file.

Rather reads the sharding stage, offloading and clipping. Keys that tune DeepSpeed's own buffers and
prints are ignored, because they change no result. Every other key is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rather.config.schema import StrategyArgs

FILE = "config_file"
ZERO = "zero_optimization"
IGNORED = {
    "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    *(f"{ZERO}.{key}" for key in ["overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_bucket_size", "allgather_partitions", "sub_group_size", "round_robin_gradients", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save", "offload_optimizer.pin_memory", "offload_param.pin_memory"]),
}  # fmt: skip
ELSEWHERE = {
    "train_batch_size": "train_batch_size at the top level",
    "train_micro_batch_size_per_gpu": "actor_train.training_args.per_device_train_batch_size",
    "gradient_accumulation_steps": "actor_train.training_args.gradient_accumulation_steps",
    "bf16.enabled": "model_args.dtype: bf16",
    "fp16.enabled": "model_args.dtype: fp16",
}
OFFLOADS = (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device")


def is_deepspeed(name: str | None) -> bool:
    return (name or "").startswith("deepspeed_")


def deepspeed_sharding(details: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the sharding stage, and whether optimizer or weights are offloaded to the CPU."""
    flat = _flat(_content(details))
    return flat.get(f"{ZERO}.stage", 0), any(flat.get(key) == "cpu" for key in OFFLOADS)


def deepspeed_clipping(args: StrategyArgs) -> float | None:
    """Return the gradient clipping of a valid DeepSpeed configuration, if it has one."""
    details = args.strategy_config
    if not is_deepspeed(args.strategy_name) or any(deepspeed_problems(details)):
        return None
    found = _flat(_content(details)).get("gradient_clipping")
    return None if found in (None, "auto") else float(found)


def deepspeed_problems(details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return (key inside strategy_config, sentence) for every setting that is not supported."""
    if FILE in details and len(details) > 1:
        yield FILE, "is a whole configuration; remove the other keys"
        return
    try:
        content = _content(details)
    except (OSError, ValueError) as error:
        yield FILE, f"{details[FILE]} cannot be read as JSON: {error}"
        return
    for key, value in _flat(content).items():
        if text := _problem(key, value):
            in_file = (FILE, f"{FILE}: {details.get(FILE)}: {key} {text}")
            yield in_file if FILE in details else (key, text)


def _problem(key: str, value: Any) -> str | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in IGNORED or value == "auto" or (key in ELSEWHERE and value is False):
        return None
    if key in ELSEWHERE:
        return f"is set by {ELSEWHERE[key]}; remove it here or set it to 'auto'"
    if key in OFFLOADS:
        return (
            None
            if value in ("cpu", "none", None)
            else f"{value!r} is not supported; use cpu or none"
        )
    if key == f"{ZERO}.stage":
        return None if is_number and value in (0, 1, 2, 3) else f"{value!r} is not 0, 1, 2 or 3"
    if key == "gradient_clipping":
        return None if is_number and value >= 0 else f"{value!r} is not a number >= 0 or 'auto'"
    return "is not supported; remove it"


def _content(details: Mapping[str, Any]) -> Mapping[str, Any]:
    if FILE not in details:
        return details
    found = json.loads(Path(str(details[FILE])).expanduser().read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat
