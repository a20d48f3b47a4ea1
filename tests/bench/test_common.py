"""The arithmetic of the benchmarks against numbers worked out by hand, and the form of what they write."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.house.source import ROOT

sys.path.insert(0, str(ROOT / "bench"))  # a script's own folder is where it finds `common`

import common
from common import SHAPES, Cell, make_steps, needed_flops, pairs_of, speed_of_light, standard_flops


@pytest.mark.parametrize(
    ("model", "weights", "online", "cached", "standard"),
    [
        ("0.5B", 0.494e9, 3.02, 2.27, 4.04),
        ("1.5B", 1.543e9, 9.66, 7.25, 12.5),
        ("3B", 3.086e9, 19.5, 14.6, 25.0),
        ("7B", 7.615e9, 44.8, 33.56, 57.0),
    ],
)
def test_flops_of_a_pair(
    model: str, weights: float, online: float, cached: float, standard: float
) -> None:
    """TFLOP of a pair of 200 + 300 + 300 tokens."""
    shape = SHAPES[model]
    assert shape.weights == pytest.approx(weights, rel=1e-3)
    assert needed_flops(shape, 200, [300, 300], reference=True) / 1e12 == pytest.approx(
        online, rel=3e-3
    )
    assert needed_flops(shape, 200, [300, 300], reference=False) / 1e12 == pytest.approx(
        cached, rel=3e-3
    )
    assert standard_flops(shape, 200, 300, 300) / 1e12 == pytest.approx(standard, rel=3e-3)


def test_flops_of_7b_by_hand() -> None:
    blocks = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    cells = 200**2 / 2 + 2 * 200 * 300 + 300**2
    by_hand = 3 * (2 * blocks * 800 + 2 * 152_064 * 3584 * 600 + 4 * 28 * 3584 * cells)
    assert needed_flops(SHAPES["7B"], 200, [300, 300], reference=False) == by_hand
    assert by_hand / 1e12 == pytest.approx(33.56, abs=0.01)


def test_four_answers_are_computed_once_for_six_pairs() -> None:
    shape = SHAPES["1.5B"]
    group = needed_flops(shape, 200, [300] * 4, reference=True)
    alone = 6 * needed_flops(shape, 200, [300, 300], reference=True)
    assert 3.2 < alone / group < 3.6
    (step,) = make_steps("four", 100, steps=1, pairs=12)
    assert [len(prompt.answers) for prompt in step] == [4, 4]
    assert len(pairs_of(step)) == 12


def test_lengths_are_as_configured() -> None:
    def means(kind: str) -> list[float]:
        (step,) = make_steps(kind, 1000, steps=1, pairs=3000)
        pairs = pairs_of(step)
        assert max(len(pair.chosen) for pair in pairs) == 1024
        return [
            float(np.mean([len(getattr(p, name)) for p in pairs]))
            for name in ("prompt", "chosen", "rejected")
        ]

    assert means("ultrafeedback") == pytest.approx([180, 312, 285], rel=0.03)
    assert means("long") == pytest.approx([1500, 247, 247], rel=0.03)
    assert means("four") == pytest.approx([199, 294, 294], rel=0.06)


def test_pairs_are_seeded_and_steps_do_not_depend_on_later_ones() -> None:
    one, two = (make_steps("ultrafeedback", 50, steps=n, pairs=4) for n in (1, 3))
    for a, b in zip(pairs_of(one[0]), pairs_of(two[0]), strict=True):
        assert np.array_equal(a.prompt, b.prompt)
        assert np.array_equal(a.chosen, b.chosen)
        assert np.array_equal(a.rejected, b.rejected)
        assert a.chosen_scored == ((len(a.prompt), len(a.prompt) + len(a.chosen)),)
    (other,) = make_steps("ultrafeedback", 50, steps=1, pairs=4, seed=1)
    assert [pair.tokens for pair in pairs_of(other)] != [pair.tokens for pair in pairs_of(one[0])]


def test_rates_of_a_cell() -> None:
    shape, steps = SHAPES["0.5B"], make_steps("ultrafeedback", 1000, steps=3, pairs=8)
    cell = Cell("ours", "ultrafeedback", "cached", 8, seconds=[0.2, 0.1, 0.4])
    cell.rate(shape, steps)
    assert cell.pairs_per_second == 40
    assert cell.of_light == pytest.approx(40 / speed_of_light(shape, steps))
    needed = [common.needed_by_step(shape, step, reference=False) for step in steps]
    shares = sorted(n / s / 989e12 for n, s in zip(needed, cell.seconds, strict=True))
    assert cell.mfu == pytest.approx(shares[1])
    slower = Cell("TRL", "ultrafeedback", "online", 8, seconds=[0.6, 0.5])
    assert common.ratio(cell, slower) == pytest.approx(
        4.0
    )  # the median of 3 and 5: the third step has no partner
    assert math.isnan(Cell("TRL", "long", "online", 8).pairs_per_second)


def test_json_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        Cell("ours", "long", "online", 4, seconds=[0.5]),
        Cell("TRL", "long", "online", 4, failed="OOM"),
    ]
    common.write_json(tmp_path / "results" / "x.json", "x", cells, model="15M")
    written = json.loads((tmp_path / "results" / "x.json").read_text())
    assert written["benchmark"] == "x"
    assert written["model"] == "15M"
    assert written["machine"]["torch"]
    assert [cell["pairs_per_second"] for cell in written["cells"]] == [8, None]  # JSON knows no NaN
    assert written["cells"][1]["failed"] == "OOM"
    common.table(
        "title",
        ("pairs", "a", "b", "c"),
        [("long", 1234.5, 0.123456, None), ("four", math.nan, 7, "OOM")],
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "title"
    assert [cell.strip() for cell in lines[4].strip("│").split("│")] == [
        "long",
        "1,234",
        "0.123",
        "-",
    ]
    assert [cell.strip() for cell in lines[5].strip("│").split("│")] == ["four", "-", "7", "OOM"]


def test_the_page_shows_the_results() -> None:
    """docs/speed.md holds the tables that bench/results gives, and the README its ratios."""
    import page

    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for model in page.MODELS:
        cells = page.read(f"gpu_flash4_{model}.json")
        row = [model]
        for reference, peer in (("online", "best"), ("cached", "precomputed")):
            mine = cells["ours", "ultrafeedback", reference]
            theirs = cells[f"TRL, {peer}", "ultrafeedback", reference]
            row += [f"{mine['pairs_per_second']:.3g}", f"{float(page.times(mine, theirs)):.1f}"]
        assert f"| {' | '.join(row)} |" in readme
