"""Attention over segments equals the definition, written out query by query in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rather.data.batch import Segments
from rather.data.pack import pack
from rather.model import attention
from rather.model.attention import segment_attention
from tests.padded import random_pairs

HEADS, WIDTH = 4, 8


def segments() -> tuple[Segments, int]:
    (batch,) = pack(random_pairs(4, 50, seed=3, longest=9), budget=10**6)
    return batch.segments, len(batch.ids_N)


def segments_and_inputs() -> tuple[Segments, list[Tensor]]:
    parts, tokens = segments()
    return parts, [torch.randn(1, HEADS, tokens, WIDTH) for _ in range(3)]


def by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Segments,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[H, N, D]: each query over the keys it may see, the last of which is its own."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    out, first_key = [], 0
    queries = iter(query.unbind(1))
    for q_len, k_len in zip(parts.q_lens, parts.k_lens, strict=True):
        index = parts.key_index_K[first_key : first_key + k_len]
        first_key += k_len
        for end in range(k_len - q_len + 1, k_len + 1):
            seen = index[max(0, end - (window or end)) : end]
            scores = torch.einsum("hd,hkd->hk", next(queries), key[:, seen]) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out.append(torch.einsum("hk,hkd->hd", scores.softmax(-1), value[:, seen]))
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equals_the_definition(
    dtype: torch.dtype, softcap: float | None, window: int | None, kv_heads: int
) -> None:
    parts, tokens = segments()
    torch.manual_seed(0)
    given = [
        torch.randn(1, heads, tokens, WIDTH).to(dtype) for heads in (HEADS, kv_heads, kv_heads)
    ]
    ours = [x.clone().requires_grad_() for x in given]
    exact = [x[0].double().requires_grad_() for x in given]
    options = {"segments": parts, "scaling": 0.5, "sliding_window": window, "softcap": softcap}
    got, weights = segment_attention(nn.Identity(), *ours, None, dropout=0.0, **options)
    want = by_hand(*exact, parts, 0.5, window, softcap)
    assert weights is None
    assert got.shape == (1, tokens, HEADS, WIDTH)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert torch.allclose(got[0].transpose(0, 1).double(), want, atol=tolerance)
    slope = torch.randn_like(want)
    got[0].transpose(0, 1).backward(slope.to(dtype))
    want.backward(slope)
    for one, other in zip(ours, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad[0].double(), other.grad, atol=4 * tolerance)


def places(key_index: Tensor, cu_q: Tensor, cu_k: Tensor) -> Segments:
    return Segments.of(cu_q.diff().tolist(), cu_k.diff().tolist(), key_index)


def kernel(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Attention in plain torch that takes no other shapes than the kernels on a GPU."""
    key_index, _order, _start, cu_q, cu_k, _max_q, _max_k, scale, left = rest
    assert query.shape[-1] == key.shape[-1], "head sizes"
    assert key.shape == value.shape, "head sizes"
    heads_first = [x.transpose(0, 1)[None] for x in (query, key, value)]
    window = left + 1 if left >= 0 else None
    parts = places(key_index, cu_q, cu_k)
    out = attention._one_by_one(*heads_first, parts, scale, window, None)[0]
    return out.contiguous(), query.new_zeros(query.shape[1], query.shape[0])


def kernel_backward(grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    query, key, value, out, _lse, *rest = tensors
    assert grad.shape == out.shape == query.shape
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        return torch.autograd.grad(kernel(*leaves, *rest)[0], leaves, grad)


def on_the_cpu(forward: Any, backward: Any) -> Iterator[None]:
    """Take the place of the kernels of a GPU."""
    library = torch.library.Library("rather", "IMPL")
    library.impl("segment_attention", forward, "CPU")
    library.impl("segment_attention_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.fixture
def kernels_on_the_cpu() -> Iterator[None]:
    yield from on_the_cpu(kernel, kernel_backward)


def assert_paths_agree(shapes: list[tuple[int, ...]], values: int, window: int | None) -> None:
    """The path of a GPU gives the output and the gradients of one segment after another.

    `shapes` are those of queries, keys, values and, if there are some, sinks.
    """
    parts, tokens = segments()
    torch.manual_seed(0)
    given = [torch.randn(1, heads, tokens, *width) for heads, *width in shapes[:3]]
    given += [torch.randn(shape) for shape in shapes[3:]]
    slope = torch.randn(1, tokens, HEADS, values)
    results = []
    for path, options in ((attention._varlen, ()), (attention._one_by_one, (None,))):
        leaves = [x.clone().requires_grad_() for x in given]
        out = path(*leaves[:3], parts, 0.5, window, *options, *leaves[3:])
        results.append([out.detach(), *torch.autograd.grad(out, leaves, slope)])
    for found, expected in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-5)


OTHER = pytest.mark.defect("R2")


@pytest.mark.usefixtures("kernels_on_the_cpu")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "widths",
    [pytest.param((12, 8), marks=OTHER), pytest.param((8, 12), marks=OTHER), (8, 8)],
    ids=str,
)
def test_the_path_of_a_gpu_takes_values_of_another_width_than_keys(
    widths: tuple[int, int], window: int | None
) -> None:
    """As with multi-head latent attention (deepseek_v3: 192 and 128)."""
    of_keys, of_values = widths
    assert_paths_agree([(HEADS, of_keys), (2, of_keys), (2, of_values)], of_values, window)


