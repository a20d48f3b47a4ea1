"""A migrated TRL config under parity trains as real TRL 1.16, or 0.24, did: tokens, losses, grad norms. See
make_trl_run.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from rather.config.load import load_config
from rather.config.schema import DPOConfig
from rather.data.batch import PairLogps, TokenPair
from rather.data.prepare import prepare
from rather.losses.objective import configure, rule
from rather.migrate.engine import migrate
from rather.migrate.peers import PEERS
from rather.migrate.source import Source
from rather.pipeline.pipeline import DPOPipeline
from tests.golden.trl_run import LOGPS, OLD_RUNS, SETTINGS, SHAPES, STEPS, make_data, make_model
from tests.tiny import metrics


class Run(NamedTuple):
    """One of TRL's: the rows it had, its settings, and what it gave."""

    parity: str
    shape: str
    settings: dict[str, Any]
    golden: dict[str, Any]


def golden(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return found


NEW, OLD = golden("trl_run_1_16.json"), golden("trl_run_0_24.json")
RUNS = {shape: Run("trl-1.x", shape, SETTINGS, NEW[shape]) for shape in SHAPES} | {
    f"old {name}": Run("trl-0.2x", *run, OLD[name]) for name, run in OLD_RUNS.items()
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("trl_run"))


def migrated(model: Path, folder: Path, run: Run, *overrides: str) -> DPOConfig:
    """The YAML that `rather migrate` makes of the TRL settings, written and read again."""
    pairs = make_data(folder / "pairs.jsonl", run.shape)
    own = {
        "model_name_or_path": str(model),
        "dataset_name": str(pairs),
        "output_dir": str(folder / "run"),
    }
    given = {**run.settings, **own}
    file = folder / "dpo.yaml"
    file.write_text(
        yaml.safe_dump(migrate(Source("trl", given), PEERS["trl"]).values), encoding="utf-8"
    )
    return load_config(file, [f"logging_dir={folder}", *overrides])


def all_pairs(config: DPOConfig) -> list[TokenPair]:
    pairs = prepare(config).train
    return pairs.take(range(len(pairs)))


def cut(prompt: list[int], answer: list[int], settings: dict[str, Any]) -> tuple[list[int], int]:
    """A sequence within max_length, and where its answer begins; nothing predicts the first token."""
    ids, limit = prompt + answer, settings["max_length"]
    lost = max(0, len(ids) - limit) if settings.get("truncation_mode") == "keep_end" else 0
    return ids[lost:][:limit], max(1, len(prompt) - lost)


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_trls(model: Path, tmp_path: Path, name: str) -> None:
    run = RUNS[name]
    pairs = all_pairs(migrated(model, tmp_path, run, f"parity={run.parity}"))
    for pair, row in zip(pairs, run.golden["tokens"], strict=True):
        for side in ("chosen", "rejected"):
            ids, begin = cut(row["prompt_ids"], row[f"{side}_ids"], run.settings)
            assert [*pair.prompt.tolist(), *getattr(pair, side).tolist()] == ids
            assert list(getattr(pair, f"{side}_scored")) == [(begin, len(ids))]


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_grad_norms_are_trls(model: Path, tmp_path: Path, name: str) -> None:
    run = RUNS[name]
    config = migrated(model, tmp_path, run, f"parity={run.parity}", "report_html=false")
    assert DPOPipeline(config).run() == 0
    lines = [line for line in metrics(config) if "loss" in line]
    assert len(lines) == STEPS
    assert [line["loss"] for line in lines] == pytest.approx(run.golden["loss"], abs=1e-4)
    assert [line["grad_norm"] for line in lines] == pytest.approx(run.golden["grad_norm"], rel=1e-4)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]  # there was something to agree about


def test_the_runs_cut_at_both_ends() -> None:
    """What is compared would else not show it."""
    for name in ("old turns", "old keep_start"):
        rows, limit = RUNS[name].golden["tokens"], RUNS[name].settings["max_length"]
        lengths = [
            len(row["prompt_ids"]) + len(row[f"{side}_ids"])
            for row in rows
            for side in ("chosen", "rejected")
        ]
        assert max(lengths) > limit
    assert max(len(row["prompt_ids"]) for row in RUNS["old chat"].golden["tokens"]) == 9


@pytest.mark.parametrize("shape", SHAPES)
def test_without_parity_tokens_are_ours(model: Path, tmp_path: Path, shape: str) -> None:
    """The key turns something: plain text gets the chat template, and the end of a turn is its end token."""
    pairs = all_pairs(migrated(model, tmp_path, RUNS[shape], "sequence_length=64"))
    for pair, row in zip(pairs, NEW[shape]["tokens"], strict=True):
        assert [*pair.prompt, *pair.chosen] != row["prompt_ids"] + row["chosen_ids"]


CHANGES: dict[str, dict[str, Any]] = {
    "": {},
    "js": {"f_divergence_type": "js"},
    "alpha": {"f_divergence_type": "alpha", "f_alpha_divergence_coef": 1 - 0.7},
    "free": {"reference_free": True},
}


@pytest.mark.parametrize("name", OLD["losses"])
def test_losses_before_0_29_are_ours(name: str) -> None:
    """Those that parity: trl-0.2x lets through, as functions of the same log-probs."""
    loss, _, change = name.partition(" ")
    ours = {"aot_pair": "aot_unpaired"}.get(loss, loss)
    numbers = {"beta": 0.3, "label_smoothing": 0.2, "discopop_tau": 0.4}
    logps = torch.tensor(LOGPS, dtype=torch.float64)
    x = PairLogps(logps[:2].T, logps[2:].T, torch.ones(4, 2, dtype=torch.float64), {})
    taken = {key: number for key, number in numbers.items() if key in rule(ours).numbers}
    found = configure([ours], taken, None, CHANGES[change])
    expected = torch.tensor(OLD["losses"][name], dtype=torch.float64)
    assert torch.allclose(found(x).sort().values, expected.sort().values, atol=1e-9)
