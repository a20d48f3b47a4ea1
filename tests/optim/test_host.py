"""AdamW's state in host memory gives the bits of a state on the device: on the CPU in bfloat16."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.cluster.writer import Writer
from rather.config.schema import TrainingArgs
from rather.data.pack import pack
from rather.losses.objective import configure
from rather.model.check import random_pairs
from rather.model.layers import arrange_layers
from rather.optim.adamw import ParameterState
from rather.optim.host import SLOTS
from rather.optim.optimizer import Optimizer
from rather.train.linear_layers import use_fewer_kernels
from rather.train.rank_trainer import RankTrainer
from tests.tiny import tiny_policy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALLEST = 64  # weights of a parameter that goes to the host: norms stay


def trainer_of(device: str, on_host: int | None, *, recompute: Any = "none") -> RankTrainer:
    torch.manual_seed(0)
    policy = tiny_policy(dtype=torch.bfloat16, num_hidden_layers=2 * SLOTS + 1).to(device)
    args = TrainingArgs(learning_rate=1e-3)
    optimizer = Optimizer(
        policy.named_parameters(), args, schedule=lambda _: 1e-3, max_grad_norm=0.5, on_host=on_host
    )
    trainer = RankTrainer(
        policy, configure(["sigmoid"], {"beta": 0.1}), optimizer, count_zeros=True
    )
    if device == "cpu":  # a GPU does so by itself
        use_fewer_kernels(policy, optimizer, alone=True)
    arrange_layers(policy, recompute=recompute)
    return trainer


def batches(number: int) -> list[Any]:
    lengths = [(3, 4 + number, 5), (6, 2, 7), (2, 9, 3)]
    return pack(random_pairs(61, lengths), 24)  # several micro-batches


def reference() -> dict[str, Tensor]:
    return {"sum": torch.tensor([[-20.0, -22.0], [-9.0, -33.0], [-40.0, -12.0]]).double()}


def state_of(trainer: RankTrainer) -> dict[str, Tensor]:
    optimizer = trainer.optimizer
    assert optimizer is not None
    masters = {f"{name}.master": weight for name, weight in optimizer.masters.items()}
    weights = dict(trainer.policy.named_parameters())
    return {**weights, **masters, **optimizer.moments()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_same_bits_as_on_the_device(device: str, recompute: str) -> None:
    resident = trainer_of(device, None, recompute=recompute)
    offloaded = trainer_of(device, SMALLEST, recompute=recompute)
    for number in range(3):
        steps = [
            trainer.train_step(batches(number), reference()) for trainer in (resident, offloaded)
        ]
        assert steps[0].grad_norm == steps[1].grad_norm
        assert steps[0].zeros_in_grad == steps[1].zeros_in_grad
        assert steps[0].grad_norm > 0.5  # it is clipped
    assert_same(state_of(offloaded), state_of(resident))


@pytest.mark.parametrize("device", DEVICES)
def test_the_large_parameters_are_on_the_host(device: str) -> None:
    trainer = trainer_of(device, SMALLEST)
    optimizer = trainer.optimizer
    assert optimizer is not None
    resident = trainer_of(device, None).optimizer
    assert resident is not None
    norms = sum(p.numel() for p in trainer.policy.parameters() if p.numel() < SMALLEST)
    assert optimizer.state_bytes() == norms * 10  # two moments and 16 low bits
    for name, moment in [*optimizer.moments().items()]:
        assert moment.device.type == ("cpu" if moment.numel() >= SMALLEST else device), name
    trainer.train_step(batches(0), reference())
    assert optimizer._host is not None
    assert optimizer._host.slots is not None
    assert optimizer._host.slots.shape[0] == SLOTS
    assert optimizer.gradient_bytes() < resident.gradient_bytes()


@pytest.mark.parametrize("way", ["on", "off"])
def test_a_save_makes_one_master_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Its files have the bytes of masters that are made all at once."""
    trainer = trainer_of("cpu", SMALLEST)
    trainer.train_step(batches(0), reference())
    (tmp_path / "whole").mkdir()
    checkpoint.write_groups(tmp_path / "whole", trainer.state()[0])
    make, masters, most = ParameterState.master, WeakSet[Tensor](), 0

    def count(state: ParameterState) -> Tensor:
        nonlocal most
        master = make(state)
        if state.form == "split":
            masters.add(master)
        most = max(most, len(masters))
        return master

    monkeypatch.setattr(ParameterState, "master", count)
    (tmp_path / "late").mkdir()
    writer = Writer("actor_train", 0, 1, way, logging.getLogger("test"))
    writer.write(tmp_path / "late", trainer.state(late=True)[0])
    writer.wait()
    assert most in (1, 2)  # the last one is freed after the next is made
    (tmp_path / "late" / "actor_train-00000.note").unlink()
    whole, late = (sorted((tmp_path / name).iterdir()) for name in ("whole", "late"))
    assert [file.name for file in whole] == [file.name for file in late]
    for first, second in zip(whole, late, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_is_given_up_leaves_nothing_behind(device: str) -> None:
    resident, offloaded = trainer_of(device, None), trainer_of(device, SMALLEST)
    offloaded.rehearse(batches(2)[0])
    offloaded.forget()
    for trainer in (resident, offloaded):
        trainer.train_step(batches(0), reference())
    assert_same(state_of(offloaded), state_of(resident))


def test_a_checkpoint_of_one_resumes_as_the_other() -> None:
    resident, offloaded = trainer_of("cpu", None), trainer_of("cpu", SMALLEST)
    resident.train_step(batches(0), reference())
    groups, numbers = resident.state()
    loaded: Any = {name: dict(group) for name, group in groups.items()}
    offloaded.load_state(loaded, numbers)
    for trainer in (resident, offloaded):
        trainer.train_step(batches(1), reference())
    assert_same(state_of(offloaded), state_of(resident))
