"""The types that travel: a tokenised pair, a packed micro-batch, and the log-probs of its pairs.

Shape suffixes: N tokens, S segments, K gathered keys, U scored tokens, T where each of them
counts, P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rather.data.image_tokens import ImageFacts
from rather.data.images import content_of

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image of a prompt; the prompt's ids already hold the tokens that it becomes.

    `digest` identifies content and processor settings: images with the same digest have the same
    pixels. `grid` is what the processor reports: (t, h, w) patches for Qwen's families, (height,
    width) in pixels for llava_next, the rows and columns of its tiles for smolvlm.
    """

    digest: str
    source: str | bytes  # a path, or the file itself
    grid: tuple[int, ...]
    tokens: int  # image tokens in the prompt


def prompt_images(
    references: Sequence[str], images: Sequence[ImageFacts]
) -> tuple[PromptImage, ...]:
    """Return the images of a prompt, as a model takes them."""
    return tuple(
        PromptImage(image.digest, image.path or content_of(reference), image.grid, image.tokens)
        for reference, image in zip(references, images, strict=True)
    )


@dataclass(frozen=True, slots=True)
class TokenPair:
    """One preference pair as token ids. `prompt` is the exact common beginning of both sequences.

    A single answer is `chosen` with an empty `rejected`; it may have a label or a score, and for
    KTO a partner.

    `chosen_scored` and `rejected_scored` are half-open spans of scored tokens, counted from the
    start of prompt + response, so that assistant turns inside the prompt can be scored too.
    """

    prompt: NDArray[np.int32]
    chosen: NDArray[np.int32]
    rejected: NDArray[np.int32]
    chosen_scored: tuple[Span, ...]
    rejected_scored: tuple[Span, ...]
    weight: float = 1.0
    margin: float = math.nan  # of a pair; this and the next ones are NaN if the data has none
    soft_label: float = math.nan  # of a pair: probability that chosen is the better answer
    id: str = ""
    digest: int = 0  # of its texts: the same in any tokenizer; 0 if it did not come from a file
    group: int = 0  # the same for all answers of one row of a data file
    images: tuple[PromptImage, ...] = ()  # of the prompt, in the order of their tokens
    label: float = math.nan  # of a single answer: 1 desirable, 0 undesirable
    score: float = math.nan  # of a single answer, as a judge gave it
    partner: NDArray[np.int32] | None = None  # the answer to another prompt, after this one
    partner_scored: tuple[Span, ...] = ()

    @property
    def prompt_key(self) -> bytes:
        """What two prompts must share to be the same: tokens alone do not show which image."""
        digests = "".join(f"|{len(image.digest)} {image.digest}" for image in self.images)
        return self.prompt.tobytes() + digests.encode()

    @property
    def tokens(self) -> int:
        """The most tokens that the pair takes in a micro-batch: the prompt counts once."""
        return len(self.prompt) + sum(len(ids) for ids, _ in self.answers)

    @property
    def answers(self) -> tuple[tuple[NDArray[np.int32], tuple[Span, ...]], ...]:
        """The tokens and scored spans of a batch's two columns: chosen, and rejected or partner."""
        second = (self.rejected, self.rejected_scored)
        if self.partner is not None:
            second = (self.partner, self.partner_scored)
        return (self.chosen, self.chosen_scored), second

    def sequence(self, side: str) -> tuple[list[int], list[int]]:
        """Return the tokens of prompt and one answer, and 1 for each that is scored."""
        ids = [*self.prompt.tolist(), *getattr(self, side).tolist()]
        scored = [0] * len(ids)
        for first, end in getattr(self, f"{side}_scored"):
            scored[first:end] = [1] * (end - first)
        return ids, scored

    def only(self, side: str) -> TokenPair:
        """Return the pair with its answer of one column, "chosen" or "rejected"."""
        nothing = self.prompt[:0]
        if side == "rejected":
            return replace(self, chosen=nothing, chosen_scored=())
        return replace(self, rejected=nothing, rejected_scored=(), partner=None, partner_scored=())


