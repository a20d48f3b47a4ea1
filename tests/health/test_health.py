"""Every finding appears on the run made for it, none on ten healthy runs; each is logged once."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from rather.tracking.health import (
    AT_END,
    HEALTH,
    LINES,
    PAIRS,
    RULES,
    SEVERITIES,
    Health,
    HealthFinding,
    HealthWatch,
    RecentLines,
    counts,
    read_findings,
    urgency,
)
from tests.commands.conftest import json_of, rather, told, write
from tests.health.cases import FOUND_IN, HEALTHY, ILL
from tests.health.tiny_runs import RATE, Case, TinyRuns, grumpy, kind
from tests.tiny import metrics

WILD = "steps of a hundred times the rate"


def names(config: DPOConfig) -> list[str]:
    return [one.name for one in read_findings(config.run_dir)]


def slug(name: str) -> str:
    return name.replace(" ", "-")


def ill(tiny_runs: TinyRuns, name: str) -> DPOConfig:
    return tiny_runs.trained(slug(name), ILL[name])


# --- on real runs ---


def test_every_rule_has_a_run_that_was_made_for_it() -> None:
    elsewhere = {"experts_collapse"}  # train/test_experts_run.py
    elsewhere |= {"labels_reversed", "answers_unlikely", "warmup_never_ends"}  # test_few_pairs.py
    elsewhere |= {"optimum_passed", "drift_without_gain", "forgetting"}  # test_outcome_rules.py
    elsewhere |= {"sentences_repeat", "starts_lost"}
    assert set(RULES) <= {*FOUND_IN, *elsewhere}
    assert set(FOUND_IN.values()) == set(ILL)
    assert len(HEALTHY) == 10


@pytest.mark.parametrize("finding", FOUND_IN)
def test_a_finding_appears_on_the_run_made_for_it(tiny_runs: TinyRuns, finding: str) -> None:
    config = ill(tiny_runs, FOUND_IN[finding])
    found = {one.name: one for one in read_findings(config.run_dir)}
    assert finding in found, f"found were {sorted(found)}"
    one = found[finding]
    assert math.isfinite(one.number)
    assert any(letter.isdigit() for letter in one.text)
    assert one.text.endswith(".")
    assert one.advice.endswith(".")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(tiny_runs: TinyRuns, name: str) -> None:
    config = tiny_runs.trained(slug(name), HEALTHY[name])
    assert names(config) == []
    assert not (config.run_dir / HEALTH).exists()
    report = json_of(config.run_dir / "report.json")
    assert report["health"] == {"serious": 0, "warning": 0, "info": 0}
    first, *_, last = [line["eval/loss"] for line in metrics(config) if "eval/loss" in line]
    assert last < 0.95 * first, "it must have learnt something"


@pytest.mark.parametrize("name", ILL)
def test_findings_follow_from_the_metrics_alone(tiny_runs: TinyRuns, name: str) -> None:
    """A resumed run finds what was found before, and nothing else."""
    config = ill(tiny_runs, name)
    health = Health(ILL[name].steps)
    again = [one for record in metrics(config) for one in health.look(record)]
    findings = read_findings(config.run_dir)
    written = [one for one in findings if "/" not in one.name and one.name not in AT_END]
    assert again == written
    assert len({one.name for one in written}) == len(written)


def test_findings_are_counted_in_the_report(tiny_runs: TinyRuns) -> None:
    config = ill(tiny_runs, WILD)
    report = json_of(config.run_dir / "report.json")
    assert report["health"] == counts(config.run_dir)
    assert report["health"]["serious"] >= 2


def test_a_resumed_run_logs_no_finding_twice(
    tiny_runs: TinyRuns, caplog: pytest.LogCaptureFixture
) -> None:
    whole = ill(tiny_runs, WILD)
    config = tiny_runs.killed(slug(WILD), ILL[WILD], 8)
    assert read_findings(config.run_dir)[-1].step > 8, "something to be found again"
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rather.tracking"):
        DPOPipeline(config).run()
    assert (config.run_dir / HEALTH).read_text() == (whole.run_dir / HEALTH).read_text()
    assert len(metrics(config)) == len(metrics(whole))
    assert not [record for record in caplog.records if "health" in record.name]


@pytest.mark.defect("U3")
def test_a_wrecked_run_of_sixteen_pairs_is_serious(tiny_runs: TinyRuns) -> None:
    case = Case(kind, kind, count=16, steps=3, rate=300 * RATE)
    changes = {"eval_prompts": None, "eval_steps": None, "validation__data_args__file_name": None}
    config = tiny_runs.trained("wrecked", case, **changes)
    first = min(read_findings(config.run_dir), key=lambda one: urgency(one.name, one.severity))
    assert (first.name, first.severity) == ("model_wrecked", "serious")


@pytest.mark.defect("U3")
def test_reversed_labels_show_on_held_out_pairs(tiny_runs: TinyRuns) -> None:
    """The run's own numbers look healthy; only the held-out pairs have the right labels."""
    case = Case(grumpy, kind, count=64, steps=6, rate=RATE / 2)
    run = tiny_runs.trained("reversed", case, eval_prompts=None, eval_steps=None)
    assert names(run) == ["labels_reversed"]


