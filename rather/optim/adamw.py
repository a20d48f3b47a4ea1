"""What AdamW keeps beside each parameter, in three forms, and one update of each.

wide   a float32 master and float32 moments; a float32 parameter is its own master
split  a bfloat16 parameter and the 16 bits it lacks, together exactly a float32 master; float32 moments
lean   a bfloat16 parameter that is rounded at random, and moments of 8 bits

Rounding at random (up with the chance that makes the mean right) is a function of seed, update and parameter name
alone, so a resumed run draws the same numbers. On CUDA the last two forms have kernels of their own.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

BLOCK = 256  # weights that share the base exponents of their lean moments
CHUNK = 1 << 22  # weights that are float32 at a time on the CPU; whole blocks


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
        """torch's fused AdamW, in place; `moments` are exp_avg, exp_avg_sq and the steps done."""
        adamw(
            weights, grads, moments[0], moments[1], [], moments[2],
            fused=True, amsgrad=False, maximize=False,
            lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps, weight_decay=decay,
        )  # fmt: skip


class State(ABC):
    """One parameter with what AdamW keeps for it; `steps` counts the updates in which it had a gradient."""

    def __init__(
        self, name: str, parameter: nn.Parameter, *, decay: float, wide_gradient: bool
    ) -> None:
        self.name, self.parameter, self.decay = name, parameter, decay
        self.steps = 0
        self._sum: Tensor | None = None
        self._sums = wide_gradient and parameter.dtype in (torch.bfloat16, torch.float16)
        if self._sums:
            # A weak reference: the garbage collector does not see hooks, and would never free what they hold.
            self._hook = parameter.register_post_accumulate_grad_hook(_adds(weakref.ref(self)))  # type: ignore[no-untyped-call]

    @property
    def gradient(self) -> Tensor | None:
        grad = self._sum if self._sums else self.parameter.grad
        return None if grad is None else here(grad)

    def narrow_gradient(self) -> bool:
        """Adds up micro-batches in the parameter's own precision from now on; False where that is so already."""
        narrowed = self._sums
        if narrowed:
            self._hook.remove()
            self._sums = False
        return narrowed

    @property
    def gradient_bytes(self) -> int:
        own = here(self.parameter)
        return own.numel() * (4 if self._sums else own.element_size())

    @property
    def own_bytes(self) -> int:
        """What is kept beside the parameter and its gradient."""
        kept = [value for name, value in vars(self).items() if name not in ("parameter", "_sum")]
        return sum(here(value).nbytes for value in kept if isinstance(value, Tensor))

    def forget_gradient(self) -> None:
        self._sum = self.parameter.grad = None

    def add_gradient(self) -> None:
        """Micro-batches are added up in float32."""
        grad = self.parameter.grad
        assert grad is not None
        self._sum = grad.float() if self._sum is None else self._sum.add_(grad)
        self.parameter.grad = None

    @abstractmethod
    def master(self) -> Tensor:
        """The weights as exactly as they are known: float32, made on demand where they are not stored so."""

    @abstractmethod
    def load_master(self, master: Tensor) -> None: ...

    @abstractmethod
    def moments(self) -> dict[str, Tensor]:
        """The tensors themselves, not copies."""

    def load_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        """Nothing is saved for a weight that never had a gradient."""
        self.steps = steps
        for kind, own in self.moments().items():
            if kind in moments:
                own.copy_(moments[kind])
            else:
                own.zero_()


