"""The state that AdamW keeps for each parameter, in three forms, and one update of each.

wide   a float32 master and float32 moments; a float32 parameter is its own master
split  a bfloat16 parameter and the 16 bits it lacks, together exactly a float32 master;
       float32 moments
lean   a bfloat16 parameter with stochastic rounding, and moments of 8 bits

Stochastic rounding rounds up with the probability that makes the mean right. It depends on the
seed, the number of the update and the parameter name alone, so a resumed run draws the same
numbers. On CUDA the last two forms have their own kernels.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

BLOCK = 256  # weights that share the base exponents of their lean moments
CHUNK = 1 << 22  # weights that are float32 at a time on the CPU; a multiple of BLOCK


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

    def adamw(
        self, weights: list[Tensor], grads: list[Tensor], moments: list[list[Tensor]], decay: float
    ) -> None:
        """Run torch's fused AdamW in place; `moments` are exp_avg, exp_avg_sq and step counts."""
        adamw(
            weights, grads, moments[0], moments[1], [], moments[2],
            fused=True, amsgrad=False, maximize=False,
            lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps, weight_decay=decay,
        )  # fmt: skip

    def noise_seed(self, name: str) -> int:
        """Return the seed of the rounding noise of one parameter."""
        text = f"{self.seed} {self.number} {name}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class ParameterState(ABC):
    """One parameter with what AdamW keeps for it.

    `moments` are saved by these names. `steps` counts the updates in which the parameter had a
    gradient.
    """

    moments: dict[str, Tensor]

    def __init__(
        self, name: str, parameter: nn.Parameter, *, decay: float, wide_gradient: bool
    ) -> None:
        self.name, self.parameter, self.decay = name, parameter, decay
        self.steps = 0
        self._sum: Tensor | None = None
        self._sums_wide = wide_gradient and parameter.dtype in (torch.bfloat16, torch.float16)
        if self._sums_wide:
            # A weak reference: the garbage collector does not see what hooks hold, and would never
            # free it.
            this = weakref.ref(self)

            def add(_parameter: Tensor) -> None:
                if (state := this()) is not None:
                    state._add_gradient()

            self._hook = parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def _add_gradient(self) -> None:
        """Add the gradient of a micro-batch to the sum in float32."""
        grad = self.parameter.grad
        assert grad is not None
        self._sum = grad.float() if self._sum is None else self._sum.add_(grad)
        self.parameter.grad = None

    @property
    def gradient(self) -> Tensor | None:
        grad = self._sum if self._sums_wide else self.parameter.grad
        return None if grad is None else local_part(grad)

    def zero_grad(self) -> None:
        self._sum = self.parameter.grad = None

    def narrow_gradient(self) -> bool:
        """Sum micro-batches in the parameter's own dtype from now on; return if that changed."""
        changed = self._sums_wide
        if changed:
            self._hook.remove()
            self._sums_wide = False
        return changed

    @property
    def gradient_bytes(self) -> int:
        own = local_part(self.parameter)
        return own.numel() * (4 if self._sums_wide else own.element_size())

    @property
    def state_bytes(self) -> int:
        """Return the size of the moments, and of a master beyond the parameter."""
        other = ("parameter", "_sum", "step")  # a step is a count for torch's AdamW
        kept = [value for name, value in vars(self).items() if name not in other]
        tensors = [*self.moments.values(), *(t for t in kept if isinstance(t, Tensor))]
        return sum(local_part(tensor).nbytes for tensor in tensors)

    @abstractmethod
    def master(self) -> Tensor:
        """Return the weights as exactly as they are known, in float32."""

    @abstractmethod
    def load_master(self, master: Tensor) -> None: ...

    def load_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Load saved moments; a weight that never had a gradient has none."""
        self.steps = steps
        for kind, own in self.moments.items():
            if kind in moments:
                own.copy_(moments[kind])
            else:
                own.zero_()


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank: all of it, or its shard."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


class WideState(ParameterState):
    """A float32 (or float64) master; a separate one only if the parameter is narrower."""

    def __init__(
        self, name: str, parameter: nn.Parameter, *, decay: float, start: Tensor | None
    ) -> None:
        super().__init__(name, parameter, decay=decay, wide_gradient=True)
        is_wide = parameter.dtype in (torch.float32, torch.float64)
        self._master = None if is_wide else (parameter if start is None else start).detach().float()
        self.moments = {kind: torch.zeros_like(self.master()) for kind in ("exp_avg", "exp_avg_sq")}
        self.step = torch.zeros(
            (), device=self.moments["exp_avg"].device
        )  # torch's AdamW counts in it

    def master(self) -> Tensor:
        return local_part(self.parameter).detach() if self._master is None else self._master

    def load_master(self, master: Tensor) -> None:
        self.master().copy_(master)
        self._round_master()

    def _round_master(self) -> None:
        """Copy a separate master into the parameter."""
        if self._master is not None:
            self.parameter.copy_(self._master)

    def load_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        super().load_moments(moments, steps)
        self.step.fill_(steps)


def update_wide(states: Sequence[WideState], update: Update) -> None:
    """Update parameters with a gradient; torch's fused AdamW takes those of one decay together."""
    gradients = [_gradient(state) for state in states]
    if states and update.gradient_scale != 1.0:
        torch._foreach_mul_(gradients, update.gradient_scale)
    for decay in {state.decay for state in states}:
        same = [state for state in states if state.decay == decay]
        moments = [[s.moments[kind] for s in same] for kind in ("exp_avg", "exp_avg_sq")]
        moments.append([s.step for s in same])
        update.adamw([s.master() for s in same], [_gradient(s) for s in same], moments, decay)
    for state in states:
        state._round_master()


