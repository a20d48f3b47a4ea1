"""Users' own losses, metrics, formats and callbacks: tried once before anything slow, then used."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rather import DPOConfig, DPOPipeline, DPOTrainer
from rather.config import plugins
from rather.data.trial import try_own_formats
from rather.errors import ConfigError, DataError
from rather.losses.objective import from_config
from rather.losses.trial import try_own_losses, try_own_metrics
from rather.pipeline.callbacks import Callback, RunView, callback
from tests.api.conftest import TOKENS
from tests.commands.conftest import rows_of
from tests.tiny import make_config, make_pairs, tiny_policy

ROWS = TOKENS[:6]
OWN = """
import torch
from rather.data.formats import data_format
from rather.losses import loss, metric
from rather.losses.losses import gap, log_ratios
from rather.pipeline.callbacks import Callback, callback

@loss()
def averaged(x, *, beta=0.1):
    return torch.relu(1 - beta * gap(log_ratios(x))).mean()

@loss()
def detached(x, *, beta=0.1):
    return torch.relu(1 - beta * gap(log_ratios(x))).detach()

@loss()
def misspelt(x):
    return x.polcy

@loss()
def fine(x, *, beta=0.1):
    return torch.relu(1 - beta * gap(log_ratios(x)))

@data_format("prompt", "chosen", "rejected")
def wrong_column(row):
    return row["prompt"], (row["chosen"], row["worse"])

@data_format("prompt", "chosen", "rejected")
def one_value(row):
    return row["prompt"]

@metric
def longer_chosen(x):
    return (x.length[:, 0] > x.length[:, 1]).double()

@callback
class StopsEarly(Callback):
    def on_train_begin(self, run):
        self.file = open(run.folder / "calls.txt", "w")
    def on_log(self, run, record):
        print("log", run.step, record["step"], file=self.file)
    def on_evaluate(self, run, record):
        print("evaluate", run.step, record["eval/longer_chosen"], file=self.file)
        if run.step == 2:
            run.stop()
    def on_save(self, run):
        print("save", run.step, file=self.file)
    def on_train_end(self, run):
        print("end", run.step, file=self.file)
        self.file.close()
"""


@pytest.fixture
def imported(tmp_path: Path) -> Iterator[Path]:
    """Import OWN as --import does; the registries forget it afterwards."""
    make_config(tmp_path)  # tokenised before OWN has formats for the same columns
    before = [
        (registry, dict(registry), dict(registry._modules)) for registry in plugins.REGISTRIES
    ]
    loaded = list(plugins._loaded)
    file = tmp_path / "own.py"
    file.write_text(OWN, encoding="utf-8")
    plugins.load([file])
    yield file
    for registry, entries, modules in before:
        registry._entries, registry._modules = entries, modules
    plugins._loaded[:] = loaded


@pytest.mark.defect("U13")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("averaged", r"must return one loss per pair: .* shape \[8\] .* got \[\]"),
        ("detached", "has no gradient"),
        ("misspelt", r"AttributeError: .*polcy.*own\.py:18"),
    ],
)
def test_a_loss_is_tried_before_anything_slow(imported: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"pref_loss: loss '{name}'.*{text}"):
        try_own_losses(from_config(DPOConfig(pref_loss=name)))


def test_a_good_loss_and_all_of_rathers_pass_the_trial(imported: Path) -> None:
    state = torch.random.get_rng_state()
    try_own_losses(from_config(DPOConfig(pref_loss=["fine", "sigmoid"], beta=0.2)))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.defect("U13")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wrong_column", r"pairs.jsonl, line 1: .*KeyError: 'worse' \(.*own\.py:26\)"),
        ("one_value", "must return the prompt and"),
    ],
)
def test_a_format_is_tried_on_the_first_row(
    imported: Path, tmp_path: Path, name: str, text: str
) -> None:
    file = make_pairs(tmp_path / "pairs.jsonl", 4)
    data = {"file_name": str(file), "format": name}
    config = DPOConfig(actor_train={"data_args": data})
    sections = config.actor_train.data_args, config.validation.data_args
    with pytest.raises(DataError, match=text):
        try_own_formats(config, config.rows, *sections)


@pytest.mark.parametrize(
    ("metric", "text"),
    [(lambda x: x.policy.mean(), r"got \[\]"), (lambda x: 1.0, "got float")],
)
def test_a_metric_is_tried_too(metric: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"one value per pair.*{text}"):
        try_own_metrics({"mine": metric}, with_reference=True)
    with pytest.raises(ConfigError, match="rename yours"):
        try_own_metrics({"loss": metric}, with_reference=True)


@pytest.mark.defect("U15")
def test_metrics_and_callbacks_of_a_run(imported: Path, tmp_path: Path) -> None:
    own = {f"{part}__data_args__format": "prompt" for part in ("actor_train", "validation")}
    config = make_config(tmp_path, max_steps=4, logging_steps=1, eval_steps=1, **own)
    DPOPipeline(config).run()
    folder = config.run_dir
    calls = (folder / "calls.txt").read_text("utf-8").splitlines()
    values = {line.split()[2] for line in calls if line.startswith("evaluate")}
    evaluations = [line.rpartition(" ")[0] for line in calls if "evaluate" in line]
    assert evaluations == ["evaluate 0", "evaluate 1", "evaluate 2"]
    others = [line for line in calls if "evaluate" not in line]
    assert others == ["log 1 1", "log 2 2", "save 2", "end 2"]
    lines = rows_of(folder / "metrics.jsonl")
    logged = {str(line["eval/longer_chosen"]) for line in lines if "eval/loss" in line}
    assert logged == values
    assert 0 < float(values.pop()) < 1


@pytest.mark.defect("U15")
def test_metrics_and_callbacks_of_a_trainer() -> None:
    seen: list[Any] = []

    class Notes(Callback):
        def on_evaluate(self, run: RunView, record: Any) -> None:
            seen.append((run.step, record["eval/margin_above_zero"]))

    def margin_above_zero(x: Any) -> Any:
        return (x.policy[:, 0] > x.policy[:, 1]).double()

    model = tiny_policy().causal_lm
    trainer = DPOTrainer(
        model,
        DPOConfig(),
        copy.deepcopy(model),
        metrics=[margin_above_zero],
        callbacks=[Notes()],
    )
    history = trainer.fit(ROWS, ROWS)
    assert seen == [(len(history), history[-1]["eval/margin_above_zero"])]


def test_a_callback_that_fails_is_named() -> None:
    class Fails(Callback):
        def on_log(self, run: RunView, record: Any) -> None:
            raise ValueError("no margin")

    model = tiny_policy().causal_lm
    trainer = DPOTrainer(model, DPOConfig(), copy.deepcopy(model), callbacks=[Fails()])
    with pytest.raises(ConfigError, match=r"Fails\.on_log failed at step 1: ValueError: no margin"):
        trainer.fit(ROWS)
    with pytest.raises(ConfigError, match="inherits from Callback"):
        callback(dict)  # type: ignore[arg-type]