# --- the watch ---


def line(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "pairs": 64, "loss": 0.69, "rewards/ties": 0.0, **values}


DIVERGING = [line(step, loss=0.69 if step < 5 else 3.0) for step in range(1, 20)]


def watching(folder: Path, records: Sequence[Any] = (), start: int = 0) -> HealthWatch:
    """A watch over a run that has logged these records."""
    write(folder / "metrics.jsonl", *records)
    return HealthWatch(folder, total_steps=100, start_step=start)


@pytest.mark.parametrize(("pairs", "found"), [(8, False), (32, True)])
def test_what_is_divergence_of_a_large_batch_may_be_chance_of_a_small_one(
    tmp_path: Path, pairs: int, found: bool
) -> None:
    watch = watching(tmp_path)
    for step in range(1, 10):
        watch.log(step, line(step, pairs=pairs, loss=0.69 if step < 5 else 1.2))
    names = [each.name for each in read_findings(tmp_path)]
    assert names == ["learning_rate_too_high"] * found


def test_a_finding_is_written_when_it_appears_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watching(tmp_path)
    with caplog.at_level(logging.INFO, "rather.tracking"):
        for record in DIVERGING:
            watch.log(record["step"], record)
    (found,) = read_findings(tmp_path)
    assert (found.name, found.severity, found.step) == ("learning_rate_too_high", "serious", 6)
    (said,) = [record.getMessage() for record in caplog.records]
    assert found.text in said
    assert found.advice in said


def test_a_resume_keeps_only_findings_before_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watching(tmp_path)
    for record in DIVERGING:
        watch.log(record["step"], record)
    whole = (tmp_path / HEALTH).read_text()
    caplog.clear()
    watch = watching(tmp_path, DIVERGING[:4], 4)
    assert not (tmp_path / HEALTH).exists()
    for record in DIVERGING[4:]:
        watch.log(record["step"], record)
    assert (tmp_path / HEALTH).read_text() == whole
    assert not caplog.records


def test_a_finding_whose_line_was_lost_is_written_again(tmp_path: Path) -> None:
    """Killed between metrics.jsonl and health.jsonl, or within a line."""
    (tmp_path / HEALTH).write_text('{"step": 6, "name": "learn')
    watching(tmp_path, DIVERGING, 19)
    assert [one.name for one in read_findings(tmp_path)] == ["learning_rate_too_high"]


def test_a_damaged_findings_file_does_not_stop_a_run(tmp_path: Path) -> None:
    """A cut character, a line of another version, and a line that is not a finding."""
    good = asdict(HealthFinding(1, "a", "warning", "ü", 1.0, "b"))
    lines = (good, {"step": 2, "kind": "older"}, 3, good)
    whole = "\n".join(json.dumps(one, ensure_ascii=False) for one in lines).encode()
    (tmp_path / HEALTH).write_bytes(whole + b"\n" + whole[: whole.index("ü".encode()) + 1])
    assert counts(tmp_path) == {"serious": 0, "warning": 2, "info": 0}


def test_nonfinite_numbers_are_ignored() -> None:
    health = Health(100)
    for step in range(1, 30):
        nothing = {"loss": None, "sft_loss": math.inf, "nonfinite": {"loss": "nan"}}
        assert not health.look(line(step, **nothing, **{"rewards/accuracies": math.nan}))


