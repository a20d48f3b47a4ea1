"""The smallest engine: torch's own AdamW on a whole model, on one process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rather.model.policy import PolicyModel
from rather.train.engine import Engine, StepOptimizer
from rather.train.rank_trainer import WholeModelRunner


class ToyOptimizer(StepOptimizer):
    def __init__(self, policy: PolicyModel, job: Any) -> None:
        self.schedule = job.schedule
        self.parameters, self.most = dict(policy.named_parameters()), job.max_grad_norm
        decay = [p for p in self.parameters.values() if p.ndim >= 2]
        plain = [p for p in self.parameters.values() if p.ndim < 2]
        args = job.training
        self.adam = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": args.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
        )

    @property
    def masters(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self.parameters.items()}

    def grad_norm(self, _names: Collection[str] | None = None) -> Tensor:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).double()

    def step(self, grad_norm: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.lr
        torch.nn.utils.clip_grads_with_norm_(
            self.parameters.values(), self.most, torch.tensor(grad_norm)
        )
        self.adam.step()
        self.updates += 1

    def zero_grad(self) -> None:
        self.adam.zero_grad()

    def moments(self) -> dict[str, Tensor]:
        return {
            f"{name}.{kind}": self.adam.state[p][kind]
            for name, p in self.parameters.items()
            for kind in ("exp_avg", "exp_avg_sq")
            if p in self.adam.state
        }

    @torch.no_grad()
    def load(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int
    ) -> None:
        self.updates = updates
        for name, p in self.parameters.items():
            p.copy_(masters[name])
            if updates:
                state = {kind: moments[f"{name}.{kind}"] for kind in ("exp_avg", "exp_avg_sq")}
                self.adam.state[p] = {"step": torch.tensor(float(updates)), **state}


class ToyEngine(Engine):
    def problems(self) -> Iterable[str]:
        if self.job.layout.devices > 1:
            yield f"actor_train.device_mapping: one device, not {self.job.layout.devices}"

    def build_policy(self) -> PolicyModel:
        return self.job.load()

    def build_optimizer(self, policy: PolicyModel) -> ToyOptimizer:
        return ToyOptimizer(policy, self.job)

    def build_runner(self, policy: PolicyModel, _optimizer: ToyOptimizer) -> WholeModelRunner:
        return WholeModelRunner(policy)


class NotAnEngine:
    """A class that `actor_train.engine` refuses."""
