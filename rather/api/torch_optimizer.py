"""What a user of the Python API brings along: an optimizer and a schedule of torch's, arguments of transformers'."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from rather.config.schema import DPOConfig, TrainingArgs
from rather.errors import ConfigError
from rather.optim.optimizer import LossScale, Optimizer
from rather.parallel.shard import local

# Fields of transformers' TrainingArguments that mean what ours of the same name do.
SHARED = tuple(name for name in TrainingArgs.model_fields if name != "log_num_zeros_in_grad")
# What says where and how often, which the caller of a trainer decides; and what transformers fills in by itself.
LEFT_TO_THE_CALLER = frozenset({
    "output_dir", "logging_dir", "run_name", "logging_steps", "save_steps", "save_strategy", "save_total_limit",
    "save_only_model", "eval_steps", "eval_strategy", "logging_strategy", "report_to", "disable_tqdm",
    "remove_unused_columns", "dataloader_pin_memory", "do_train", "do_eval", "use_cpu",
    "local_rank", "ddp_timeout", "hub_private_repo", "overwrite_output_dir", "log_level", "warmup_ratio",
})  # fmt: skip

OF_TRAIN_CONFIG = ("max_steps", "seed")  # of transformers', which ours have in DPOConfig


class GivenOptimizer(Optimizer):
    """A torch optimizer behind the calls of ours. Its state is its owner's: no checkpoint holds it."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        max_grad_norm: float,
        compute: torch.dtype,
    ) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.parameters = {name: p for name, p in parameters if p.requires_grad and id(p) in held}
        if not self.parameters:
            raise ConfigError(
                "optimizer: it holds no parameter of the model that is to be trained."
            )
        self.optimizer, self.scheduler, self.max_grad_norm = optimizer, scheduler, max_grad_norm
        self.masters: Mapping[str, Tensor] = {
            name: local(p.detach()) for name, p in self.parameters.items()
        }
        self.updates, self.loss_scale = 0, LossScale() if compute == torch.float16 else None

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def gradient(self, name: str) -> Tensor | None:
        found = self.parameters[name].grad
        return None if found is None else local(found)

    def named_gradients(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        named = {
            name: self.gradient(name) for name in self.parameters if names is None or name in names
        }
        return {name: gradient for name, gradient in named.items() if gradient is not None}

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        clip = (
            self.max_grad_norm / (grad_norm + 1e-6) if 0 < self.max_grad_norm < grad_norm else 1.0
        )
        if clip != self.scale:
            torch._foreach_mul_(self.gradients(), clip / self.scale)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.updates += 1

    def narrow_gradients(self) -> bool:
        return False

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        return {}


def put_over(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Onto the parameters that took the place of its own, known by `names`, when the model was divided."""
    for group in optimizer.param_groups:
        own = [parameters.get(names.get(id(p), "")) for p in group["params"]]
        now = [p for p in own if p is not None]  # of a pipeline the others are on other ranks
        if optimizer.state and any(
            p is not before for p, before in zip(now, group["params"], strict=False)
        ):
            raise ConfigError(
                "optimizer: it has taken steps, and its state is not divided; give a fresh one."
            )
        group["params"] = now


def training_args(given: Any) -> TrainingArgs:
    """Ours as they are; of transformers' what means the same here. What would have no effect is refused by name."""
    if isinstance(given, TrainingArgs):
        return given
    defaults = type(given)(output_dir=given.output_dir)
    changed = {
        field.name
        for field in fields(given)
        if getattr(given, field.name) != getattr(defaults, field.name)
    }
    if told := [name for name in OF_TRAIN_CONFIG if name in changed]:
        raise ConfigError(
            f"args: {', '.join(told)}: set it in train_config, as DPOConfig({told[0]}=...)."
        )
    if strange := sorted(changed - {*SHARED, *LEFT_TO_THE_CALLER}):
        raise ConfigError(
            f"args: {', '.join(strange)}: not a setting of this trainer; leave it at its default."
        )
    values = {
        name: getattr(given, name) for name in SHARED if getattr(given, name, None) is not None
    }
    values["lr_scheduler_type"] = str(
        getattr(given.lr_scheduler_type, "value", given.lr_scheduler_type)
    )
    values["lr_scheduler_kwargs"] = given.lr_scheduler_kwargs or {}
    if "max_grad_norm" not in changed:  # theirs is 1.0, which must not hide that of train_config
        del values["max_grad_norm"]
    if 0 < (warmup := float(given.warmup_steps)) < 1:  # transformers 5 writes the ratio there
        values |= {"warmup_steps": 0, "warmup_ratio": warmup}
    with _one_sentence():
        return TrainingArgs(**values)


def with_args(config: DPOConfig, given: Any) -> DPOConfig:
    """The config with `args` in the place of its own, judged like one that was written so."""
    if given is None:
        return config
    if said := sorted(config.actor_train.training_args.model_fields_set):
        raise ConfigError(
            f"args: train_config has training_args too ({', '.join(said)}); keep one of them."
        )
    actor = config.actor_train.model_copy(update={"training_args": training_args(given)})
    with _one_sentence():
        return DPOConfig.model_validate(config.model_copy(update={"actor_train": actor}))


@contextmanager
def _one_sentence() -> Iterator[None]:
    """For each problem, instead of pydantic's report."""
    try:
        yield
    except ValidationError as error:
        said = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
        raise ConfigError([f"{place}: {text}" if place else text for place, text in said]) from None
