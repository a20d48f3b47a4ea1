"""Attention over packed pairs: ours (one variable-length kernel, or a loop on a CPU), padded SDPA, FlexAttention.

    python bench/attention.py                      # the Qwen2.5 shapes on a GPU, the 15M Llama on a CPU
    python bench/attention.py --shapes 7B --lengths long

One layer over the pairs of one micro-batch, forward and backward. Ours and FlexAttention see each prompt once, padded
SDPA (as everyone else runs it) sees it twice, in batches of 8 pairs padded to the longest. TFLOP/s count the cells
that are needed, 3.5 times the forward's for both passes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    LENGTHS,
    RESULTS,
    SHAPES,
    Shape,
    free,
    machine,
    make_steps,
    milliseconds,
    table,
    told,
    write_facts,
)
from numpy.typing import NDArray
from torch import Tensor

from rather.data.batch import Segments
from rather.model.attention import segment_attention

TOKENS = {"cuda": 16384, "cpu": 2048}
PAIRS_PADDED = 8  # in one padded batch
COLUMNS = ("shape", "pairs", "way", "tokens", "forward ms", "backward ms", "TFLOP/s", "error")


@dataclass(frozen=True)
class Pair:
    prompt: int
    chosen: int
    rejected: int

    @property
    def cells(self) -> float:
        answers = (self.chosen, self.rejected)
        return self.prompt**2 / 2 + sum(self.prompt * a + a**2 / 2 for a in answers)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = list(SHAPES)[1:] if device == "cuda" else ["15M"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=names)
    parser.add_argument(
        "--lengths", nargs="+", choices=list(LENGTHS), default=["ultrafeedback", "long"]
    )
    parser.add_argument("--repeats", type=int, default=10 if device == "cuda" else 3)
    parser.add_argument("--json", type=Path, default=RESULTS / f"attention_{device}.json")
    args = parser.parse_args()
    print(told(machine()), flush=True)
    rows = []
    for name in args.shapes:
        for lengths in args.lengths:
            rows += [
                (name, lengths, *row)
                for row in measured(SHAPES[name], lengths, device, args.repeats)
            ]
            write_facts(args.json, "attention", columns=COLUMNS, rows=rows)
    table("attention of one layer", COLUMNS, rows)


def measured(shape: Shape, lengths: str, device: str, repeats: int) -> list[tuple[Any, ...]]:
    """(way, tokens, forward ms, backward ms, TFLOP/s, largest error relative to the largest value) of each way."""
    pairs = some_pairs(lengths, TOKENS[device])
    tokens = sum(pair.prompt + pair.chosen + pair.rejected for pair in pairs)
    flops = 3.5 * 4 * shape.hidden * sum(pair.cells for pair in pairs)
    given = projections(shape, tokens, device)
    exact = ours(pairs, [x.float() for x in given]).rows()
    ways: dict[str, Callable[..., Way]] = {"ours": ours, "padded SDPA": padded_sdpa}
    if device == "cuda":
        ways["FlexAttention"] = flex_attention
    rows = []
    for name, prepare in ways.items():
        free()
        way = prepare(pairs, given)
        error = float((way.rows() - exact).abs().max() / exact.abs().max())
        there, back = way.times(repeats)
        rows.append((name, tokens, there, back, flops / (there + back) / 1e9, error))
    return rows


@dataclass
class Way:
    """A way to compute attention: its inputs as it likes them, and where its results are each token's."""

    inputs: list[Tensor]
    forward: Callable[[], list[Tensor]]
    in_order: Callable[[list[Tensor]], Tensor]  # [tokens, heads, width]

    @torch.no_grad()
    def rows(self) -> Tensor:
        return self.in_order(self.forward())

    def times(self, repeats: int) -> tuple[float, float]:
        """Milliseconds of forward and backward."""
        for x in self.inputs:
            x.requires_grad_()
        out = self.forward()
        grads = [torch.randn_like(x) for x in out]

        def backward() -> Any:
            return torch.autograd.grad(out, self.inputs, grads, retain_graph=True)

        return milliseconds(self.forward, repeats=repeats), milliseconds(backward, repeats=repeats)


def some_pairs(lengths: str, tokens: int) -> list[Pair]:
    """Pairs up to so many tokens."""
    chosen: list[Pair] = []
    for prompt in make_steps(lengths, 1000, steps=1, pairs=96)[0]:
        pair = Pair(len(prompt.prompt), len(prompt.answers[0]), len(prompt.answers[1]))
        tokens -= pair.prompt + pair.chosen + pair.rejected
        if tokens < 0 and chosen:
            break
        chosen.append(pair)
    return chosen


