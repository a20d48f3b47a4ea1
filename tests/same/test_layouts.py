"""Whole runs in every layout: losses, norms, log-probs, gradients and weights of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import Tensor

from rather.config.strategies import Layout
from tests.cells import cells
from tests.same.canonical import (
    Outcome,
    Setup,
    assert_same,
    joined,
    make_trainer,
    train,
    trainer_on,
    whole,
)
from tests.same.cases import FAST, TASKS, WIDE, layout_of, rows
from tests.same.pool import pool


def run(layout: Layout | None, setup: Setup) -> tuple[Outcome, dict[str, Any]]:
    """One rank of a run, with its part of the gradients of the first step."""
    trainer = trainer_on(layout, setup) if layout else make_trainer(setup)
    optimizer, gradients = trainer._trained, dict[str, Any]()
    step = optimizer.step

    def recorded(grad_norm: float) -> None:
        if not gradients:
            named = {name: g.clone() for name, g in optimizer.named_gradients().items()}
            gradients.update(trainer._pieces(named))
        step(grad_norm)

    optimizer.step = recorded  # type: ignore[method-assign]
    return train(trainer, setup), gradients


@cache
def expected(setup: Setup) -> tuple[Outcome, dict[str, Tensor]]:
    return run(None, setup)


@pytest.mark.parametrize(("layout", "task"), cells(rows(FAST), rows(WIDE)))
def test_the_run_is_that_of_one_process(layout: str, task: str) -> None:
    ranks, setup = layout_of(layout), TASKS[task]
    outcome, gradients = expected(setup)
    outcomes, pieces = zip(*pool(ranks.devices).run(run, ranks, setup), strict=True)
    assert_same(joined(list(outcomes)), outcome)
    found: dict[str, Tensor] = whole(list(pieces))
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = float((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6))
        assert error < 1e-5, f"{name}: {error:.2g}"


def test_the_table_holds_every_task_and_each_axis_a_loss_over_whole_steps() -> None:
    runs = [(layout_of(layout), task) for layout, task in rows(FAST) + rows(WIDE)]
    assert {task for _, task in runs} == TASKS.keys()
    for axis in ("shard", "tp", "cp", "pp"):
        assert any(getattr(layout, axis) > 1 for layout, task in runs if task == "aot")


def test_only_adapters_are_trained_next_to_experts_and_in_them() -> None:
    for task, count in (("adapters", 0), ("adapters of experts", 8)):
        names = expected(TASKS[task])[0].weights
        assert any(".lora_" in name for name in names)
        assert sum(".experts." in name for name in names) == count
