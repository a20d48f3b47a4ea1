"""Vision towers that take the patches of an image as one sequence: fewer launches, no waiting.

transformers calls attention once for each window of an image and asks the device for the length of
each of them in every layer: for an image of 448 x 448 pixels that takes longer than its arithmetic.
Here one kernel serves all windows, and what follows from the size of an image is computed once for
each size, on the host.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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

log = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
OFTEN = 8  # images of a size after which a graph for it pays: recording takes as long as ten images
MOST_GRAPHS = 32  # each holds the patches and features of one image

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
    if query.is_cuda and query.dtype in HALF and query.shape[-1] % 8 == 0:
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


@dataclass(frozen=True)
class _Graph:
    """Recorded launches, and where they read patches and leave features."""

    graph: torch.cuda.CUDAGraph
    patches: Tensor
    features: Tensor
    compute: Callable[[Tensor], Tensor]  # holds other tensors that the launches read

    def replay(self, patches: Tensor) -> Tensor:
        self.patches.copy_(patches)
        self.graph.replay()
        return self.features.clone()


class TowerGraphs:
    """Runs a frozen tower on a GPU with one launch, for sizes of images that come often.

    The tower is more than a thousand short kernels, which take longer to launch than to run. A CUDA
    graph launches them all at once. They are the same kernels for the same number of patches, so
    features keep their bits.
    """

    def __init__(self, tower: nn.Module) -> None:
        self.tower = tower
        self.is_possible = True
        self.graphs: dict[tuple[int, ...], _Graph] = {}
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._addresses: list[int] = []  # of the weights that the graphs read
        self._pool: Any = None  # memory of all graphs, of which one runs at a time

    def run(
        self, grid: tuple[int, ...], patches: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the features that `compute` makes of the patches of an image of this size."""
        if not (patches.is_cuda and self.is_possible and self._has_fixed_weights()):
            return compute(patches)
        self._seen[grid] += 1
        is_full = len(self.graphs) == MOST_GRAPHS
        if grid not in self.graphs and not is_full and self._seen[grid] > OFTEN:
            self._record(grid, patches, compute)
        if grid not in self.graphs:
            return compute(patches)
        return self.graphs[grid].replay(patches)

    def _has_fixed_weights(self) -> bool:
        """Return whether no weight trains, is divided or has moved since graphs were recorded."""
        weights = list(self.tower.parameters())
        if any(weight.requires_grad or type(weight) is not nn.Parameter for weight in weights):
            return False
        if weights[0].dtype not in HALF:  # attention then asks for the lengths of windows
            return False
        addresses = [weight.data_ptr() for weight in weights]
        if self.graphs and addresses != self._addresses:
            self.is_possible = False  # they wait on the host between turns: each brings new ones
            self.graphs.clear()
        self._addresses = addresses
        return self.is_possible

    def _record(
        self, grid: tuple[int, ...], patches: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> None:
        stream = torch.cuda.current_stream(patches.device)
        graph, own_patches = torch.cuda.CUDAGraph(), patches.clone()
        try:
            # Other threads, such as the one that stores features, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                features = compute(own_patches)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own one
            self.is_possible = False
            reason = str(error).splitlines()[0]
            log.warning("the vision tower runs without CUDA graphs, which is slower: %s", reason)
            return
        self._pool = graph.pool()
        self.graphs[grid] = _Graph(graph, own_patches, features, compute)
