"""Both trainers, killed at a random step and started again, end with the same bits."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import signal
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather import DPOConfig, DPOTrainer
from rather.api.collate import DataCollatorForPreferenceDataset, StatefulDistributedSampler
from rather.checkpoint.checkpoint import newest_good
from rather.coati import DPOTrainer as CoatiTrainer
from rather.config.schema import TrainingArgs
from rather.errors import CheckpointError, ConfigError, DataError
from tests.api.conftest import TOKENS
from tests.commands.conftest import json_of
from tests.tiny import in_child

STEPS = 8  # two epochs of 14 pairs, two micro-batches of two pairs each
SEED = 15


def kill_after(steps: int, trainer: DPOTrainer) -> None:
    """Kill this process after the optimizer has taken `steps` steps in it."""
    optimizer = trainer._make_optimizer(STEPS)
    step, done = optimizer.step, 0

    def counted(grad_norm: float) -> None:
        nonlocal done
        step(grad_norm)
        done += 1
        if done == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.step = counted  # type: ignore[method-assign]


def loader(folder: Path) -> DataLoader[Any]:
    collate = DataCollatorForPreferenceDataset(AutoTokenizer.from_pretrained(folder))
    sampler: Any = StatefulDistributedSampler(TOKENS, seed=3)
    return DataLoader(TOKENS, batch_size=2, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


SOURCES: dict[str, Callable[[Path], Any]] = {
    "rows": lambda folder: TOKENS,
    "dataset": lambda folder: import_module("datasets").Dataset.from_list(TOKENS),
    "loader": loader,
}


def torch_optimizer(model: Any, kind: str) -> dict[str, Any]:
    """One with moments and a step count, one with other settings in every step."""
    if kind == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": MultiStepLR(optimizer, [2, 5], gamma=0.5)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    schedule: LRScheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS + 1)
    return {"optimizer": optimizer, "lr_scheduler": schedule}


def fit(folder: Path, output: Path, source: str, optimizer: str = "", kill: int = 0) -> int:
    model = AutoModelForCausalLM.from_pretrained(folder)
    args = TrainingArgs(
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
    )
    given = torch_optimizer(model, optimizer) if optimizer else {}
    trainer = DPOTrainer(
        model, DPOConfig(save_steps=2), copy.deepcopy(model), args, **given,
        tokenizer=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    if kill:
        kill_after(kill, trainer)
    history = trainer.fit(SOURCES[source](folder), TOKENS[:3], output_dir=output)
    trainer.save_model(output / "exported")
    (output / "history.json").write_text(json.dumps(history))
    return 0


def coati(folder: Path, output: Path, source: str, optimizer: str = "", kill: int = 0) -> int:
    model = AutoModelForCausalLM.from_pretrained(folder)
    given = torch_optimizer(model, optimizer)
    trainer = CoatiTrainer(
        actor=model, ref_model=copy.deepcopy(model), actor_optim=given["optimizer"],
        actor_lr_scheduler=given["lr_scheduler"], tokenizer=AutoTokenizer.from_pretrained(folder),
        max_epochs=2, accumulation_steps=2, save_interval=2, save_dir=output,
    )  # fmt: skip
    if kill:
        kill_after(kill, trainer.trainer)
    history = trainer.fit(SOURCES[source](folder), SOURCES[source](folder))
    trainer.trainer.save_model(output / "exported")
    (output / "history.json").write_text(json.dumps(history))
    return 0


def outcome(output: Path) -> tuple[Any, dict[str, torch.Tensor], Any, bytes]:
    """Return history, tensors and numbers of the last checkpoint, and the exported weights."""
    last = newest_good(output)
    assert last is not None
    assert last.step == STEPS
    names = ("model", "optimizer", "rng")
    tensors = {f"{name}/{key}": x for name in names for key, x in last.tensors(name).items()}
    exported = (output / "exported" / "model.safetensors").read_bytes()
    history = json_of(output / "history.json")
    return history, tensors, (last.state["trainer"], last.state["position"]), exported


CASES = [
    pytest.param(fit, "rows", "", id="fit-rows"),
    pytest.param(fit, "loader", "adamw", id="fit-loader-adamw"),
    pytest.param(fit, "dataset", "sgd", id="fit-dataset-sgd", marks=pytest.mark.wide),
    pytest.param(coati, "loader", "adamw", id="coati-loader"),
]


@pytest.mark.parametrize(("train", "source", "optimizer"), CASES)
def test_a_killed_training_resumes_to_the_same_bits(
    folder: Path, tmp_path: Path, train: Callable[..., int], source: str, optimizer: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert in_child(train, folder, whole, source, optimizer) == 0
    step = random.Random(f"{SEED} {train.__name__} {source}").randint(1, STEPS - 1)
    assert in_child(train, folder, killed, source, optimizer, step) == -signal.SIGKILL
    assert not (killed / "history.json").exists()
    assert in_child(train, folder, killed, source, optimizer) == 0
    one, other = outcome(whole), outcome(killed)
    assert len(one[0]) == STEPS
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert any(key.startswith("optimizer/") for key in one[1])
    assert [key for key in one[1] if not torch.equal(one[1][key], other[1][key])] == []
    assert one[2:] == other[2:]


# --- in one process ---


def trainer_of(folder: Path, **given: Any) -> DPOTrainer:
    model = AutoModelForCausalLM.from_pretrained(folder)
    args = TrainingArgs(per_device_train_batch_size=4, num_train_epochs=1)
    if "make" in given:
        given["optimizer"] = given.pop("make")(model.parameters())
    config = given.pop("config", DPOConfig(save_steps=1, max_steps=2))
    return DPOTrainer(model, config, copy.deepcopy(model), args, **given)


@pytest.mark.defect("U10")
def test_a_finished_training_is_loaded(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = DPOConfig(max_steps=50)
    first, again = (trainer_of(folder, config=config) for _ in range(2))
    with caplog.at_level(logging.INFO, "rather"):
        history = first.fit(TOKENS, output_dir=tmp_path)
        assert "max_steps: 50 cannot be reached: num_train_epochs (1) ends the run" in caplog.text
        assert again.fit(TOKENS, output_dir=tmp_path) == history
    assert "num_train_epochs ended it; raise num_train_epochs to continue" in caplog.text
    parameters = (each.policy.policy.parameters() for each in (first, again))
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


def test_no_folder_is_made_without_an_output_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer_of(folder).fit(TOKENS)
    assert list(tmp_path.iterdir()) == []


def test_other_pairs_or_another_loss_are_refused(folder: Path, tmp_path: Path) -> None:
    trainer_of(folder).fit(TOKENS, output_dir=tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        trainer_of(folder).fit(TOKENS[1:], output_dir=tmp_path)
    changed = DPOConfig(max_steps=2, beta=0.5)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        trainer_of(folder, config=changed).fit(TOKENS, output_dir=tmp_path)


@pytest.mark.parametrize("changed", ["model", "reference"])
def test_other_weights_that_no_checkpoint_contains_are_refused(
    folder: Path, tmp_path: Path, changed: str
) -> None:
    """The base under an adapter, and the reference."""

    def trainer(*, change: bool) -> DPOTrainer:
        models = {
            name: AutoModelForCausalLM.from_pretrained(folder) for name in ("model", "reference")
        }
        if change:
            with torch.no_grad():
                next(models[changed].parameters())[0, 0] += 1
        settings = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(models["model"], settings)
        args = TrainingArgs(per_device_train_batch_size=4)
        return DPOTrainer(model, DPOConfig(max_steps=1), models["reference"], args)

    history = trainer(change=False).fit(TOKENS, output_dir=tmp_path)
    with pytest.raises(CheckpointError, match=f"belongs to another run:\n  {changed} weights: "):
        trainer(change=True).fit(TOKENS, output_dir=tmp_path)
    assert trainer(change=False).fit(TOKENS, output_dir=tmp_path) == history


def generated() -> Iterator[Any]:
    yield from TOKENS


@pytest.mark.parametrize(
    ("source", "name"),
    [(generated, "generator"), (lambda: DataLoader(TOKENS, collate_fn=list), "DataLoader")],  # type: ignore[arg-type]
    ids=["generator", "DataLoader"],
)
def test_other_iterators_cannot_be_resumed(
    folder: Path, tmp_path: Path, source: Callable[[], Any], name: str
) -> None:
    trainer_of(folder).fit(source(), output_dir=tmp_path)
    longer = DPOConfig(save_steps=1, max_steps=3)
    with pytest.raises(DataError, match=f"a {name} cannot be resumed at step 2: give rows"):
        trainer_of(folder, config=longer).fit(source(), output_dir=tmp_path)


class Odd(torch.optim.SGD):
    """An optimizer whose state is neither a tensor nor a JSON value."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["secret"] = object()


def test_state_that_is_not_json_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(folder, make=lambda parameters: Odd(parameters, lr=1e-3))
    with pytest.raises(ConfigError, match=r"Odd: 'secret' of its state \(object\) is neither"):
        trainer.fit(TOKENS, output_dir=tmp_path)
    assert len(trainer.fit(TOKENS)) == 2, "without an output folder it trains"
