"""report.html of a real, resumed run: it says what the folder holds, and a browser draws it."""

from __future__ import annotations

import html
import json
import logging
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rather.config.load import load
from rather.config.redaction import HIDDEN
from rather.errors import ConfigError
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.starts import command, record_start
from rather.run_folder import control
from rather.tools.report import sections
from rather.tools.report.folder import Folder, MetricsReader, without_secrets
from rather.tools.report.page import MOST_POINTS
from rather.tools.report.pairs import PairHistory, read_ledger
from rather.tools.report.sections import report_page
from rather.tools.report.write import write_last_report, write_report
from tests.browser import (
    NARROW,
    WIDE,
    OpenPage,
    accessibility_findings,
    drawn_points,
    figures,
    overflow,
)
from tests.commands.conftest import exits, succeed, write
from tests.tiny import make_config, rows_of

SECRET = "canary-4711-canary"
FINDING = {
    "step": 4,
    "name": "chosen log-prob falling",
    "severity": "serious",
    "text": "80 % of the chosen answers are less likely than before.",
    "number": 0.8,
    "advice": f"Raise beta. <b>{SECRET}</b>",
}
METRICS_OF_A_RUN = (
    "loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected", "logps/chosen",
    "logps/rejected", "logps/chosen_below_reference", "lengths/chosen", "lengths/rejected",
    "rewards/length_correlation", "grad_norm", "lr", "pairs_per_second", "time/train", "time/reference",
    "time/wait",
)  # fmt: skip
STATS = {"tokens": 9, "repetition": 0.25, "ended": True}
INCIDENT = {"time": "2026-01-01T00:00:00+00:00", "kind": "nonfinite", "step": 3, "action": "skip"}


def answer(step: int) -> dict[str, Any]:
    texts = {"prompt": "w1 <w2>", "reference": "w50 w51", "policy": f"w3 of step {step}"}
    return {"step": step, **texts, "reference_stats": STATS, "policy_stats": STATS}