@dataclass(frozen=True)
class Segments:
    """What each token may see: query segments follow one another, keys are gathered by index.

    A segment of q queries sees k keys, causal from the bottom right; `key_index_K` lists the keys
    of all segments. The int32 tensors are for a kernel that takes all segments at once, q_lens and
    k_lens for a loop over them. The lists are not fields, because torch.compile would recompile
    for every new list of numbers.
    """

    key_index_K: Tensor
    # For the gradient of the gather: the places of key_index_K sorted by the token that they name
    # (int32), and where those of each token begin, [N + 1].
    order_K: Tensor
    start_N: Tensor
    cu_q: Tensor  # [S + 1]
    cu_k: Tensor
    max_q: int
    max_k: int

    @staticmethod
    def of(q_lens: Sequence[int], k_lens: Sequence[int], key_index_K: Tensor) -> Segments:
        keys = key_index_K.numpy()
        order = torch.from_numpy(keys.argsort(kind="stable").astype(np.int32))
        uses = np.bincount(keys, minlength=sum(q_lens))
        start, cu_q, cu_k = (
            torch.from_numpy(np.append(0, lens).cumsum(dtype=np.int32))
            for lens in (uses, q_lens, k_lens)
        )
        return Segments(key_index_K, order, start, cu_q, cu_k, max(q_lens), max(k_lens))

    @cached_property
    def path_ends(self) -> Tensor:
        """`cu_k` as one tensor for all layers: kernels remember what they derived from it."""
        return self.cu_k.long()

    @cached_property
    def own_place_N(self) -> Tensor:
        """Where the rows of all segments are among the gathered keys; without waiting."""
        rows = torch.arange(len(self.start_N) - 1, device=self.cu_q.device)
        segment = torch.searchsorted(self.cu_q[1:-1], rows, right=True)
        return rows + (self.cu_k - self.cu_q)[segment + 1]

    @cached_property
    def own_row_K(self) -> Tensor:
        """Which row each gathered key is, if it belongs to the segment itself; else -1."""
        rows = torch.arange(len(self.own_place_N), device=self.cu_q.device)
        return torch.full_like(self.key_index_K, -1).index_copy(0, self.own_place_N, rows)

    @cached_property
    def q_lens(self) -> list[int]:
        return np.diff(self.cu_q.cpu().numpy()).tolist()  # type: ignore[no-any-return]

    @cached_property
    def k_lens(self) -> list[int]:
        return np.diff(self.cu_k.cpu().numpy()).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PairBatch:
    """One micro-batch.

    A common beginning of several sequences is laid out once; positions count within a sequence.
    So one scored token may count in several pairs: the model computes the U different ones, and
    T says where each counts.
    """

    ids_N: Tensor
    positions_N: Tensor
    counted_N: Tensor  # 1; 0 for fillers, and for tokens that another batch of the step has too
    segments: Segments
    rows_U: Tensor  # the hidden row that predicts target U
    targets_U: Tensor
    token_T: Tensor  # which of U
    cell_T: Tensor  # 2 x the pair's place in this batch, + 1 for the rejected response
    shared_T: Tensor  # 1 within the scored length of the pair's shorter response, else 0
    length_P2: Tensor  # scored tokens of each response
    weight_P: Tensor  # 1, the user's weight, or 0 for a filler: the only mask on pairs
    margin_P: Tensor
    soft_label_P: Tensor
    label_P: Tensor
    score_P: Tensor
    group_P: Tensor
    pair_P: Tensor  # the pair's place in its optimizer step, to find its reference log-probs
    real_tokens: int  # of the N tokens; the others only fill the batch up to its size
    images: tuple[PromptImage, ...] = ()  # one for each place of an image, in the order of ids_N

    def to(self, device: str) -> PairBatch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PairBatch:
        """Return the batch in pinned memory, from which a GPU copies while it computes."""
        return self._each(Tensor.pin_memory) if torch.cuda.is_available() else self

    def without_pairs(self) -> PairBatch:
        """Return the tokens alone: the head has nothing to do."""
        names = [name for name in vars(self) if name.endswith(("_U", "_T", "_P", "_P2"))]
        return replace(self, **{name: getattr(self, name)[:0] for name in names})

    def _each(self, change: Callable[[Tensor], Tensor]) -> PairBatch:
        def changed(item: object) -> dict[str, Any]:
            fields = vars(item).items()
            return {name: change(field) for name, field in fields if isinstance(field, Tensor)}

        segments = replace(self.segments, **changed(self.segments))
        return replace(self, segments=segments, **changed(self))


