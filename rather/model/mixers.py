"""Linear attention, state space scans and short convolutions over packed segments.

A scan carries a state from token to token, so it cannot skip over what a packed row holds between a
prompt and its second answer. Here the model's own function runs over the path of each segment: the
keys that attention would gather, which are the tokens of one sequence in their order. The rows of
the segment itself are kept. Only the scan sees a shared prompt more than once; projections, MLP and
head, where the work is, do not.

transformers builds these layers from functions of the module of each family. They are replaced once
by functions that do as before until they are given segments. On a GPU one call of
flash-linear-attention's kernels takes all paths, if they are installed and right there; otherwise
the functions in torch take paths of similar length as a batch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from rather.data.batch import Segments

log = logging.getLogger(__name__)

SHORTEST = 64  # paths up to this length are one batch: the functions fill up to such chunks anyway
# Triton from the first to before the second computes wrong gradients of the gated delta rule on
# Hopper; flash-linear-attention refuses it, in the middle of a step.
WRONG_ON_HOPPER = ((3, 4, 0), (3, 7, 1))


@dataclass(frozen=True)
class _Scan:
    """A function of transformers that mixes tokens: its time dimension and tensors over time."""

    time: int
    places: tuple[int, ...]  # of tensors over time among the positional arguments
    names: tuple[str, ...] = ()  # of further ones among the keywords
    fused: Callable[..., Any] | None = None  # takes all paths at once on a GPU


def _convolution(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    segments: Segments,
    **_unused: Any,
) -> Tensor:
    """Return what a short convolution makes of `hidden` [1, D, N]."""
    paths = _on_paths(hidden.transpose(1, 2), segments)
    convolve = import_module("fla.modules.causal_conv1d").causal_conv1d
    mixed = convolve(paths, weight, bias, activation=activation, cu_seqlens=segments.path_ends)[0]
    return _own_rows(mixed, segments).transpose(1, 2)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    segments: Segments,
    use_qk_l2norm_in_kernel: bool = False,
    **_unused: Any,
) -> tuple[Tensor, None]:
    # The package tunes its own norm again, for many seconds, when the number of tokens changes.
    if use_qk_l2norm_in_kernel:
        query, key = _Unit.apply(query), _Unit.apply(key)
    tensors = [_on_paths(tensor, segments) for tensor in (query, key, value, g, beta)]
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    mixed: Tensor = rule(*tensors, cu_seqlens=segments.path_ends)[0]
    return _own_rows(mixed, segments), None


def _on_paths(tensor: Tensor, segments: Segments) -> Tensor:
    """Return [1, K, ...], the paths of all segments, from a tensor [1, N, ...] of all tokens."""
    paths: Tensor = _OnPaths.apply(tensor[0].flatten(1), segments)
    return paths.view(1, -1, *tensor.shape[2:])


def _own_rows(mixed: Tensor, segments: Segments) -> Tensor:
    """Return [1, N, ...], the rows of the segments themselves, from those of all paths."""
    rows: Tensor = _OwnRows.apply(mixed[0].flatten(1), segments)
    return rows.view(1, -1, *mixed.shape[2:])


# Both ways with kernels of their own: torch's gathers are several times as slow, and their
# gradients add up in another order each time.
class _OnPaths(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_ND: Tensor, segments: Segments) -> Tensor:
        from rather.model.kernels import gather_rows

        ctx.segments = segments
        return gather_rows(tokens_ND, segments.key_index_K)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from rather.model.kernels import sum_rows

        return sum_rows(grads[0], ctx.segments.order_K, ctx.segments.start_N), None


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, paths_KD: Tensor, segments: Segments) -> Tensor:
        from rather.model.kernels import gather_rows

        ctx.segments = segments
        return gather_rows(paths_KD, segments.own_place_N)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from rather.model.kernels import gather_rows

        return gather_rows(grads[0], ctx.segments.own_row_K), None


class _Unit(torch.autograd.Function):
    """Vectors of length one: computed in float32, and only the result is kept."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        if vectors.is_cuda:
            from rather.model.kernels import unit_vectors

            unit, inverse = unit_vectors(vectors)
        else:
            exact = vectors.float()
            inverse = torch.rsqrt(exact.square().sum(-1, keepdim=True) + 1e-6)
            unit = (exact * inverse).to(vectors.dtype)
        ctx.save_for_backward(unit, inverse)
        return unit

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        unit, inverse = ctx.saved_tensors
        if unit.is_cuda:
            from rather.model.kernels import unit_vectors_gradient

            return unit_vectors_gradient(grads[0], unit, inverse)
        exact, grad = unit.float(), grads[0].float()
        across = grad - exact * (exact * grad).sum(-1, keepdim=True)
        return (inverse * across).to(unit.dtype)


SCANS = {
    "causal_conv1d_fn": _Scan(2, (0,), fused=_convolution),
    "torch_chunk_gated_delta_rule": _Scan(1, (0, 1, 2), ("g", "beta"), _delta_rule),
    "mamba2_chunk_scan": _Scan(1, (0, 1, 3, 4)),
}


