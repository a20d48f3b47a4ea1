"""The grid of a sweep: which arguments are axes, their combinations, and the names of the runs."""

from __future__ import annotations

import re

import pytest

from rather.errors import ConfigError
from rather.tools.sweep import combinations, read_grid, split


def test_commas_make_an_axis() -> None:
    fixed, axes = read_grid(["beta=0.01,0.1", "max_steps=3", "++pref_loss=sigmoid,[sigmoid,sft]"])
    assert fixed == ["max_steps=3"]
    assert axes == {"beta": ["0.01", "0.1"], "pref_loss": ["sigmoid", "[sigmoid,sft]"]}
    names = combinations(axes)
    assert list(names) == [
        "beta-0.01_pref_loss-sigmoid", "beta-0.01_pref_loss--sigmoid-sft-",
        "beta-0.1_pref_loss-sigmoid", "beta-0.1_pref_loss--sigmoid-sft-",
    ]  # fmt: skip
    assert names["beta-0.1_pref_loss--sigmoid-sft-"] == {
        "beta": "0.1",
        "pref_loss": "[sigmoid,sft]",
    }


def test_lists_and_quotes_are_one_value() -> None:
    assert split("0.1, 0.1,") == ["0.1"]
    assert split("[0,1],'a,b',{x: 1, y: 2}") == ["[0,1]", "'a,b'", "{x: 1, y: 2}"]
    with pytest.raises(ConfigError, match="Nothing to sweep over"):
        read_grid(["actor_train.device_mapping=[0,1]"])


def test_names_of_long_keys_and_odd_values() -> None:
    _, axes = read_grid(["actor_train.training_args.learning_rate=1e-6,5e-7", "pretrain=a/b,a-b"])
    assert list(combinations(axes)) == [
        "learning_rate-1e-6_pretrain-a-b", "learning_rate-1e-6_pretrain-a-bx",
        "learning_rate-5e-7_pretrain-a-b", "learning_rate-5e-7_pretrain-a-bx",
    ]  # fmt: skip
    _, same = read_grid(["actor_train.infer_batch_size=1,2", "reference.infer_batch_size=3,4"])
    assert "actor_train.infer_batch_size-1_reference.infer_batch_size-3" in combinations(same)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("exp_name=a,b", "the runs of a sweep cannot differ in it; give it one value"),
        (
            "system_envs.OMP_NUM_THREADS=1,2",
            "the runs of a sweep cannot differ in it; give it one value",
        ),
        ("reference.cache.path=a,b", "the runs of a sweep cannot differ in it; give it one value"),
    ],
)
def test_bad_grids_are_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_grid([override, "beta=1,2"])
