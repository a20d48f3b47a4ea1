"""The state that AdamW keeps for each parameter, in three forms, and their updates.

wide   a float32 master and float32 moments; a float32 parameter is its own master
split  a bfloat16 parameter and the 16 bits it lacks, together exactly a float32 master;
       float32 moments
lean   a bfloat16 parameter with stochastic rounding, and moments of 8 bits: each is a byte per
       weight and a base exponent per block

Stochastic rounding rounds up with the probability that makes the mean right. It depends on the
seed, the number of the update and the parameter name alone, so a resumed run draws the same
numbers. On CUDA the last two forms have their own kernels.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rather.arithmetic import ceil_div
from rather.optim.rounding import Rounding, exact, low_bits, rounded
from rather.optim.summing import SummingLinear

BLOCK = 256  # weights that share the base exponents of their lean moments
SMALL = 1 << 20  # weights of a parameter whose gradients wait for others
CHUNK = 1 << 22  # weights expanded to float32 at a time on the CPU; a multiple of BLOCK


@dataclass(frozen=True)
class Update:
    """The numbers of one update."""

    number: int  # updates done before
    lr: float
    beta1: float
    beta2: float
    eps: float
    gradient_scale: float  # clipping and loss scale
    seed: int

    def adamw(self, states: Sequence[ParameterState], *tensors: list[Tensor]) -> None:
        """Run torch's fused AdamW in place on weights, gradients, exp_avg, exp_avg_sq.

        The weights have the same decay.
        """
        weights, gradients, means, squares = tensors
        steps = torch.tensor([float(state.steps) for state in states])
        counts = list(steps.to(weights[0].device, non_blocking=True).unbind())
        adamw(
            weights, gradients, means, squares, [], counts, fused=True, amsgrad=False,
            maximize=False, lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps,
            weight_decay=states[0].decay,
        )  # fmt: skip

    def noise_seed(self, name: str) -> int:
        """Return the seed of the rounding noise of one parameter."""
        text = f"{self.seed} {self.number} {name}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class ParameterState:
    """One parameter with what AdamW keeps for it.

    `moments` are saved under these names. `steps` counts the updates in which the parameter had a
    gradient. `rest` is the lower 16 bits of the master of a split parameter, or the master of a
    wide float16 parameter.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        decay: float,
        *,
        lean: bool,
        start: Tensor | None,
        rounding: Rounding,
        sums: GradientSums,
        on_host: bool = False,
    ) -> None:
        """`on_host`: what AdamW keeps of a split parameter is made in host memory."""
        self.name = name
        self.parameter = parameter
        self.decay = decay
        self.rounding = rounding
        self.steps = 0
        self.rest: Tensor | None = None
        self.moments: dict[str, Tensor] = {}
        self.form: Literal["wide", "split", "lean"] = "wide"
        if rounding.applies(name, parameter):
            self.form = "lean" if lean else "split"
        elif parameter.dtype == torch.float16:
            self.rest = (parameter if start is None else start).detach().float()
        if self.form != "wide" and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()  # updates write to flat views
        weight = self.local
        if self.form == "split":
            begin = weight.float() if start is None else start.detach().to(weight.device)
            self.rest = rounding.split(name, weight, begin)
            if rounding.kind == "nearest":
                self.rest = _round_to_nearest(weight, begin)
        if on_host and self.rest is not None:
            self.rest = self.rest.cpu()
        self._make_moments("cpu" if on_host and self.form == "split" else weight.device)
        self.sum: Tensor | None = None  # without what `sums` has not added yet
        self._sums = sums
        self.linear: SummingLinear | None = None  # sums the gradient by itself
        self.sums_wide = parameter.dtype == torch.float16
        self.sums_wide |= self.form == "split" and parameter.dtype == torch.bfloat16
        if self.sums_wide:
            # A weak reference: the garbage collector does not see what hooks hold.
            this = weakref.ref(self)

            def add_to_sum(parameter: Tensor) -> None:
                if (state := this()) is not None and (grad := parameter.grad) is not None:
                    state._sums.add(state, grad)
                    parameter.grad = None

            register: Any = parameter.register_post_accumulate_grad_hook
            self.hook = register(add_to_sum)

    def _make_moments(self, device: torch.device | str) -> None:
        weight = self.local
        wide = torch.promote_types(self.parameter.dtype, torch.float32)
        for kind in ("exp_avg", "exp_avg_sq"):
            dtype = torch.uint8 if self.form == "lean" else wide
            self.moments[kind] = torch.zeros_like(weight, dtype=dtype, device=device)
            if self.form == "lean":
                blocks = ceil_div(weight.numel(), BLOCK)
                self.moments[f"{kind}_base"] = weight.new_zeros(blocks, dtype=torch.int16)

    @property
    def local(self) -> Tensor:
        """The part of the parameter on this rank; FSDP2 replaces it when it pads shards."""
        return local(self.parameter).detach()

    @property
    def gradient(self) -> Tensor | None:
        if self._sums.late:
            self._sums.complete()
        grad = self._wide_sum() if self.sums_wide else self.parameter.grad
        return None if grad is None else local(grad)

    def _wide_sum(self) -> Tensor | None:
        """Return the float32 sum: what the linear layer added, and what autograd gave besides.

        Autograd gives the gradients of a weight that is also used outside of its layer.
        """
        total = self.linear.total if self.linear else None
        if total is None:
            return self.sum
        if self.sum is not None:
            total.add_(self.sum)
            self.sum = None
        return total

    def zero_grad(self) -> None:
        self._sums.late.pop(self, None)
        self.sum = self.parameter.grad = None

    def stored(self) -> dict[str, Tensor]:
        """Return what AdamW keeps beside the parameter, by name."""
        return self.moments if self.rest is None else {"rest": self.rest, **self.moments}

    def store(self, name: str, tensor: Tensor) -> None:
        """Use another tensor with the same numbers for something that AdamW keeps."""
        if name == "rest":
            self.rest = tensor
        else:
            self.moments[name] = tensor

    def master(self) -> Tensor:
        """Return the weights as exactly as they are known, in float32."""
        if self.form == "lean":
            return self.local.float()
        if self.rest is None:
            return self.local
        if self.form == "wide":
            return self.rest
        weight = self.local
        return self.rounding.exact(self.name, weight, self.rest.to(weight.device))

    @property
    def master_dtype(self) -> torch.dtype:
        return torch.float32 if self.rest is not None or self.form == "lean" else self.local.dtype

    def load(self, master: Tensor, moments: Mapping[str, Tensor], steps: int) -> None:
        """Load master and moments; a weight that never had a gradient has no moments."""
        if self.form == "split":
            assert self.rest is not None
            self.rest.copy_(self.rounding.split(self.name, self.local, master))
        else:
            self.local.copy_(master)
            if self.rest is not None:
                self.rest.copy_(master)
        self.steps = steps
        for kind, moment in self.moments.items():
            moment.copy_(moments[kind]) if kind in moments else moment.zero_()


