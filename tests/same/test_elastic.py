"""Saved under one layout, resumed under any other: the same bits, and the same losses
afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import Shard
from rather.config.schema import ActorModelArgs
from rather.config.strategies import Layout
from rather.parallel.load import Start, load_divided, load_policy
from rather.parallel.mesh import build_mesh
from rather.train.rank_trainer import RankTrainer
from tests.cells import cells
from tests.checkpoint.saving import save_checkpoint
from tests.same.canonical import Setup, make_policy, make_trainer, train, trainer_on, whole
from tests.same.cases import layout_of
from tests.same.pool import pool

SAVED_AFTER, MORE = 2, 3  # steps
SETUP = Setup(steps=SAVED_AFTER + MORE, lr=1e-4, layers=4)
EXPERTS = replace(SETUP, family="qwen3_moe", tied=False, layers=2, router_loss=0.3)


@dataclass(frozen=True)
class Model:
    """What is trained: a model, or an adapter of the one in `base`."""

    setup: Setup = SETUP
    base: str = ""
    init: Any = True  # of the adapter

    def trainer_on(self, layout: Layout) -> RankTrainer:
        if not self.base:
            return trainer_on(layout, self.setup)
        args = ActorModelArgs(lora_rank=3, init_lora_weights=self.init)
        start = Start(5, kept=self.init == "pissa")
        if layout.devices == 1:
            return make_trainer(self.setup, policy=load_policy(self.base, args, "cpu", start=start))
        mesh = build_mesh(layout, "cpu")
        policy = load_divided(self.base, args, "cpu", mesh, layout, trains=True, start=start)
        return make_trainer(self.setup, mesh, policy, layout.stage)


def save(layout: Layout, run_dir: Path, model: Model) -> None:
    """A few steps, then a checkpoint by all ranks."""
    trainer = model.trainer_on(layout)
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


def resume(layout: Layout, path: Path, model: Model) -> Resumed:
    """(pieces of model and optimizer as loaded, numbers, losses of the next steps)."""
    trainer, found = model.trainer_on(layout), checkpoint.reopen(path)
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


def on(layout: Layout, work: Any, path: Path, model: Model) -> list[Any]:
    if layout.devices == 1:
        return [work(layout, path, model)]
    return pool(layout.devices).run(work, layout, path, model)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    base = tmp_path_factory.mktemp("elastic")
    make_policy(SETUP).causal_lm.save_pretrained(base)
    adapted = {"lora": Model(base=str(base)), "pissa": Model(base=str(base), init="pissa")}
    return {"dense": Model(), "experts": Model(EXPERTS), **adapted}


@cache
def uninterrupted(model: Model) -> list[float]:
    """Losses of a run that was never interrupted, after the step of the checkpoint."""
    trainer = model.trainer_on(Layout(1))
    losses = train(trainer, SETUP, 0, SAVED_AFTER + MORE).losses
    return losses[SAVED_AFTER * len(losses) // (SAVED_AFTER + MORE) :]


# Each layout is read once and written once, by make test or by the wide cells.
FAST = [("dense", "dp1", "dp2 zero3"), ("dense", "pp2", "cp2")]
WIDE = [
    ("dense", "dp2 zero3", "tp2"),
    ("dense", "tp2", "pp2"),
    ("dense", "cp2", "dp2"),
    ("dense", "dp2", "dp1"),
    ("dense", "dp2 zero2", "dp2 zero1"),
    ("dense", "dp2 zero1", "dp2 zero2"),
    ("dense", "dp4 zero3 shard2", "dp2 zero3 tp2"),
    ("dense", "dp2 zero3 tp2", "dp4 zero3 shard2"),
    ("experts", "dp4 zero3 shard2 ep4", "dp2 zero1 ep2 pp2"),
    ("experts", "dp2 zero3 ep2 tp2", "dp4 zero1 ep2"),
    ("experts", "dp2 ep2", "dp1"),
    ("lora", "dp1", "dp2"),
    ("lora", "tp2", "pp2"),
    ("pissa", "dp2 zero3", "dp1"),
]


@pytest.mark.parametrize(("kind", "before", "after"), cells(FAST, WIDE))
def test_any_layout_resumes_under_any_other(
    models: dict[str, Model], tmp_path: Path, kind: str, before: str, after: str
) -> None:
    model = models[kind]
    on(layout_of(before), save, tmp_path, model)
    path = tmp_path / f"checkpoint-{SAVED_AFTER}"
    found = checkpoint.open_checkpoint(path)
    assert not model.base or not any("base_layer" in name for name in found.tensors("model"))
    results: list[Resumed] = on(layout_of(after), resume, path, model)
    for place, group in enumerate(("model", "optimizer")):
        loaded, stored = whole([each[place] for each in results]), found.tensors(group)
        assert loaded.keys() == stored.keys()
        assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    for _, _, numbers, losses in results:
        assert numbers == found.state["numbers"]
        assert losses == pytest.approx(uninterrupted(model), rel=1e-5)