def series(text: str, anchor: str) -> list[dict[str, Any]]:
    """The lines or bars of a chart."""
    drawn: list[dict[str, Any]] = figures(text)[anchor]["series"]
    return drawn


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Twelve steps by two commands, with what others write into a run folder."""
    folder = tmp_path_factory.mktemp("report")
    steps = {"eval_steps": 2, "logging_steps": 1, "report_html": True}
    config = make_config(folder, actor_train__training_args__num_train_epochs=4, **steps)
    file = folder / "shop.yaml"
    file.write_text(
        yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOP_API_KEY", SECRET)
        arguments = ["train", str(file), "beta=0.3", "max_steps=12"]
        patch.setattr("sys.argv", ["rather", *arguments])
        with pytest.MonkeyPatch.context() as stopping:
            stopping.setattr(
                control, "take_requests", lambda run_dir, step: control.STOP if step == 6 else None
            )
            exits(143, *arguments)
        assert "<dd>stopped</dd>" in (config.run_dir / "report.html").read_text(encoding="utf-8")
        succeed(*arguments)
        said = {"health": [FINDING], "answers": [answer(0), answer(12)], "incidents": [INCIDENT]}
        for name, lines in said.items():
            write(config.run_dir / f"{name}.jsonl", *lines)
        succeed("report", config.run_dir)
        yield config.run_dir


@pytest.fixture
def text(run_dir: Path) -> str:
    return (run_dir / "report.html").read_text(encoding="utf-8")


def cells(text: str, caption: str) -> dict[str, list[str]]:
    """The rows of a table by their headings."""
    return dict(rows(text, caption))


def rows(text: str, caption: str) -> list[tuple[str, list[str]]]:
    body = text.partition(f"<caption><span>{caption}</span></caption>")[2].partition("</table>")[0]
    found = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', body)
    return [
        (name, [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", rest)])
        for name, rest in found
    ]


def test_curves_show_the_metrics(run_dir: Path, text: str) -> None:
    records = rows_of(run_dir / "metrics.jsonl")
    training = [record for record in records if "loss" in record]
    held_out = [record for record in records if "eval/loss" in record]
    for anchor, metrics in {
        "loss": ["loss"],
        "accuracy": ["rewards/accuracies"],
        "margin": ["rewards/margins"],
        "rewards": ["rewards/chosen", "rewards/rejected"],
        "lengths": ["lengths/chosen", "lengths/rejected"],
    }.items():
        expected = [[line[name] for line in training] for name in metrics]
        expected += [[line[f"eval/{name}"] for line in held_out] for name in metrics]
        drawn = [line["y"] for line in series(text, anchor)]
        assert [pytest.approx(values, rel=1e-4) for values in expected] == drawn, anchor
        assert series(text, anchor)[0]["x"] == list(range(1, 13))
    assert [line["name"] for line in series(text, "loss")] == ["training", "held-out"]
    assert {"time-of-a-step", "speed", "prompt-lengths"} <= figures(text).keys()


def test_one_report_covers_both_starts(text: str) -> None:
    assert "<dd>12 of 12</dd>" in text
    assert re.search(
        r"<dd>\d+\.\d%</dd><dd class=\"note\">95 %: \d+\.\d% to \d+\.\d%; before: all ties</dd>",
        text,
    )
    assert "<dd>finished</dd>" in text
    starts = [
        each for _, each in rows(text, "Starts of this run") if "beta=0.3" in each[1]
    ]  # two in one second
    assert [before for before, _ in starts] == ["0", "6"]


@pytest.mark.defect("U23")
@pytest.mark.parametrize(
    ("last", "low", "longer", "health", "answer", "reason"),
    [
        (0.766, 0.731, 0.5, [], "Yes", "76.6% (95 %: 73.1% to 80.0%) on 500 pairs; all ties before"),
        (0.766, 0.731, 0.78, [], "Not shown", "the longer answer is right on 78.0%: the model has"),
        (0.766, 0.731, 0.22, [], "Not shown", "Always picking the shorter answer is right on 78.0%"),
        (0.9, 0.85, 0.78, [FINDING], "Perhaps", "Health has 1 serious finding: chosen log-prob f"),
        (0.52, 0.48, 0.5, [], "Not shown", "That may be chance."),
        (0.46, 0.42, 0.5, [], "No", "That may be chance."),
    ],
)  # fmt: skip
def test_one_sentence_says_whether_it_was_worth_it(
    tmp_path: Path, last: float, low: float, longer: float, health: Any, answer: str, reason: str
) -> None:
    name = "eval/rewards/accuracies"
    before = {"step": 0, "eval/loss": 0.69, name: 0.0, "eval/rewards/ties": 1.0}
    after = {"step": 9, "eval/loss": 0.5, name: last, "eval/rewards/ties": 0.0}
    after |= {f"{name}_low": low, f"{name}_high": 0.8, "eval/pairs": 500}
    write(tmp_path / "metrics.jsonl", before, after)
    run = Folder(tmp_path)
    run.data = {
        "rows": "pairs",
        "look": {"sets": {"eval": {"length_bias": {"longer_wins": longer}}}},
    }
    run.health = health
    page = report_page(run, "finished")
    sentence = re.search(r'<p class="verdict">(.*?)</p>', page)
    assert sentence
    assert f">{answer}.</strong>" in sentence[1]
    assert reason in html.unescape(sentence[1])
    assert page.index(sentence[0]) < page.index("<dl class='tiles'>")


def test_single_answers_are_desirable_or_not(tmp_path: Path) -> None:
    values = {"rewards/accuracies": 0.9, "rewards/chosen": 1.0, "rewards/rejected": -1.0}
    record = {"step": 9, "eval/loss": 0.5} | {f"eval/{name}": x for name, x in values.items()}
    before = record | {"step": 0, "eval/rewards/accuracies": 0.0}
    write(tmp_path / "metrics.jsonl", before, record)
    run = Folder(tmp_path)
    sets = {"eval": {"length_bias": {"longer_wins": 0.8}}}
    run.data = {"rows": "labelled", "look": {"sets": sets}}
    page = report_page(run, "finished")
    assert "The longer of a desirable and an undesirable answer is the desirable one" in page
    names = {line["name"] for line in series(page, "rewards")}
    assert names == {"held-out, desirable", "held-out, undesirable"}


@pytest.mark.defect("U23")
def test_suspicious_pairs_have_their_texts(run_dir: Path, text: str) -> None:
    """And margins of several epochs are drawn as first and last seen, those of one only once."""
    suspects = rows(text, "The pairs with the highest flip score")
    answers = [row["chosen"] for row in rows_of(run_dir.parents[1] / "pairs.jsonl")]
    shown = {" ".join(cells[-2].split()) for _, cells in suspects}
    assert len(suspects) == 20
    assert shown <= {" ".join(answer.split()) for answer in answers}
    drawn = series(text, "margins-of-the-pairs")
    assert [line["name"] for line in drawn] == ["first seen", "last seen"]
    once = PairHistory.of(read_ledger(run_dir).slice(0, 8))
    drawn = series(sections._margins_chart(once), "margins-of-the-pairs")
    assert [line["name"] for line in drawn] == ["first seen"]


def test_settings_against_their_defaults(text: str) -> None:
    settings = cells(text, "Keys that differ from their defaults")
    assert settings["beta"] == ["0.3", "null", "command line"]
    assert settings["sequence_length"][:2] == ["64", "1024"]
    assert settings["sequence_length"][2].startswith("shop.yaml:")
    assert settings["reference.model_args.model_name_or_path"][2] == "follows pretrain"
    assert "seed" not in settings


def test_machine_time_and_cost(run_dir: Path, text: str) -> None:
    machine = cells(text, "The last start")
    assert {"torch", "transformers", "Python", "device"} <= machine.keys()
    assert (machine["devices"], machine["hosts"]) == (["1"], ["1"])
    cost = cells(text, "Cost of all steps in metrics.jsonl; a shared prompt counts once")
    training = [record for record in rows_of(run_dir / "metrics.jsonl") if "tokens" in record]
    assert cost["Pairs"] == [f"{sum(record['pairs'] for record in training)}"]
    assert cost["Tokens"] == [f"{sum(record['tokens'] for record in training):,}"]
    seconds = sum(record["pairs"] / record["pairs_per_second"] for record in training)
    assert float(cost["Device-hours in steps"][0]) == pytest.approx(seconds / 3600, rel=1e-3)
    parts = json.loads((run_dir / "report.json").read_text())
    assert set(parts["parts"]) == {"wait", "train", "reference", "evaluate", "save"}
    assert sum(parts["parts"].values()) <= parts["seconds"]
    assert "everything else" in text


def test_findings_answers_and_incidents(text: str) -> None:
    assert "80 % of the chosen answers are less likely than before." in text
    assert "After: the policy at step 12" in text
    assert "w3 of step 12" in text
    assert "w3 of step 0" not in text
    assert "w1 &lt;w2&gt;" in text
    assert "9 tokens, ended by itself, repetition 0.25" in text
    assert "action: skip" in text


def test_no_secret_and_no_markup_from_data(text: str) -> None:
    assert SECRET not in text
    assert f"&lt;b&gt;{HIDDEN}&lt;/b&gt;" in text
    assert "cannot be shown" not in text


def test_texts_are_redacted_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_API_KEY", SECRET)
    told = {"a": ["see http://host", "me@host", {"b": SECRET, "c": 1}], "d": f"x{SECRET}y", "e": ""}
    assert without_secrets(told) == {
        "a": ["see http://host", "me@host", {"b": HIDDEN, "c": 1}],
        "d": f"x{HIDDEN}y",
        "e": "",
    }


def test_it_can_be_rewritten_from_the_folder(run_dir: Path, text: str, tmp_path: Path) -> None:
    out = tmp_path / "again.html"
    done = succeed("report", run_dir, "--out", out)
    assert str(out) in done.output
    assert out.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["again.html"]


def test_a_folder_without_a_run_is_refused(run_dir: Path, tmp_path: Path) -> None:
    assert "not a run folder" in exits(2, "report", tmp_path)
    assert "cannot be written" in exits(
        2, "report", run_dir, "--out", tmp_path / "missing" / "a.html"
    )


def test_a_folder_with_few_files(run_dir: Path, tmp_path: Path) -> None:
    """And a last line that a kill has torn."""
    metrics = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text(metrics + '{"step": 13, "lo', encoding="utf-8")
    page = report_page(Folder(tmp_path), "not finished")
    assert "<dd>12</dd>" in page
    assert "<dd>not finished</dd>" in page
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    assert "No step has been logged yet." in report_page(Folder(tmp_path), "running")


def test_a_damaged_file_costs_only_its_part(run_dir: Path, tmp_path: Path) -> None:
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    strange = [b'{"step": NaN}', b'{"step": 1e400}', b'{"step": 5, "loss": 1' + b"0" * 400 + b"}", b"\xff\xfe",
               b'{"step": 5, "nonfinite": 3}', b'{"step": 5, "nonfinite": {"loss": "x"}}']  # fmt: skip
    (tmp_path / "metrics.jsonl").write_bytes(metrics + b"\n".join(strange) + b"\n")
    for name, line in (
        ("health", {"step": 1}),
        ("answers", {"prompt": []}),
        ("starts", {"settings": 3}),
    ):
        write(tmp_path / f"{name}.jsonl", line)
    (tmp_path / "incidents.jsonl").mkdir()
    for name in ("data_report", "plan", "report"):
        (tmp_path / f"{name}.json").write_text(
            '{"measured": 1, "parts": 1, "seconds": "x"}', encoding="utf-8"
        )
    page = report_page(Folder(tmp_path), "not finished")
    assert series(page, "loss")[0]["x"] == list(range(1, 13))
    told = dict(re.findall(r'<h2 id="([^"]+)">.*?</h2>(.{,80})', page))
    damaged = {anchor for anchor, text in told.items() if "is damaged" in text}
    assert told.keys() - damaged == {"curves", "incidents"}


def test_a_lone_surrogate_is_replaced(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes((run_dir / "metrics.jsonl").read_bytes())
    write(tmp_path / "health.jsonl", {**FINDING, "text": "half \ud83d"})
    assert "half ?" in write_report(tmp_path, state="running").read_text(encoding="utf-8")


def test_the_current_folder(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir)
    page = report_page(Folder(Path()), "running")
    assert f"<title>{run_dir.name}</title>" in page
    assert f"exp_name={run_dir.name}-again" in page


def test_two_writers_at_once(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rather report` while the run ends: each has a file of its own until it is whole."""
    out, move = tmp_path / "report.html", os.replace

    def other_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", move)
        write_report(run_dir, out, state="running")
        move(source, target)

    monkeypatch.setattr(os, "replace", other_first)
    write_report(run_dir, out, state="running")
    assert os.listdir(tmp_path) == ["report.html"]


