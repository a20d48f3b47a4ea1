"""A run that learned nothing says so: in its last lines, exit code, report.json and `rather health`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rather.commands.terminal import guarded
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.progress import Progress
from rather.run_folder.layout import write_run_report
from rather.run_folder.names import RUN_REPORT
from rather.tools.report.folder import Folder
from rather.tools.report.sections import health
from rather.tracking.health import read_findings
from tests.commands.conftest import exits
from tests.faults import inject
from tests.runs import assert_equal, evaluations, saved, steps
from tests.tiny import make_config, make_model, rows_of, write_rows
from tests.train.test_nonfinite import nan_at
from tests.train.test_pipeline import Overflowing


class Overflows(Overflowing):
    """Overflows in four to nine steps."""

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        super().initialize(total_steps, model)
        if self.trainer.optimizer and self.trainer.optimizer.loss_scale:
            self.trainer.optimizer.loss_scale.value = 2.0**24


TRAINING = "actor_train__training_args__"
FP16 = {"actor_train__model_args__dtype": "fp16", "actor_train__worker_cls": Overflows}


@pytest.fixture(autouse=True)
def setup(no_self_check: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO):
        yield
    inject.detach()


def run(folder: Path, name: str, **changes: Any) -> tuple[DPOConfig, int]:
    """Train four steps as the command does; return the exit code."""
    config = make_config(folder, exp_name=name, **{"max_steps": 4, **changes})
    return config, guarded(lambda: DPOPipeline(config).run())


def found(config: DPOConfig) -> dict[str, str]:
    return {one.name: one.text for one in read_findings(config.run_dir)}


def command(config: DPOConfig) -> str:
    """Return what `rather health` prints, in one line."""
    return " ".join(exits(0, "health", config.run_dir).split())


def report(config: DPOConfig) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((config.run_dir / RUN_REPORT).read_text())
    return read


def weighted(folder: Path, name: str, weights: list[float]) -> str:
    """Write the first pairs with these weights; return the file."""
    rows = rows_of(folder / "pairs.jsonl")
    file = folder / f"{name}.jsonl"
    pairs = [{**row, "weight": weight} for row, weight in zip(rows, weights, strict=False)]
    return str(write_rows(file, pairs))


def zero_model(folder: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(make_model(folder / "zero"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(folder / "zero")
    return str(folder / "zero")


@pytest.mark.parametrize("cause", ["rate", "beta", "weights", "warm-up"])
def test_weights_that_did_not_change(
    shared: Path, tmp_path: Path, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes: dict[str, Any] = {
        "rate": {f"{TRAINING}learning_rate": 0.0},
        "beta": {"beta": 1e-300},
        "weights": {"pretrain": zero_model(tmp_path)} if cause == "weights" else {},
        "warm-up": {"max_steps": 1, f"{TRAINING}warmup_steps": 1},  # its first update has rate 0
    }[cause]
    config, code = run(shared, f"unchanged-{cause}", **changes)
    assert code == 0
    count = changes.get("max_steps", 4)
    said = f"updates made: {count}; 0 of {count} steps were skipped; the weights did not change."
    assert f"Outcome: {said}" in caplog.text
    assert f"Outcome: {said}" in command(config)
    assert said in health(Folder(config.run_dir))
    assert "the weights did not change" in found(config)["weights_unchanged"]
    # Nothing was learned, and a model of zeros answers the same to every text.
    others = {"weights": {"weights_vanished"}, "beta": {"data/tiny_beta"}}
    also = {"nothing_learned", *others.get(cause, ())}
    assert found(config).keys() == {"weights_unchanged", *also}
    assert report(config)["health"]["serious"] == 1 + len(also)


def test_a_run_that_learns_has_no_such_finding(shared: Path) -> None:
    config, code = run(shared, "learns")
    assert (code, found(config)) == (0, {})
    said = "100 % of the weights changed in float32; 100 % changed in the exported file; the file"
    told = command(config)
    assert f"0 of 4 steps were skipped; {said} keeps 100 % of the update. " in told
    assert told.endswith("No problems found.")


def test_an_update_that_rounding_discards(shared: Path, tmp_path: Path) -> None:
    source = str(make_model(tmp_path / "half", dtype=torch.bfloat16))
    rate = {f"{TRAINING}learning_rate": 1e-6, "max_steps": 2, "pretrain": source}
    for rounding, findings in (("nearest", ["update_lost"]), ("dithered", [])):
        config, code = run(shared, f"discards-{rounding}", rounding=rounding, **rate)
        assert (code, list(found(config))) == (0, findings)
    lost = report(make_config(shared, exp_name="discards-nearest"))
    assert lost["changed_masters"] > 0.9 > 0.2 > lost["changed_file"]
    assert lost["kept_share"] < 0.5
    assert report(config)["kept_share"] == pytest.approx(1, abs=0.2)


def test_only_pairs_without_weight_are_refused_before_training(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = weighted(shared, "weightless", [0.0] * 16)
    config, code = run(shared, "weightless", actor_train__data_args__file_name=file)
    assert code == 3
    assert "0 usable pairs: all training pairs have weight 0" in capsys.readouterr().err
    assert not (config.run_dir / "metrics.jsonl").exists()


def test_a_step_without_weight_is_skipped_and_logs_no_nan(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights_of_pairs = [1.0, 0.0, 2.0, 0.0]
    changes = {
        "actor_train__data_args__file_name": weighted(shared, "some", weights_of_pairs),
        f"{TRAINING}per_device_train_batch_size": 1,
    }
    config, code = run(shared, "some", save_steps=1, max_ckpt_to_keep=0, **changes)
    assert code == 0
    lines = steps(config)
    skipped = [line["step"] for line in lines if line["skipped_iter"]]
    assert len(skipped) == 2
    assert all(("loss" in line) == (line["step"] not in skipped) for line in lines)
    assert not any("nonfinite" in line for line in lines)
    for step in skipped:
        if step > 1:  # otherwise the momentum of earlier steps would move the weights
            assert_equal(saved(config, step - 1), saved(config, step))
    assert caplog.text.count("all its pairs have weight 0") == 1
    assert "2 of 4 steps were skipped (only pairs of weight 0: 2)" in found(config)["steps_skipped"]


def test_steps_without_weight_alone_end_with_exit_code_3(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are known only at the end if the steps reach no pair that has a weight."""
    file = weighted(shared, "late", [0.0] * 39 + [1.0])
    changes = {
        "actor_train__data_args__file_name": file,
        f"{TRAINING}per_device_train_batch_size": 1,
        "max_steps": 2,
    }
    config, code = run(shared, "late", **changes)
    assert code == 3
    text = "no update was made: 2 of 2 steps were skipped (only pairs of weight 0: 2)"
    assert text in capsys.readouterr().err
    assert text in found(config)["run_failed"]