def test_a_window_holds_enough_lines_and_enough_pairs_and_no_more() -> None:
    draw = random.Random(0)
    for pairs in (1, 10, 100, 1000):
        recent, values = RecentLines(), [draw.random() for _ in range(600)]
        for value in values:
            recent.add({"pairs": pairs, "loss": value})
        size = max(LINES, math.ceil(PAIRS / pairs))
        assert len(recent.lines) == size
        assert recent.pairs == size * pairs
        assert recent.get("loss") == pytest.approx(sum(values[-size:]) / size)
        assert recent.get("grad_norm") is None


def test_each_held_out_set_is_judged_separately() -> None:
    history, found = Health(100), []
    for step in range(1, 13):
        history.add(line(step, loss=0.69 - 0.05 * step))
        if step % 2 == 0:
            held_out = {"eval/good/loss": 0.5, "eval/bad/loss": 0.6 + 0.05 * step}
            history.add({"step": step, "eval/bad/sft_loss": 1.0, **held_out})
            found.append(RULES["overfitting"].find(history))
    assert set(history.evaluations) == {"good", "bad"}
    assert not found[1], "one evaluation is not believed"
    values = next(one for one in found if one)
    assert values["name"] == " of bad"
    assert values["number"] == pytest.approx(0.2)


def test_files_with_the_old_name_of_a_metric_are_read() -> None:
    def find(name: str, share: float) -> list[HealthFinding]:
        health, last = Health(100), {"sft_loss": 2.0, name: share}
        records = [line(1, sft_loss=1.0), *(line(step, **last) for step in range(2, 40))]
        return [one for record in records for one in health.look(record)]

    for name in ("logps/falling", "logps/chosen_below_reference"):
        assert [one.name for one in find(name, 0.9)] == ["chosen_falling"]
        assert find(name, 0.1) == []


def test_data_findings_come_from_the_report_of_the_data(tmp_path: Path) -> None:
    one: dict[str, Any] = {
        "text": "20 % are cut.",
        "number": 0.2,
        "advice": "Raise sequence_length.",
    }
    found = [
        {"name": "truncation", "severity": "warning", "set": "train", **one},
        {"name": "leakage", "severity": "serious", "set": "eval", **one},
        {"name": "sampled", "severity": "info", "set": "train", **one},
    ]
    write(tmp_path / "data_report.json", {"look": {"findings": found}})
    watching(tmp_path)
    assert read_findings(tmp_path) == [
        HealthFinding(0, "data/truncation", "warning", *one.values()),
        HealthFinding(0, "data/eval/leakage", "serious", *one.values()),
    ]


# --- the command ---


def test_the_command_prints_the_worst_first(tiny_runs: TinyRuns) -> None:
    run_dir = ill(tiny_runs, WILD).run_dir
    table, shown = rather("health", run_dir), told("health", run_dir)
    assert table.exit_code == 0
    for one in read_findings(run_dir):
        assert one.name in table.output
    assert sorted(one["name"] for one in shown) == sorted(names(ill(tiny_runs, WILD)))
    severities = [one["severity"] for one in shown]
    assert severities == sorted(severities, key=SEVERITIES.index)
    assert set(shown[0]) == {"step", "name", "severity", "text", "number", "advice"}


def test_the_command_on_a_healthy_run(tiny_runs: TinyRuns) -> None:
    run_dir = tiny_runs.trained("sigmoid", HEALTHY["sigmoid"]).run_dir
    assert "No problems found." in rather("health", run_dir).output
    assert told("health", run_dir) == []


@pytest.mark.parametrize(("calibrated", "is_found"), [(0.61, False), (0.63, True)])
def test_a_held_out_loss_that_rises_counts_if_a_quarter_of_the_gain_is_given_back(
    calibrated: float, is_found: bool
) -> None:
    """The calibrated loss fell from 0.68 to 0.6: a quarter of that gain is reached at 0.62."""
    history = Health(100)
    for step, (loss, scaled) in enumerate([(0.7, 0.68), (0.6, 0.6), *[(0.9, calibrated)] * 2], 1):
        history.add(line(step, loss=0.69 - 0.05 * step))
        history.add({"step": step, "eval/loss": loss, "eval/calibrated_loss": scaled})
    assert bool(RULES["overfitting"].find(history)) == is_found
