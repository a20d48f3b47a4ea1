"""Other settings for the run of a config, and `rather plan MODEL --methods`."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from rather.commands.plan import verdict
from rather.data.batch import TokenPair
from rather.model.budget import LADDER, tokens_in
from rather.model.head import KEEP_BYTES
from rather.plan.forecast import Forecast
from rather.plan.memory import Device
from rather.plan.others import (
    METHODS,
    RECOMPUTE,
    TOKENS,
    Alternative,
    alternatives,
    methods_of,
)
from tests.commands.conftest import refusal, succeed, told
from tests.plan.test_arithmetic import GIB, Known, model, steps


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Known:
    folder = tmp_path_factory.mktemp("seven")
    own = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 131_072}
    return Known.of(model(folder, "7B", **own))


def others_of(
    known: Known, gpu: str, sample: list[list[TokenPair]], **changes: Any
) -> tuple[Forecast, list[Alternative]]:
    forecast = known.judged(gpu, sample, **changes)
    return forecast, alternatives(
        forecast, lambda change: known.judged(gpu, sample, **{**changes, **change})
    )


def test_a_config_that_does_not_fit_lists_settings_that_do(seven: Known) -> None:
    own, others = others_of(seven, "h100", steps(16))
    assert not own.fits
    assert others
    assert all(other.forecast.fits for other in others)
    rates = [float(f"{other.pairs_per_second:.2g}") for other in others]
    assert rates == sorted(rates, reverse=True)
    said = verdict(own, others)
    assert said.startswith("does not fit: ")
    assert said.endswith(f"; try {others[0].overrides}")
    again = seven.judged("h100", steps(16), **others[0].change)
    assert verdict(again, []).startswith("fits: ")


def test_if_nothing_fits_more_devices_are_proposed(seven: Known) -> None:
    assert "; try more devices (--gpus), or" in verdict(seven.judged("l4", steps(2)), [])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {TOKENS: 8192},  # fewer hold all pairs, too
        {"actor_train.model_args.lora_rank": 16},  # has no reference to offload
        {RECOMPUTE: "full", "precision": "lean"},
        {"actor_train.device_mapping": [0, 1, 2, 3], "reference.device_mapping": [0, 1, 2, 3]},
    ],
    ids=str,
)
def test_each_row_is_faster_or_smaller_than_others_that_train_the_same(
    seven: Known, changes: dict[str, Any]
) -> None:
    own, others = others_of(seven, "b200", steps(4), **changes)
    assert own.fits
    assert others
    for one, other in product([Alternative({}, own), *others], others):
        if one.trained_settings == other.trained_settings and one.sort_key < other.sort_key:
            assert other.forecast.parts.total < one.forecast.parts.total
            assert one.sort_key[0] < other.sort_key[0]  # faster


# --- methods ---


def test_what_fits_a_gpu_of_24_gib(seven: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rather.plan.others.LENGTHS", (2048, 131_072))
    methods = methods_of(str(seven.place), Device("cuda", 24 * GIB), "l4")
    assert methods.keys() == METHODS.keys()
    short, long = zip(*methods.values(), strict=True)
    fitting = [name for name, method in zip(methods, short, strict=True) if method.forecast.fits]
    assert fitting == ["LoRA", "LoRA on 4-bit weights"]
    full, host, lean, lora, _ = (method.forecast.parts.total for method in short)
    assert full > lean > host > lora
    assert all(method.pairs_per_second for method in (*short, *long))
    assert not any(method.forecast.fits for method in long)


def test_a_table_and_json(seven: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rather.plan.others.LENGTHS", (131_072,))
    line = ("plan", seven.place, "--methods", "--gpu", "H200")
    shown = succeed(*line).output
    assert "131,072 tokens" in shown
    assert "LoRA on 4-bit weights" in shown
    (row,) = (row for row in told(*line) if row["method"] == "LoRA")
    assert row["fits"]
    assert (row["sequence_length"], row["recompute"]) == (131_072, "full")
    assert row["settings"] == {"actor_train.model_args.lora_rank": 16}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--gpu", "h300"], "--gpu h300: unknown"),
        ([], "--methods: PyTorch finds no GPU here"),
        (["--gpu", "h200", "--gpus", "2"], "takes a model and --gpu alone"),
        (["--gpu", "h200", "beta=0.1"], "takes a model and --gpu alone"),
    ],
)
def test_wrong_arguments(seven: Known, arguments: list[str], reason: str) -> None:
    assert reason in refusal(2, "plan", seven.place, *arguments, "--methods")


def test_tokens_beyond_the_kept_logits_need_no_memory_for_them() -> None:
    row, other = 300_000, 200_000
    kept = KEEP_BYTES["cuda"] // row
    room_of_kept = (kept - 4096) * (row + other)
    below = tokens_in(room_of_kept / 2, 4096, row + other, row)
    assert below == pytest.approx((kept + 4096) / 2, abs=LADDER["cuda"])
    above = tokens_in(room_of_kept + 10_000 * other, 4096, row + other, row)
    assert above == pytest.approx(kept + 10_000, abs=LADDER["cuda"])
    assert tokens_in(-1e12, 4096, row + other, row) == 0
