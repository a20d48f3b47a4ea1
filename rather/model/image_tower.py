"""Vision towers that take the patches of an image as one sequence: fewer launches, no waiting.

transformers calls attention once for each window of an image and asks the device for the length of
each of them in every layer: for an image of 448 x 448 pixels that takes longer than its arithmetic.
Here one kernel serves all windows, and what follows from the size of an image is computed once for
each size, on the host.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils.generic import get_max_seqlen
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

# transformers passes the lengths of windows only to an implementation with "flash" in its name.
IMPLEMENTATION = "rather_flash_windows"


def arrange_tower(tower: Any) -> None:
    """Let a tower of packed patches run with few launches."""
    tower.config._attn_implementation = IMPLEMENTATION
    tower.patch_embed.forward = MethodType(_embed_patches, tower.patch_embed)


def _embed_patches(patch_embed: Any, patches: Tensor) -> Tensor:
    """Embed patches by a product: it is the same as their convolution, which can be far slower."""
    convolution = patch_embed.proj
    weight = convolution.weight.flatten(1)
    return F.linear(patches.to(weight.dtype), weight, convolution.bias)


def window_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None = None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """query, key, value [1, H, N, D] -> [1, N, H, D]; a window or image attends to itself alone."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and is_half and query.shape[-1] % 8 == 0:
        by_token = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
        lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        without_dropout = (0.0, False, False)  # nor a causal or a debug mask
        attended, *_ = torch.ops.aten._flash_attention_forward(
            *by_token, *lengths, *without_dropout, scale=scaling
        )
        return attended[None], None
    window_sizes = cu_seq_lens_q.diff().tolist()
    windows = zip(*(x.split(window_sizes, dim=2) for x in (query, key, value)), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in windows]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, window_attention)


def tower_layout(tower: Any, grid: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """Return the arguments of a tower that it would compute from the grid of an image."""
    grid_thw = torch.tensor([grid])
    merge_size = tower.spatial_merge_size
    cu_seqlens, max_seqlen = get_vision_attention_seqlens(grid_thw, tower.config)
    layout = {
        "position_ids": get_vision_position_ids(grid_thw, merge_size),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
    }
    if hasattr(tower, "window_size"):
        index, cu_windows = get_vision_window_index(
            grid_thw, merge_size, tower.window_size, tower.patch_size
        )
        layout |= {"window_index": index, "cu_window_seqlens": cu_windows}
        layout["max_window_seqlen"] = get_max_seqlen(cu_windows, tower.config)
    else:
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid_thw,
            tower.num_grid_per_side,
            tower.interpolation_mode,
            tower.interpolation_align_corners,
            merge_size,
        )
        layout |= {"interp_indices": indices, "interp_weights": weights}
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in layout.items()
    }
