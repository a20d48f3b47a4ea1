"""AdamW with exact float32 master weights, schedules as pure functions of the updates done, clipping.

Weights in half precision are the rounded image of their masters: at a learning rate of 1e-6 an update is far below
the spacing of bfloat16 numbers and would be lost. Their gradients are added up in float32 as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rather.config.schema import TrainingArgs


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

    `exact` holds float32 weights for masters to start from, where the parameters are already rounded.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        args: TrainingArgs,
        *,
        schedule: Callable[[int], float],
        max_grad_norm: float,
        exact: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        start = {**self.parameters, **(exact or {})}
        self.masters = {
            name: p if p.dtype in (torch.float32, torch.float64) else nn.Parameter(start[name].detach().float())
            for name, p in self.parameters.items()
        }
        self.schedule, self.max_grad_norm = schedule, max_grad_norm
        self.updates = 0
        half = any(p.dtype == torch.float16 for p in self.parameters.values())
        self.loss_scale = LossScale() if half else None
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(_accumulate_into(self.masters[name]))  # type: ignore[no-untyped-call]
        decayed = [p for p in self.masters.values() if p.ndim >= 2]
        others = [p for p in self.masters.values() if p.ndim < 2]  # norms and biases, as everywhere
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self.schedule(self.updates)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by before backward."""
        return self.loss_scale.value if self.loss_scale else 1.0

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.masters.values() if p.grad is not None]

    def grad_norm(self) -> Tensor:
        """Norm of the whole gradient before clipping, loss scale removed."""
        norms = torch._foreach_norm(self.gradients(), 2, dtype=torch.float64)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm / self.scale

    def step(self, grad_norm: float) -> None:
        """One update; the caller has seen that `grad_norm` is finite."""
        clip = min(1.0, self.max_grad_norm / (grad_norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
        if clip / self.scale != 1.0:
            torch._foreach_mul_(self.gradients(), clip / self.scale)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])
        self.updates += 1

    def zero_grad(self) -> None:
        for master in self.masters.values():
            master.grad = None

    def moments(self) -> dict[str, Tensor]:
        """`<parameter>.exp_avg` and `.exp_avg_sq`: with the masters all that an update depends on."""
        state = self.adamw.state
        return {
            f"{name}.{kind}": state[master][kind]
            for name, master in self.masters.items()
            if master in state
            for kind in ("exp_avg", "exp_avg_sq")
        }

    @torch.no_grad()
    def load(self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int) -> None:
        self.updates = updates
        for name, master in self.masters.items():
            master.copy_(masters[name])
            self.parameters[name].copy_(master)
            if f"{name}.exp_avg" in moments:  # not there before the first update, nor for weights without gradients
                self.adamw.state[master] = {
                    "step": torch.tensor(float(updates), device=master.device),
                    **{k: moments[f"{name}.{k}"].to(master.device) for k in ("exp_avg", "exp_avg_sq")},
                }


def _accumulate_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hook


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
    return max(0.0, 0.5 * (1 + math.cos(2 * math.pi * kwargs.get("num_cycles", 0.5) * min(1.0, done / horizon))))


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
