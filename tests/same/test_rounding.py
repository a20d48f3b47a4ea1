"""One checkpoint gives the same bfloat16 weights in every layout: those of the exported file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rather.checkpoint.checkpoint import write_groups
from rather.checkpoint.sharded_tensors import Shard
from rather.cluster.worker import stored
from rather.config.schema import ActorModelArgs, ModelArgs
from rather.config.strategies import Layout
from rather.model.export import FileCast, whole_model
from rather.model.policy import PolicyModel
from rather.optim.adamw import local
from rather.optim.rounding import Rounding, rounded, thresholds
from rather.parallel.load import Start, load_divided, load_policy
from rather.parallel.mesh import Mesh, build_mesh
from rather.parallel.shard import places, units
from rather.train.rank_trainer import RankTrainer
from tests.cells import cells
from tests.same.canonical import Setup, make_policy, make_trainer, train
from tests.same.cases import layout_of
from tests.same.pool import pool
from tests.tiny import tiny_policy

DITHERED = Rounding("dithered")
SETUP = Setup(steps=3, layers=2, lr=1e-6)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source in bfloat16, or in the precision that the cell names."""
    precision: str = getattr(request, "param", "bfloat16")
    made: Path = tmp_path_factory.mktemp(precision)
    dtype = getattr(torch, precision)
    make_policy(SETUP).causal_lm.to(dtype).save_pretrained(made)
    return made


def load(folder: Path, layout: Layout | None, **changes: Any) -> tuple[Any, Mesh]:
    args = ModelArgs(dtype="bf16")
    if layout is None:
        trains = changes.pop("trains", True)
        return load_policy(str(folder), args, "cpu", exact=trains, rounding=DITHERED), Mesh()
    mesh = build_mesh(layout, "cpu")
    changes = {"trains": True, "rounding": DITHERED, **changes}
    return load_divided(str(folder), args, "cpu", mesh, layout, **changes), mesh


def trainer_of(folder: Path, layout: Layout | None) -> RankTrainer:
    policy, mesh = load(folder, layout)
    return make_trainer(SETUP, mesh, policy, layout.stage if layout else 0)


def forward_weights(policy: Any, mesh: Mesh) -> dict[str, Shard]:
    """Return what this rank multiplies with; of sharded weights the gathered ones."""
    if not isinstance(policy, FSDPModule):
        own = places(policy, mesh)
        return {
            name: Shard(p.detach().bfloat16().clone(), own[name])
            for name, p in policy.named_parameters()
        }
    own = places(policy, mesh)
    for unit in units(policy):
        unit.unshard()
    found = {}
    for name, p in policy.named_parameters():
        spec = own[name]
        rows = spec.narrow(0, -spec.offsets[0], p.shape[0])  # gathered along the first dimension
        if name in policy.tp_dims and policy.tp_dims[name] == 0:
            size = policy.tp_sizes[name] // mesh.size("tp")
            rows = spec.narrow(0, mesh.rank("tp") * size - spec.offsets[0], p.shape[0])
        assert p.dtype in (torch.bfloat16, torch.float32)
        found[name] = Shard(p.detach().bfloat16().clone(), rows)
    for unit in units(policy):
        unit.reshard()
    return found


def after_training(folder: Path, layout: Layout, state: Any) -> tuple[Any, Any, Any]:
    """Return the weights after loading a state; after more steps; and the masters then."""
    trainer = trainer_of(folder, layout)
    trainer.load_state(*state)
    loaded = forward_weights(trainer.policy, trainer.mesh)
    train(trainer, SETUP, 1)
    trained = forward_weights(trainer.policy, trainer.mesh)
    own = places(trainer.policy, trainer.mesh)
    masters = {
        name: Shard(local(master).clone(), own[name]) for name, master in trainer.weights().items()
    }
    return loaded, trained, masters


def sources_and_layouts(fast: Sequence[str], wide: Sequence[tuple[str, str]]) -> Any:
    """Parametrise with a source in bfloat16 on each fast layout, and with the wide cells."""
    in_bfloat16 = [("bfloat16", layout) for layout in fast]
    return pytest.mark.parametrize(
        ("folder", "name"), cells(in_bfloat16, wide), indirect=["folder"]
    )


@sources_and_layouts(
    fast=["dp2 zero3", "tp2", "pp2", "cp2"],
    wide=[
        ("bfloat16", "dp2"),
        ("bfloat16", "dp2 zero3 host"),
        ("float32", "dp2 zero1"),
        ("float32", "dp2 zero3 tp2"),
        ("float32", "dp3 zero3"),
        ("float32", "dp4 zero3 shard2"),
    ],
)
def test_every_layout_computes_with_the_weights_of_the_file(
    folder: Path, name: str, tmp_path: Path
) -> None:
    layout = layout_of(name)
    alone = trainer_of(folder, None)
    train(alone, SETUP, 0, 1)
    groups, numbers = alone.state()
    whole = {key: {n: t.clone() for n, t in group.items()} for key, group in groups.items()}
    policy = alone.policy
    assert isinstance(policy, PolicyModel)
    policy.causal_lm.config.dtype = torch.bfloat16
    cast = FileCast(torch.bfloat16, DITHERED)
    written = whole_model(policy, alone.weights(), _Tokenizer(), tmp_path / "model", cast)
    file = load_file(written / "model.safetensors")
    results = pool(layout.devices).run(after_training, folder, layout, (whole, numbers))
    for loaded, trained, masters in results:
        for key, shard in loaded.items():
            part = file[key.removeprefix("causal_lm.")][shard.spec.slices]
            assert shard.tensor.equal(part), key
        for key, shard in masters.items():
            if shard.tensor.numel():
                expected = rounded(shard.tensor.reshape(-1), thresholds(key, shard.spec))
                expected = expected.view(shard.tensor.shape)
                found = trained[key]
                part = found.tensor[shard.spec.relative_to(found.spec.offsets)]
                assert part.equal(expected), key


