"""On two ranks: the loss on texts at each evaluation, and answers once, of the exported model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rather.config.run_config import DPOConfig
from rather.config.values import FORGETTING
from rather.outcome.forgetting import forgetting_of
from rather.outcome.result import LINES
from rather.pipeline.answers_at_end import AnswersAtEnd
from tests.commands.conftest import json_of, rows_of
from tests.health.test_answers import by_hand
from tests.health.tiny_runs import EASY, TinyRuns, measures_all
from tests.tiny import metrics, train_on_two_ranks


@pytest.fixture(scope="module")
def run(tiny_runs: TinyRuns) -> DPOConfig:
    """A run on two ranks."""
    config = tiny_runs.config(
        "two-ranks", EASY, actor_train__device_mapping=[0, 1], reference__device_mapping=[0, 1],
        actor_train__training_args__per_device_train_batch_size=8,
        **measures_all(tiny_runs.folder),
    )  # fmt: skip
    train_on_two_ranks(config.model_dump(mode="json", exclude_unset=True))
    return config


def test_the_loss_on_texts_is_that_of_one_process(tiny_runs: TinyRuns, run: DPOConfig) -> None:
    lines = [line for line in metrics(run) if f"{FORGETTING}loss" in line]
    assert [line["step"] for line in lines] == [0, 4]
    folders = (tiny_runs.folder / "base", run.run_dir / "model")
    for line, folder in zip(lines, folders, strict=True):
        alone = forgetting_of(str(folder), Path(run.forgetting))
        assert line[f"{FORGETTING}loss"] == pytest.approx(alone.loss, rel=1e-4)
        assert f"{FORGETTING}right" not in line


def test_answers_are_those_of_the_exported_model_once(tiny_runs: TinyRuns, run: DPOConfig) -> None:
    rows = rows_of(run.run_dir / "answers.jsonl")
    assert run.eval_prompts
    prompts = run.eval_prompts.prompts or []
    assert [(row["step"], row["prompt"]) for row in rows] == [(4, prompt) for prompt in prompts]
    assert [row["policy"] for row in rows] == by_hand(run.run_dir / "model", prompts)
    assert [row["reference"] for row in rows] == by_hand(tiny_runs.folder / "base", prompts)
    *before, last = metrics(run)
    assert not any("eval/win_rate" in line for line in before)
    assert 0 <= last["eval/win_rate"] <= 1
    after = forgetting_of(str(run.run_dir / "model"), Path(run.forgetting))
    before_training = forgetting_of(str(tiny_runs.folder / "base"), Path(run.forgetting))
    assert last[f"{FORGETTING}right"] == len(after.right) / 36
    assert last[f"{FORGETTING}right_before"] == len(before_training.right) / 36
    result = json_of(run.run_dir / "report.json")["result"]
    assert result[1].startswith("Win rate against the base is")
    asked = len(before_training.right) / 36
    assert f"; {asked:.0%} of the answers were right and " in result[2]
    assert result[2].endswith("of what the base knew kept.")
    card = (run.run_dir / "model" / "README.md").read_text()
    assert " ".join(result[:LINES]) in card


def test_a_model_that_does_not_fit_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    monkeypatch.setattr("rather.pipeline.answers_at_end.free_memory", lambda: 1000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    at_end = AnswersAtEnd("base", None, None, None)  # type: ignore[arg-type]
    assert at_end.record(4, tmp_path) == {}
    assert "answers were not compared" in caplog.text