def test_device_hours_count_the_devices_of_each_start(run_dir: Path) -> None:
    run = Folder(run_dir)
    run.starts[1]["environment"]["devices"] = 3
    pairs, speed = run.metrics["pairs"], run.metrics["pairs_per_second"]
    spent = [count / fast for count, fast in zip(pairs.values, speed.values, strict=True)]
    cost = cells(
        report_page(run, "running"),
        "Cost of all steps in metrics.jsonl; a shared prompt counts once",
    )
    expected = (sum(spent[:6]) + 3 * sum(spent[6:])) / 3600
    assert float(cost["Device-hours in steps"][0]) == pytest.approx(expected, rel=1e-3)
    assert cost["Devices"] == ["3"]


def test_a_start_that_cannot_be_recorded_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, report_html=True)
    config.run_dir.mkdir(parents=True)
    monkeypatch.setattr(
        "sys.argv", ["rather", "train", "caf\udce9.yaml"]
    )  # a name in Latin-1, as Python reads it
    record_start(config, "cpu", 0, 5)
    (config.run_dir / "metrics.jsonl").touch()
    (start,) = Folder(config.run_dir).starts
    assert start["command"] == "rather train 'caf\udce9.yaml'"
    monkeypatch.setattr("sys.argv", [])
    record_start(config, "cpu", 0, 5)
    assert "this start was not recorded" in caplog.text


