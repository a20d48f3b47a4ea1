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


def _delta_rule(
    paths: list[Tensor], cu: Tensor, *, g: Tensor, beta: Tensor, **options: Any
) -> Tensor:
    query, key, value = paths
    # The package tunes its own norm again, for many seconds, when the number of tokens changes.
    if options.get("use_qk_l2norm_in_kernel"):
        query, key = _Unit.apply(query), _Unit.apply(key)
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    mixed: Tensor = rule(query, key, value, g=g, beta=beta, cu_seqlens=cu.long())[0]
    return mixed


class _Unit(torch.autograd.Function):
    """Vectors of length one: computed in float32, and only the result is kept."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        exact = vectors.float()
        inverse = torch.rsqrt(exact.square().sum(-1, keepdim=True) + 1e-6)
        unit = (exact * inverse).to(vectors.dtype)
        ctx.save_for_backward(unit, inverse)
        return unit

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        unit, inverse = ctx.saved_tensors
        unit, grad = unit.float(), grads[0].float()
        across = grad - unit * (unit * grad).sum(-1, keepdim=True)
        return (inverse * across).to(grads[0].dtype)


SCANS = {
    "causal_conv1d_fn": _Scan(2, (0,)),
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
        log.warning("linear attention runs in torch's own functions: %s", problem)
    else:
        log.info("linear attention runs in the kernels of flash-linear-attention")


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
    # The functions return (output, state) if they can return a state at all.
    values = [args[index] for index in scan.places]
    names = [name for name in scan.names if isinstance(kwargs.get(name), Tensor)]
    values += [kwargs[name] for name in names]
    count = len(scan.places)
    if scan.fused and values[0].is_cuda and not fused_problem(values[0].device):
        paths = [tensor.index_select(scan.time, segments.key_index_K) for tensor in values]
        by_name = dict(zip(names, paths[count:], strict=True))
        output = scan.fused(paths[:count], segments.cu_k, **{**kwargs, **by_name})
        return output.index_select(scan.time, _own_places(segments)), None

    def one_batch(paths: list[Tensor]) -> Any:
        mixed = list(args)
        for index, path in zip(scan.places, paths[:count], strict=True):
            mixed[index] = path
        by_name = dict(zip(names, paths[count:], strict=True))
        return function(*mixed, **{**kwargs, **by_name})

    return _in_batches(one_batch, scan.time, values, segments)


def _own_places(segments: Segments) -> Tensor:
    """Return where the rows of all segments are among the gathered keys; without waiting."""
    rows = torch.arange(len(segments.start_N) - 1, device=segments.cu_q.device)
    segment = torch.searchsorted(segments.cu_q[1:-1], rows, right=True)
    return rows + (segments.cu_k - segments.cu_q)[segment + 1]


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
