"""`rather compare-losses`: the numbers of each loss, the right weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from rather.commands.compare_losses import (
    LossRow,
    compare_rows,
    measure,
)
from rather.commands.models import compare_losses_command
from rather.commands.score import LogProbs
from rather.config.run_config import DPOConfig
from rather.data.batch import PairFacts, PairLogps
from rather.errors import ConfigError
from rather.pipeline.pipeline import DPOPipeline
from tests.losses.formulas import PAIRWISE
from tests.tiny import make_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> DPOConfig:
    config = make_config(tmp_path_factory.mktemp("compare"), max_steps=3, save_steps=None)
    DPOPipeline(config).run()
    return config


@pytest.fixture(scope="module")
def log_probs(trained: DPOConfig) -> LogProbs:
    return measure(trained)


@pytest.fixture(scope="module")
def rows(trained: DPOConfig, log_probs: LogProbs) -> list[LossRow]:
    return compare_rows(trained, log_probs)


def some_pairs(policy: list[list[float]]) -> LogProbs:
    """Two-token answers of a reference that gives every answer -10."""
    sums = torch.tensor(policy, dtype=torch.float64)
    ones = torch.ones(len(sums), dtype=torch.float64)
    facts = PairFacts(torch.full_like(sums, 2.0), ones, ones, ones)
    return LogProbs(facts, {"sum": sums}, {"sum": torch.full_like(sums, -10.0)})


def test_values_are_those_of_each_loss(
    rows: list[LossRow], log_probs: LogProbs, trained: DPOConfig
) -> None:
    x = PairLogps(
        log_probs.policy["sum"],
        log_probs.reference["sum"],
        log_probs.facts.length,
        {"mean_chosen_length": log_probs.facts.length[:, 0].mean()},
    )
    assert [row.name for row in rows] == [f"this run: {trained.pref_loss}", *PAIRWISE]
    for row in rows[1:]:
        if row.name != "odpo":
            assert row.value == pytest.approx(
                float(PAIRWISE[row.name].function(x).mean()), rel=1e-12
            ), row.name
            assert 0 <= row.saturated <= 1
            assert row.gradient > 0
    assert len(log_probs.margins) == 9
    assert log_probs.margins.abs().min() > 0


def test_the_run_itself_evaluates_to_the_same_loss(rows: list[LossRow], trained: DPOConfig) -> None:
    pipeline = DPOPipeline(trained)
    pipeline.initialize(model=str(trained.run_dir / "model"))
    assert rows[0].value == pytest.approx(pipeline.evaluate()["eval/loss"], rel=1e-6)


def test_gradient_is_what_differences_say(rows: list[LossRow], log_probs: LogProbs) -> None:
    """Of each pair, the size of the change of the summed loss when one of its two log-probs moves."""
    step = 1e-4
    for row in rows:
        if row.missing:
            continue
        sizes = []
        for pair in range(len(log_probs.margins)):
            parts = []
            for side in (0, 1):
                moved = []
                for sign in (1, -1):
                    sums = log_probs.policy["sum"].clone()
                    sums[pair, side] += sign * step
                    moved.append(float(row.objective(log_probs.for_loss({"sum": sums})).sum()))
                parts.append((moved[0] - moved[1]) / (2 * step))
            sizes.append(math.hypot(*parts))
        assert row.gradient == pytest.approx(sum(sizes) / len(sizes), rel=1e-4), row.name


def test_odpo_without_margins_is_reported(rows: list[LossRow]) -> None:
    odpo = next(row for row in rows if row.name == "odpo")
    assert odpo.missing == "margin"
    assert math.isnan(odpo.value)


def test_saturation_counts_pairs_that_no_longer_teach(trained: DPOConfig) -> None:
    x = some_pairs([[-10.0, -10.0], [-5.0, -70.0], [-1.0, -90.0], [-9.0, -11.0]])
    found = {row.name: row for row in compare_rows(trained, x)}
    assert found["sigmoid"].saturated == 0.5  # margins of 65 and 89 nats at beta 0.1
    assert found["hinge"].saturated == 0.5
    assert found["sft"].saturated == 0  # its gradient is the same everywhere
    assert found["simpo"].saturated == 0.5
    assert not found["odpo"].missing


def test_modifiers_of_the_run_are_part_of_its_row(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, ld_alpha=0.5, use_weighting=True, rpo_alpha=1.0, max_steps=1, save_steps=None
    )
    DPOPipeline(config).run()
    x = measure(config, most=5)
    own, plain = compare_rows(config, x)[:2]
    assert own.numbers == {"ld_alpha": 0.5, "use_weighting": True, "rpo_alpha": 1.0}
    assert own.value != plain.value
    assert set(x.policy) == {"sum", "shared", "squares"}
    assert len(x.margins) == 5


def test_losses_with_a_reference_are_compared_in_a_run_without_one(tmp_path: Path) -> None:
    config = make_config(tmp_path, pref_loss="simpo", max_steps=1, save_steps=None)
    DPOPipeline(config).run()
    found = {row.name: row for row in compare_rows(config, measure(config, most=4))}
    assert found["this run: simpo"].value == found["simpo"].value
    assert found["sigmoid"].value != pytest.approx(math.log(2), abs=1e-6)


def test_weights_come_from_the_newest_checkpoint_or_as_named(
    trained: DPOConfig, log_probs: LogProbs
) -> None:
    base = measure(trained, trained.actor_train.model_path)
    assert torch.equal(base.policy["sum"], base.reference["sum"])
    result = measure(trained, str(trained.run_dir / "model"))
    assert torch.allclose(result.policy["sum"], log_probs.policy["sum"])
    assert not torch.allclose(result.policy["sum"], base.policy["sum"])


def test_a_run_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)train first, or pass weights with --model"):
        measure(make_config(tmp_path))


def test_command(trained: DPOConfig, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(compare_losses_command)
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(trained.model_dump(mode="json", exclude_unset=True)), encoding="utf-8"
    )
    runner = CliRunner()
    done = runner.invoke(app, [str(file), "--pairs", "3"], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert all(f" {name} " in done.output for name in PAIRWISE)
    assert "not computable: pairs have no margin" in done.output
    equal = runner.invoke(
        app, [str(file), "--pairs", "3", "--model", trained.actor_train.model_path]
    )
    assert "Policy and reference are equal" in equal.output
