"""How many tokens a training micro-batch may have, and what becomes of its activations, so that a step fits the device.

Measured, not computed: two small rehearsals of forward and backward give the memory per token of this very model,
kernels and precision, and the largest micro-batch there may be is tried before the first step. Neither choice changes
a result; they cost or save time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rather.data.batch import PairBatch, TokenPair
from rather.data.pack import pack
from rather.errors import MemoryShortage
from rather.model.layers import LEVELS, Recompute, arrange_layers
from rather.model.policy import PolicyModel

log = logging.getLogger(__name__)

TOKENS = {
    "cpu": 4096,
    "cuda": 32768,
}  # of a training micro-batch where nothing is told: no larger one is faster
LEAST = 3072  # a GPU is badly used below; recomputing activations is then the better choice
LADDER = {
    "cpu": 0,
    "cuda": 512,
}  # micro-batches are filled up to multiples of it, where shapes are compiled
REHEARSED = (2048, 4096)
REHEARSED_PAIR = 1024  # tokens of the pairs in them
PARKING_PAYS = 20_000  # tokens of a step from which bringing a parked reference back is cheaper than recomputing
SHARE = 0.94  # of the free memory that is planned with: what is left covers fragments


class NoRoom(MemoryShortage):
    """Not even the smallest useful micro-batch fits."""


class Rehearsing(Protocol):
    """What can run a micro-batch without an update, and forget it."""

    def rehearse(self, batch: PairBatch) -> None: ...

    def forget(self) -> None: ...


@dataclass(frozen=True)
class Budget:
    """Tokens of a micro-batch and how its activations are treated."""

    tokens: int
    recompute: Recompute
    bytes_of_token: float | None = None  # as rehearsed: activations and logits


def choose_budget(
    policy: PolicyModel,
    trainer: Rehearsing,
    *,
    tokens: int | None,
    recompute: Recompute | None,
    offload: bool,
    compiled: bool,
    largest_pair: int,
    make_room: Callable[[], bool] | None = None,
) -> Budget:
    """Takes what is told; chooses the rest as fast as fits. Leaves the layers arranged accordingly.

    `make_room` frees memory that others hold, at a price below that of recomputing, and tells whether it did.
    """
    device = policy.causal_lm.device.type
    wanted = tokens or TOKENS[device]
    if device == "cpu":
        arrange_layers(policy, recompute=recompute or "none", offload=offload, compiled=compiled)
        return Budget(wanted, recompute or "none")
    least = max(min(LEAST, wanted), largest_pair)
    needed = max(tokens or least, largest_pair)
    for level in (recompute,) if recompute else LEVELS:
        arrange_layers(policy, recompute=level, offload=offload, compiled=compiled)
        fitting, each = (
            (wanted, None) if tokens and recompute else _tokens_that_fit(policy, trainer)
        )
        if fitting < needed and make_room and make_room():
            fitting, each = _tokens_that_fit(policy, trainer)
        if fitting >= needed and (
            tried := _largest_tried(policy, trainer, min(wanted, fitting), least, largest_pair)
        ):
            return Budget(tried, level, each)
    raise NoRoom(
        f"the policy does not fit: beside its weights and optimizer there is room for micro-batches of {fitting} "
        f"tokens, {needed} are needed ({largest_pair} by the longest pair)."
    )


def _largest_tried(
    policy: PolicyModel, trainer: Rehearsing, tokens: int, least: int, largest_pair: int
) -> int:
    """Runs the largest micro-batch that such a budget allows, and halves it until it fits; 0 where none does."""
    while True:
        try:
            for batch in _rehearsal(policy, max(tokens, largest_pair), largest_pair):
                trainer.rehearse(batch)
            return tokens
        except torch.OutOfMemoryError as error:
            told = str(error).splitlines()[0]
        finally:
            trainer.forget()
            torch.cuda.empty_cache()
        if tokens // 2 < least:
            return 0
        log.warning(
            "a micro-batch of %d tokens was tried: %s Half as many are tried next.", tokens, told
        )
        tokens //= 2


def _tokens_that_fit(policy: PolicyModel, trainer: Rehearsing) -> tuple[int, float | None]:
    """By a line through the peaks of two rehearsals, and its slope in bytes; 0 where even these do not fit."""
    torch.cuda.empty_cache()
    resting = torch.cuda.memory_allocated()
    room = (
        SHARE * torch.cuda.mem_get_info()[0]
    )  # with an empty cache: all that others have not taken
    peaks = []
    try:
        for batch in (
            batch for tokens in REHEARSED for batch in _rehearsal(policy, tokens, REHEARSED_PAIR)
        ):
            trainer.rehearse(
                batch
            )  # compiles, and leaves gradients, beside which all further micro-batches run
            torch.cuda.reset_peak_memory_stats()
            trainer.rehearse(batch)
            peaks.append(torch.cuda.max_memory_allocated() - resting)
    except torch.OutOfMemoryError:
        return 0, None
    finally:
        trainer.forget()
        torch.cuda.empty_cache()
    each = max(1.0, (peaks[1] - peaks[0]) / (REHEARSED[1] - REHEARSED[0]))
    fitting = int((room - peaks[0]) / each) + REHEARSED[0]
    return max(0, fitting // LADDER["cuda"] * LADDER["cuda"]), each


def _rehearsal(policy: PolicyModel, tokens: int, largest_pair: int) -> list[PairBatch]:
    """A micro-batch whose tokens are nearly all scored, of one pair and smaller ones: no real one needs more memory."""
    random = np.random.default_rng(0)
    vocabulary = policy.causal_lm.get_input_embeddings().weight.shape[0]
    smaller = min(REHEARSED_PAIR, largest_pair)
    pairs = []
    for size in (largest_pair, *[smaller] * ((tokens - largest_pair) // smaller)):
        answer = max(1, (size - 1) // 2)
        prompt, chosen, rejected = (
            random.integers(0, vocabulary, n).astype(np.int32) for n in (1, answer, answer)
        )
        pairs.append(TokenPair(prompt, chosen, rejected, ((1, 1 + answer),), ((1, 1 + answer),)))
    return pack(pairs, tokens, ladder=LADDER["cuda"])
