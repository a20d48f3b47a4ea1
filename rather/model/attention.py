"""Attention over segments: each sees its own gathered keys, causal from the bottom right.

Registered with transformers under the name `rather`, so the model files stay Hugging Face's own.
CUDA in half precision runs one variable-length kernel (FlashAttention 4 if it is installed, else
torch's own), also with attention sinks; everything else (CPU, float32, soft-capped families) loops
over segments.

If ranks divide the tokens of a micro-batch, each gathers all keys and values for its own queries.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rather.data.batch import Segments
from rather.model.collectives import Group, gather

IMPLEMENTATION = "rather"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpreadSegments(Segments):
    """Segments of one rank's tokens; key indices count the concatenated tokens of all ranks."""

    group: Group


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
    """query [1, H, N, D], key [1, Hkv, N, D], value [1, Hkv, N, V] -> [1, N, H, V]."""
    if isinstance(segments, SpreadSegments):  # one message; backward sums the ranks' gradients
        keys_and_values = gather(torch.cat([key, value], dim=-1), 2, segments.group)
        key, value = keys_and_values.split([key.shape[-1], value.shape[-1]], dim=-1)
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        query = _scaled_by_position(module, query, segments)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not softcap:
        return _varlen(query, key, value, segments, scale, sliding_window, s_aux), None
    return _one_by_one(query, key, value, segments, scale, sliding_window, softcap, s_aux), None


def _scaled_by_position(module: Any, query: Tensor, segments: Segments) -> Tensor:
    """Scale queries by their position in the sequence. Llama 4 has scaled them by their row."""
    rows = torch.arange(query.shape[2], device=query.device)
    segment = torch.searchsorted(segments.cu_q[1:-1], rows, right=True)
    own_keys = segments.cu_k.diff() - segments.cu_q.diff()
    positions = rows - segments.cu_q[segment] + own_keys[segment]

    floor_scale, attn_scale = float(module.floor_scale), float(module.attn_scale)

    def scale(places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places + 1.0) / floor_scale)) * attn_scale + 1

    factor = scale(positions) / scale(rows)
    return (query * factor[:, None]).to(query.dtype)


# --- CPU, float32, soft-caps: one segment after another ---


