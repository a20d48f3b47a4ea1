"""A migrated TRL config under parity trains as real TRL 1.16 did: tokens, losses, grad norms.

See make_trl_run.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rather.config.load import load_config
from rather.config.run_config import DPOConfig
from rather.data.batch import TokenPair
from rather.data.prepare import prepare
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.migrate.engine import migrate
from rather.tools.migrate.peers import PEERS
from rather.tools.migrate.source import SourceSettings
from tests.golden.trl_run import SETTINGS, SHAPES, STEPS, make_data, make_model
from tests.tiny import metrics


def golden(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return found


RUNS = golden("trl_run_1_16.json")
ON = "parity=trl-1.x"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("trl_run"))


def migrated(model: Path, folder: Path, shape: str, *overrides: str) -> DPOConfig:
    """The YAML that `rather migrate` makes of the TRL settings, written and read again."""
    pairs = make_data(folder / "pairs.jsonl", shape)
    own = {
        "model_name_or_path": str(model),
        "dataset_name": str(pairs),
        "output_dir": str(folder / "run"),
    }
    given = {**SETTINGS, **own}
    file = folder / "dpo.yaml"
    file.write_text(
        yaml.safe_dump(migrate(SourceSettings("trl", given), PEERS["trl"]).values), encoding="utf-8"
    )
    return load_config(file, [f"logging_dir={folder}", *overrides])


def all_pairs(config: DPOConfig) -> list[TokenPair]:
    pairs = prepare(config).train
    return pairs.take(range(len(pairs)))


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_trls(model: Path, tmp_path: Path, shape: str) -> None:
    pairs = all_pairs(migrated(model, tmp_path, shape, ON))
    for pair, row in zip(pairs, RUNS[shape]["tokens"], strict=True):
        for side in ("chosen", "rejected"):
            ids = (row["prompt_ids"] + row[f"{side}_ids"])[: SETTINGS["max_length"]]
            assert [*pair.prompt.tolist(), *getattr(pair, side).tolist()] == ids
            begin = max(1, len(row["prompt_ids"]))  # nothing predicts the first token
            assert list(getattr(pair, f"{side}_scored")) == [(begin, len(ids))]


@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_grad_norms_are_trls(model: Path, tmp_path: Path, shape: str) -> None:
    config = migrated(model, tmp_path, shape, ON, "report_html=false")
    expected = RUNS[shape]
    assert DPOPipeline(config).run() == 0
    lines = [line for line in metrics(config) if "loss" in line]
    assert len(lines) == STEPS
    assert [line["loss"] for line in lines] == pytest.approx(expected["loss"], abs=1e-4)
    assert [line["grad_norm"] for line in lines] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]  # there was something to agree about


@pytest.mark.parametrize("shape", SHAPES)
def test_without_parity_tokens_are_rathers(model: Path, tmp_path: Path, shape: str) -> None:
    """The key turns something: plain text gets the chat template, and the end of a turn is its
    end token."""
    pairs = all_pairs(migrated(model, tmp_path, shape, "sequence_length=64"))
    for pair, row in zip(pairs, RUNS[shape]["tokens"], strict=True):
        assert [*pair.prompt, *pair.chosen] != row["prompt_ids"] + row["chosen_ids"]