def test_metrics_are_read_as_columns(tmp_path: Path) -> None:
    """Lines have different metrics, values that are not finite, an old name, or are damaged."""
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 3.0, "logps/falling": 0.5, "eval/logps/falling": 0.25},
        {"step": 2, "loss": None, "nonfinite": {"loss": "inf"}, "more": 7.0},
        {"step": 3, "loss": 1.0, "logps/chosen_below_reference": 0.75},
        {"step": "x"},
        {},
    ]
    columns = MetricsReader(write(tmp_path / "metrics.jsonl", *lines)).update()
    read = {name: (list(each.steps), list(each.values)) for name, each in columns.items()}
    assert read == {
        "loss": ([1, 2, 3], [3.0, float("inf"), 1.0]),
        "more": ([2], [7.0]),
        "logps/chosen_below_reference": ([1, 3], [0.5, 0.75]),
        "eval/logps/chosen_below_reference": ([1], [0.25]),
    }
    page = report_page(Folder(tmp_path), "running")
    anchor = "chosen-answers-less-likely-than-under-the-reference"
    assert series(page, anchor)[0]["y"] == [0.5, 0.75]
    assert series(page, "loss")[0]["y"] == [3.0, None, 1.0]


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    records = [
        {"step": step, **dict.fromkeys(METRICS_OF_A_RUN, 1 / step)} for step in range(1, 2001)
    ]
    held_out = [
        {"step": step, **{f"eval/{name}": 1 / step for name in METRICS_OF_A_RUN}}
        for step in range(10, 2001, 10)
    ]
    write(tmp_path / "metrics.jsonl", *records, *held_out)
    page = report_page(Folder(tmp_path), "running")
    (training, _) = series(page, "loss")
    assert len(training["x"]) <= MOST_POINTS
    assert (training["x"][0], training["x"][-1], training["y"][0]) == (1, 2000, 1.0)
    assert len(figures(page)) == 12
    assert len(page) < 250_000


