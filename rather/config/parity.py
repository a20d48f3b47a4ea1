"""`parity: trl-1.x`: what it presets, and which settings TRL (0.29 and later) does not have.

Tokens are made as TRL makes them (data/tokens.py). TRL's losses equal Rather's, except for what is
refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rather.config.strategies import data_parallel
from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

DATA = "actor_train.data_args"
# TRL drops only rows whose prompt fills the length, and cuts answers at the end.
PRESETS: dict[str, Any] = {f"{DATA}.overlong": "truncate_response", "on_bad": "error"}
LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
    "apo_down", "discopop", "sft", "bco_pair", "sigmoid_norm",
)  # fmt: skip
OF_A_MICRO_BATCH = ("sft", "aot", "aot_unpaired")
ABSENT = (
    "gamma", "gamma_beta_ratio", "length_normalization", "cpo_alpha", "alphapo_alpha", "odpo_alpha", "pref_ftx",
    "soft_labels", "rpo_alpha", "reference_free",
)  # fmt: skip
FIXED = {
    "score": "last",
    "separator": "",
    "overlong": "truncate_response",
    "max_prompt_length": None,
}


def parity_problems(config: DPOConfig) -> Iterator[tuple[str, ...]]:
    """Return the settings that TRL cannot reproduce."""
    for key, text in _differences(config) if config.parity else ():
        yield key, f"{text} (parity: {config.parity})", "parity"


def _differences(config: DPOConfig) -> Iterator[tuple[str, str]]:
    training, data = config.actor_train.training_args, config.actor_train.data_args
    micro_batches = data_parallel(config.actor_train) * training.gradient_accumulation_steps
    for name in config.loss_names:
        if name not in LOSSES:
            yield "pref_loss", f"'{name}' is not a loss of TRL's DPO trainer"
        if name in OF_A_MICRO_BATCH and micro_batches > 1:
            text = f"'{name}' depends on micro-batches in TRL; use one device and no accumulation"
            yield "pref_loss", text
    if config.label_smoothing and "sigmoid" in config.loss_names:
        yield "label_smoothing", "TRL ignores it for sigmoid; remove it"
    for key in (key for key in ABSENT if getattr(config, key) is not None):
        yield key, "TRL has no such setting; remove it"
    for key, value in FIXED.items():
        if getattr(data, key) != value:
            yield f"{DATA}.{key}", f"TRL has no such choice; leave it at {value!r}"
    if data.special_tokens in ("escape", "drop"):
        yield f"{DATA}.special_tokens", "TRL keeps special tokens in the text; set keep or warn"
    if training.lr_scheduler_type == "constant" and (
        training.warmup_steps or training.warmup_ratio
    ):
        text = (
            "transformers' constant schedule has no warm-up; set constant_with_warmup or remove it"
        )
        yield "actor_train.training_args.lr_scheduler_type", text


def check_even(config: DPOConfig, pairs: int, dp: int) -> None:
    """Refuse a smaller last micro-batch of an epoch, which weighs more in TRL than in Rather."""
    training = config.actor_train.training_args
    size, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    is_alone = dp == 1 and (steps == 1 or -(-pairs // size) % steps == 1)
    if config.parity and pairs % (size * dp) and not is_alone:
        raise ConfigError(
            f"parity: {config.parity}: {pairs} pairs are not a multiple of per_device_train_batch_size {size}"
            f"{f' x dp {dp}' if dp > 1 else ''}: in TRL the smaller micro-batch at the end of an epoch "
            "weighs more. Choose a size that divides the pairs."
        )
