"""parity: trl-1.x | trl-0.2x: what it presets, and what of a config that TRL cannot have meant.

Tokens are made as TRL makes them (data/tokens.py). Its losses are ours, but for what is refused here by name: before
0.29 TRL averages all log-probs of a list with ipo, leaves the reference in some losses that are reference_free, shifts
bco_pair by a running mean, and counts tokens from the wrong places for ld_alpha and use_weighting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rather.errors import ConfigError

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

DATA = "actor_train.data_args"
NAMES = {"trl-1.x": "TRL 1.x", "trl-0.2x": "TRL before 0.29"}
# TRL drops no row but one whose prompt fills the length. From 0.29 on it cuts answers at the end, before that pairs at
# the beginning.
PRESETS: dict[str, dict[str, Any]] = {
    "trl-1.x": {f"{DATA}.overlong": "truncate_response", "on_bad": "error"},
    "trl-0.2x": {
        f"{DATA}.overlong": "truncate_prompt",
        f"{DATA}.max_prompt_length": 512,
        "on_bad": "error",
    },
}
SHARED = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
    "apo_down", "discopop", "sft",
)  # fmt: skip
LOSSES = {"trl-1.x": (*SHARED, "bco_pair", "sigmoid_norm"), "trl-0.2x": SHARED}
OF_A_MICRO_BATCH = ("sft", "aot", "aot_unpaired")
MARGINS = (
    "sigmoid",
    "hinge",
    "exo_pair",
    "robust",
)  # of the log-ratios that TRL before 0.29 bends or frees
ABSENT = (
    "gamma", "gamma_beta_ratio", "length_normalization", "cpo_alpha", "alphapo_alpha", "odpo_alpha", "pref_ftx",
    "soft_labels",
)  # fmt: skip
ABSENT_IN = {"trl-1.x": (*ABSENT, "rpo_alpha", "reference_free"), "trl-0.2x": ABSENT}
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "trl-1.x": {
        "score": ("last",), "separator": ("",), "overlong": ("truncate_response",), "max_prompt_length": (None,)
    },
    "trl-0.2x": {"score": ("last",), "separator": ("",), "overlong": ("truncate_prompt", "truncate_response")},
}  # fmt: skip


def parity_problems(config: DPOConfig, dp: int) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(key, sentence, keys it depends on)"""
    if config.parity is None:
        return
    old = _old_problems(config, dp) if config.parity == "trl-0.2x" else ()
    for key, text in (
        *_loss_problems(config, dp),
        *old,
        *_data_problems(config),
        *_schedule_problems(config),
    ):
        yield key, f"{text} (parity: {config.parity})", ("parity",)


def _loss_problems(config: DPOConfig, dp: int) -> Iterator[tuple[str, str]]:
    assert config.parity is not None
    names, name_of = config.loss_names, NAMES[config.parity]
    for name in (name for name in names if name not in LOSSES[config.parity]):
        yield "pref_loss", f"'{name}' is not a loss of TRL's DPO trainer that can be reproduced"
    for name in (
        name for name in names if name in OF_A_MICRO_BATCH and _micro_batches(config, dp) > 1
    ):
        yield (
            "pref_loss",
            f"'{name}' depends on micro-batches in TRL; use one device and no accumulation",
        )
    if config.parity == "trl-1.x" and config.label_smoothing and "sigmoid" in names:
        yield "label_smoothing", "TRL 1.x ignores it for sigmoid; remove it"
    for key in (key for key in ABSENT_IN[config.parity] if getattr(config, key) is not None):
        yield key, f"{name_of} has no such setting; remove it"


def _old_problems(config: DPOConfig, dp: int) -> Iterator[tuple[str, str]]:
    """What TRL before 0.29 means otherwise."""
    names = config.loss_names
    if "ipo" in names and len(names) > 1:
        yield (
            "pref_loss",
            "TRL before 0.29 averages the log-probs of every loss in a list with ipo; take ipo alone",
        )
    if config.rpo_alpha and _micro_batches(config, dp) > 1:
        yield "rpo_alpha", "depends on micro-batches in TRL; use one device and no accumulation"
    for key in (key for key in ("ld_alpha", "use_weighting") if getattr(config, key) is not None):
        yield key, "TRL before 0.29 counts its tokens from the start of the prompt; remove it"
    bent = config.f_divergence_type not in (None, "reverse_kl")
    for key in (
        key
        for key, on in (("f_divergence_type", bent), ("reference_free", config.reference_free))
        if on
    ):
        for name in (name for name in names if name not in (*MARGINS, "sft")):
            yield (
                key,
                f"TRL before 0.29 takes it for {', '.join(MARGINS)}, not for {name}; remove it",
            )
    if config.f_divergence_type == "forward_kl":
        yield (
            "f_divergence_type",
            "TRL before 0.29 has no forward_kl; set alpha, and f_alpha_divergence_coef to 0",
        )
    if config.f_divergence_type == "alpha" and config.f_alpha_divergence_coef is None:
        text = "is 1 - alpha of TRL before 0.29, whose default is 1; write it, such as 0"
        yield "f_alpha_divergence_coef", text


def _micro_batches(config: DPOConfig, dp: int) -> int:
    return dp * config.actor_train.training_args.gradient_accumulation_steps


def _data_problems(config: DPOConfig) -> Iterator[tuple[str, str]]:
    assert config.parity is not None
    data = config.actor_train.data_args
    for key, allowed in SETTINGS[config.parity].items():
        if getattr(data, key) not in allowed:
            ways = " or ".join(map(repr, allowed))
            yield f"{DATA}.{key}", f"{NAMES[config.parity]} has no choice here; leave it at {ways}"
    if data.special_tokens in ("escape", "drop"):
        yield (
            f"{DATA}.special_tokens",
            "TRL keeps special tokens in the text; set it to keep or warn",
        )


def _schedule_problems(config: DPOConfig) -> Iterator[tuple[str, str]]:
    training = config.actor_train.training_args
    if training.lr_scheduler_type == "constant" and (
        training.warmup_steps or training.warmup_ratio
    ):
        key = "actor_train.training_args.lr_scheduler_type"
        yield (
            key,
            "transformers' constant schedule has no warm-up; set constant_with_warmup or remove it",
        )


def check_even(config: DPOConfig, pairs: int, dp: int) -> None:
    """TRL averages over micro-batches, so that a smaller one at the end of an epoch would weigh more."""
    training = config.actor_train.training_args
    size, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    alone = dp == 1 and (steps == 1 or -(-pairs // size) % steps == 1)
    if config.parity and pairs % (size * dp) and not alone:
        raise ConfigError(
            f"parity: {config.parity}: {pairs} pairs are no multiple of per_device_train_batch_size {size}"
            f"{f' x dp {dp}' if dp > 1 else ''}: in TRL the smaller micro-batch at the end of an epoch weighs more. "
            "Take a size that divides them."
        )
