"""What every rank runs: the cells of tests/same on another engine, all in one process group."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.config import plugins
from rather.config.schema import ModelArgs, TrainingArgs
from rather.config.strategies import Layout
from rather.parallel.mesh import build_mesh
from rather.train.engine import Engine, EngineJob
from rather.train.rank_trainer import RankTrainer
from tests.same.canonical import Outcome, Setup, make_loss, make_policy, make_step, pairs_of, train

EXAMPLES = Path(__file__).parents[2] / "examples" / "engines"
DEEPSPEED, MEGATRON = "deepspeed_engine.py:DeepSpeedEngine", "megatron_engine.py:MegatronEngine"


@dataclass(frozen=True)
class Cell:
    """One run: an engine, a layout of two ranks, and what is trained."""

    engine: str
    layout: Layout
    setup: Setup
    does: str = "train"  # or skip, resume, attributes
    details: str = "{}"  # strategy_config, as JSON
    dtype: str = "fp32"

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.details)
        return found


@dataclass
class Result:
    """What a rank returns of a cell."""

    outcomes: list[Outcome] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


def find(name: str) -> type[Engine]:
    file, _, class_name = name.partition(":")
    found: type[Engine] = plugins.load_function(EXAMPLES / file, class_name, "engine")
    return found


def make_trainer(cell: Cell) -> RankTrainer:
    """Return the trainer that a worker builds, around the model of the canonical run."""
    setup = cell.setup

    def load() -> Any:
        policy = make_policy(setup)
        if cell.dtype == "bf16":
            for parameter in policy.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        return policy

    mesh = build_mesh(cell.layout, "cpu")
    training = TrainingArgs(learning_rate=setup.lr, weight_decay=0.1, adam_epsilon=1e-6)
    job = EngineJob(
        "canonical",
        ModelArgs(dtype=cell.dtype),  # type: ignore[arg-type]
        "cpu",
        mesh,
        cell.layout,
        cell.config,
        training,
        1.0,
        lambda _: setup.lr,
        "preference",
        load,
    )
    engine = find(cell.engine)(job)
    assert not (problems := list(engine.problems())), problems
    policy = engine.build_policy()
    optimizer = engine.build_optimizer(policy)
    runner = engine.build_runner(policy, optimizer)
    return RankTrainer(
        policy, make_loss(setup), optimizer, mesh=mesh, runner=runner,
        router_loss=setup.router_loss, owns_weights=False,
    )  # fmt: skip


class Never:
    """Limits that skip every step."""

    def exceeded(self, _loss: float, _norm: float) -> bool:
        return True


def one_step(trainer: RankTrainer, setup: Setup, number: int, limits: Any = None) -> Any:
    step = make_step(pairs_of(setup)[number], trainer.mesh.size("dp"))
    own = step.dealt[trainer.mesh.rank("dp")]
    return trainer.train_step(own, step.reference, step.facts, limits)


def skips(cell: Cell) -> Result:
    """Skip the second of three steps; compare with a run that never sees it."""
    with_skip, without = make_trainer(cell), make_trainer(cell)
    one_step(with_skip, cell.setup, 0)
    skipped = one_step(with_skip, cell.setup, 1, Never())
    one_step(without, cell.setup, 0)
    trainers = (with_skip, without)
    outcomes = []
    for trainer in trainers:
        last = one_step(trainer, cell.setup, 2)
        pieces = {name: tensor.clone() for name, tensor in trainer.weight_pieces().items()}
        outcomes.append(Outcome([last.loss], [last.grad_norm], [last.policy], pieces))
    return Result(outcomes, [str(skipped.skip_reason)])


def resumes(cell: Cell) -> Result:
    """Train three steps; then two, a state on the first rank, a new engine, and the third."""
    whole = train(make_trainer(cell), cell.setup)
    first = make_trainer(cell)
    train(first, cell.setup, 0, 2)
    groups, numbers = first.state()
    shared: list[Any] = [{name: dict(group) for name, group in groups.items()}]
    torch.distributed.broadcast_object_list(shared, src=0)  # a checkpoint that all ranks read
    second = make_trainer(cell)
    second.load_state(shared[0], numbers)
    last = train(second, cell.setup, 2, 3)
    ends = Outcome(whole.losses[2:], whole.grad_norms[2:], whole.logps[2:], whole.weights)
    return Result([last, ends])


def attributes(cell: Cell) -> Result:
    """Return the private attributes that the engine's optimizer lacks."""
    optimizer: Any = make_trainer(cell).optimizer
    module = find(cell.engine).__module__
    import sys

    private = sys.modules[module].PRIVATE  # type: ignore[attr-defined]
    names = private[optimizer.stage] if hasattr(optimizer, "stage") else private
    owner = getattr(optimizer, "zero", None) or optimizer.inner
    return Result([], [name for name in names if not hasattr(owner, name)])


RUNS: dict[str, Callable[[Cell], Result]] = {
    "train": lambda cell: Result([train(make_trainer(cell), cell.setup)]),
    "skip": skips,
    "resume": resumes,
    "attributes": attributes,
}


def run_cells(cells: dict[str, Cell]) -> dict[str, Result]:
    torch.set_num_threads(1)
    return {name: RUNS[cell.does](cell) for name, cell in cells.items()}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