class HalfState(ParameterState):
    """A bfloat16 parameter."""

    kernel: ClassVar[str]

    def __init__(
        self, name: str, parameter: nn.Parameter, *, decay: float, wide_gradient: bool
    ) -> None:
        super().__init__(name, parameter, decay=decay, wide_gradient=wide_gradient)
        parameter.data = parameter.data.contiguous()

    @abstractmethod
    def update_chunks(self, update: Update) -> None:
        """Update on the CPU, where only a chunk of the weights is float32 at a time."""

    def _adamw(self, update: Update, master: Tensor, *others: Tensor) -> None:
        """Update master, gradient (before scaling), exp_avg and exp_avg_sq in place."""
        gradient, exp_avg, exp_avg_sq = others
        steps = torch.tensor(float(self.steps))
        scaled = gradient.float() * update.gradient_scale
        update.adamw([master], [scaled], [[exp_avg], [exp_avg_sq], [steps]], self.decay)


class SplitState(HalfState):
    """The parameter is the upper half of its float32 master, rounded; `remainder` is the signed
    rest.

    Exact halves are rounded up, for rounding them to even would need 65537 remainders. A parameter
    that starts as the even neighbour of a half keeps its bits, and its master starts one float32
    step lower.
    """

    kernel = "split"

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        *,
        decay: float,
        wide_gradient: bool,
        start: Tensor | None,
    ) -> None:
        super().__init__(name, parameter, decay=decay, wide_gradient=wide_gradient)
        self.remainder = torch.zeros_like(parameter, dtype=torch.int16)
        if start is not None:
            parameter.data.copy_(start)
            exact = start.detach().to(parameter.device).contiguous().view(torch.int32)
            self.remainder.copy_((exact - _upper(parameter)).clamp_(-(1 << 15), (1 << 15) - 1))
        wide = (torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2))
        self.moments = dict(zip(("exp_avg", "exp_avg_sq"), wide, strict=True))

    def master(self) -> Tensor:
        return join(self.parameter, self.remainder)

    def load_master(self, master: Tensor) -> None:
        split(master.to(self.parameter.device).contiguous(), self.parameter, self.remainder)

    def update_chunks(self, update: Update) -> None:
        tensors = (self.parameter, self.remainder, _gradient(self), *self.moments.values())
        for weight, remainder, *others in _chunks(CHUNK, *tensors):
            master = join(weight, remainder)
            self._adamw(update, master, *others)
            split(master, weight, remainder)


