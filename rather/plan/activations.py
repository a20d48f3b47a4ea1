"""What a micro-batch adds to the state of a rank: activations, logits, and temporary buffers.

Counted from what autograd keeps of a decoder layer: rows as wide as the residual stream (hidden),
queries, keys and the MLP (inner). Checked against the saved tensors on a CPU and against measured
peaks of an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rather.model.head import CHUNK_BYTES, KEEP_BYTES

if TYPE_CHECKING:
    from rather.model.layers import Recompute
    from rather.model.sizes import Sizes

KEYS_GATHERED = 1.25  # on a CPU keys and values are copied for each answer, the prompt's again


@dataclass(frozen=True)
class LayerSettings:
    """How the layers run."""

    kind: str  # of the device: cpu or cuda
    itemsize: int
    recompute: Recompute = "none"
    compiled: bool = False
    adapter: bool = False  # the base is frozen, and its linear layers have adapters
    offload: bool = False  # activations wait on the host


def kept_bytes(sizes: Sizes, settings: LayerSettings) -> float:
    """Return the bytes per token that one layer keeps until its backward pass."""
    if settings.recompute == "none":
        return _all_bytes(sizes, settings)
    numbers = float(sizes.hidden)  # the input of the layer
    if settings.recompute != "full":
        # Products and attention.
        numbers += 2 * sizes.query + 2 * sizes.key + (1 if settings.compiled else 2) * sizes.hidden
    if settings.recompute == "half":
        numbers += sizes.inner
        # Every second wide product: those of an adapter are wide, and both that open the MLP count.
        if settings.adapter:
            numbers += sizes.inner + sizes.query + sizes.key + sizes.hidden
    return numbers * settings.itemsize


def _all_bytes(sizes: Sizes, settings: LayerSettings) -> float:
    """Return the bytes per token if nothing is recomputed.

    A compiler recomputes norms and one wide product.
    """
    if settings.compiled:
        attention = 2 * sizes.query + 2.0 * sizes.key
        mlp = (3 if sizes.gated else 2) * sizes.inner
        return (4 * sizes.hidden + attention + mlp) * settings.itemsize
    # A norm keeps its input (in float32), its normalised rows if its weight is trained, its result.
    norm = 4 / settings.itemsize + 1 + (not settings.adapter)
    attention = 2 * sizes.query + 2.0 * sizes.key
    if settings.kind == "cpu":
        attention = 3 * sizes.query + 2 * KEYS_GATHERED * sizes.key
    mlp = (4 if sizes.gated else 3) * sizes.inner
    return (norm * sum(sizes.norms) + attention + mlp) * settings.itemsize


def backward_bytes(sizes: Sizes, settings: LayerSettings) -> float:
    """Return the bytes per token of the layer in its backward pass: recomputed rows, gradients."""
    gradients = float((3 * sizes.inner + 2 * sizes.hidden) * settings.itemsize)
    if settings.recompute == "none":
        return gradients
    kept = kept_bytes(sizes, settings) if settings.recompute != "full" else 0.0
    return max(0.0, _all_bytes(sizes, settings) - kept) + gradients


def forward_bytes(sizes: Sizes, settings: LayerSettings) -> float:
    """Return the bytes per token of the layer at work without gradients."""
    return float((3 * sizes.inner + 3 * sizes.hidden) * settings.itemsize)


def head_bytes(
    sizes: Sizes, rows: float, settings: LayerSettings, tp: int = 1
) -> tuple[float, float]:
    """Return the bytes of (logits, gradients of the head) for scored tokens.

    Logits above the limit are computed again in chunks, which are summed in float32.
    """
    words = sizes.vocabulary / tp
    logits, limit = rows * words * settings.itemsize, KEEP_BYTES[settings.kind]
    both = 2 * rows * sizes.hidden * settings.itemsize
    weights = 0.0 if settings.adapter else words * sizes.hidden
    if logits <= limit:
        return logits, both + weights * settings.itemsize
    chunk = min(logits, CHUNK_BYTES[settings.kind])
    return chunk, both + weights * (4 + (settings.itemsize if settings.itemsize < 4 else 0))