# Name -> [P, 2]: the "sum" of log-probs, and further columns that a loss asks for. Roles exchange
# these. Next to those of a reference, "baseline" may hold the number that a step is compared with.
Columns = Mapping[str, Tensor]


class PairLogps(NamedTuple):
    """Everything that a loss may know about the pairs of a micro-batch."""

    policy: Tensor  # [P, 2] summed log-probs in float64, chosen first
    reference: Tensor | None  # [P, 2]
    length: Tensor  # [P, 2] scored tokens
    extra: Mapping[str, Tensor] = {}  # what a loss declares: margins, "policy/shared", ...


class GroupLogps(NamedTuple):
    """Several prompts with K scored answers each, as a loss over groups sees them."""

    policy: Tensor  # [groups, K] summed log-probs in float64
    reference: Tensor  # [groups, K]
    length: Tensor  # [groups, K] scored tokens
    scores: Tensor  # [groups, K] of the judge


class PairFacts(NamedTuple):
    """What is known about pairs before any model has seen them."""

    length: Tensor  # [P, 2] scored tokens
    weight: Tensor  # [P]
    margin: Tensor  # [P]
    soft_label: Tensor  # [P]
    label: Tensor  # [P] of single answers
    score: Tensor  # [P] of single answers
    group: Tensor  # [P] equal for the answers of one prompt

    @staticmethod
    def of(batch: PairBatch) -> PairFacts:
        facts = (getattr(batch, f"{name}_P") for name in PairFacts._fields[1:])
        return PairFacts(batch.length_P2, *facts)

    @staticmethod
    def of_pairs(pairs: Sequence[TokenPair]) -> PairFacts:
        columns = ([getattr(pair, name) for pair in pairs] for name in PairFacts._fields[1:])
        lengths = torch.from_numpy(scored_lengths(pairs)).double()
        facts = [torch.tensor(column, dtype=torch.float64) for column in columns]
        return PairFacts(lengths, *facts)

    @staticmethod
    def of_step(batches: Sequence[PairBatch]) -> PairFacts:
        """Return the facts of all pairs of a step, in their order within it."""
        order = torch.argsort(torch.cat([batch.pair_P for batch in batches]))
        return PairFacts.concat([PairFacts.of(batch) for batch in batches]).at(order)

    @staticmethod
    def concat(parts: Sequence[PairFacts]) -> PairFacts:
        return PairFacts(*map(torch.cat, zip(*parts, strict=True)))

    def at(self, places: Tensor) -> PairFacts:
        return PairFacts(*(tensor[places] for tensor in self))

    def to(self, device: str) -> PairFacts:
        return PairFacts(*(tensor.to(device, non_blocking=True) for tensor in self))

    @property
    def mean_chosen_length(self) -> Tensor:
        """The mean scored tokens of a chosen answer, weighted by pair; 1 if nothing has weight."""
        total = self.weight.sum()
        mean = (self.length[:, 0] @ self.weight) / total.clamp(min=1e-300)
        return torch.where(total > 0, mean, 1.0)

    def with_logps(
        self, policy: Columns, reference: Columns | None, mean_chosen_length: Tensor
    ) -> PairLogps:
        """Return these pairs with their log-probs; the mean length is that of the whole step."""
        names = ("margin", "soft_label", "label", "score", "group")
        extra = {name: getattr(self, name) for name in names}
        extra["mean_chosen_length"] = mean_chosen_length
        for role, columns in (("policy", policy), ("reference", reference or {})):
            extra |= {f"{role}/{name}": column for name, column in columns.items()}
        if reference and "baseline" in reference:  # one number for all rows of the step
            extra["baseline"] = reference["baseline"][:, 0]
        return PairLogps(policy["sum"], reference["sum"] if reference else None, self.length, extra)


def scored_lengths(pairs: Sequence[TokenPair]) -> NDArray[np.int64]:
    """Return the number of scored tokens of chosen and rejected, [pairs, 2]."""
    counts = []
    for pair in pairs:
        for _, spans in pair.answers:
            counts.append(sum(end - first for first, end in spans))
    return np.array(counts, np.int64).reshape(-1, 2)
