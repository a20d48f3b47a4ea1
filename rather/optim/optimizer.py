"""AdamW that loses no update, learning-rate schedules, clipping.

Weights in half precision are the rounded image of float32 masters: at a learning rate of 1e-6 an
update is far below the spacing of bfloat16 numbers and would be lost. Their gradients are summed in
float32 as well. `lean` gives up the masters and rounds stochastically instead. See adamw.py for the
state of a parameter.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rather.checkpoint.sharded_tensors import TensorStream
from rather.config.schema import TrainingArgs
from rather.errors import ConfigError
from rather.optim.adamw import GradientSums, ParameterState, Update, local, update_parameters
from rather.optim.host import HostState
from rather.optim.rounding import Rounding
from rather.optim.summing import Totals, summing


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
    """AdamW over named parameters. `updates` counts the steps; the learning rate follows it.

    `exact` holds float32 weights as the start of the masters, if the parameters are already
    rounded. `lean` (`seed` decides its rounding) is for bfloat16 parameters, whose micro-batches it
    also sums in bfloat16. `compute` is the dtype that float32 parameters are computed in.
    `on_host`: parameters of at least so many weights have their state in host memory.
    """

    stores_whole = False  # each rank stores its own shards

    _host = HostState()  # nothing is on the host

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        args: TrainingArgs,
        *,
        schedule: Callable[[int], float],
        max_grad_norm: float,
        exact: Mapping[str, Tensor] | None = None,
        lean: bool = False,
        compute: torch.dtype | None = None,
        seed: int = 0,
        rounding: Rounding = Rounding(),
        on_host: int | None = None,
    ) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.args = args
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.seed = seed
        sums = GradientSums()
        self._states = {
            name: ParameterState(
                name, p, args.weight_decay if p.ndim >= 2 else 0.0,  # not for norms and biases
                lean=lean, start=(exact or {}).get(name), rounding=rounding, sums=sums,
                on_host=on_host is not None and p.numel() >= on_host,
            )
            for name, p in self.parameters.items()
        }  # fmt: skip
        self._host = HostState(self._states.values(), on_host)
        self.masters: Mapping[str, Tensor] = Masters(self._states, self._host.settle)
        self.updates = 0
        self._prepared: Callable[[float], None] | None = None
        self._totals: Totals | None = None  # of linear layers that sum their gradients
        self._on_cuda = any(p.is_cuda for p in self.parameters.values())
        half = torch.float16 in (compute, *(p.dtype for p in self.parameters.values()))
        self.loss_scale = LossScale() if half else None

    @property
    def lr(self) -> float:
        """Return the learning rate of the next update."""
        return self.schedule(self.updates)

    @property
    def scale(self) -> float:
        """Return what the loss is multiplied by before backward."""
        return self.loss_scale.value if self.loss_scale else 1.0

    def gradient(self, name: str) -> Tensor | None:
        """Return this rank's part of a parameter's gradient; None for a frozen one."""
        return self._states[name].gradient if name in self._states else None

    def gradients(self, names: Collection[str] | None = None) -> list[Tensor]:
        """Return this rank's part of the gradients of all parameters, or of the named ones."""
        return list(self.named_gradients(names).values())

    def named_gradients(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        chosen = [name for name in self.parameters if names is None or name in names]
        return {name: gradient for name in chosen if (gradient := self.gradient(name)) is not None}

    def gradients_in_turn(
        self, names: Collection[str] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield `named_gradients` in parts: those on the device, then each that the host keeps."""
        chosen = set(self.parameters if names is None else names)
        yield self.named_gradients(chosen - {state.name for state in self._host.summing})
        for states in self._host.gradients_in_turn():
            yield self.named_gradients(chosen & {state.name for state in states})

    def _norms(self, names: Collection[str] | None) -> dict[str, Tensor]:
        """Return the norm of each gradient on this rank, in the order of the parameters."""
        norms: dict[str, Tensor] = {}
        for gradients in self.gradients_in_turn(names):
            if gradients:
                in_order = torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float64)
                norms |= zip(gradients, in_order, strict=True)
        return {name: norms[name] for name in self.parameters if name in norms}

    def norms(self, names: Collection[str] | None = None) -> dict[str, float]:
        """Return the norm of each gradient on this rank, loss scale removed; waits for it."""
        return {name: float(norm) / self.scale for name, norm in self._norms(names).items()}

    def grad_norm(self, names: Collection[str] | None = None) -> Tensor:
        """Return the norm of the gradient on this rank before clipping, loss scale removed."""
        norms = [*self._norms(names).values()] or [torch.zeros((), dtype=torch.float64)]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm / self.scale

    def prepare(self) -> None:
        """Do what an update can do before the norm of the gradient is known."""
        if self._on_cuda:  # a user's own optimizer has no update of this kind
            self._prepared = self._launch(self._states_here(), self._update(1.0))

    def _launch(
        self, states: Sequence[ParameterState], update: Update
    ) -> Callable[[float], None] | None:
        """Return what updates parameters in half precision on CUDA; None on other devices."""
        if not self._on_cuda:
            return None
        from rather.optim import kernels

        return kernels.prepare(states, update)

    def _states_here(self) -> list[ParameterState]:
        """Return the states that are not in host memory."""
        return [state for state in self._states.values() if state not in self._host.states]

    def _update(self, clip: float) -> Update:
        numbers = (self.args.adam_beta1, self.args.adam_beta2, self.args.adam_epsilon)
        return Update(self.updates, self.lr, *numbers, clip / self.scale, self.seed)

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """Do one update; the caller has checked that `grad_norm` is finite."""
        clip = min(1.0, self.max_grad_norm / (grad_norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
        if self._prepared is None:
            self.prepare()
        moved = [state for state in self._states.values() if state.gradient is not None]
        update = self._update(clip)
        resident = [state for state in moved if state not in self._host.states]
        update_parameters(resident, update, self._prepared)
        for shelf in self._host.in_turn():
            states = [state for state in shelf if state.gradient is not None]
            update_parameters(states, update, self._launch(states, update))
        self._prepared = None
        for state in moved:
            state.steps += 1
        self.updates += 1

    def narrow_gradients(self) -> bool:
        """Sum micro-batches in the parameters' own dtype from now on; return whether that changed.

        Float16 stays as it is: the sum of scaled gradients would leave its range.
        """
        wide = [state for state in self._states.values() if state.sums_wide]
        if self.loss_scale is not None or self._host.shelves:
            return False
        for state in wide:
            state.hook.remove()
            state.sums_wide = False
        self._totals = None
        return bool(wide)

    def sum_inside(self, modules: Iterable[nn.Module]) -> None:
        """Let the linear layers among modules on CUDA add to the sums of their gradients."""
        wide = {s.parameter: s for s in self._states.values() if s.sums_wide}
        for parameter, linear in summing(modules, wide).items():
            wide[parameter].linear = linear

    def carry_sums(self, layers: Iterable[nn.Module]) -> None:
        """Let decoder layers have the sums of their gradients only in their backward pass."""
        self._host.watch(layers)

    def begin_sums(self) -> None:
        """Give totals of zeros to the linear layers that sum gradients; `zero_grad` frees them."""
        self._host.begin()
        states = [state for state in self._states.values() if state not in self._host.summing]
        linears = [s.linear for s in states if s.linear and s.sums_wide]
        if linears and self._totals is None:
            self._totals = Totals(linears)
        if self._totals:
            self._totals.begin()

    def gradient_bytes(self) -> int:
        """Return the size of all gradients of this rank that are on its device."""
        total = 0
        for state in self._states.values():
            shard = local(state.parameter)
            if state not in self._host.summing:
                total += shard.numel() * 4 if state.sums_wide else shard.nbytes
        return total

    def state_bytes(self) -> int:
        """Return the size of the moments on this rank, and of masters beyond the parameters.

        Without those in host memory.
        """
        stored = [tensor for state in self._states_here() for tensor in state.stored().values()]
        return sum(local(tensor).nbytes for tensor in stored)

    def zero_grad(self) -> None:
        self._prepared = None
        for state in self._states.values():
            state.zero_grad()
        if self._totals:
            self._totals.free()
        self._host.end()

    def moments(self) -> dict[str, Tensor]:
        """Return `<parameter>.exp_avg` and so on: with the masters, all that an update depends on.

        A weight that never had a gradient has none. One that missed updates also has
        `<parameter>.step`, the number of its own updates.
        """
        self._host.settle()
        moments: dict[str, Tensor] = {}
        for name, state in self._states.items():
            if state.steps:
                moments |= {f"{name}.{kind}": tensor for kind, tensor in state.moments.items()}
            if 0 < state.steps < self.updates:
                moments[f"{name}.step"] = torch.tensor(state.steps)
        return moments

    @torch.no_grad()
    def load(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int
    ) -> None:
        # Only lean moments have bases. An exact run could not recover the bits that they lack.
        then = any(key.endswith(".exp_avg_base") for key in moments)
        now = any(state.form == "lean" for state in self._states.values())
        if len(moments) and then != now:
            kinds = {True: "lean", False: "exact"}
            raise ConfigError(
                f"precision: {kinds[now]}, but the checkpoint was written with {kinds[then]}; "
                f"set precision={kinds[then]} to resume it, or start from scratch with "
                "--overwrite or another exp_name"
            )
        self.updates = updates
        self._host.settle()
        for name, state in self._states.items():
            keys = {kind: f"{name}.{kind}" for kind in state.moments}
            moments_of_state = {kind: moments[key] for kind, key in keys.items() if key in moments}
            steps = int(moments.get(f"{name}.step", updates)) if moments_of_state else 0
            state.load(masters[name], moments_of_state, steps)


class Masters(UserDict[str, Any]):
    """Float32 weights by name, each made on access: all at once may not fit next to the model."""

    def __init__(self, states: Mapping[str, ParameterState], settle: Callable[[], None]) -> None:
        super().__init__(states)
        self.settle = settle

    def __getitem__(self, name: str) -> Tensor:
        self.settle()
        return self.data[name].master()  # type: ignore[no-any-return]

    def late(self) -> dict[str, TensorStream]:
        """Return all weights to be made when they are written, one after another."""

        def stream(name: str, state: ParameterState) -> TensorStream:
            shape = tuple(state.local.shape)
            return TensorStream.late(state.master_dtype, shape, lambda: self[name])

        return {name: stream(name, state) for name, state in self.data.items()}


def warmup_of(args: TrainingArgs, total_steps: int) -> int:
    """Return the steps of the warm-up. A run that is shorter than it warms up for a tenth."""
    if args.warmup_steps > total_steps:
        return total_steps // 10
    return args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)


def schedule(args: TrainingArgs, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the updates done, over the real number of steps."""
    peak = args.learning_rate
    kwargs = args.lr_scheduler_kwargs
    warmup = warmup_of(args, total_steps)
    floor = kwargs.get("min_lr_rate", kwargs.get("min_lr", 0.0) / peak if peak else 0.0)
    horizon = max(1, total_steps - warmup)

    def cosine(done: int) -> float:
        """Half a wave by default; `num_cycles` counts whole ones."""
        angle = 2 * math.pi * kwargs.get("num_cycles", 0.5) * min(1.0, done / horizon)
        return max(0.0, 0.5 * (1 + math.cos(angle)))

    def inverse_sqrt(done: int) -> float:
        timescale = kwargs.get("timescale", warmup or 10_000)
        return math.sqrt(timescale / (timescale + done))

    def wsd(done: int) -> float:
        """Warm-up, stable, decay: flat, then linear to the floor over `num_decay_steps`."""
        decay = kwargs.get("num_decay_steps", max(1, horizon // 10))
        return min(1.0, max(0.0, (horizon - done) / decay)) if decay else 1.0

    shapes: dict[str, Callable[[int], float]] = {
        "constant": lambda _done: 1.0,
        "linear": lambda done: max(0.0, 1 - done / horizon),
        "cosine": cosine,
        "inverse_sqrt": inverse_sqrt,
        "wsd": wsd,
    }
    # The suffixes _with_min_lr and _with_warmup are ignored: every schedule supports both.
    shape = shapes[args.lr_scheduler_type.partition("_with_")[0]]

    def rate(updates: int) -> float:
        if updates < warmup:
            return peak * updates / warmup
        return peak * (floor + (1 - floor) * shape(updates - warmup))

    return rate
