"""Losses of single answers equal what real TRL gave: 1.16 for KTO and APO, 1.10 for BCO. Made by
make_trl_unpaired.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rather.data.batch import PairLogps
from rather.losses.objective import PairLoss, configure

GOLDEN: dict[str, Any] = json.loads(
    Path(__file__).with_name("trl_unpaired.json").read_text(encoding="utf-8")
)
CASES: list[dict[str, Any]] = GOLDEN["cases"]


def stored(*, swapped: bool) -> PairLogps:
    """Policy and reference of each answer, and of TRL's answer to another prompt."""
    names = ("reference", "policy") if swapped else ("policy", "reference")
    policy, reference, length, label = (
        torch.tensor([row[name] for row in GOLDEN["rows"]], dtype=torch.float64)
        for name in (*names, "length", "label")
    )
    return PairLogps(policy, reference, length, {"label": label})


def with_baseline(loss: PairLoss, x: PairLogps) -> PairLogps:
    if loss.baseline_kind is None:
        return x
    baseline, _ = loss.baseline(x, [0, 0.0])
    return x._replace(extra={**x.extra, "baseline": baseline})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['settings']} {case['swapped']}")
def test_equal_to_trl(case: dict[str, Any]) -> None:
    settings = dict(case["settings"])
    loss = configure([settings.pop("loss_type", "bco")], settings)
    x = with_baseline(loss, stored(swapped=case["swapped"]))
    assert float(loss(x).mean()) == pytest.approx(case["loss"], rel=2e-6)


def test_the_cases_see_both_sides_of_the_clamp() -> None:
    kl = [
        configure(["kto"], {}).baseline(stored(swapped=way), [0, 0.0])[0] for way in (False, True)
    ]
    assert kl[0] == 0 < kl[1]
    assert {case["trl"] for case in CASES} == {"1.16.0", "1.10.0"}
