"""The quality benchmark on a tiny model: its scorer, its parts, its checks, and the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.house.source import ROOT
from tests.tiny import make_model, make_pairs

sys.path.insert(0, str(ROOT / "bench"))  # a script's own folder is where it finds `common`

import quality
from quality import Numbers, Scorer, Settings


def test_the_scorer_agrees_with_rather(tmp_path: Path) -> None:
    """Padded rows through plain transformers, packed ones through Rather: the same log-probs."""
    from rather.config.schema import ModelArgs
    from rather.data.pack import pack
    from rather.data.prepare import prepare
    from rather.losses.objective import configure
    from rather.parallel.load import load_policy
    from rather.train.rank_trainer import RankTrainer
    from tests.tiny import make_config

    model = make_model(tmp_path / "base", dtype=torch.bfloat16)
    pairs = quality.token_pairs(model, make_pairs(tmp_path / "pairs.jsonl", 9))
    scorer = Scorer(model, pairs, "cpu")
    found = scorer.log_probs(scorer.weights(), rows=4)
    lines = map(json.dumps, map(quality.row_of, pairs))
    (tmp_path / "tokens.jsonl").write_text("\n".join(lines))
    config = make_config(
        tmp_path,
        actor_train__data_args__file_name=str(tmp_path / "tokens.jsonl"),
        validation__data_args__file_name=None,
    )
    data = prepare(config).train
    policy = load_policy(str(model), ModelArgs(dtype="fp32"), "cpu").requires_grad_(False)
    trainer = RankTrainer(policy, configure(["sigmoid"], {"beta": quality.BETA}))
    own = trainer.log_probs(pack(data.take(range(len(pairs))), 64))["sum"]
    torch.testing.assert_close(found, own, rtol=1e-6, atol=1e-4)
    assert len({round(value, 3) for value in found.flatten().tolist()}) > len(pairs)


def test_other_keys_round_otherwise(tmp_path: Path) -> None:
    masters = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    first, same, other = (quality.rounded("dithered", masters, key)["w"] for key in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert quality.kept_share({"w": torch.zeros(64, 64)}, masters, {"w": other}) == pytest.approx(
        1, abs=1e-3
    )


def rows_of(margin: float, kept: float, loss: float) -> list[dict[str, Any]]:
    """Two seeds at one rate. TRL's loss is 0.6 or 0.62; masters have a margin of 1."""
    rows = []
    for seed in range(2):
        own = {"rate": 1e-6, "seed": seed, "key": 0, "file_key": 0, "train_margin": 0.0}
        scores = {"accuracy": 1.0, "error": 0.0, "loss": loss, "kept": kept, "margin": margin}
        dithered = {**own, "forward": "dithered"}
        rows.append({**dithered, **scores, "file": "dithered"})
        rows.append({**dithered, **scores, "file": "float32", "margin": 1.0})
        rows.append({**dithered, **scores, "file": "nearest", "margin": 0.1})
        for file in ("float32", "nearest"):
            rows.append(
                {**own, **scores, "forward": "TRL", "file": file, "loss": 0.6 + 0.02 * seed}
            )
    return rows


@pytest.mark.parametrize(
    ("margin", "kept", "loss", "failed"),
    [
        (0.95, 1.005, 0.62, []),
        (0.85, 1.0, 0.61, ["margin"]),
        (1.15, 1.0, 0.61, ["margin"]),
        (1.0, 0.98, 0.61, ["share"]),
        (1.0, 1.02, 0.61, ["share"]),
        (1.0, 1.0, 0.63, ["loss", "loss"]),
    ],
)
def test_each_check_can_fail(margin: float, kept: float, loss: float, failed: list[str]) -> None:
    settings = Settings("tiny", (1e-6,), 2, 1, 3, 4, 8)
    rows = rows_of(margin, kept, loss)
    found = [text for passed, text in quality.checks(settings, rows) if not passed]
    assert len(found) == len(failed)
    assert all(word in text for word, text in zip(failed, found, strict=True))
    assert Numbers(rows, 1e-6, "TRL", "nearest", "loss").text(2) == "0.61 ± 0.01"
    where = "at 1e-06" if "loss" in failed else "at no learning rate"
    assert all(where in line for line in quality.compared(settings, rows))


def test_the_page_shows_the_result() -> None:
    text = quality.PAGE.read_text("utf-8")
    assert quality.filled(text) == text
    _, _, rows = quality.read(quality.RESULTS / "quality.json")
    kinds = ("float32", "dithered", "nearest")
    exact, file, nearest = (Numbers(rows, 2e-6, "dithered", kind, "margin").mean for kind in kinds)
    said = f"learning rate 2e-6: {exact:.3f} in float32, {file:.3f} in the exported bf16 file, "
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"{said}{nearest:.3f} if rounded to nearest" in readme
