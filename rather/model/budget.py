"""Choose micro-batch tokens and recomputation so that a training step fits the device.

Measured, not computed: two small trial passes give the memory per token of this model, kernels and
precision, and the largest micro-batch is tried before the first step. Neither choice changes a
result; they only cost or save time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from rather.data.batch import PairBatch
from rather.data.pack import pack
from rather.errors import MemoryShortage
from rather.model.check import random_pairs
from rather.model.head import KEEP_BYTES
from rather.model.layers import LEVELS, Recompute, arrange_layers
from rather.model.policy import PolicyModel

log = logging.getLogger(__name__)

TOKENS = {"cpu": 4096, "cuda": 32768}  # default of a micro-batch; larger ones are not faster
LEAST = 3072  # with fewer tokens a GPU is badly used, and recomputing activations is better
LADDER = {"cpu": 0, "cuda": 512}  # compiled shapes are padded to a multiple
REHEARSED = (2048, 4096)
REHEARSED_PAIR = 1024  # tokens of the pairs in them
# With at least this many tokens per step, copying an offloaded reference back is cheaper than
# recomputing.
PARKING_PAYS = 20_000
SHARE = 0.94  # of the free memory is used; the rest covers fragmentation
SHARED = 0.85  # the same on several ranks, which cannot try and fail: the others would wait
ROOMY = 12  # kept activations take at most this many times the memory of recomputed ones


class NoRoom(MemoryShortage):
    """Not even the smallest useful micro-batch fits."""

    def __init__(self, fitting: int, needed: int, largest_pair: int) -> None:
        super().__init__(
            f"the policy does not fit: next to its weights and optimizer there is memory for "
            f"micro-batches of {fitting} tokens, but {needed} are "
            f"needed ({largest_pair} by the longest pair)."
        )


@dataclass(frozen=True)
class Budget:
    """Tokens of a micro-batch and how its activations are treated."""

    tokens: int
    recompute: Recompute


def default_tokens(device: str, router_loss: float) -> int:
    """Return the tokens of a micro-batch if none are set.

    A router loss needs the choices of a whole step: with several micro-batches a pass of its own
    counts them, so one large micro-batch is faster.
    """
    return TOKENS[device] * (2 if router_loss and device == "cuda" else 1)


def _router_loss(policy: PolicyModel) -> float:
    return policy.balance.coefficient if policy.balance else 0.0


def choose_budget(
    policy: PolicyModel,
    trainer: Any,
    *,
    tokens: int | None,
    recompute: Recompute | None,
    offload: bool,
    compiled: bool,
    largest_pair: int,
    at_least: Recompute = "none",
    make_room: Callable[[], bool] | None = None,
) -> Budget:
    """Choose what is not given, as fast as fits, and arrange the layers accordingly.

    `trainer` can `rehearse` a micro-batch without an update, and `forget` it. A recomputation that
    is not given recomputes `at_least` so much.
    `make_room` frees memory at a lower cost than recomputing, and returns whether it did.
    """
    device = policy.causal_lm.device.type
    most_tokens = tokens or default_tokens(device, _router_loss(policy))
    if device == "cpu":
        arrange_layers(policy, recompute=recompute or "none", offload=offload, compiled=compiled)
        return Budget(most_tokens, recompute or "none")
    least = max(min(LEAST, most_tokens), largest_pair)
    needed = max(tokens or least, largest_pair)
    for level in (recompute,) if recompute else LEVELS[LEVELS.index(at_least) :]:
        arrange_layers(policy, recompute=level, offload=offload, compiled=compiled, alone=True)
        fitting = most_tokens if tokens and recompute else _tokens_that_fit(policy, trainer)
        if fitting < needed and make_room and make_room():
            fitting = _tokens_that_fit(policy, trainer)
        if fitting >= needed and (
            tried := _largest_tried(policy, trainer, min(most_tokens, fitting), least, largest_pair)
        ):
            return Budget(tried, level)
    raise NoRoom(fitting, needed, largest_pair)


def agree_on_budget(
    policy: PolicyModel,
    trainer: Any,
    least: Callable[[int], int],
    *,
    tokens: int | None,
    recompute: Recompute | None,
    offload: bool,
    compiled: bool,
    largest_pair: int,
    at_least: Recompute = "none",
) -> Budget:
    """Choose the same on several ranks: each measures, and `least` returns the minimum of all.

    A rank that ran out of memory would leave the others waiting. So the level that needs least is
    measured first, and the others only if it leaves room for their trial passes.
    """
    most_tokens = tokens or default_tokens("cuda", _router_loss(policy))
    needed = max(tokens or min(LEAST, most_tokens), largest_pair)

    def measure(level: Recompute, *, compiled: bool) -> int:
        arrange_layers(policy, recompute=level, offload=offload, compiled=compiled)
        return least(_tokens_that_fit(policy, trainer, SHARED))

    level: Recompute = recompute or "full"
    fitting = measure(level, compiled=False)
    if fitting < needed:
        raise NoRoom(fitting, needed, largest_pair)
    if recompute is None and fitting >= ROOMY * REHEARSED[1]:
        for cheaper in LEVELS[LEVELS.index(at_least) : -1]:
            room = measure(cheaper, compiled=compiled)
            if room >= needed:
                return Budget(min(most_tokens, room), cheaper)
    arrange_layers(policy, recompute=level, offload=offload, compiled=compiled)
    return Budget(min(most_tokens, fitting), level)


def _largest_tried(
    policy: PolicyModel, trainer: Any, tokens: int, least: int, largest_pair: int
) -> int:
    """Run the largest micro-batch of a budget, and a smaller one until it fits; 0 if none does."""
    while True:
        try:
            # Twice: from its second micro-batch on, a step holds gradients.
            for batch in 2 * _rehearsal(policy, max(tokens, largest_pair), largest_pair):
                trainer.rehearse(batch)
            return tokens
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        finally:
            trainer.forget()
            torch.cuda.empty_cache()
        smaller = 3 * tokens // 4 // LADDER["cuda"] * LADDER["cuda"]
        if smaller < least:
            return 0
        log.warning(
            "tried a micro-batch of %d tokens: %s Trying %d tokens.", tokens, reason, smaller
        )
        tokens = smaller


def _tokens_that_fit(policy: PolicyModel, trainer: Any, share: float = SHARE) -> int:
    """Return the tokens that fit, from the peaks of two trial passes; 0 if those do not fit."""
    torch.cuda.empty_cache()
    resting = torch.cuda.memory_allocated()
    room = share * torch.cuda.mem_get_info()[0]  # the cache is empty: all that is free
    peaks = []
    try:
        batches = [_rehearsal(policy, tokens, REHEARSED_PAIR) for tokens in REHEARSED]
        for batch in chain.from_iterable(batches):
            # The first pass compiles, and leaves the gradients that all further ones run with.
            trainer.rehearse(batch)
            torch.cuda.reset_peak_memory_stats()
            trainer.rehearse(batch)
            peaks.append(torch.cuda.max_memory_allocated() - resting)
    except torch.OutOfMemoryError:
        return 0
    finally:
        trainer.forget()
        torch.cuda.empty_cache()
    bytes_per_token = max(1.0, (peaks[1] - peaks[0]) / (REHEARSED[1] - REHEARSED[0]))
    row = policy.vocabulary_size * next(policy.parameters()).element_size()
    return tokens_in(room - peaks[0], REHEARSED[0], bytes_per_token, row)


def tokens_in(room: float, tokens: int, bytes_per_token: float, row: int) -> int:
    """Return how many tokens fit if `room` is left beside `tokens`; rows of logits have `row` bytes.

    More logits than are kept are computed in chunks, so that further tokens need no memory for
    them.
    """
    ladder = LADDER["cuda"]
    kept = KEEP_BYTES["cuda"] // row
    fitting = tokens + room / bytes_per_token
    if fitting > kept > tokens and bytes_per_token > row:
        room -= (kept - tokens) * bytes_per_token
        fitting = kept + room / (bytes_per_token - row)
    return max(0, int(fitting) // ladder * ladder)


def _rehearsal(policy: PolicyModel, tokens: int, largest_pair: int) -> list[PairBatch]:
    """Return a micro-batch of which nearly all tokens are scored: none needs more memory."""
    smaller = min(REHEARSED_PAIR, largest_pair)
    sizes = (largest_pair, *[smaller] * ((tokens - largest_pair) // smaller))
    answers = [max(1, (size - 1) // 2) for size in sizes]
    pairs = random_pairs(policy.vocabulary_size, [(1, answer, answer) for answer in answers])
    return pack(pairs, tokens, ladder=LADDER["cuda"])