def _round_to_nearest(weight: Tensor, begin: Tensor) -> Tensor:
    """Round float32 weights into `weight` as torch does, and return the bits that it lacks.

    torch rounds exact halves to even, and a reference is rounded by torch. The master of such a
    half starts one float32 step lower.
    """
    weight.copy_(begin.bfloat16())
    upper = weight.bfloat16().view(torch.int16).int() << 16
    bits = begin.contiguous().view(torch.int32) - upper
    return bits.clamp_(-(1 << 15), (1 << 15) - 1).short()


class GradientSums:
    """Adds gradients to float32 sums; those of small parameters later, in a few kernels."""

    def __init__(self) -> None:
        self.late: dict[ParameterState, Tensor] = {}  # gradients that are not in a sum yet

    def add(self, state: ParameterState, grad: Tensor) -> None:
        if state in self.late:
            self.complete()
        if grad.numel() < SMALL and not isinstance(grad, DTensor):
            self.late[state] = grad
        else:
            state.sum = grad.float() if state.sum is None else state.sum.add_(grad)

    def complete(self) -> None:
        """Add the gradients that are late."""
        states = list(self.late)
        grads = list(self.late.values())
        self.late = {}
        wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        torch._foreach_copy_(wide, grads)
        later = [(s.sum, grad) for s, grad in zip(states, wide, strict=True) if s.sum is not None]
        if later:
            torch._foreach_add_([total for total, _ in later], [grad for _, grad in later])
        for state, first in zip(states, wide, strict=True):
            state.sum = first if state.sum is None else state.sum


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank: all of it, or its shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def update_parameters(
    states: Sequence[ParameterState],
    update: Update,
    prepared: Callable[[float], None] | None = None,
) -> None:
    """Update parameters that have a gradient; `prepared` those in half precision on CUDA."""
    _update_wide([state for state in states if state.form == "wide"], update)
    if prepared:
        return prepared(update.gradient_scale)
    for state in states:
        if state.form != "wide":
            _update_chunks(state, update)


