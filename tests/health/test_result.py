"""The end of a run in four lines: what they say, and where they are found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rather.config.run_config import DPOConfig
from rather.errors import RatherError
from rather.outcome.result import LINES, answer_lines, result_lines, run_result, shown_lines
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.board.runs import RESULT_LINES
from tests.commands.conftest import json_of, rows_of, told, write
from tests.commands.fake_server import longer, says, serving
from tests.health.tiny_runs import EASY, TinyRuns
from tests.tiny import make_config, metrics


def test_the_lines_are_in_report_card_and_page(measured_run: DPOConfig) -> None:
    folder = measured_run.run_dir
    lines = json_of(folder / "report.json")["result"]
    assert lines == run_result(folder)
    assert RESULT_LINES == LINES
    starts = "Held-out accuracy is", "Win rate against the base is", "Forgetting: the loss", "Drift"
    for line, start in zip(lines, starts, strict=False):
        assert line.startswith(start), lines
    assert [line.split(":")[0] for line in lines[LINES:]] == ["Prompt", "Before", "After"] * 2
    assert " ".join(lines[:LINES]) in (folder / "model" / "README.md").read_text()


def answers_of(config: DPOConfig, who: str) -> list[str]:
    rows = rows_of(config.run_dir / "answers.jsonl")
    return [row[who] for row in rows if row["step"] == EASY.steps]


def test_the_win_rate_is_that_of_the_answers(measured_run: DPOConfig) -> None:
    *before, last = metrics(measured_run)
    answers = zip(*(answers_of(measured_run, who) for who in ("reference", "policy")), strict=True)
    lengths = [(len(first), len(second)) for first, second in answers]
    wins = sum((first > second) + (first == second) / 2 for first, second in lengths)
    assert last["eval/win_rate"] == wins / len(lengths)
    assert last["eval/win_rate_low"] <= last["eval/win_rate"] <= last["eval/win_rate_high"]
    assert not any("eval/win_rate" in line for line in before)  # asked once


def judged_run(tiny_runs: TinyRuns, name: str, judge: dict[str, str]) -> DPOConfig:
    return tiny_runs.trained(name, EASY, forgetting="off", eval_prompts__judge=judge)


def test_a_reward_model_judges_the_end_of_a_run(tiny_runs: TinyRuns) -> None:
    changes = {"task": "reward", "pref_loss": "bradley_terry", "eval_prompts": None}
    reward = tiny_runs.trained("reward", replace(EASY, steps=1), **changes)
    model = str(reward.run_dir / "model")
    config = judged_run(tiny_runs, "by-reward", {"with": model})
    assert config.eval_prompts
    files = []
    for who in ("reference", "policy"):
        texts = zip(config.eval_prompts.prompts or [], answers_of(config, who), strict=True)
        rows = [{"prompt": prompt, "responses": [text]} for prompt, text in texts]
        files.append(write(config.run_dir / f"{who}.jsonl", *rows))
    compared = told("judge", *files, "--with", model)
    assert metrics(config)[-1]["eval/win_rate"] == compared["win_rate"]
    assert compared["ties"] < compared["n"]


def test_a_server_judges_the_end_of_a_run_once(tiny_runs: TinyRuns) -> None:
    with serving(says(longer)) as server:
        config = judged_run(tiny_runs, "by-server", {"with": server.url, "model": "m"})
        assert len(server.requests) <= 8  # four prompts, both orders; equal questions are cached
    lengths = zip(answers_of(config, "reference"), answers_of(config, "policy"), strict=True)
    wins = [(len(a) > len(b)) + (len(a) == len(b)) / 2 for b, a in lengths]
    assert metrics(config)[-1]["eval/win_rate"] == sum(wins) / len(wins)
    result = run_result(config.run_dir)
    assert result[1].startswith("Win rate against the base is")
    assert result[2] == "Forgetting was not measured: `forgetting` is off."


def test_what_was_not_measured_is_said() -> None:
    lines = result_lines({}, {})
    # Answers to learn have a loss only; a reward model writes no text.
    learned = result_lines({"eval/loss": [1.75, 1.5], "sft_loss": [1.7], "loss": [1.7]}, {})
    assert learned[0] == "Held-out loss went from 1.75 to 1.5."
    assert "eval_prompts.judge" in learned[1]
    scored = result_lines({"eval/loss": [0.7, 0.6], "loss": [0.7]}, {})
    assert scored[1] == "Win rate was not measured: a reward model writes no text."
    assert shown_lines(lines) == lines[:1]  # a training of rounds measures nothing
    drifted = result_lines({"eval/drift": [0.0, 0.2]}, {})
    assert shown_lines(drifted) == drifted
    assert result_lines({"eval/drift": [0.0, 66.8]}, {"drift_limit": 1.0})[3].endswith(
        "66.8 nats per held-out token. That is above drift_limit (1)."
    )
    assert "drift_limit" not in result_lines({"eval/drift": [0.0, 0.2]}, {"drift_limit": 1.0})[3]
    assert len(lines) == LINES
    assert all("not measured" in line for line in lines)
    assert "does not know the texts" in result_lines({}, {"forgetting_left_out": ""})[2]
    assert answer_lines([]) == []


@pytest.mark.parametrize(("low", "is_chance"), [(0.38, True), (0.51, False)])
def test_a_win_rate_that_may_be_chance_is_called_so(low: float, is_chance: bool) -> None:
    rates = {"eval/win_rate": [0.9], "eval/win_rate_low": [low], "eval/win_rate_high": [1.0]}
    assert result_lines(rates, {})[1].endswith("%). That may be chance.") is is_chance


def test_length_alone_is_named() -> None:
    held_out = {"eval/loss": [0.69, 0.5], "eval/rewards/accuracies": [0.0, 0.7], "eval/pairs": [400.0] * 2,
                "eval/rewards/accuracies_low": [0.0, 0.66], "eval/rewards/accuracies_high": [0.0, 0.74],
                "eval/rewards/ties": [1.0, 0.0]}  # fmt: skip
    bias = {"look": {"sets": {"eval": {"length_bias": {"longer_wins": 0.75}}}}}
    assert "has not been shown to beat length" in result_lines(held_out, bias)[0]
    bias["look"]["sets"]["eval"]["length_bias"]["longer_wins"] = 0.55
    assert "Always picking the longer answer is right on 55.0%." in result_lines(held_out, bias)[0]


def test_a_judge_that_is_not_there_is_named(tmp_path: Path) -> None:
    judge = {"with": str(tmp_path / "missing.py:score")}
    config = make_config(
        tmp_path, eval_prompts={"prompts": ["w1"], "judge": judge, "max_new_tokens": 2}
    )
    with pytest.raises(RatherError, match=r"missing\.py"):
        DPOPipeline(config)  # before anything is trained
