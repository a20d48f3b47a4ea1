"""Measures the speed of this device: times some layers of the model on pairs of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rather.config.schema import ModelArgs
from rather.data.batch import PairBatch, TokenPair
from rather.data.pack import pack
from rather.model.budget import LADDER
from rather.model.layers import Recompute, arrange_layers
from rather.model.policy import PolicyModel, pair_columns
from rather.model.sizes import few_layers
from rather.parallel.load import compute_dtype
from rather.plan.speed import Flops, Speed, passes

if TYPE_CHECKING:
    from rather.model.sizes import Sizes

FEW, MORE = 1, 3  # layers; their difference is that of two layers without head and embedding
MOST_FLOPS = {"cpu": 5e9, "cuda": 2e14}  # of one forward pass that is timed
REPEATS = 2
COPIED = {"cpu": 1 << 24, "cuda": 1 << 28}  # numbers


def measured_speed(
    name: str,
    args: ModelArgs,
    sizes: Sizes,
    pairs: Sequence[TokenPair],
    budget: int,
    kind: str,
    recompute: Recompute,
) -> Speed:
    """Return the FLOP/s of micro-batches of up to `budget` tokens. Takes seconds."""
    known = [_with_known_tokens(pair, sizes.vocabulary) for pair in pairs]
    batch = _batch(sizes, known, budget, kind)
    trained, forward = {}, {}
    for layers in (FEW, MORE):
        policy = PolicyModel(few_layers(name, args, layers, kind, compute_dtype(args, kind)))
        arrange_layers(policy, recompute=recompute)
        own = batch.to(kind)
        trained[layers] = _seconds(lambda policy=policy, own=own: _train(policy, own), kind)  # type: ignore[misc]
        forward[layers] = _seconds(lambda policy=policy, own=own: _forward(policy, own), kind)  # type: ignore[misc]
        del policy
    flops, adapter = Flops.of([batch], sizes), args.has_adapter
    layer = flops.layers / sizes.layers * (MORE - FEW)
    rest = max(trained[FEW] - (trained[MORE] - trained[FEW]) / (MORE - FEW), 1e-9)
    memory = _memory_speed(kind)
    return Speed(
        train=layer * passes(recompute, adapter=adapter) / max(trained[MORE] - trained[FEW], 1e-9),
        forward=layer / max(forward[MORE] - forward[FEW], 1e-9),
        head=flops.head * (2 if adapter else 3) / rest,
        memory=memory,
        link=memory,
        source=f"{FEW} and {MORE} layers timed on this {kind} with {flops.tokens} tokens",
    )


def _batch(sizes: Sizes, pairs: Sequence[TokenPair], budget: int, kind: str) -> PairBatch:
    """Pack as many pairs of the step as can be timed in a second or two."""
    for count in range(1, len(pairs) + 1):
        batches = pack(pairs[:count], budget, ladder=LADDER[kind])
        work = Flops.of(batches[:1], sizes)
        if len(batches) > 1 or work.layers / sizes.layers * MORE + work.head > MOST_FLOPS[kind]:
            break
    if count == 1:
        return batches[0]
    return pack(pairs[: count - 1], 10**9, ladder=LADDER[kind])[0]


def _with_known_tokens(pair: TokenPair, vocabulary: int) -> TokenPair:
    """Return a pair with tokens that the model has: assumed pairs may have any."""
    names = ("prompt", "chosen", "rejected")
    return replace(pair, **{name: getattr(pair, name) % vocabulary for name in names})


def _train(policy: PolicyModel, batch: PairBatch) -> None:
    loss: Tensor = pair_columns(policy, batch)["sum"].sum()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    for parameter in policy.parameters():
        parameter.grad = None


@torch.no_grad()
def _forward(policy: PolicyModel, batch: PairBatch) -> None:
    pair_columns(policy, batch)


def _seconds(work: Callable[[], object], kind: str) -> float:
    """Return the seconds of the fastest of some runs, after one to warm up."""
    taken = []
    for _ in range(1 + REPEATS):
        _wait(kind)
        began = time.perf_counter()
        work()
        _wait(kind)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _memory_speed(kind: str) -> float:
    """Return the bytes/s of adding one array to another."""
    one, other = (torch.zeros(COPIED[kind], device=kind) for _ in range(2))
    return 3 * one.nbytes / _seconds(lambda: one.add_(other), kind)


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
