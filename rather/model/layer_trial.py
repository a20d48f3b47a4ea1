"""What the layers of a family keep of a micro-batch, found by running them without memory.

The formulas of memory.py are those of plain decoders. Scans, sinks, latent attention and experts
keep other tensors. Here one layer of each kind runs forward and backward on fake tensors, and the
bytes of all living tensors are counted. A GPU need not be there: only attention differs on it.
Scans are counted as torch's own functions; the kernels of flash-linear-attention keep less.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface

from rather.config.schema import ModelArgs
from rather.data.batch import PairBatch, TokenPair
from rather.data.pack import pack
from rather.model.budget import LADDER
from rather.model.check import random_pairs
from rather.model.layers import layers_of
from rather.model.policy import PolicyModel
from rather.model.sizes import LAYER, Sizes, few_layers, sizes_of
from rather.model.towers import set_attention

TOKENS = 1024  # of the micro-batch that is tried
ON_GPU = "rather_trial"  # attention that keeps what the kernel of a GPU keeps
PLAIN = re.compile(
    r"(self_attn|mlp|attn|attention)\.([qkvo]_proj|[qk]_norm|gate_proj|up_proj|down_proj|qkv_proj"
    r"|gate_up_proj|gate|c_attn|c_proj|c_fc|experts(\.[a-z_]+)?|dense)$"
    r"|^[a-z_]*(norm|ln_\d)[a-z_]*$"
)


@dataclass(frozen=True)
class LayerTrial:
    """Bytes per token of a decoder layer, if nothing is recomputed."""

    kept: float  # until the backward pass; the mean of all layers
    passing: float  # beyond that, for a moment of the forward or the backward pass


def is_plain(sizes: Sizes) -> bool:
    """Return whether all layers consist of what the formulas count."""
    names = [LAYER.split(name)[-1] for name in sizes.shapes if LAYER.search(name)]
    modules = {name.removesuffix(".weight").removesuffix(".bias") for name in names}
    return len(set(_kinds(sizes))) == 1 and all(PLAIN.search(module) for module in modules)


def _kinds(sizes: Sizes) -> list[tuple[Any, ...]]:
    """Return the parameters of each layer: layers that have the same are of one kind."""
    layers: dict[int, list[Any]] = {}
    for name, shape in sizes.shapes.items():
        if match := LAYER.search(name):
            layers.setdefault(int(match[1]), []).append((name[match.end() :], shape))
    return [tuple(layers.get(layer, ())) for layer in range(sizes.layers)]


def try_layers(
    name: str, args: ModelArgs, kind: str, itemsize: int, pairs: Sequence[TokenPair]
) -> LayerTrial:
    """Return what the layers of a model keep of such pairs on a kind of device."""
    lengths = []
    for pair in pairs:
        (chosen, _), (second, _) = pair.answers
        lengths.append((len(pair.prompt), len(chosen), len(second)))
    return _try_layers(name, type(args), args.model_dump_json(), kind, itemsize, tuple(lengths))


@lru_cache(16)  # forecasts of several settings need the same
def _try_layers(
    name: str,
    kind_of_args: type[ModelArgs],
    written_args: str,
    kind: str,
    itemsize: int,
    lengths: Sequence[tuple[int, int, int]],
) -> LayerTrial:
    args = kind_of_args.model_validate_json(written_args)
    sizes = sizes_of(name, args)
    kinds = _kinds(sizes)
    count = 1 + max(kinds.index(layer_kind) for layer_kind in set(kinds))
    batch = pack(random_pairs(sizes.vocabulary, lengths), TOKENS, ladder=LADDER[kind])[0]
    tokens, lengths_known = len(batch.ids_N), _lengths(batch)
    # In the precision of the run: a conversion of float32 to float32 makes no copy.
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    live = _LiveBytes()
    kept: list[int] = []
    inputs: list[weakref.ref[Any]] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy = PolicyModel(few_layers(name, args, count, "cpu", dtype))
        if kind == "cuda":
            set_attention(policy.causal_lm, ON_GPU)
        for parameter in policy.parameters():
            if parameter.requires_grad:  # the gradients are counted elsewhere
                register: Any = parameter.register_post_accumulate_grad_hook
                register(_forget_gradient)
        for layer in layers_of(policy):
            layer.register_forward_pre_hook(lambda *_: kept.append(live.now))
            layer.register_forward_hook(lambda *_: kept.append(live.now - kept.pop()))
            layer.register_forward_pre_hook(lambda _layer, given: inputs.append(_storage(given[0])))
        live.leave_out([*policy.parameters(), *policy.buffers()])
        fake_batch = batch.to("cpu")
        fake_batch.segments.__dict__.update(lengths_known)  # fake tensors have no numbers
        with live:
            hidden = policy.hidden(fake_batch)
            forward = live.now
            for layer_number, storage in enumerate(inputs):
                if storage() is None:  # it lived until the layer returned
                    kept[layer_number] -= sizes.hidden * itemsize * tokens
            hidden.sum().backward()
    by_kind = dict(zip(kinds, kept, strict=False))
    mean = sum(by_kind[layer_kind] for layer_kind in kinds) / len(kinds)
    return LayerTrial(mean / tokens, (live.most - forward) / tokens)


def _storage(tensor: Tensor) -> weakref.ref[Any]:
    return weakref.ref(tensor.untyped_storage())


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _lengths(batch: PairBatch) -> dict[str, list[int]]:
    return {"q_lens": batch.segments.q_lens, "k_lens": batch.segments.k_lens}


class _OneKernel(torch.autograd.Function):
    """Keeps what the attention kernel of a GPU keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        _one, heads, tokens, _width = query.shape
        attended = query.new_empty(1, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, attended)
        return attended

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def _attend_on_gpu(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any = None, **_unused: Any
) -> tuple[Tensor, None]:
    attended: Tensor = _OneKernel.apply(query, key, value)
    return attended, None


AttentionInterface.register(ON_GPU, _attend_on_gpu)
AttentionMaskInterface.register(ON_GPU, lambda *_args, **_kwargs: None)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Do not count what lives anyway; autograd keeps views of the weights."""
        self._counted.update(tensor.untyped_storage() for tensor in tensors)

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator is torch.ops.aten._grouped_mm.default:  # fake tensors must be bfloat16
            left, right, *more = args
            output = operator(left.bfloat16(), right.bfloat16(), *more, **(kwargs or {}))
            output = output.to(left.dtype)
        else:
            output = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return output

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._counted:
            return
        self._counted.add(storage)
        size = storage.nbytes()
        weakref.finalize(storage, self._free, size)
        self.now += size
        self.most = max(self.most, self.now)

    def _free(self, size: int) -> None:
        self.now -= size
