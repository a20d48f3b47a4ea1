"""The plain padded computation that ours must equal: one row per answer, Hugging Face's forward, full log-softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rather.batch import TokenPair


def random_pairs(count: int, vocab: int, *, seed: int = 0, longest: int = 24) -> list[TokenPair]:
    """Ragged random pairs; the first has a response of one token."""
    random = np.random.default_rng(seed)

    def ids(low: int, high: int) -> Any:
        return random.integers(3, vocab, size=random.integers(low, high + 1)).astype(np.int32)

    pairs = []
    for i in range(count):
        prompt, chosen, rejected = ids(1, longest), ids(1, 1) if i == 0 else ids(2, longest), ids(2, longest)
        p = len(prompt)
        spans = ((p, p + len(chosen)),), ((p, p + len(rejected)),)
        pairs.append(TokenPair(prompt, chosen, rejected, *spans, id=str(i)))
    return pairs


def padded_logps(causal_lm: Any, pairs: Sequence[TokenPair]) -> Tensor:
    """[P, 2] summed log-probs, float64 sums of what the model's padded forward gives."""
    sides = [(pair, side) for pair in pairs for side in ("chosen", "rejected")]
    rows = [np.concatenate([pair.prompt, getattr(pair, side)]) for pair, side in sides]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    scored = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, ((pair, side), row) in enumerate(zip(sides, rows, strict=True)):
        ids[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
        for first, end in getattr(pair, f"{side}_scored"):
            scored[i, first:end] = True
    ids, scored = ids.to(causal_lm.device), scored.to(causal_lm.device)
    # Padding on the right is never seen by a causal model; a mask of it makes rows with no visible key, which are NaN
    # in Hugging Face's float64 window attention.
    seen = torch.ones_like(ids)
    logits = causal_lm(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logps = torch.log_softmax(logits.to(wide), dim=-1).gather(2, ids[:, 1:, None])[..., 0].double()
    return torch.where(scored[:, 1:], logps, 0.0).sum(1).view(len(pairs), 2)
