"""The types that travel: a tokenised pair, a packed micro-batch of pairs, and the log-probs of its pairs.

Shape suffixes: N tokens, S segments, K gathered keys, T scored tokens, R responses, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TokenPair:
    """One preference pair as token ids. `prompt` is the exact common beginning of both sequences.

    `chosen_scored` and `rejected_scored` are half-open spans of scored tokens, counted from the start of
    prompt + response (so that earlier assistant turns inside the prompt can be scored too).
    """

    prompt: NDArray[np.int32]
    chosen: NDArray[np.int32]
    rejected: NDArray[np.int32]
    chosen_scored: tuple[Span, ...]
    rejected_scored: tuple[Span, ...]
    weight: float = 1.0
    margin: float = math.nan  # not a number where the data has none
    soft_label: float = math.nan  # chance that chosen is the better answer
    id: str = ""

    @property
    def tokens(self) -> int:
        """What the pair costs in a micro-batch: the prompt counts once."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass(frozen=True)
class Segments:
    """What each token may see: query segments lie one after another, keys are gathered by index.

    A segment of q queries sees k keys, causal from the bottom right; `key_index_K` lists the keys of all segments.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    key_index_K: Tensor


@dataclass(frozen=True)
class PairBatch:
    """One micro-batch: each prompt once, then each of its responses; positions restart after the prompt."""

    ids_N: Tensor
    positions_N: Tensor
    segments: Segments
    rows_T: Tensor  # the hidden row that predicts target T
    targets_T: Tensor
    response_T: Tensor  # the response that scored token T belongs to
    shared_T: Tensor  # 1 within the scored length of the pair's shorter response, else 0
    length_R: Tensor  # scored tokens of each response
    chosen_P: Tensor  # indices of responses
    rejected_P: Tensor
    weight_P: Tensor  # 1, the user's weight, or 0 for a filler: the only mask on pairs anywhere
    margin_P: Tensor
    soft_label_P: Tensor
    pair_P: Tensor  # the pair's place in its optimizer step, to meet its reference log-probs

    def to(self, device: str) -> PairBatch:
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "segments"}
        segments = replace(self.segments, key_index_K=self.segments.key_index_K.to(device))
        return replace(self, segments=segments, **moved)


# Name -> [P, 2]: "sum" of log-probs, and what a loss asks for beside it. What crosses between the roles.
Columns = Mapping[str, Tensor]


class PairLogps(NamedTuple):
    """All that any loss may know about the pairs of a micro-batch."""

    policy: Tensor  # [P, 2] summed log-probs in float64, chosen first
    reference: Tensor | None  # [P, 2]
    length: Tensor  # [P, 2] scored tokens
    extra: Mapping[str, Tensor] = {}  # what a loss declares: margins, soft labels, "policy/shared", ...


@dataclass(frozen=True)
class PairFacts:
    """What is known of pairs before any model has seen them."""

    length: Tensor  # [P, 2] scored tokens
    weight: Tensor  # [P]
    margin: Tensor  # [P]
    soft_label: Tensor  # [P]

    @staticmethod
    def of(batch: PairBatch) -> PairFacts:
        length = torch.stack([batch.length_R[batch.chosen_P], batch.length_R[batch.rejected_P]], dim=1)
        return PairFacts(length, batch.weight_P, batch.margin_P, batch.soft_label_P)

    @staticmethod
    def of_step(batches: Sequence[PairBatch]) -> PairFacts:
        """Of all pairs of a step, in their order within it."""
        order = torch.argsort(torch.cat([batch.pair_P for batch in batches]))
        return PairFacts.joined([PairFacts.of(batch) for batch in batches]).at(order)

    @staticmethod
    def joined(parts: Sequence[PairFacts]) -> PairFacts:
        return PairFacts(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(PairFacts)))

    def at(self, places: Tensor) -> PairFacts:
        return PairFacts(*(getattr(self, f.name)[places] for f in fields(PairFacts)))

    def to(self, device: str) -> PairFacts:
        return PairFacts(*(getattr(self, f.name).to(device) for f in fields(PairFacts)))

    @property
    def mean_chosen_length(self) -> Tensor:
        """Scored tokens of a chosen answer, averaged over pairs by their weights; 1 where nothing has weight."""
        total = self.weight.sum()
        return torch.where(total > 0, (self.length[:, 0] @ self.weight) / total.clamp(min=1e-300), 1.0)

    def seen_by_a_loss(self, policy: Columns, reference: Columns | None, mean_chosen_length: Tensor) -> PairLogps:
        """These pairs with their log-probs; the mean length is that of all pairs they are averaged with."""
        extra = {"margin": self.margin, "soft_label": self.soft_label, "mean_chosen_length": mean_chosen_length}
        for role, columns in (("policy", policy), ("reference", reference or {})):
            extra |= {f"{role}/{name}": column for name, column in columns.items()}
        return PairLogps(policy["sum"], reference["sum"] if reference else None, self.length, extra)