def here(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank: all of it, or its shard."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _adds(state: weakref.ref[State]) -> Callable[[Tensor], None]:
    def hook(_parameter: Tensor) -> None:
        alive = state()
        if alive is not None:
            alive.add_gradient()

    return hook


class Wide(State):
    """A float32 (or float64) master; a separate one only where the parameter is narrower."""

    def __init__(
        self, name: str, parameter: nn.Parameter, *, decay: float, start: Tensor | None
    ) -> None:
        super().__init__(name, parameter, decay=decay, wide_gradient=True)
        own = parameter.dtype in (torch.float32, torch.float64)
        self._apart = None if own else (parameter if start is None else start).detach().float()
        self.exp_avg, self.exp_avg_sq = (
            torch.zeros_like(self.master()),
            torch.zeros_like(self.master()),
        )
        self.step = torch.zeros((), device=self.exp_avg.device)

    def master(self) -> Tensor:
        return here(self.parameter).detach() if self._apart is None else self._apart

    def load_master(self, master: Tensor) -> None:
        self.master().copy_(master)
        self._show()

    def _show(self) -> None:
        """The parameter is the image of a master that is kept apart."""
        if self._apart is not None:
            self.parameter.copy_(self._apart)

    def moments(self) -> dict[str, Tensor]:
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def load_moments(self, moments: Mapping[str, Tensor], steps: int) -> None:
        super().load_moments(moments, steps)
        self.step.fill_(steps)

    @staticmethod
    def update(states: Sequence[Wide], update: Update) -> None:
        gradients = [_gradient(state) for state in states]
        if update.gradient_scale != 1.0:
            torch._foreach_mul_(gradients, update.gradient_scale)
        for decay, group in groupby(
            sorted(states, key=lambda state: -state.decay), key=lambda state: state.decay
        ):
            same = list(group)
            moments = [
                [s.exp_avg for s in same],
                [s.exp_avg_sq for s in same],
                [s.step for s in same],
            ]
            update.adamw([s.master() for s in same], [_gradient(s) for s in same], moments, decay)
        for state in states:
            state._show()


class Split(State):
    """The bfloat16 parameter holds the upper half of its float32 master, rounded; `remainder` the signed rest.

    Exact halves are rounded up, for rounding them to even would need 65537 remainders. A parameter that starts as
    the even neighbour of a half keeps its bits, and its master starts one float32 step lower.
    """

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
        parameter.data = parameter.data.contiguous()
        self.remainder = torch.zeros_like(parameter, dtype=torch.int16)
        if start is not None:
            parameter.data.copy_(start)
            rest = start.detach().to(parameter.device).contiguous().view(torch.int32) - _upper(
                parameter
            )
            self.remainder.copy_(rest.clamp_(-(1 << 15), (1 << 15) - 1))
        self.exp_avg = torch.zeros_like(parameter, dtype=torch.float32)
        self.exp_avg_sq = torch.zeros_like(parameter, dtype=torch.float32)

    def master(self) -> Tensor:
        return join(self.parameter, self.remainder)

    def load_master(self, master: Tensor) -> None:
        split(master.to(self.parameter.device).contiguous(), self.parameter, self.remainder)

    def moments(self) -> dict[str, Tensor]:
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @staticmethod
    def update(states: Sequence[Split], update: Update) -> None:
        if states[0].parameter.is_cuda:
            _launch("split", states, update)
            return
        for state in states:
            tensors = (
                state.parameter,
                state.remainder,
                state.exp_avg,
                state.exp_avg_sq,
                _gradient(state),
            )
            for weight, remainder, exp_avg, exp_avg_sq, gradient in _chunks(CHUNK, *tensors):
                master = join(weight, remainder)
                moments = [[exp_avg], [exp_avg_sq], [torch.tensor(float(state.steps))]]
                update.adamw(
                    [master], [gradient.float() * update.gradient_scale], moments, state.decay
                )
                split(master, weight, remainder)


class Lean(State):
    """A bfloat16 parameter rounded at random; each moment a byte a weight and a base exponent a block."""

    def __init__(
        self, name: str, parameter: nn.Parameter, *, decay: float, wide_gradient: bool
    ) -> None:
        super().__init__(name, parameter, decay=decay, wide_gradient=wide_gradient)
        parameter.data = parameter.data.contiguous()
        blocks = -(-parameter.numel() // BLOCK)
        codes = [torch.zeros_like(parameter, dtype=torch.uint8) for _ in range(2)]
        bases = [torch.zeros(blocks, dtype=torch.int16, device=parameter.device) for _ in range(2)]
        (self.exp_avg, self.exp_avg_sq), (self.exp_avg_base, self.exp_avg_sq_base) = codes, bases

    def master(self) -> Tensor:
        return self.parameter.detach().float()

    def load_master(self, master: Tensor) -> None:
        self.parameter.copy_(master)

    def moments(self) -> dict[str, Tensor]:
        kinds = ("exp_avg", "exp_avg_base", "exp_avg_sq", "exp_avg_sq_base")
        return {kind: getattr(self, kind) for kind in kinds}

    @staticmethod
    def update(states: Sequence[Lean], update: Update) -> None:
        if states[0].parameter.is_cuda:
            _launch("lean", states, update)
            return
        for state in states:
            generator = torch.Generator().manual_seed(seed_of(state, update))
            codes = _chunks(
                CHUNK, state.parameter, state.exp_avg, state.exp_avg_sq, _gradient(state)
            )
            bases = _chunks(CHUNK // BLOCK, state.exp_avg_base, state.exp_avg_sq_base)
            for (weight, exp_avg, exp_avg_sq, gradient), (base, base_sq) in zip(
                codes, bases, strict=True
            ):
                wide = [weight.float(), decoded_signed(exp_avg, base), decoded(exp_avg_sq, base_sq)]
                moments = [[wide[1]], [wide[2]], [torch.tensor(float(state.steps))]]
                update.adamw(
                    [wide[0]], [gradient.float() * update.gradient_scale], moments, state.decay
                )
                noise = torch.empty(weight.shape, dtype=torch.int64).random_(generator=generator)
                low = [
                    ((noise >> shift) & mask).int()
                    for shift, mask in ((0, 0xFFFF), (16, 0xFFFFF), (36, 0xFFFFF))
                ]
                weight.view(torch.int16).copy_((wide[0].view(torch.int32) + low[0]) >> 16)
                encode_signed(wide[1], low[1], exp_avg, base)
                encode(wide[2], low[2], exp_avg_sq, base_sq)


def seed_of(state: State, update: Update) -> int:
    """Of the noise of one parameter in one update."""
    text = f"{update.seed} {update.number} {state.name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


# --- bits ---


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a split parameter."""
    return _upper(parameter).add_(remainder).view(torch.float32)


def split(master: Tensor, parameter: Tensor, remainder: Tensor) -> None:
    """The other way round: writes both halves of a float32 tensor."""
    bits = master.view(torch.int32)
    remainder.copy_(bits)  # its lower 16 bits, read as a signed number
    parameter.detach().view(torch.int16).copy_((bits + 0x8000) >> 16)


def _upper(parameter: Tensor) -> Tensor:
    return parameter.detach().view(torch.int16).int() << 16


def encode(values: Tensor, noise: Tensor, codes: Tensor, bases: Tensor) -> None:
    """Numbers >= 0 as 5 exponent and 3 mantissa bits below the largest of their block; `noise` < 2**20 rounds.

    What lies more than 2**32 below the largest becomes the smallest code, which is 0 only in a block of small numbers.
    """
    rounded = (values.view(torch.int32) + noise) >> 20
    largest = _block_maxima(rounded)
    bases.copy_((largest - 255).clamp_(min=0))
    codes.copy_((rounded - _spread(bases, rounded)).clamp_(min=0))


def decoded(codes: Tensor, bases: Tensor) -> Tensor:
    return ((codes.int() + _spread(bases, codes)) << 20).view(torch.float32)


def encode_signed(values: Tensor, noise: Tensor, codes: Tensor, bases: Tensor) -> None:
    """A sign, 4 exponent and 3 mantissa bits; 2**16 and more below the largest of a block is 0."""
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


# --- helpers of the updates ---


def _gradient(state: State) -> Tensor:
    assert state.gradient is not None
    return state.gradient


def _chunks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat pieces of tensors of one size; writing to a piece writes to its tensor."""
    return zip(*(torch.split(tensor.detach().reshape(-1), size) for tensor in tensors), strict=True)


def _launch(form: str, states: Sequence[Split] | Sequence[Lean], update: Update) -> None:
    """One kernel over all parameters: a launch for each would cost more than small parameters take."""
    from rather.optim import kernels

    tensors, numbers, seeds = [], [], []
    for state in states:
        own = [state.remainder] if isinstance(state, Split) else []
        tensors.append(
            [state.parameter, *own, *state.moments().values(), _gradient(state).contiguous()]
        )
        done = state.steps + 1
        step_size, correction = (
            update.lr / (1 - update.beta1**done),
            math.sqrt(1 - update.beta2**done),
        )
        numbers.append([step_size, correction, update.lr * state.decay])
        seeds.append(seed_of(state, update) if isinstance(state, Lean) else 0)
    common = (
        update.beta1,
        1 - update.beta1,
        update.beta2,
        1 - update.beta2,
        update.eps,
        update.gradient_scale,
    )
    kernels.adamw(form, tensors, numbers, seeds, common)
