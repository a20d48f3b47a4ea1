"""parity: what it presets, and what it refuses because TRL has no such setting."""

from __future__ import annotations

import pytest

from rather.config.compat import check_even
from rather.config.load import config_from_dict
from rather.errors import ConfigError
from tests.config.conftest import smallest

ON = "parity=trl-1.x"
SIZE = "actor_train.training_args.per_device_train_batch_size"
STEPS = "actor_train.training_args.gradient_accumulation_steps"


def test_presets_of_unset_keys() -> None:
    config = config_from_dict(smallest(ON))
    assert (
        config.actor_train.data_args.overlong
        == config.validation.data_args.overlong
        == "truncate_response"
    )
    assert config.on_bad == "error"
    assert config.followed["on_bad"] == "parity"
    assert config_from_dict(smallest(ON, "on_bad=drop")).on_bad == "drop"
    assert config_from_dict(smallest()).on_bad == "drop"


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["pref_loss=orpo"], "pref_loss", "not a loss of TRL's DPO trainer"),
        (["label_smoothing=0.1"], "label_smoothing", "TRL ignores it for sigmoid"),
        (["rpo_alpha=1"], "rpo_alpha", "has no such setting"),
        (["gamma=1"], "gamma", "has no such setting"),
        (["pref_loss=sft", f"{STEPS}=2"], "pref_loss", "depends on micro-batches"),
        (["actor_train.data_args.score=assistant"], "actor_train.data_args.score", "has no such choice"),
        (["actor_train.data_args.overlong=drop"], "actor_train.data_args.overlong", "'truncate_response'"),
        (["actor_train.data_args.special_tokens=escape"], "actor_train.data_args.special_tokens", "keep or warn"),
        (["actor_train.training_args.lr_scheduler_type=constant", "actor_train.training_args.warmup_steps=3"],
         "actor_train.training_args.lr_scheduler_type", "has no warm-up"),
    ],
)  # fmt: skip
def test_what_it_refuses(judged, settings: list[str], key: str, said: str) -> None:
    (problem,) = judged(ON, *settings)
    assert problem.startswith(f"{key}: ")
    assert said in problem
    config_from_dict(smallest(*settings))  # none of it is wrong by itself


def test_what_it_lets_through() -> None:
    config_from_dict(smallest(ON, "pref_loss=robust", "label_smoothing=0.1"))
    config_from_dict(smallest(ON, "pref_loss=[sigmoid, sft]", "loss_weights=[1, 0.5]"))


@pytest.mark.parametrize(
    ("pairs", "size", "steps", "dp", "even"),
    [(16, 4, 2, 1, True), (18, 4, 2, 1, True), (15, 4, 2, 1, False), (15, 4, 1, 1, True), (17, 4, 2, 1, True),
     (12, 4, 1, 2, False), (16, 4, 1, 2, True)],
)  # fmt: skip
def test_uneven_micro_batches_are_refused(
    pairs: int, size: int, steps: int, dp: int, even: bool
) -> None:
    config = config_from_dict(smallest(ON, f"{SIZE}={size}", f"{STEPS}={steps}"))
    if even:
        check_even(config, pairs, dp)
    else:
        with pytest.raises(ConfigError, match="smaller micro-batch"):
            check_even(config, pairs, dp)