def interrupted(folder: Path, layout: Layout, saved: Path) -> tuple[Any, Any]:
    """Return the weights of a run in one go, and of one that was saved and loaded after a step."""
    whole, first, again = (trainer_of(folder, layout) for _ in range(3))
    train(whole, SETUP)
    train(first, SETUP, 0, 1)
    groups, numbers = first.state()
    write_groups(saved, groups, rank=dist.get_rank())
    dist.barrier()
    again.load_state({group: stored(saved, group) for group in groups}, numbers)
    train(again, SETUP, 1)
    return tuple(
        {name: local(master).clone() for name, master in trainer.weights().items()}
        | {f"{n} rounded": s.tensor for n, s in forward_weights(trainer.policy, mesh).items()}
        for trainer, mesh in ((whole, whole.mesh), (again, again.mesh))
    )


@sources_and_layouts(fast=["tp2"], wide=[("float32", "dp3 zero3")])
def test_a_resumed_run_has_the_bits_of_a_whole_one(folder: Path, name: str, tmp_path: Path) -> None:
    layout = layout_of(name)
    for whole, resumed in pool(layout.devices).run(interrupted, folder, layout, tmp_path):
        assert whole.keys() == resumed.keys()
        for key, weight in whole.items():
            assert weight.equal(resumed[key]), key


class _Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """Write nothing."""


def frozen_weights(folder: Path, layout: Layout) -> dict[str, Shard]:
    policy, mesh = load(folder, layout, trains=False)
    own = places(policy, mesh)
    return {n: Shard(local(p.detach()).clone(), own[n]) for n, p in policy.named_parameters()}


@sources_and_layouts(
    fast=["dp2 zero3", "tp2"],
    wide=[("float32", "pp2"), ("float32", "dp3 zero3"), ("bfloat16", "dp4 zero3 shard2")],
)
def test_policy_and_reference_begin_with_the_same_bits(folder: Path, name: str) -> None:
    source = load_file(folder / "model.safetensors")
    policy = trainer_of(folder, None).policy
    expected = {n: p.detach().bfloat16() for n, p in policy.named_parameters()}
    for key, weight in expected.items():
        value = source[key.removeprefix("causal_lm.")]
        assert weight.equal(value if value.dtype == torch.bfloat16 else _dithered(key, value))
    frozen, _ = load(folder, None, trains=False)
    for key, parameter in frozen.named_parameters():
        assert parameter.detach().bfloat16().equal(expected[key])
    layout = layout_of(name)
    for found in pool(layout.devices).run(frozen_weights, folder, layout):
        for key, shard in found.items():
            assert shard.tensor.bfloat16().equal(expected[key][shard.spec.slices])


def _dithered(name: str, value: Tensor) -> Tensor:
    flat = rounded(value.reshape(-1), thresholds(name, DITHERED.place(name, value)))
    return flat.view(value.shape)


@pytest.mark.defect("mutation 6")
def test_a_reference_in_bfloat16_moves_by_less_than_a_step_of_bfloat16() -> None:
    """With real bfloat16 weights on every CPU; a CPU without such instructions loads float32."""
    frozen = tiny_policy(dtype=torch.bfloat16).requires_grad_(False)
    moving = RankTrainer(frozen, make_trainer(SETUP).loss)
    began = {name: weight.double() for name, weight in moving.weights().items()}
    target = {name: weight.float() + 0.1 for name, weight in moving.weights().items()}
    for _ in range(20):
        moving.mix_weights(target, 1e-4)
    way = 0.1 * (1 - (1 - 1e-4) ** 20)
    again = RankTrainer(tiny_policy(dtype=torch.bfloat16).requires_grad_(False), moving.loss)
    again.mix_weights(moving.weights(), 1.0)  # as a checkpoint is restored
    for name, weight in moving.weights().items():
        moved = weight.double() - began[name]
        assert torch.allclose(moved, torch.full_like(moved, way), rtol=0.02), name
        assert again.weights()[name].equal(weight)


def test_an_adapter_and_its_base_are_rounded_alike(folder: Path) -> None:
    plain = load_policy(str(folder), ModelArgs(dtype="bf16"), "cpu", rounding=DITHERED)
    args = ActorModelArgs(lora_rank=2, dtype="bf16")
    policy = load_policy(str(folder), args, "cpu", exact=True, start=Start(3), rounding=DITHERED)
    base = {n.replace(".base_layer.", "."): p for n, p in policy.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert base[name].equal(parameter), name


def test_the_frozen_start_of_an_adapter_has_its_bits(folder: Path) -> None:
    """PiSSA begins away from 0, so its start is a reference."""
    args = ActorModelArgs(lora_rank=2, init_lora_weights="pissa", dtype="bf16")
    start = Start(3, kept=True)
    policy = load_policy(str(folder), args, "cpu", exact=True, start=start, rounding=DITHERED)
    weights = {n: p.bfloat16() for n, p in policy.named_parameters() if ".lora_" in n}
    pairs = [(p, weights[n.replace(".default.", ".reference.")]) for n, p in weights.items()]
    assert len(pairs) > 4
    assert all(own.equal(begin) for own, begin in pairs)
    exact = {n: p for n, p in policy.exact.items() if ".lora_" in n}
    assert any(not p.bfloat16().equal(weights[n]) for n, p in exact.items())