def test_the_reproduction_command_gives_the_same_numbers(run_dir: Path, text: str) -> None:
    line = re.search(r"<pre>(rather train .*?)</pre>", text)
    assert line
    program, *arguments = shlex.split(html.unescape(line[1]))
    assert program == "rather"
    succeed(*arguments, "report_html=false")
    there = run_dir.with_name("run-again")

    def numbers(folder: Path) -> list[dict[str, Any]]:
        clock = ("second", "time/")
        return [
            {name: value for name, value in each.items() if not any(map(name.count, clock))}
            for each in rows_of(folder / "metrics.jsonl")
        ]

    assert numbers(there) == numbers(run_dir)
    assert "was changed" not in text
    assert not (there / "report.html").exists()
    assert (there / "starts.jsonl").exists()


def test_settings_changed_by_a_resumed_run_are_named(run_dir: Path) -> None:
    run = Folder(run_dir)
    run.starts[0]["settings"]["max_steps"]["value"] = 6
    assert "max_steps was changed when the run was resumed" in report_page(run, "stopped")


@pytest.mark.defect("N20")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_writes_its_small_report_at_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: signal.Signals,
) -> None:
    config = make_config(tmp_path, max_steps=4, logging_steps=1, eval_steps=1, report_html=True)
    page = config.run_dir / "report.html"
    signals = [number]  # a second one would quit at once

    def signal_at_step_two(run_dir: Path, step: int) -> None:
        assert not page.exists()
        if step == 2 and signals:
            os.kill(os.getpid(), signals.pop())

    monkeypatch.setattr(control, "take_requests", signal_at_step_two)
    with caplog.at_level(logging.WARNING):
        assert DPOPipeline(config).run() == 128 + number
    assert not caplog.records
    text = page.read_text(encoding="utf-8")
    assert "<dd>stopped</dd>" in text
    assert "<dd>2 of 4</dd>" in text
    assert len(text) < 100_000


def test_the_report_of_a_failed_run_says_so_and_a_full_disk_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = write(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1.0}).with_name("report.html")
    write_last_report(tmp_path, MemoryError)
    assert "<dd>failed</dd>" in page.read_text(encoding="utf-8")

    def full_disk(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    write_last_report(tmp_path, None)
    (record,) = caplog.records
    assert "report.html was not written (OSError: [Errno 28]" in record.getMessage()
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "report.html"]


def test_auto_is_only_read_in_a_run_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    data = "actor_train: {data_args: {file_name: pairs.jsonl}}"
    file.write_text(f"report_html: auto\npretrain: model\n{data}\n")
    with pytest.raises(ConfigError, match=r"report_html \(config.yaml:1\): `auto` was removed"):
        load(file)
    (tmp_path / "metrics.jsonl").touch()
    assert load(file).report_html is True


def test_the_command_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/rather", "train", "a b.yaml"])
    assert command() == "rather train 'a b.yaml'"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert command() == "torchrun --nproc-per-node 2 -m rather train 'a b.yaml'"
    monkeypatch.setattr("sys.argv", ["mine.py", "x"])
    assert command() == "python mine.py x"


@pytest.mark.parametrize(("size", "theme"), [(WIDE, "light"), (NARROW, "dark")])
def test_in_a_browser(
    open_page: OpenPage, run_dir: Path, size: tuple[int, int], theme: str
) -> None:
    page = open_page(run_dir / "report.html", size=size, theme=theme)
    assert page.locator(".plot svg").count() == page.locator("figure.chart").count() >= 12
    assert sum(points >= 5 for points in drawn_points(page)) >= 15
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 60) == (theme == "dark")
    assert overflow(page) == 0
    assert not accessibility_findings(page)
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