def test_held_out_pairs_without_weight_log_no_nan(
    shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {
        "validation__data_args__file_name": weighted(shared, "held-out", [0.0] * 5),
        # Without weight, the exported model cannot be compared with the trained one either.
        "pretrain": str(make_model(tmp_path / "half", dtype=torch.bfloat16)),
        "actor_train__model_args__dtype": "fp32",
    }
    config, code = run(shared, "held-out", max_steps=1, **changes)
    assert code == 0
    evaluated = evaluations(config)
    assert [line["eval/pairs"] for line in evaluated] == [5, 5]
    assert not any("nonfinite" in line or "eval/loss" in line for line in evaluated)
    assert "held-out pairs: all have weight 0" in caplog.text


def test_float16_that_skips_every_step(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "no update was made: 4 of 4 steps were skipped (float16 overflow: 4)"
    for _ in range(2):  # the same command again ends in the same way
        config, code = run(shared, "fp16", **FP16)
        assert code == 6
        assert said in capsys.readouterr().err
        assert not (config.run_dir / "model").exists()
        assert set(found(config)) == {"run_failed", "nothing_learned"}
        assert said in command(config)
        assert report(config)["updates"] == 0
        assert report(config)["skip_reasons"] == {"overflow": 4}
    _, code = run(shared, "fp16", **{**FP16, "max_steps": 10, f"{TRAINING}num_train_epochs": 2.0})
    assert code == 0
    assert list(found(config)) == ["steps_skipped"]  # it was resumed until the scale was small
    assert 0 < report(config)["updates"] <= 6


def test_a_run_that_ended_by_nan_names_the_end_and_its_cause(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inject.arm(nan_at(3))
    config, code = run(shared, "nan", on_nonfinite="stop", save_steps=2)
    assert code == 6
    assert "step 3: loss nan" in capsys.readouterr().err
    shown = command(config)
    assert "Outcome: updates made: 2; 0 of 2 steps were skipped." in shown
    assert "run_failed 6 the run ended with exit code 6 (steps done: 2). step 3: loss nan" in shown
    inject.detach()
    _, code = run(shared, "nan", on_nonfinite="stop", save_steps=2)
    assert (code, found(config)) == (0, {})  # it was resumed, and went well


def test_most_steps_skipped(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    inject.arm(";".join(map(nan_at, (1, 2, 4))))
    config, code = run(shared, "most", save_steps=2)
    assert code == 0
    said = "updates made: 1; 3 of 4 steps were skipped (NaN or Inf: 3)"
    assert f"Outcome: {said}" in caplog.text
    assert f"Outcome: {said}" in command(config)
    assert list(found(config)) == ["steps_skipped"]


def test_a_skipped_step_has_one_loss_in_log_and_metrics(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inject.arm("step=2,phase=backward,role=actor_train,kind=nan")
    config, _ = run(shared, "truth")
    line = steps(config)[1]
    assert (line["skipped_iter"], line["nonfinite"]) == (1, {"grad_norm": "nan"})
    assert f"step 2: loss {line['loss']:.4g}, gradient norm nan" in caplog.text
    inject.arm(nan_at(2))
    config, _ = run(shared, "nan-truth")
    line = steps(config)[1]
    assert line["nonfinite"]["loss"] == "nan"
    assert line["lengths/chosen"] > 0  # a number that was found stays one


@pytest.mark.parametrize(
    ("shares", "said", "finding"),
    [
        (
            {"changed_masters": 0.998, "changed_file": 0.2, "kept_share": 0.17},
            "99.8 % of the weights changed in float32; 20 % changed in the exported file; the file "
            "keeps 17 % of the update.",
            {"update_lost": "the written file keeps only 17 % of the update."},
        ),
        (
            {"changed_masters": 1e-6, "changed_file": 1e-6, "kept_share": 0.5},
            "0.0001 % of the weights changed in float32",
            {},
        ),
        (
            {"changed_masters": 0.0},
            "0 of 1 steps were skipped; the weights did not change.",
            {"weights_unchanged": "the weights did not change (updates made: 1)."},
        ),
    ],
)
def test_what_the_export_found(
    shared: Path,
    shares: dict[str, float],
    said: str,
    finding: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DPOPipeline, "_export_model", lambda *_: shares)
    config, code = run(shared, f"export-{len(said)}", max_steps=1)
    assert code == 0
    assert shares.items() <= report(config).items()
    assert said in command(config)
    assert found(config) == finding


def test_a_checkpoint_without_counts() -> None:
    """It tells the number of skipped steps, not why they were."""
    saved = asdict(Progress(step=5))
    del saved["skipped"], saved["idle"]
    outcome = Progress.of(saved, updates=3).outcome()
    assert (outcome["updates"], outcome["skipped_steps"]) == (3, 2)
    assert Progress.of(asdict(Progress(step=5, skipped={"spike": 1})), 9).outcome()["updates"] == 4


def test_a_kill_never_leaves_half_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run_report(tmp_path, {"updates": 1})

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(KeyboardInterrupt):
        write_run_report(tmp_path, {"updates": 2})
    assert json.loads((tmp_path / RUN_REPORT).read_text()) == {"updates": 1}
