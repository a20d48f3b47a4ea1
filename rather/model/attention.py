"""Attention over segments: each query segment sees its own gathered keys, causal from the bottom right.

Registered with transformers under the name `rather`, so the model files stay Hugging Face's own. CUDA in half
precision runs one variable-length kernel; everything else (CPU, float32, soft-capped families) loops over segments.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rather.batch import Segments
from rather.errors import ConfigError

IMPLEMENTATION = "rather"


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, Hkv, N, D] -> [1, N, H, D]."""
    if s_aux is not None:
        raise ConfigError(f"{type(module).__name__}: attention sinks are not supported; use a model without them")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key = key.index_select(2, segments.key_index_K)
    value = value.index_select(2, segments.key_index_K)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not softcap:
        return _varlen(query, key, value, segments, scale, sliding_window), None
    queries = query.split(list(segments.q_lens), dim=2)
    keys = key.split(list(segments.k_lens), dim=2)
    values = value.split(list(segments.k_lens), dim=2)
    attend = _soft_capped if softcap else _attend
    out = [attend(q, k, v, scale, sliding_window, softcap) for q, k, v in zip(queries, keys, values, strict=True)]
    return torch.cat(out, dim=2).transpose(1, 2), None


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, _softcap: float | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2] and (window is None or window >= k.shape[2]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = _visible(q.shape[2], k.shape[2], window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _soft_capped(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    assert softcap is not None
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.tanh(q @ k.transpose(2, 3) * scale / softcap) * softcap
    scores = scores.masked_fill(~_visible(q.shape[2], k.shape[2], window, q.device), float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def _visible(q: int, k: int, window: int | None, device: torch.device) -> Tensor:
    """[q, k]: may query i see key j? Aligned at the bottom right, where both end at the same token."""
    behind = torch.arange(k - q, k, device=device)[:, None] - torch.arange(k, device=device)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # absent from torch's CPU-only use, so imported where it runs

    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    # torch 2.13 refuses grouped heads without the flag, 2.11 does not know the flag and needs none.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        _cumulative(segments.q_lens, query.device),
        _cumulative(segments.k_lens, query.device),
        max(segments.q_lens),
        max(segments.k_lens),
        **options,
    )
    assert isinstance(out, Tensor)
    return out[None]


def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


AttentionInterface.register(IMPLEMENTATION, segment_attention)
# Segments say what each token sees: transformers must build no mask of its own from the positions.
AttentionMaskInterface.register(IMPLEMENTATION, lambda *_args, **_kwargs: None)
