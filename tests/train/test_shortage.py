"""Memory that does not suffice: smaller micro-batches with the same result, or a table and three ways out.

No GPU is needed: micro-batches above a limit raise what CUDA raises. tests/gpu/test_shortage_cuda.py really runs out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rather.cluster.health import Failure
from rather.cluster.memory import GIB, Peak, bytes_held, shortage
from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from rather.data.batch import PairBatch
from rather.data.pack import pack
from rather.errors import MemoryShortage
from rather.model import budget
from rather.train.rank_trainer import RankTrainer
from tests import runs
from tests.padded import random_pairs
from tests.runs import exported, incidents
from tests.tiny import make_config, tiny_policy

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."
CHANGES = {
    "max_steps": 4,
    "actor_train__max_tokens_per_microbatch_in_train": 400,
    "actor_train__training_args__adam_epsilon": 1e-6,  # smaller gradients are noise from the order of sums
}


pytestmark = pytest.mark.usefixtures("no_self_check")


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rather.pipeline.guard.SMALLEST_BUDGET", 8)


class Device:
    """Memory for micro-batches of so many tokens; it ends after a backward pass, or without one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, trained: float, looked_at: float = 10**9
    ) -> None:
        self.runs: list[tuple[str, int]] = []
        for name, most in (("train_step", trained), ("log_probs", looked_at)):
            monkeypatch.setattr(
                RankTrainer, name, self._limited(getattr(RankTrainer, name), name, most)
            )

    def _limited(self, method: Any, name: str, most: float) -> Any:
        def call(trainer: RankTrainer, batches: Sequence[PairBatch], *args: Any) -> Any:
            tokens = max(len(batch.ids_N) for batch in batches)
            self.runs.append((name, tokens))
            if tokens > most:
                if name == "train_step":
                    trainer.rehearse(batches[0])  # leaves gradients behind
                raise torch.OutOfMemoryError(f"{SAID}\nMore about the allocator.")
            return method(trainer, batches, *args)

        return call


def run(folder: Path, name: str, **changes: Any) -> tuple[DPOConfig, list[dict[str, Any]]]:
    return runs.run(folder, name, **{**CHANGES, **changes})


def assert_same_result(folder: Path, got: DPOConfig, lines: list[dict[str, Any]]) -> None:
    want, expected = run(folder, "memory-enough")
    for mine, theirs in zip(lines, expected, strict=True):
        for key in ("loss", "grad_norm", "eval/loss", "eval/rewards/margins"):
            assert mine.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-5, abs=1e-7)
    model = exported(got)
    for name, weight in exported(want).items():
        assert torch.allclose(model[name], weight, atol=1e-6), name


