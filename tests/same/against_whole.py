"""Compare a rank's part of a divided model with the whole; what ranks refuse and write together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoTokenizer

from rather.checkpoint.checkpoint import write_groups
from rather.checkpoint.sharded_tensors import ShardedFiles
from rather.data.batch import PairBatch, TokenPair
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.losses.objective import configure
from rather.model.attention import IMPLEMENTATION
from rather.model.collectives import all_reduce_
from rather.model.export import FileCast, export_stored
from rather.model.layers import arrange_layers
from rather.model.policy import PolicyModel, pair_columns
from rather.parallel.context import spread_tokens
from rather.parallel.mesh import Mesh
from rather.parallel.stages import Stages
from rather.parallel.tensor import part, split_model
from rather.train.rank_trainer import RankTrainer
from tests.model.test_families import VOCAB, tiny
from tests.padded import random_pairs

WANTED = ("shared", "squares")


def worst_difference(
    family: str,
    axes: dict[str, int],
    *,
    sequence_parallel: bool = False,
    pairs: list[TokenPair] | None = None,
    budget: int = 120,
    arranged: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> float:
    """Relative to the largest number of each tensor, over columns and gradients."""
    mesh = Mesh.build(**axes)
    batches = pack(
        pairs or random_pairs(5, VOCAB), budget, ranks=2
    )  # the last may be one of fillers alone
    plain, divided = (
        PolicyModel(tiny(family, torch.float32, IMPLEMENTATION, **model or {})) for _ in range(2)
    )
    split_model(divided, mesh, sequence_parallel=sequence_parallel)
    spread_tokens(divided, mesh)
    arrange_layers(divided, **arranged or {})
    want, got = columns_and_gradients(plain, batches), columns_and_gradients(divided, batches)
    if group := mesh.group("cp"):
        all_reduce_([got[name] for name in got if name.startswith("causal_lm")], group)
    if divided.tp_partial and (group := mesh.group("tp")):
        all_reduce_([got[name] for name in sorted(divided.tp_partial)], group)
    for name, dim in divided.tp_dims.items():
        own = part(divided.tp_sizes[name], mesh.rank("tp"), mesh.size("tp"))
        want[name] = want[name].narrow(dim, *own)
    assert want.keys() == got.keys()
    return max(_difference(want[name], got[name]) for name in want)


def refusal(work: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return what a ConfigError says; nothing if there is none."""
    try:
        work(*args, **options)
    except ConfigError as error:
        return str(error)
    return ""


def export_together(
    policy: Any, mesh: Mesh, folder: Path, target: Path, cast: FileCast
) -> ShardedFiles | None:
    """Every rank writes the pieces it holds; the first exports a model from them, which it returns."""
    trainer = RankTrainer(policy, configure(["sigmoid"], {}), mesh=mesh)
    pieces = target.with_name("pieces")
    pieces.mkdir(exist_ok=True)
    write_groups(pieces, {"weights": trainer.weight_pieces()}, rank=dist.get_rank())
    dist.barrier()
    if dist.get_rank():
        return None
    model = policy.stages[0].causal_lm if isinstance(policy, Stages) else policy.causal_lm
    stored = ShardedFiles(sorted(pieces.iterdir()))
    export_stored(model, stored, AutoTokenizer.from_pretrained(folder), target, "card", cast)
    return stored


def columns_and_gradients(policy: PolicyModel, batches: list[PairBatch]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        columns = pair_columns(policy, batch, WANTED)
        found |= {f"{name} {number}": column.detach().clone() for name, column in columns.items()}
        sums, shared = columns["sum"], columns["shared"]
        (sums[:, 0] - sums[:, 1] + shared[:, 0] * 0.5).tanh().sum().backward()
    found |= {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return found


def _difference(want: Tensor, got: Tensor) -> float:
    assert want.shape == got.shape
    return (
        float((want - got).abs().max() / want.abs().max().clamp(min=1e-8)) if want.numel() else 0.0
    )