# The lengths are Python numbers: each micro-batch would be compiled again.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    by_segment = [query.split(segments.q_lens, dim=2)]
    for gathered in (key, value):
        of_keys = gathered.index_select(2, segments.key_index_K)
        by_segment.append(of_keys.split(segments.k_lens, dim=2))
    tensors = zip(*by_segment, strict=True)
    attended = [_attend(q, k, v, scale, window, cap, sinks) for q, k, v in tensors]
    return torch.cat(attended, dim=2).transpose(1, 2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with one segment. `sinks` [H] are scores of a key without a value, one per head."""
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    is_plain = not cap and sinks is None
    if is_plain and queries == keys and (window is None or window >= keys):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1
        )
    behind = torch.arange(keys - queries, keys, device=q.device)[:, None]
    behind = behind - torch.arange(keys, device=q.device)
    mask = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    if is_plain:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=group > 1
        )
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    logits = q @ k.transpose(2, 3) * scale
    if cap:
        logits = torch.tanh(logits / cap) * cap
    logits = logits.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if sinks is not None:
        total = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
        weights = weights * torch.sigmoid(total - sinks.float().view(1, -1, 1, 1))
    return weights.to(q.dtype) @ v


# --- CUDA: one kernel for all segments ---


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    s: Segments,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    # The kernels take one width for all three, but with multi-head latent attention keys are wider
    # than values. Zeros add nothing to a score, and further columns of the output are cut off.
    width = max(query.shape[-1], value.shape[-1])
    by_token = [_widened(x[0].transpose(0, 1), width) for x in (query, key, value)]
    layout = (s.key_index_K, s.order_K, s.start_N, s.cu_q, s.cu_k, s.max_q, s.max_k)
    window_left = -1 if window is None else window - 1
    attended: Tensor = _SegmentAttention.apply(*by_token, sinks, *layout, scale, window_left)
    own_width = value.shape[-1]
    return (attended if own_width == width else attended[..., :own_width])[None]


def _widened(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


# Gather and kernel are one operator, so that a compiler sees neither the number of gathered keys
# nor the sum over their gradients, which it would turn into slow atomic additions. torch's own
# `varlen_attn` calls the same kernels, but its option for grouped heads changes between releases.
_operators = torch.library.Library("rather", "FRAGMENT")
_PLACES = (
    "Tensor key_index, Tensor order, Tensor start, Tensor cu_q, Tensor cu_k, SymInt max_q, "
    "SymInt max_k, float scale, SymInt left"
)
_operators.define(
    f"segment_attention(Tensor query, Tensor key, Tensor value, {_PLACES}) -> (Tensor, Tensor)"
)
_operators.define(
    "segment_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor lse, {_PLACES}) -> (Tensor, Tensor, Tensor)"
)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_index: Tensor,
    _order: Tensor,
    _start: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """query [N, H, D], key and value [N, Hkv, D] -> out [N, H, D], log-sum-exp [H, N]."""
    from rather.model.kernels import gather_by_key

    tensors = query.contiguous(), *gather_by_key(key, value, key_index)
    if flash4 := _newest(query, *rest):
        attended, lse, *_ = flash4._flash_attn_fwd(*tensors, return_lse=True, **_options_4(*rest))
    else:
        attended, lse, *_ = torch.ops.aten._flash_attention_forward(
            *tensors, *_arguments(*rest), **_options(*rest)
        )
    return attended, lse


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    key_index: Tensor,
    order: Tensor,
    start: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    from rather.model.kernels import gather_by_key, sum_by_key

    tensors = query.contiguous(), *gather_by_key(key, value, key_index)
    if flash4 := _newest(query, *rest):
        d_query, d_key, d_value = flash4._flash_attn_bwd(
            *tensors, out, grad.contiguous(), lse, **_options_4(*rest)
        )
    else:
        arguments = (*_arguments(*rest)[:-1], *[_no_dropout(grad.device)] * 2)
        d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), *tensors, out, lse, *arguments, **_options(*rest)
        )
    return d_query, *sum_by_key(d_key, d_value, order, start)


@cache
def flash_attention_4(device: torch.device, head_size: int) -> Any:
    """Return the kernels of FlashAttention 4, or None if torch's own run.

    They need Hopper or Blackwell, and fail on very small heads.
    """
    if torch.cuda.get_device_capability(device)[0] not in (9, 10) or head_size not in (64, 128):
        return None
    # A kernel takes seconds to compile, so it is kept. The default folder is below /tmp.
    folder = Path(torch.hub.get_dir()).with_name("flash_attention_4")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    warnings.filterwarnings("ignore", "Argument aux_data")
    try:
        return import_module("flash_attn.cute.interface")
    except ImportError as error:
        if not str(error.name).startswith("flash_attn"):
            log.warning(
                "FlashAttention 4 is installed but cannot be imported; using torch's kernels: %s",
                error,
            )
        return None


def _newest(query: Tensor, *numbers: Any) -> Any:
    """Return FlashAttention 4, or None for what it was not tested with: windows, determinism."""
    if numbers[-1] >= 0 or torch.are_deterministic_algorithms_enabled():
        return None
    return flash_attention_4(query.device, query.shape[-1])


def _options_4(
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, _left: int
) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
        "softmax_scale": scale,
        "causal": True,
    }


@cache  # a launch for each layer otherwise
def _no_dropout(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.uint64, device=device)


def _arguments(
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, _scale: float, left: int
) -> tuple[Any, ...]:
    """Return the arguments behind the tensors: without dropout, causal, no debug mask."""
    # With a sliding window, window_size_right=0 makes it causal.
    return cu_q, cu_k, max_q, max_k, 0.0, left < 0, False


def _options(*numbers: Any) -> dict[str, Any]:
    *_, scale, window_left = numbers
    return {"scale": scale, "window_size_left": window_left, "window_size_right": 0}


def _fake_forward(query: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), lse


def _fake_backward(_grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in rest[:3])


for _name, _real, _fake in (
    ("segment_attention", _forward, _fake_forward),
    ("segment_attention_backward", _backward, _fake_backward),
):
    _operators.impl(_name, _real, "CUDA")
    torch.library.register_fake(f"rather::{_name}", _fake, lib=_operators)


class _SegmentAttention(torch.autograd.Function):
    """The operators with their gradient: `torch.library.register_autograd` takes longer to call.

    A sink is one more key without a value. It enters the sum over all keys, so the output is scaled
    by the share of the others. Given that sum, the kernel's gradients are right as they are.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *places: Any
    ) -> Tensor:
        attended, lse = torch.ops.rather.segment_attention(query, key, value, *places)
        if sinks is not None:
            score = sinks.float()[:, None]
            share = torch.sigmoid(lse - score)
            attended = (attended.float() * share.t()[..., None]).to(attended.dtype)
            lse = torch.logaddexp(lse, score)
        ctx.save_for_backward(query, key, value, attended, lse, sinks, *places[:5])
        ctx.numbers = places[5:]
        return attended  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, attended, lse, sinks, *layout = ctx.saved_tensors
        gradients = torch.ops.rather.segment_attention_backward(
            grads[0], query, key, value, attended, lse, *layout, *ctx.numbers
        )
        of_sinks = None
        if sinks is not None:
            along = (grads[0].float() * attended.float()).sum(-1).t()
            weight = torch.exp(sinks.float()[:, None] - lse)
            of_sinks = -(weight * along).sum(1).to(sinks.dtype)
        return (*gradients, of_sinks, *[None] * 9)


AttentionInterface.register(IMPLEMENTATION, segment_attention)
# Segments define what each token sees: transformers must not build a mask from the positions.
AttentionMaskInterface.register(IMPLEMENTATION, lambda *_args, **_kwargs: None)