def test_a_training_step_is_repeated_with_smaller_micro_batches(shared: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = Device(patch, trained=60)
        config, lines = run(shared, "memory-train")
    assert_same_result(shared, config, lines)
    told = incidents(config)
    assert {(each["kind"], each["role"], each["said"]) for each in told} == {
        ("out_of_memory", "actor_train", SAID)
    }
    first, second = (
        told  # steps that were packed before are packed again, and halve nothing further
    )
    assert (first["step"], second["step"]) == (1, 1)
    assert first["tokens"] > second["tokens"] > 60 >= second["budget"]
    assert second["budget"] == second["tokens"] // 2
    assert [tokens for name, tokens in device.runs if name == "train_step"][-1] <= 60


def test_evaluation_and_reference_are_repeated_with_smaller_micro_batches(shared: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Device(patch, trained=10**9, looked_at=70)
        config, lines = run(shared, "memory-look", reference__cache__enabled=False)
    assert_same_result(shared, config, lines)
    budgets = {role: [each["budget"] for each in incidents(config) if each["role"] == role]
               for role in ("actor_train", "reference")}  # fmt: skip
    for each in budgets.values():
        assert each
        assert each[-1] <= 70
        assert each == sorted(each, reverse=True)


def test_a_shortage_that_smaller_batches_cannot_solve_lists_memory_use(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Device(monkeypatch, trained=5)
    monkeypatch.setattr(Peak, "bytes", 3 * GIB)
    with pytest.raises(MemoryShortage) as caught:
        run(shared, "memory-none")
    said = str(caught.value)
    assert caught.value.exit_code == 8
    assert said.startswith(SAID)
    assert "allocator" not in said
    rows = re.findall(r"^  (\w+).* +[0-9.]+ GiB$", said, re.MULTILINE)
    assert rows == ["weights", "gradients", "masters", "reference", "activations"]
    _, ways = said.split("Any of these needs less:\n")
    named = [way.split()[0] for way in ways.splitlines()]
    assert len(named) == 3
    settings = [name.split("=") for name in named if "=" in name]
    assert len(settings) == 2
    for key, value in settings:  # every one is a setting that the config takes
        make_config(shared, **{key.replace(".", "__"): int(value) if value.isdigit() else value})


def test_a_model_that_does_not_fit_says_so(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(SAID)

    monkeypatch.setattr("rather.cluster.worker.load_policy", full)
    with pytest.raises(
        MemoryShortage, match=r"(?s)Tried to allocate.*state of actor_train, computed .*needs less"
    ):
        run(shared, "memory-model")


def test_a_rank_that_runs_out_of_memory_explains_it(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text, which is how a failure leaves its process, with the bytes of the real tensors."""
    worker = ActorWorker(make_config(shared), "actor_train")
    worker.initialize(3)
    held = bytes_held(worker.trainer)
    weights = sum(parameter.nbytes for parameter in worker.trainer.policy.parameters())
    assert (held["weights"], held["gradients"]) == (weights, weights)
    assert 2 * weights <= held["masters and moments"] <= 2 * weights + 4 * 100

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError(f"{SAID}\nMore.")

    monkeypatch.setattr(worker.trainer, "log_probs", full)
    reference = weights
    monkeypatch.setattr(Peak, "bytes", sum(held.values()) + reference + GIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        worker.compute_log_probs(pack(random_pairs(1, 20), 100))
    told = Failure.of(caught.value).error("actor_train rank 1 of 2")
    assert isinstance(told, MemoryShortage)
    start = f"actor_train rank 1 of 2: {SAID} \nWhere the memory of cpu goes (the largest micro-"
    assert str(told).startswith(start)
    assert "tokens):\n  weights " in str(told)
    assert re.search(r"\n  activations.*  1.000 GiB\n", str(told))
    assert str(shortage(caught.value)) in str(told).replace(" \n", "\n")


# --- the probe before the first step ---


class Rehearsal:
    """Runs out of memory above so many tokens, and gradients take the room of 1,000."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.seen: list[int] = []
        self.gradients = self.forgotten = 0

    def rehearse(self, batch: PairBatch) -> None:
        self.seen.append(len(batch.ids_N))
        if self.seen[-1] + self.gradients > self.most:
            raise torch.OutOfMemoryError(SAID)
        self.gradients = 1000

    def forget(self) -> None:
        self.forgotten += 1
        self.gradients = 0


@pytest.mark.parametrize(
    ("most", "longest", "chosen", "seen"),
    [
        (9500, 100, 8192, [8192, 8192]),
        (9000, 100, 6144, [8192, 8192, 6144, 6144]),  # fits only without gradients
        (6000, 100, 4608, [8192, 6144, 4608, 4608]),
        (3000, 100, 0, [8192, 6144, 4608, 3072]),  # less is badly used
        (10300, 9000, 8192, [9216, 9216]),  # a pair larger than the budget has its own micro-batch
    ],
)
def test_the_largest_micro_batch_is_tried_first(
    most: int, longest: int, chosen: int, seen: list[int]
) -> None:
    trainer = Rehearsal(most)
    found = budget._largest_tried(tiny_policy(), trainer, 8192, budget.LEAST, longest)
    assert (found, trainer.seen) == (chosen, seen)
    assert trainer.forgotten == len(set(seen))
