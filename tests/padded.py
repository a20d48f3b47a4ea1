"""The plain padded computation that ours must equal: one row per answer, Hugging Face's forward,
full log-softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rather.data.batch import PairBatch, Span, TokenPair
from rather.data.pack import pack
from rather.model.attention import IMPLEMENTATION
from rather.model.policy import PolicyModel, pair_columns


def random_pairs(count: int, vocab: int, *, seed: int = 0, longest: int = 24) -> list[TokenPair]:
    """Ragged random pairs; the first has a response of one token."""
    random = np.random.default_rng(seed)

    def ids(low: int, high: int) -> Any:
        return random.integers(3, vocab, size=random.integers(low, high + 1)).astype(np.int32)

    pairs = []
    for i in range(count):
        prompt, chosen, rejected = (
            ids(1, longest),
            ids(1, 1) if i == 0 else ids(2, longest),
            ids(2, longest),
        )
        p = len(prompt)
        spans = ((p, p + len(chosen)),), ((p, p + len(rejected)),)
        pairs.append(TokenPair(prompt, chosen, rejected, *spans, id=str(i)))
    return pairs


def ranked_pairs(vocab: int, *, seed: int = 0) -> list[TokenPair]:
    """Pairs that share what can be shared, between single ones: four answers to one prompt in all six pairs.

    One answer begins another, two begin alike; a turn inside the prompt is scored too. The last
    pair repeats a prompt with the same chosen answer.
    """
    random = np.random.default_rng(seed)

    def ids(length: int) -> Any:
        return random.integers(3, vocab, size=length).astype(np.int32)

    pairs = []
    for single, length in zip(random_pairs(3, vocab, seed=seed, longest=9), (9, 4, 6), strict=True):
        prompt, longest = ids(length), ids(8)
        answers = [longest[:3], longest, np.concatenate([longest[:5], ids(4)]), ids(5)]
        for better in range(4):
            for worse in range(better + 1, 4):
                chosen, rejected = answers[better], answers[worse]
                spans = [((1, 3), (length, length + len(answer))) for answer in (chosen, rejected)]
                pairs.append(
                    TokenPair(
                        prompt, chosen, rejected, *spans, id=f"{length}: {better} over {worse}"
                    )
                )
        pairs.append(single)
    return [*pairs, replace(pairs[0], rejected=ids(6), rejected_scored=((1, 3), (9, 15)))]


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
    # Padding on the right is never seen by a causal model; a mask of it makes rows with no visible
    # key, which are NaN
    # in Hugging Face's float64 window attention.
    seen = torch.ones_like(ids)
    logits = causal_lm(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logps = torch.log_softmax(logits.to(wide), dim=-1).gather(2, ids[:, 1:, None])[..., 0].double()
    return torch.where(scored[:, 1:], logps, 0.0).sum(1).view(len(pairs), 2)


def packed_logps(policy: PolicyModel, pairs: Sequence[TokenPair], budget: int = 10**6) -> Tensor:
    """[P, 2] summed log-probs in float64 of packed micro-batches, by default of one."""
    sums = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for batch in pack(pairs, budget):
        sums = sums.index_add(0, batch.pair_P, pair_columns(policy, batch)["sum"])
    return sums


def assert_packed_equals_padded(
    model: Any, pairs: Sequence[TokenPair], budgets: Sequence[int], tolerance: float = 1e-5
) -> None:
    """Log-probs and every gradient of packed micro-batches are those of padded rows."""
    want = padded_logps(model, pairs)
    wanted = _gradients(model, want)
    model.set_attn_implementation(IMPLEMENTATION)
    for budget in budgets:
        got = packed_logps(PolicyModel(model), pairs, budget)
        assert torch.allclose(got, want, rtol=tolerance, atol=tolerance)
        found = _gradients(model, got)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


def _gradients(model: Any, logps: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logps[:, 0] - logps[:, 1]).tanh().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain_columns(causal_lm: Any, pairs: Sequence[TokenPair]) -> dict[str, Tensor]:
    """[P, 2] sums, sums within the shorter answer's length, and sums of log sum p^2, by one
    sequence at a time.
    """
    columns: dict[str, list[Tensor]] = {"sum": [], "shared": [], "squares": []}
    for pair in pairs:
        hits = [_hits(spans) for spans in (pair.chosen_scored, pair.rejected_scored)]
        for answer, hit in zip((pair.chosen, pair.rejected), hits, strict=True):
            ids = torch.from_numpy(np.concatenate([pair.prompt, answer]).astype(np.int64))
            spread = torch.log_softmax(causal_lm(input_ids=ids[None]).logits[0], dim=-1)[hit - 1]
            own = spread.gather(1, ids[hit, None])[:, 0]
            columns["sum"].append(own.sum())
            columns["shared"].append(own[: min(map(len, hits))].sum())
            columns["squares"].append(torch.log(spread.exp().square().sum(-1)).sum())
    return {name: torch.stack(values).view(-1, 2) for name, values in columns.items()}


def _hits(spans: Sequence[Span]) -> Tensor:
    return torch.cat([torch.arange(first, end) for first, end in spans])


def fill(batches: Sequence[PairBatch]) -> float:
    """Return the share of tokens that are not fillers."""
    return sum(batch.real_tokens for batch in batches) / sum(len(batch.ids_N) for batch in batches)