def _update_wide(states: Sequence[ParameterState], update: Update) -> None:
    """Update parameters whose master is a tensor of its own, those of one decay at once."""
    if states and update.gradient_scale != 1.0:
        torch._foreach_mul_([_gradient(state) for state in states], update.gradient_scale)
    for decay in {state.decay for state in states}:
        same = [state for state in states if state.decay == decay]
        masters = [state.master() for state in same]
        gradients = [_gradient(state) for state in same]
        means = [state.moments["exp_avg"] for state in same]
        squares = [state.moments["exp_avg_sq"] for state in same]
        update.adamw(same, masters, gradients, means, squares)
    for state in states:
        if state.rest is not None:
            state.parameter.copy_(state.rest)


def _update_chunks(state: ParameterState, update: Update) -> None:
    """Update on the CPU, one chunk of float32 weights at a time."""

    def run_adamw(master: Tensor, gradient: Tensor, *moments: Tensor) -> None:
        scaled = gradient.float() * update.gradient_scale
        update.adamw([state], [master], [scaled], *([moment] for moment in moments))

    weights = state.local
    gradients = _gradient(state)
    if state.rest is not None:
        tensors = _chunks(CHUNK, weights, gradients, state.rest, *state.moments.values())
        for number, (weight, gradient, low, *moments) in enumerate(tensors):
            span = (number * CHUNK, number * CHUNK + weight.numel())
            thresholds = state.rounding.thresholds(state.name, state.local, *span)
            master = exact(weight, low, thresholds)
            run_adamw(master, gradient, *moments)
            weight.copy_(rounded(master, thresholds))
            low.copy_(low_bits(master))
        return
    codes, base, codes_sq, base_sq = state.moments.values()
    generator = torch.Generator().manual_seed(update.noise_seed(state.name))
    chunks = _chunks(CHUNK, weights, gradients, codes, codes_sq)
    bases = _chunks(CHUNK // BLOCK, base, base_sq)
    for (weight, gradient, mean, square), (mean_base, square_base) in zip(
        chunks, bases, strict=True
    ):
        wide = weight.float()
        exp_avg = decode(mean, mean_base, signed=True)
        exp_avg_sq = decode(square, square_base)
        run_adamw(wide, gradient, exp_avg, exp_avg_sq)
        noise = torch.empty(weight.shape, dtype=torch.int64).random_(generator=generator)
        weight.copy_(rounded(wide, (noise & 0xFFFF).int()))
        encode(exp_avg, (noise >> 16 & 0xFFFFF).int(), mean, mean_base, signed=True)
        encode(exp_avg_sq, (noise >> 36 & 0xFFFFF).int(), square, square_base)


def _gradient(state: ParameterState) -> Tensor:
    assert state.gradient is not None
    return state.gradient


def _chunks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return flat chunks of tensors of one size; writing to a chunk writes to its tensor."""
    return zip(*(torch.split(tensor.detach().reshape(-1), size) for tensor in tensors), strict=True)


# --- bits ---


def encode(
    values: Tensor, noise: Tensor, codes: Tensor, bases: Tensor, *, signed: bool = False
) -> None:
    """Store numbers as 5 exponent and 3 mantissa bits below the largest of their block.

    A sign takes one of the exponent bits; else the numbers must be >= 0. `noise` < 2**20 rounds.
    A number more than 2**32 (signed: 2**16) below the largest becomes the smallest code, which is
    0 if signed, else only in a block of small numbers.
    """
    bits = values.view(torch.int32)
    rounded = ((bits & 0x7FFFFFFF) + noise) >> 20
    filled = nn.functional.pad(rounded, (0, -len(rounded) % BLOCK))
    bases.copy_((filled.view(-1, BLOCK).amax(1) - (127 if signed else 255)).clamp_(min=0))
    codes.copy_((rounded - _spread(bases, rounded)).clamp_(min=0) + (bits < 0) * 128)


def decode(codes: Tensor, bases: Tensor, *, signed: bool = False) -> Tensor:
    size = codes.int() & (127 if signed else 255)
    values = ((size + _spread(bases, codes)) << 20).view(torch.float32)
    if not signed:
        return values
    return torch.where(size == 0, 0.0, torch.where(codes > 127, -values, values))


def _spread(bases: Tensor, like: Tensor) -> Tensor:
    return bases.int().repeat_interleave(BLOCK)[: len(like)]