def has_scans(model: nn.Module) -> bool:
    """Return whether layers of a model carry a state from token to token."""
    return any(_scans_of(module) for module in _modules(model))


def mix_over_paths(model: nn.Module) -> None:
    """Let the scans of a model's family take segments."""
    for module in _modules(model):
        for name in _scans_of(module):
            function = getattr(module, name)
            if not hasattr(function, "over_paths"):
                setattr(module, name, _over_paths(function, SCANS[name]))


def report_scan(model: nn.Module, device: str) -> None:
    """Say once which implementation scans tokens on a GPU, before the first step."""
    functions = {name for module in _modules(model) for name in _scans_of(module)}
    if device.startswith("cuda") and any(SCANS[name].fused for name in functions):
        _report(fused_problem(torch.device(device)))


@cache
def _report(problem: str) -> None:
    if problem:
        log.warning("convolutions and linear attention run in torch's own functions: %s", problem)
    else:
        log.info("convolutions and linear attention run in flash-linear-attention's kernels")


@cache
def fused_problem(device: torch.device) -> str:
    """Return why flash-linear-attention's kernels cannot train on a GPU; "" if they can."""
    try:
        import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        return f"flash-linear-attention is not installed ({error}); install rather[linear]"
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    triton = tuple(int(digits) for digits in version("triton").split("+")[0].split(".")[:3])
    first, fixed = WRONG_ON_HOPPER
    if is_hopper and first <= triton < fixed and not _is_installed("tilelang"):
        return (
            f"Triton {version('triton')} computes wrong gradients of the gated delta rule on this "
            "GPU; install Triton 3.7.1 or newer, or tilelang"
        )
    return ""


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _modules(model: nn.Module) -> list[Any]:
    """Return the Python modules of transformers that define the parts of a model."""
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.")]


def _scans_of(module: Any) -> list[str]:
    return [name for name in SCANS if callable(getattr(module, name, None))]


def _over_paths(function: Callable[..., Any], scan: _Scan) -> Callable[..., Any]:
    plain_function = unwrap(function)  # transformers takes other packages' kernels even on a CPU

    @wraps(function)
    def mixer(*args: Any, segments: Segments | None = None, **kwargs: Any) -> Any:
        if segments is None:
            return function(*args, **kwargs)
        return _run(plain_function, scan, args, kwargs, segments)

    mixer.over_paths = True  # type: ignore[attr-defined]
    return mixer


# Lengths are Python numbers, and the functions loop over chunks: each micro-batch would be compiled
# again.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(
    function: Callable[..., Any],
    scan: _Scan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    segments: Segments,
) -> Any:
    is_known = kwargs.get("activation") in (None, "silu", "swish")
    if scan.fused and is_known and args[0].is_cuda and not fused_problem(args[0].device):
        return scan.fused(*args, segments=segments, **kwargs)
    values = [args[index] for index in scan.places]
    names = [name for name in scan.names if isinstance(kwargs.get(name), Tensor)]
    values += [kwargs[name] for name in names]
    count = len(scan.places)

    def one_batch(paths: list[Tensor]) -> Any:
        mixed = list(args)
        for index, path in zip(scan.places, paths[:count], strict=True):
            mixed[index] = path
        by_name = dict(zip(names, paths[count:], strict=True))
        return function(*mixed, **{**kwargs, **by_name})

    return _in_batches(one_batch, scan.time, values, segments)


def _in_batches(
    run: Callable[[list[Tensor]], Any], time: int, values: list[Tensor], segments: Segments
) -> Any:
    """Run paths of similar length as one batch, filled up behind their ends, which no row sees."""
    paths = segments.key_index_K.split(segments.k_lens)
    batches: dict[int, list[int]] = {}
    for number, length in enumerate(segments.k_lens):
        batches.setdefault(max(SHORTEST, length - 1).bit_length(), []).append(number)
    rows: dict[int, Tensor] = {}
    has_state = False
    # The functions return (output, state) if they can return a state at all.
    for numbers in batches.values():
        index = nn.utils.rnn.pad_sequence([paths[number] for number in numbers], batch_first=True)
        mixed = run([_gathered(tensor, time, index) for tensor in values])
        if isinstance(mixed, tuple):
            has_state, mixed = True, mixed[0]
        for row, number in enumerate(numbers):
            length, end = segments.q_lens[number], segments.k_lens[number]
            rows[number] = mixed[row : row + 1].narrow(time, end - length, length)
    joined = torch.cat([rows[number] for number in range(len(paths))], dim=time)
    return (joined, None) if has_state else joined


def _gathered(value: Tensor, time: int, index: Tensor) -> Tensor:
    """Return [paths, ...] from a tensor [1, ...] of all tokens; `index` is [paths, tokens]."""
    flat = value[0].index_select(time - 1, index.flatten())
    by_path: Tensor = flat.unflatten(time - 1, index.shape)
    return by_path.movedim(time - 1, 0)
