"""Saved under one layout, resumed under any other: the same bits, and the same losses
afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import Shard
from rather.config.strategies import Layout
from rather.parallel.apply import divide
from rather.parallel.mesh import build_mesh
from rather.parallel.shard import STAGES
from rather.train.rank_trainer import RankTrainer, WholeModelRunner
from tests.cells import cells
from tests.checkpoint.saving import save_checkpoint
from tests.same.canonical import Setup, make_policy, make_trainer, train, whole
from tests.same.pool import pool

SAVED_AFTER, MORE = 2, 3  # steps
SETUP = Setup(steps=SAVED_AFTER + MORE, lr=1e-4, layers=4)
LAYOUTS: dict[str, Layout] = {
    "1": Layout(1),
    "dp2": Layout(2, stage=0),
    "zero1": Layout(2, stage=1, shard=2),
    "zero2": Layout(2, stage=2, shard=2),
    "zero3": Layout(2, stage=3, shard=2),
    "tp2": Layout(1, tp=2),
    "pp2": Layout(1, pp=2),
    "cp2": Layout(1, cp=2),
    "hsdp": Layout(4, stage=3, shard=2),
    "zero3 x tp2": Layout(2, tp=2, stage=3, shard=2),
}


def trainer_on(layout: Layout) -> RankTrainer:
    mesh = build_mesh(layout, "cpu")
    policy = divide(make_policy(SETUP), mesh, layout, compute=torch.float32)
    runner = None if layout.pp > 1 else WholeModelRunner(policy, STAGES[layout.stage])  # type: ignore[arg-type]
    return make_trainer(SETUP, mesh, policy, runner)  # type: ignore[arg-type]


Make = Callable[[Layout], RankTrainer]


def save(layout: Layout, run_dir: Path, make: Make = trainer_on) -> None:
    """A few steps, then a checkpoint by all ranks."""
    trainer = make(layout)
    train(trainer, SETUP, 0, SAVED_AFTER)
    groups, numbers = trainer.state()
    if layout.devices == 1:
        save_checkpoint(run_dir, SAVED_AFTER, groups, {"numbers": numbers})
    elif dist.get_rank() == 0:
        save_checkpoint(
            run_dir, SAVED_AFTER, {}, {"numbers": numbers}, ranks=partial(written_by_all, groups)
        )
    else:
        written_by_all(groups)


def written_by_all(groups: Any, folder: Path | None = None) -> dict[str, tuple[int, str]]:
    """On every rank: the first tells the folder; when all have written, what they wrote."""
    told = [folder]
    dist.broadcast_object_list(told)
    assert told[0] is not None
    checkpoint.SHARD_BYTES = 50_000  # in this child process
    own = checkpoint.write_groups(told[0], groups, rank=dist.get_rank())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: digest for each in everyone for name, digest in each.items()}


Resumed = tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[float]]


def resume(layout: Layout, path: Path, make: Make = trainer_on) -> Resumed:
    """(pieces of model and optimizer as loaded, numbers, losses of the next steps)."""
    trainer, found = make(layout), checkpoint.reopen(path)
    stored = {group: found.stored(group) for group in ("model", "optimizer", "rng")}
    trainer.load_state(stored, found.state["numbers"])
    groups, numbers = trainer.state()
    copied = [
        {name: _copied(piece) for name, piece in groups[group].items()}
        for group in ("model", "optimizer")
    ]
    losses = train(trainer, SETUP, SAVED_AFTER, SAVED_AFTER + MORE).losses
    return copied[0], copied[1], numbers, losses


def _copied(piece: Tensor | Shard) -> Tensor | Shard:
    return Shard(piece.tensor.clone(), piece.spec) if isinstance(piece, Shard) else piece.clone()


def on(layout: Layout, work: Any, path: Path, make: Make = trainer_on) -> list[Any]:
    return (
        [work(layout, path, make)]
        if layout.devices == 1
        else pool(layout.devices).run(work, layout, path, make)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The path of a checkpoint from each layout, made when it is asked for."""
    root = tmp_path_factory.mktemp("elastic")

    class Saved(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            run_dir = root / name.replace(" ", "-")
            on(LAYOUTS[name], save, run_dir)
            self[name] = run_dir / f"checkpoint-{SAVED_AFTER}"
            return self[name]

    return Saved()


def assert_goes_on(
    path: Path, layout: Layout, expected: list[float], make: Make = trainer_on
) -> None:
    found = checkpoint.open_checkpoint(path)
    results: list[Resumed] = on(layout, resume, path, make)
    for place, group in enumerate(("model", "optimizer")):
        loaded, stored = whole([each[place] for each in results]), found.tensors(group)
        assert loaded.keys() == stored.keys()
        assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    for _, _, numbers, losses in results:
        assert numbers == found.state["numbers"]
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """Losses of more steps of a run that was never interrupted."""
    return train(make_trainer(SETUP), SETUP, 0, SAVED_AFTER + MORE).losses[SAVED_AFTER:]


# Each layout is read once and written once, by make test or by the wide cells.
FAST = [("1", "zero3"), ("pp2", "cp2")]
WIDE = [
    ("zero3", "tp2"),
    ("tp2", "pp2"),
    ("cp2", "dp2"),
    ("dp2", "1"),
    ("zero2", "zero1"),
    ("zero1", "zero2"),
]


@pytest.mark.parametrize(("before", "after"), cells(FAST, WIDE))
def test_any_layout_resumes_under_any_other(
    saved: dict[str, Path], expected: list[float], before: str, after: str
) -> None:
    assert_goes_on(saved[before], LAYOUTS[after], expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [("hsdp", "zero3 x tp2"), ("zero3 x tp2", "hsdp")],
)
def test_layouts_of_four(
    saved: dict[str, Path], expected: list[float], before: str, after: str
) -> None:
    assert_goes_on(saved[before], LAYOUTS[after], expected)
