"""What users of the Python API bring: a torch optimizer, a schedule, transformers' arguments."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rather.config.schema import ActorConfig, TrainingArgs
from rather.errors import ConfigError
from rather.optim.adamw import local
from rather.optim.optimizer import LossScale, Optimizer

# Fields of transformers' TrainingArguments that mean the same here.
SHARED = tuple(name for name in TrainingArgs.model_fields if name != "log_num_zeros_in_grad")
# Fields without an effect: the caller decides where and how often, or transformers sets them.
IGNORED = frozenset({
    "output_dir", "logging_dir", "run_name", "logging_steps", "save_steps", "save_strategy",
    "save_total_limit", "save_only_model", "eval_steps", "eval_strategy", "logging_strategy",
    "report_to", "disable_tqdm", "remove_unused_columns", "dataloader_pin_memory", "do_train",
    "do_eval", "use_cpu", "local_rank", "ddp_timeout", "hub_private_repo", "overwrite_output_dir",
    "log_level", "warmup_ratio",
})  # fmt: skip


class TorchOptimizer(Optimizer):
    """A torch optimizer with the calls of Rather's.

    Checkpoints hold its tensors as safetensors, and its numbers and those of the scheduler as JSON.
    State that fits neither is refused; nothing is pickled.
    """

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
            raise ConfigError("optimizer: has no parameter of the model that is to be trained.")
        self.optimizer, self.scheduler, self.max_grad_norm = optimizer, scheduler, max_grad_norm
        self.masters: Mapping[str, Tensor] = {
            name: local(p.detach()) for name, p in self.parameters.items()
        }
        self.updates, self.loss_scale = 0, LossScale() if compute == torch.float16 else None
        # Gradients stay where the optimizer looks.
        self._states, self._on_cuda, self._totals = {}, False, None
        self._initial = copy.deepcopy(self._settings())

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def gradient(self, name: str) -> Tensor | None:
        found = self.parameters[name].grad if name in self.parameters else None
        return None if found is None else local(found)

    def prepare(self) -> None:
        """A given optimizer has nothing to do before the norm of the gradient is known."""

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        limit = self.max_grad_norm
        clip = limit / (grad_norm + 1e-6) if 0 < limit < grad_norm else 1.0
        if clip != self.scale:
            torch._foreach_mul_(self.gradients(), clip / self.scale)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.updates += 1

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    # --- state ---

    def moments(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": local(value)
            for name, p in self.parameters.items()
            for key, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        }

    def numbers(self) -> dict[str, Any]:
        """Return the state that is not a tensor, as far as it differs from a new optimizer's."""
        found: dict[str, Any] = {}
        for part, values in self._settings().items():
            before = self._initial.get(part, {})
            found[part] = {k: x for k, x in values.items() if k not in before or x != before[k]}
        for name, p in self.parameters.items():
            state = self.optimizer.state.get(p, {})
            if own := {key: x for key, x in state.items() if not isinstance(x, Tensor)}:
                found[f"state {name}"] = own
        for part, numbers in found.items():
            owner = self.scheduler if part == "scheduler" else self.optimizer
            for key, number in numbers.items():
                if not _survives_json(number):
                    raise ConfigError(
                        f"{type(owner).__name__}: '{key}' of its state ({type(number).__name__}) "
                        "is neither a tensor nor a JSON value, so checkpoints cannot hold it; train "
                        "without an output folder, or with another optimizer or scheduler."
                    )
        return found

    @torch.no_grad()
    def load(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int
    ) -> None:
        self.updates = updates
        groups = self.optimizer.param_groups
        number = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
        state: dict[int, dict[str, Tensor]] = {}
        for name, p in self.parameters.items():
            local(p).copy_(masters[name])
        for key in moments:
            name, _, kind = key.rpartition(".")
            p, value = self.parameters[name], moments[key]
            if isinstance(p, DTensor) and value.shape == local(p).shape:  # divided like the weight
                whole = torch.zeros_like(p, dtype=value.dtype)
                local(whole).copy_(value)
                value = whole
            state.setdefault(number[id(p)], {})[kind] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})

    def load_numbers(self, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what `numbers` returned; tensors are loaded already."""
        for part, values in numbers.items():
            kind, _, name = part.partition(" ")
            if kind == "state":
                self.optimizer.state[self.parameters[name]] |= values
            elif kind == "group":
                group = self.optimizer.param_groups[int(name)]
                tuples = {k: tuple(x) for k, x in values.items() if isinstance(group.get(k), tuple)}
                group.update({**values, **tuples})
            else:
                self.scheduler.load_state_dict({**self.scheduler.state_dict(), **values})

    def _settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each parameter group, and the state of the scheduler."""
        found = {
            f"group {i}": {key: value for key, value in group.items() if key != "params"}
            for i, group in enumerate(self.optimizer.param_groups)
        }
        if self.scheduler is not None:
            found["scheduler"] = self.scheduler.state_dict()
        return found


def replace_parameters(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Give an optimizer the parameters of a model that was divided over ranks, by their `names`."""
    for group in optimizer.param_groups:
        own = [parameters.get(names.get(id(p), "")) for p in group["params"]]
        now = [p for p in own if p is not None]  # the others are in other pipeline stages
        if optimizer.state and any(
            p is not before for p, before in zip(now, group["params"], strict=False)
        ):
            raise ConfigError(
                "optimizer: has taken steps, and its state is not divided; give a new one."
            )
        group["params"] = now


def _survives_json(number: Any) -> bool:
    """Return whether JSON gives the same value back; a tuple may become a list."""
    try:
        read_back = json.loads(json.dumps(number, allow_nan=False))
    except (TypeError, ValueError):
        return False
    return bool(read_back == (list(number) if isinstance(number, tuple) else number))


def with_args(actor: ActorConfig, given: Any) -> ActorConfig:
    """Return the section with `args` as its training arguments."""
    if known := sorted(actor.training_args.model_fields_set):
        raise ConfigError(
            f"args: train_config has training_args too ({', '.join(known)}); keep one of them."
        )
    try:
        own = given if isinstance(given, TrainingArgs) else TrainingArgs(**_shared_values(given))
        return actor.model_copy(update={"training_args": own})
    except ValidationError as error:
        found = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
        raise ConfigError([f"{key}: {text}" if key else text for key, text in found]) from None


def _shared_values(given: Any) -> dict[str, Any]:
    """Return transformers' arguments as far as they mean the same here; refuse the rest."""
    defaults = type(given)(output_dir=given.output_dir)
    names = [each.name for each in fields(given)]
    changed = {name for name in names if getattr(given, name) != getattr(defaults, name)}
    if unknown := sorted(changed - {*SHARED, *IGNORED}):
        raise ConfigError(
            f"args: {', '.join(unknown)}: not a setting of this trainer; leave it at its default. "
            "max_steps and seed belong in train_config, as DPOConfig(max_steps=...)."
        )
    found = {name: getattr(given, name, None) for name in SHARED}
    values = {name: value for name, value in found.items() if value is not None}
    kind = given.lr_scheduler_type
    values["lr_scheduler_type"] = str(getattr(kind, "value", kind))
    values["lr_scheduler_kwargs"] = given.lr_scheduler_kwargs or {}
    if "max_grad_norm" not in changed:  # transformers' default must not hide that of train_config
        del values["max_grad_norm"]
    if 0 < (warmup := float(given.warmup_steps)) < 1:  # transformers 5 writes the ratio there
        values |= {"warmup_steps": 0, "warmup_ratio": warmup}
    return values