def dense_scores(query: Tensor, key: Tensor, rest: Sequence[Any]) -> Tensor:
    """The scores [H, N, keys] of all queries and gathered keys; -inf for what a query cannot see."""
    key_index, _order, _start, cu_q, cu_k, _max_q, _max_k, scale, left = rest
    seen = torch.zeros(len(query), len(key_index), dtype=torch.bool)
    ends = [cu[i : len(cu) - 1 + i].tolist() for cu in (cu_q, cu_k) for i in (0, 1)]
    for q, q_end, k, k_end in zip(*ends, strict=True):
        behind = torch.arange(k_end - (q_end - q), k_end)[:, None] - torch.arange(k, k_end)
        seen[q:q_end, k:k_end] = (behind >= 0) & ((behind <= left) | (left < 0))
    key = key[key_index].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("nhd,khd->hnk", query, key) * scale
    return scores.masked_fill(~seen, float("-inf"))


def flash(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    scores = dense_scores(query, key, rest)
    value = value[rest[0]].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    out = torch.einsum("hnk,khd->nhd", scores.softmax(-1), value)
    return out.contiguous(), scores.logsumexp(-1)


def flash_backward(grad: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
    """As the kernels compute it: from the output and the log-sum-exp that they are given."""
    query, key, value, out, lse, *rest = tensors
    index, scale, groups = rest[0], rest[-2], query.shape[1] // key.shape[1]
    weights = (dense_scores(query, key, rest) - lse[..., None]).exp()
    wide_key, wide_value = (x[index].repeat_interleave(groups, dim=1) for x in (key, value))
    slope = torch.einsum("nhd,khd->hnk", grad, wide_value) - (grad * out).sum(-1).t()[..., None]
    slope = weights * slope * scale
    d_query = torch.einsum("hnk,khd->nhd", slope, wide_key)
    wide = torch.einsum("hnk,nhd->khd", slope, query), torch.einsum("hnk,nhd->khd", weights, grad)
    by_key = [x.unflatten(1, (-1, groups)).sum(2) for x in wide]
    return d_query, *(torch.zeros_like(key).index_add(0, index, x) for x in by_key)


@pytest.fixture
def flash_on_the_cpu() -> Iterator[None]:
    yield from on_the_cpu(flash, flash_backward)


@pytest.mark.usefixtures("flash_on_the_cpu")
@pytest.mark.parametrize("window", [None, 4])
def test_sinks_on_the_path_of_a_gpu(window: int | None) -> None:
    """The kernel's own backward is right once it is given the sum over keys and sink."""
    assert_paths_agree([(HEADS, WIDTH), (2, WIDTH), (2, WIDTH), (HEADS,)], WIDTH, window)


@pytest.mark.parametrize("window", [4, 5, 6])
def test_a_window_as_long_as_the_sequence(window: int) -> None:
    """Plain causal attention serves from the length of the sequence on, and not one token before."""
    parts = Segments.of((5,), (5,), torch.arange(5))
    q, k, v = (torch.randn(1, HEADS, 5, WIDTH) for _ in range(3))
    got, _ = segment_attention(
        nn.Identity(), q, k, v, None, segments=parts, scaling=1.0, sliding_window=window
    )
    assert torch.allclose(
        got[0].transpose(0, 1), by_hand(q[0], k[0], v[0], parts, 1.0, window, None), atol=1e-5
    )


def test_the_usual_scale_without_one() -> None:
    parts, inputs = segments_and_inputs()
    given, _ = segment_attention(nn.Identity(), *inputs, None, segments=parts, scaling=WIDTH**-0.5)
    without, _ = segment_attention(nn.Identity(), *inputs, None, segments=parts)
    assert torch.equal(given, without)


@pytest.mark.parametrize("window", [None, 5])
def test_a_sink_is_one_more_key_without_a_value(window: int | None) -> None:
    parts, inputs = segments_and_inputs()
    sinks = torch.randn(HEADS, requires_grad=True)
    options: dict[str, Any] = {"segments": parts, "sliding_window": window}
    got, _ = segment_attention(nn.Linear(1, 1), *inputs, None, s_aux=sinks, **options)
    plain, _ = segment_attention(nn.Linear(1, 1), *inputs, None, **options)
    # A key whose score is far below all others takes nothing; a score far above takes all.
    none, _ = segment_attention(nn.Linear(1, 1), *inputs, None, s_aux=sinks - 1e3, **options)
    whole, _ = segment_attention(nn.Linear(1, 1), *inputs, None, s_aux=sinks + 1e3, **options)
    assert torch.allclose(none, plain, atol=1e-6)
    assert torch.equal(whole, torch.zeros_like(whole))
    share = (got / plain).mean(-1)
    assert bool(((share > 0) & (share < 1)).all())
    got.sum().backward()
    assert sinks.grad is not None
    assert bool(sinks.grad.abs().min() > 0)
