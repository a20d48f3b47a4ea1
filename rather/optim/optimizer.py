"""AdamW that loses no update, schedules as pure functions of the updates done, clipping.

Weights in half precision are the rounded image of float32 masters: at a learning rate of 1e-6 an update is far below
the spacing of bfloat16 numbers and would be lost. Their gradients are added up in float32 as well. `lean` gives the
masters up and rounds at random instead. What is kept for each parameter: adamw.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rather.checkpoint.sharded_tensors import ShardSpec
from rather.config.schema import TrainingArgs
from rather.errors import ConfigError
from rather.optim.adamw import Lean, Split, State, Update, Wide


@dataclass
class LossScale:
    """Dynamic loss scale for float16: halved on overflow, doubled after `patience` clean steps."""

    value: float = 2.0**16
    clean: int = 0
    patience: int = 2000

    def overflowed(self) -> None:
        self.value, self.clean = self.value / 2, 0

    def succeeded(self) -> None:
        self.clean += 1
        if self.clean == self.patience:
            self.value, self.clean = self.value * 2, 0


class Optimizer:
    """One optimizer over named parameters. `updates` counts the steps really taken; the learning rate follows it.

    `exact` holds float32 weights for masters to start from, where the parameters are already rounded. `lean` (whose
    rounding `seed` decides) is for bfloat16 parameters. `wide_gradients: false` adds up micro-batches in bfloat16, as
    lean does unless told. `compute` is what float32 parameters are used in, where that is narrower.
    """

    rows: Mapping[str, ShardSpec] | None = (
        None  # of whole parameters, those whose moments lie here; all if None
    )

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        args: TrainingArgs,
        *,
        schedule: Callable[[int], float],
        max_grad_norm: float,
        exact: Mapping[str, Tensor] | None = None,
        lean: bool = False,
        wide_gradients: bool | None = None,
        compute: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.args, self.schedule, self.max_grad_norm, self.seed = (
            args,
            schedule,
            max_grad_norm,
            seed,
        )
        if lean and any(isinstance(p, DTensor) for p in self.parameters.values()):
            raise ConfigError(
                "precision: lean rounds blocks of a whole weight at random, which shards would change; type "
                "precision=exact on several devices"
            )
        wide = not lean if wide_gradients is None else wide_gradients
        self._states = {
            name: _state(
                name,
                p,
                args.weight_decay,
                lean=lean,
                wide_gradients=wide,
                start=(exact or {}).get(name),
            )
            for name, p in self.parameters.items()
        }
        self.masters: Mapping[str, Tensor] = _Masters(self._states)
        self.updates = 0
        half = torch.float16 in (compute, *(p.dtype for p in self.parameters.values()))
        self.loss_scale = LossScale() if half else None

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.schedule(self.updates)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by before backward."""
        return self.loss_scale.value if self.loss_scale else 1.0

    def gradient(self, name: str) -> Tensor | None:
        """What of one parameter's gradient lies on this rank; None of a frozen one."""
        return self._states[name].gradient if name in self._states else None

    def gradients(self, names: Collection[str] | None = None) -> list[Tensor]:
        """What of the gradient lies on this rank; of the named parameters only, where names are given."""
        return list(self.named_gradients(names).values())

    def named_gradients(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        states = {
            name: state for name, state in self._states.items() if names is None or name in names
        }
        return {name: g for name, state in states.items() if (g := state.gradient) is not None}

    def norms(self, names: Collection[str] | None = None) -> dict[str, float]:
        """Of each gradient on this rank, loss scale removed. The host waits for them."""
        gradients = self.named_gradients(names)
        found = (
            torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float64)
            if gradients
            else []
        )
        return {name: float(norm) / self.scale for name, norm in zip(gradients, found, strict=True)}

    def grad_norm(self, names: Collection[str] | None = None) -> Tensor:
        """Norm of the gradient on this rank before clipping, loss scale removed."""
        gradients = self.gradients(names)
        if not gradients:
            return torch.zeros((), dtype=torch.float64)
        norm: Tensor = torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64))
        )
        return norm / self.scale

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """One update; the caller has seen that `grad_norm` is finite."""
        clip = min(1.0, self.max_grad_norm / (grad_norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
        args = self.args
        update = Update(
            number=self.updates,
            lr=self.lr,
            beta1=args.adam_beta1,
            beta2=args.adam_beta2,
            eps=args.adam_epsilon,
            gradient_scale=clip / self.scale,
            seed=self.seed,
        )
        moved = [state for state in self._states.values() if state.gradient is not None]
        if wide := [state for state in moved if isinstance(state, Wide)]:
            Wide.update(wide, update)
        if split := [state for state in moved if isinstance(state, Split)]:
            Split.update(split, update)
        if lean := [state for state in moved if isinstance(state, Lean)]:
            Lean.update(lean, update)
        for state in moved:
            state.steps += 1
        self.updates += 1

    def narrow_gradients(self) -> bool:
        """Adds up micro-batches in the parameters' own precision; False where that is so already.

        Not for float16, whose range the sum of scaled gradients would leave.
        """
        narrowed = [
            state.narrow_gradient() for state in self._states.values() if self.loss_scale is None
        ]
        return any(narrowed)

    def gradient_bytes(self) -> int:
        """Of all gradients of this rank, once they are there."""
        return sum(state.gradient_bytes for state in self._states.values())

    def state_bytes(self) -> int:
        """Of masters and moments on this rank."""
        return sum(state.own_bytes for state in self._states.values())

    def zero_grad(self) -> None:
        for state in self._states.values():
            state.forget_gradient()

    def moments(self) -> dict[str, Tensor]:
        """`<parameter>.exp_avg`, `.exp_avg_sq` and so on: with the masters all that an update depends on.

        Weights that never had a gradient have none; those that missed some updates have also `<parameter>.step`.
        """
        found: dict[str, Tensor] = {}
        for name, state in self._states.items():
            if state.steps:
                found |= {f"{name}.{kind}": tensor for kind, tensor in state.moments().items()}
            if 0 < state.steps < self.updates:
                found[f"{name}.step"] = torch.tensor(state.steps)
        return found

    @torch.no_grad()
    def load(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int
    ) -> None:
        self._refuse_other_precision(moments)
        self.updates = updates
        for name, state in self._states.items():
            state.load_master(masters[name])
            own = {
                kind: moments[f"{name}.{kind}"]
                for kind in state.moments()
                if f"{name}.{kind}" in moments
            }
            state.load_moments(own, int(moments.get(f"{name}.step", updates)) if own else 0)

    def _refuse_other_precision(self, moments: Mapping[str, Tensor]) -> None:
        """Lean moments have bases. What they lack, a continued run would not get back."""
        for name, state in self._states.items():
            then, now = f"{name}.exp_avg_base" in moments, isinstance(state, Lean)
            if f"{name}.exp_avg" in moments and then != now:
                kinds = {True: "lean", False: "exact"}
                raise ConfigError(
                    f"precision: {kinds[now]}, but the checkpoint was written with {kinds[then]}; type "
                    f"precision={kinds[then]} to go on from it, or start anew with --overwrite or another exp_name"
                )


class _Masters(Mapping[str, Tensor]):
    """Float32 weights by name, each made when it is asked for: all at once may not fit beside the model."""

    def __init__(self, states: Mapping[str, State]) -> None:
        self._states = states

    def __getitem__(self, name: str) -> Tensor:
        return self._states[name].master()

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def _state(
    name: str,
    parameter: nn.Parameter,
    decay: float,
    *,
    lean: bool,
    wide_gradients: bool,
    start: Tensor | None,
) -> State:
    """What a parameter's dtype needs. Norms and biases do not decay, as everywhere."""
    decay = decay if parameter.ndim >= 2 else 0.0
    if parameter.dtype != torch.bfloat16:
        return Wide(name, parameter, decay=decay, start=start)
    if lean:
        return Lean(name, parameter, decay=decay, wide_gradient=wide_gradients)
    return Split(name, parameter, decay=decay, wide_gradient=wide_gradients, start=start)


def schedule(args: TrainingArgs, total_steps: int) -> Callable[[int], float]:
    """Learning rate as a function of the updates done so far; the horizon is the real number of optimizer steps."""
    peak, kwargs = args.learning_rate, args.lr_scheduler_kwargs
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)
    floor = kwargs.get("min_lr_rate", kwargs.get("min_lr", 0.0) / peak if peak else 0.0)
    shape = SHAPES[args.lr_scheduler_type]
    horizon = max(1, total_steps - warmup)

    def rate(updates: int) -> float:
        if updates < warmup:
            return peak * updates / warmup
        return peak * (floor + (1 - floor) * shape(updates - warmup, horizon, warmup, kwargs))

    return rate


def _constant(_done: int, _horizon: int, _warmup: int, _kwargs: Mapping[str, float]) -> float:
    return 1.0


def _linear(done: int, horizon: int, _warmup: int, _kwargs: Mapping[str, float]) -> float:
    return max(0.0, 1 - done / horizon)


def _cosine(done: int, horizon: int, _warmup: int, kwargs: Mapping[str, float]) -> float:
    """Half a wave by default; `num_cycles` counts whole ones."""
    return max(
        0.0,
        0.5
        * (1 + math.cos(2 * math.pi * kwargs.get("num_cycles", 0.5) * min(1.0, done / horizon))),
    )


def _inverse_sqrt(done: int, _horizon: int, warmup: int, kwargs: Mapping[str, float]) -> float:
    timescale = kwargs.get("timescale", warmup or 10_000)
    return math.sqrt(timescale / (timescale + done))


def _wsd(done: int, horizon: int, _warmup: int, kwargs: Mapping[str, float]) -> float:
    """Warm-up, stable, decay: flat, then linear to the floor over `num_decay_steps` (a tenth by default)."""
    decay = kwargs.get("num_decay_steps", max(1, horizon // 10))
    return min(1.0, max(0.0, (horizon - done) / decay)) if decay else 1.0


SHAPES: Mapping[str, Callable[[int, int, int, Mapping[str, float]], float]] = {
    "constant": _constant,
    "constant_with_warmup": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _wsd,
}
