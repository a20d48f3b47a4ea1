"""How often a step waits for its device, counted with tensors of the meta device."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rather.config.schema import TrainingArgs
from rather.data.pack import pack
from rather.losses.objective import configure
from rather.model import attention, head
from rather.model.policy import PolicyModel
from rather.optim.optimizer import Optimizer
from rather.train.rank_trainer import RankTrainer
from tests.padded import random_pairs
from tests.tiny import tiny_policy


class Waits(TorchDispatchMode):
    """Copies from one device to another for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
            waits = not (kwargs or {}).get("non_blocking", len(args) > 2 and args[2])
            if isinstance(source, Tensor) and source.device != out.device and waits:
                self.seen.append("".join(traceback.format_stack(limit=6)))
        return out


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by segments in one operator, and the head's budgets of a GPU."""

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Any,
        scale: float,
        window: Any,
        _cap: Any,
        sinks: Any,
    ) -> Tensor:
        return attention._varlen(q, k, v, segments, scale, window, sinks)

    monkeypatch.setattr(attention, "_one_by_one", varlen)
    for budget in (head.KEEP_BYTES, head.CHUNK_BYTES):
        monkeypatch.setitem(budget, "meta", budget["cuda"])


def meta_policy() -> PolicyModel:
    return tiny_policy(dtype=torch.bfloat16).to("meta")


def meta_trainer() -> RankTrainer:
    policy, args = meta_policy(), TrainingArgs()
    optimizer = Optimizer(
        policy.named_parameters(), args, schedule=lambda _: 1e-4, max_grad_norm=1.0
    )
    return RankTrainer(policy, configure(["sigmoid"], {}), optimizer)


@pytest.mark.usefixtures("like_a_gpu")
def test_a_step_waits_for_its_numbers_and_for_nothing_before() -> None:
    policy = meta_trainer()
    reference = RankTrainer(meta_policy().requires_grad_(False), configure(["sigmoid"], {}))
    batches = pack(random_pairs(24, 60), 128)
    with (
        Waits() as waits,
        pytest.raises(NotImplementedError, match="Cannot copy out of meta") as stopped,
    ):
        policy.train_step(batches, reference.log_probs(batches))
    assert waits.seen == []
    assert [entry.name for entry in stopped.traceback if entry.path.name == "rank_trainer.py"][
        -1
    ] == "_reduce_numbers"


def test_a_copy_that_waits_is_seen() -> None:
    with Waits() as waits:
        torch.zeros(3).to("meta", non_blocking=True)
        assert waits.seen == []
        torch.zeros(3).to("meta")
    assert len(waits.seen) == 1