def projections(shape: Shape, tokens: int, device: str) -> list[Tensor]:
    """Query, key and value of one layer: [1, heads, tokens, width]."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    width = shape.hidden // shape.heads
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [torch.randn(1, n, tokens, width, device=device, dtype=dtype) for n in heads]


def ours(pairs: Sequence[Pair], given: Sequence[Tensor]) -> Way:
    """Prompt and chosen answer are one segment, the rejected answer the next one, which sees the prompt too."""
    q_lens, k_lens, keys, start = [], [], [], 0
    for pair in pairs:
        middle, end = (
            start + pair.prompt + pair.chosen,
            start + pair.prompt + pair.chosen + pair.rejected,
        )
        q_lens += [middle - start, end - middle]
        k_lens += [middle - start, pair.prompt + pair.rejected]
        keys += [
            np.arange(start, middle),
            np.arange(start, start + pair.prompt),
            np.arange(middle, end),
        ]
        start = end
    made = Segments.of(q_lens, k_lens, torch.from_numpy(np.concatenate(keys)))
    moved = {name: x.to(given[0].device) for name, x in vars(made).items() if isinstance(x, Tensor)}
    segments = Segments(**{**vars(made), **moved})
    query, key, value = (x.clone() for x in given)
    nobody = torch.nn.Identity()

    def forward() -> list[Tensor]:
        return [segment_attention(nobody, query, key, value, None, segments=segments)[0]]

    return Way([query, key, value], forward, lambda out: out[0][0])


def padded_sdpa(pairs: Sequence[Pair], given: Sequence[Tensor]) -> Way:
    """Prompt + answer twice a pair, in batches padded to their longest row."""
    batches = [*padded(pairs)]
    inputs = [
        x[0].transpose(0, 1)[places].transpose(1, 2).contiguous()
        for places, _ in batches
        for x in given
    ]
    grouped = given[0].shape[1] != given[1].shape[1]

    def forward() -> list[Tensor]:
        triples = zip(inputs[::3], inputs[1::3], inputs[2::3], strict=True)
        return [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            for q, k, v in triples
        ]

    def in_order(out: list[Tensor]) -> Tensor:
        _, heads, tokens, width = given[0].shape
        rows = given[0].new_empty(tokens, heads, width)
        for (places, real), batch in zip(batches, out, strict=True):
            rows[places[real]] = batch.transpose(1, 2)[real]
        return rows

    return Way(inputs, forward, in_order)


def padded(pairs: Sequence[Pair]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches as (places of tokens [rows, longest], which of them are no padding)."""
    start = 0
    for first in range(0, len(pairs), PAIRS_PADDED):
        rows: list[NDArray[np.int64]] = []
        for pair in pairs[first : first + PAIRS_PADDED]:
            middle, end = (
                start + pair.prompt + pair.chosen,
                start + pair.prompt + pair.chosen + pair.rejected,
            )
            prompt = np.arange(start, start + pair.prompt)
            rows += [np.arange(start, middle), np.concatenate([prompt, np.arange(middle, end)])]
            start = end
        lengths = np.asarray([len(row) for row in rows])
        real = np.arange(lengths.max()) < lengths[:, None]
        places = np.zeros(real.shape, dtype=np.int64)
        places[real] = np.concatenate(rows)
        yield torch.from_numpy(places), torch.from_numpy(real)


def flex_attention(pairs: Sequence[Pair], given: Sequence[Tensor]) -> Way:
    """One kernel with a mask of blocks, which is made anew for each micro-batch: making it counts as forward."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attend

    device, tokens = given[0].device, given[0].shape[2]
    pair, branch, position = marks(pairs, device)
    query, key, value = (x.clone() for x in given)
    compiled = torch.compile(attend, dynamic=False)
    grouped = given[0].shape[1] != given[1].shape[1]

    def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same_branch = (branch[k] == 0) | (branch[k] == branch[q])
        return (pair[q] == pair[k]) & same_branch & (position[k] <= position[q])

    def forward() -> list[Tensor]:
        mask = create_block_mask(visible, None, None, tokens, tokens, device=device, _compile=True)
        return [compiled(query, key, value, block_mask=mask, enable_gqa=grouped)]

    return Way([query, key, value], forward, lambda out: out[0][0].transpose(0, 1))


def marks(pairs: Sequence[Pair], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token: its pair, its branch (0 prompt, 1 chosen, 2 rejected), its position."""
    numbers = [
        (i, branch, position)
        for i, pair in enumerate(pairs)
        for branch, first, length in (
            (0, 0, pair.prompt),
            (1, pair.prompt, pair.chosen),
            (2, pair.prompt, pair.rejected),
        )
        for position in range(first, first + length)
    ]
    pair_of, branch_of, position_of = torch.tensor(numbers, device=device).unbind(1)
    return pair_of, branch_of, position_of


if __name__ == "__main__":
    main()