class LeanState(HalfState):
    """A stochastically rounded parameter; each moment is a byte per weight and a base exponent per
    block.
    """

    kernel = "lean"

    def __init__(
        self, name: str, parameter: nn.Parameter, *, decay: float, wide_gradient: bool
    ) -> None:
        super().__init__(name, parameter, decay=decay, wide_gradient=wide_gradient)
        blocks, device = -(-parameter.numel() // BLOCK), parameter.device
        self.moments = {}
        for kind in ("exp_avg", "exp_avg_sq"):
            self.moments[kind] = torch.zeros_like(parameter, dtype=torch.uint8)
            self.moments[f"{kind}_base"] = torch.zeros(blocks, dtype=torch.int16, device=device)

    def master(self) -> Tensor:
        return self.parameter.detach().float()

    def load_master(self, master: Tensor) -> None:
        self.parameter.copy_(master)

    def update_chunks(self, update: Update) -> None:
        codes, base, codes_sq, base_sq = self.moments.values()
        generator = torch.Generator().manual_seed(update.noise_seed(self.name))
        for (weight, gradient, mean, square), bases in zip(
            _chunks(CHUNK, self.parameter, _gradient(self), codes, codes_sq),
            _chunks(CHUNK // BLOCK, base, base_sq),
            strict=True,
        ):
            wide = weight.float()
            exp_avg, exp_avg_sq = decoded_signed(mean, bases[0]), decoded(square, bases[1])
            self._adamw(update, wide, gradient, exp_avg, exp_avg_sq)
            noise = torch.empty(weight.shape, dtype=torch.int64).random_(generator=generator)
            low = [
                ((noise >> shift) & mask).int()
                for shift, mask in ((0, 0xFFFF), (16, 0xFFFFF), (36, 0xFFFFF))
            ]
            weight.view(torch.int16).copy_((wide.view(torch.int32) + low[0]) >> 16)
            encode_signed(exp_avg, low[1], mean, bases[0])
            encode(exp_avg_sq, low[2], square, bases[1])


def update_half(states: Sequence[HalfState], update: Update) -> None:
    """Update parameters that have a gradient, all of one form."""
    if states and states[0].parameter.is_cuda:
        _launch_kernel(states, update)
        return
    for state in states:
        state.update_chunks(update)


def _gradient(state: ParameterState) -> Tensor:
    assert state.gradient is not None
    return state.gradient


def _chunks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return flat chunks of tensors of one size; writing to a chunk writes to its tensor."""
    return zip(*(torch.split(tensor.detach().reshape(-1), size) for tensor in tensors), strict=True)


def _launch_kernel(states: Sequence[HalfState], update: Update) -> None:
    """Run one kernel over all parameters: a launch for each would take longer than small parameters
    do.
    """
    from rather.optim import kernels

    tensors, numbers, seeds = [], [], []
    for state in states:
        remainder = [state.remainder] if isinstance(state, SplitState) else []
        tensors.append(
            [state.parameter, *remainder, *state.moments.values(), _gradient(state).contiguous()]
        )
        done = state.steps + 1
        step_size = update.lr / (1 - update.beta1**done)
        correction = math.sqrt(1 - update.beta2**done)
        numbers.append([step_size, correction, update.lr * state.decay])
        seeds.append(update.noise_seed(state.name) if isinstance(state, LeanState) else 0)
    betas = (update.beta1, 1 - update.beta1, update.beta2, 1 - update.beta2)
    common = (*betas, update.eps, update.gradient_scale)
    kernels.adamw(states[0].kernel, tensors, numbers, seeds, common)


# --- bits ---


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of a split parameter."""
    return _upper(parameter).add_(remainder).view(torch.float32)


def split(master: Tensor, parameter: Tensor, remainder: Tensor) -> None:
    """Write both halves of a float32 master."""
    bits = master.view(torch.int32)
    remainder.copy_(bits)  # its lower 16 bits, read as a signed number
    parameter.detach().view(torch.int16).copy_((bits + 0x8000) >> 16)


def _upper(parameter: Tensor) -> Tensor:
    return parameter.detach().view(torch.int16).int() << 16


def encode(values: Tensor, noise: Tensor, codes: Tensor, bases: Tensor) -> None:
    """Store numbers >= 0 as 5 exponent and 3 mantissa bits below the largest of their block.

    `noise` < 2**20 rounds. A number more than 2**32 below the largest becomes the smallest code,
    which is 0 only in a block of small numbers.
    """
    rounded = (values.view(torch.int32) + noise) >> 20
    largest = _block_maxima(rounded)
    bases.copy_((largest - 255).clamp_(min=0))
    codes.copy_((rounded - _spread(bases, rounded)).clamp_(min=0))


def decoded(codes: Tensor, bases: Tensor) -> Tensor:
    return ((codes.int() + _spread(bases, codes)) << 20).view(torch.float32)


def encode_signed(values: Tensor, noise: Tensor, codes: Tensor, bases: Tensor) -> None:
    """Store a sign, 4 exponent and 3 mantissa bits; 2**16 and more below the largest is 0."""
    bits = values.view(torch.int32)
    rounded = ((bits & 0x7FFFFFFF) + noise) >> 20
    largest = _block_maxima(rounded)
    bases.copy_((largest - 127).clamp_(min=0))
    codes.copy_((rounded - _spread(bases, rounded)).clamp_(min=0) + (bits < 0) * 128)


def decoded_signed(codes: Tensor, bases: Tensor) -> Tensor:
    size = codes.int() & 127
    values = ((size + _spread(bases, codes)) << 20).view(torch.float32)
    return torch.where(size == 0, 0.0, torch.where(codes > 127, -values, values))


def _block_maxima(numbers: Tensor) -> Tensor:
    filled = nn.functional.pad(numbers, (0, -len(numbers) % BLOCK))
    return filled.view(-1, BLOCK).amax(1)


def _spread(bases: Tensor, like: Tensor) -> Tensor:
    return bases.int().repeat_interleave(BLOCK)[: len(like)]
