"""What a micro-batch adds to the state of a rank: activations, logits, and what passes while one layer is at work.

Counted from what autograd keeps of a decoder layer: so many rows as wide as the residual stream (hidden), queries, keys
and the MLP (inner). Checked against the saved tensors themselves on a CPU and against measured peaks of an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rather.model.head import CHUNK_BYTES, KEEP_BYTES

if TYPE_CHECKING:
    from rather.model.layers import Recompute
    from rather.model.sizes import Sizes

KEYS_GATHERED = 1.25  # on a CPU keys and values are copied for each answer, the prompt's again


@dataclass(frozen=True)
class Running:
    """How the layers run."""

    kind: str  # of the device: cpu or cuda
    itemsize: int
    recompute: Recompute = "none"
    compiled: bool = False
    adapter: bool = (
        False  # the base is frozen, and all its linear layers have a few numbers beside them
    )
    offload: bool = False  # activations wait on the host


class Head(NamedTuple):
    """Bytes at the moment in which the head turns logits into gradients."""

    logits: float
    beside: float  # gradients of its weights and rows


def kept(sizes: Sizes, running: Running) -> float:
    """Bytes of one token that one layer keeps until its backward pass."""
    if running.recompute == "none":
        return _all_of_it(sizes, running)
    numbers = float(sizes.hidden)  # what went into the layer
    if running.recompute != "full":
        narrow = sizes.query + 2 * sizes.key + sizes.hidden + sizes.query  # products and attention
        numbers += narrow if running.compiled else narrow + sizes.hidden
    if running.recompute == "half":
        numbers += sizes.inner
        if running.adapter:  # every second wide product: those of an adapter are wide, and both that open the MLP count
            numbers += sizes.inner + sizes.query + sizes.key + sizes.hidden
    return numbers * running.itemsize


def _all_of_it(sizes: Sizes, running: Running) -> float:
    """Bytes of one token where nothing is computed again. A compiler computes norms again, and one wide product."""
    if running.compiled:
        numbers = (
            4 * sizes.hidden
            + 2 * sizes.query
            + 2 * sizes.key
            + (3 if sizes.gated else 2) * sizes.inner
        )
        return float(numbers * running.itemsize)
    # A norm keeps its input (in float32), its normalised rows for a weight that is trained, and its result.
    of_norm = 4 / running.itemsize + 1 + (not running.adapter)
    attention = 2 * sizes.query + 2.0 * sizes.key
    if running.kind == "cpu":
        attention = 3 * sizes.query + 2 * KEYS_GATHERED * sizes.key
    mlp = (4 if sizes.gated else 3) * sizes.inner
    return (of_norm * sum(sizes.norms) + attention + mlp) * running.itemsize


def passing(sizes: Sizes, running: Running) -> float:
    """Bytes of one token in the layer that is at work backward: what is computed again, and gradients."""
    gradients = (3 * sizes.inner + 2 * sizes.hidden) * running.itemsize
    if running.recompute == "none":
        return float(gradients)
    again = _all_of_it(sizes, running) - (
        kept(sizes, running) if running.recompute != "full" else 0.0
    )
    return max(0.0, again) + gradients


def forward_only(sizes: Sizes, running: Running) -> float:
    """Bytes of one token in the layer that is at work without gradients."""
    return float((3 * sizes.inner + 3 * sizes.hidden) * running.itemsize)


def head(sizes: Sizes, rows: float, running: Running, tp: int = 1) -> Head:
    """Of so many scored tokens. Logits past the limit are made again in chunks, which add up in float32."""
    words = sizes.vocabulary / tp
    logits, limit = rows * words * running.itemsize, KEEP_BYTES[running.kind]
    both = 2 * rows * sizes.hidden * running.itemsize
    weights = 0.0 if running.adapter else words * sizes.hidden
    if logits <= limit:
        return Head(logits, both + weights * running.itemsize)
    chunk = min(logits, CHUNK_BYTES[running.kind])
    return Head(chunk, both + weights * (4 + (running.itemsize if running.itemsize < 4 else 0)))
