"""The seam of an engine: what loads a policy, runs its micro-batches and updates its weights.

RankTrainer calls a Runner and a StepOptimizer. Rather's own engine is `torch`, and
`actor_train.engine` names another one: FILE.py:Class, or an entry point of an installed package in
the group `rather.engines`. Both are code of the user's choice. The door is experimental.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor

from rather.config import plugins
from rather.config.schema import ModelArgs, TrainingArgs
from rather.config.strategies import Layout
from rather.data.batch import PairBatch
from rather.errors import ConfigError
from rather.files import JsonObject
from rather.model.policy import PolicyModel
from rather.optim.optimizer import LossScale
from rather.parallel.mesh import Mesh
from rather.parallel.stages import Objective

KEY = "actor_train.engine"
ENTRY_POINTS = "rather.engines"


class Runner(Protocol):
    """Runs the micro-batches of one rank."""

    def columns(
        self, batches: Sequence[PairBatch], wanted: Collection[str]
    ) -> list[dict[str, Tensor]] | None:
        """Return the columns of each micro-batch, without gradients; None without the head."""

    def backward(
        self, batches: Sequence[PairBatch], wanted: Collection[str], objective: Objective
    ) -> None:
        """Accumulate the gradients of the objective: its sum over micro-batches and ranks."""


class StepOptimizer(Protocol):
    """Updates the weights of one rank. `Optimizer` is Rather's own.

    An engine's optimizer is a subclass: the defaults are for one that keeps gradients to itself.
    """

    # Whether masters, moments and load use whole tensors, of which the first rank stores all. They
    # are gathered: every rank reads them in the same order, and the others may get empty ones.
    stores_whole: bool = True
    schedule: Callable[[int], float]
    updates: int = 0
    loss_scale: LossScale | None = None

    @property
    def lr(self) -> float:
        return self.schedule(self.updates)

    @property
    def scale(self) -> float:
        """What the objective is multiplied by before backward; `grad_norm` has it removed."""
        return 1.0

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The float32 weights by the names of the whole PolicyModel."""

    def begin_sums(self) -> None:
        """Prepare to add up the gradients of a step."""

    def prepare(self) -> None:
        """Do what an update can do before the norm of the gradient is known."""

    def gradient(self, name: str) -> Tensor | None:
        return None

    def gradients_in_turn(
        self, names: Collection[str] | None = None
    ) -> Iterable[Mapping[str, Tensor]]:
        return ()

    def norms(self, names: Collection[str] | None = None) -> dict[str, float]:
        return {}

    def grad_norm(self, names: Collection[str] | None = None) -> Tensor:
        """Return this rank's share: the squares of all ranks are summed."""

    def step(self, grad_norm: float) -> None: ...
    def zero_grad(self) -> None: ...
    def moments(self) -> dict[str, Tensor]: ...
    def load(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int
    ) -> None: ...
    def narrow_gradients(self) -> bool:
        return False


@dataclass(frozen=True)
class EngineJob:
    """What an engine is given. `load` returns the whole policy on the device, weights checked."""

    model: str
    args: ModelArgs
    device: str
    mesh: Mesh
    layout: Layout
    strategy_config: JsonObject
    training: TrainingArgs
    max_grad_norm: float
    schedule: Callable[[int], float]
    task: str
    load: Callable[[], PolicyModel]


@dataclass
class Engine(ABC):
    """Builds the three parts of a rank that trains. Override `problems` to refuse runs."""

    job: EngineJob
    dithers: ClassVar[bool] = False  # keeps updates below the spacing of bfloat16 numbers

    def problems(self) -> Iterable[str]:
        """Return why this run is impossible; each sentence begins with the key that asks for it."""
        return ()

    @abstractmethod
    def build_policy(self) -> PolicyModel: ...
    @abstractmethod
    def build_optimizer(self, policy: Any) -> StepOptimizer: ...
    @abstractmethod
    def build_runner(self, policy: Any, optimizer: Any) -> Runner: ...


def find_engine(name: str) -> type[Engine]:
    """Return the class that `actor_train.engine` names; this runs its code."""
    file, _, class_name = name.rpartition(":")
    if file:
        engine = plugins.load_function(Path(file), class_name, f"{KEY}:")
    else:
        installed = entry_points(group=ENTRY_POINTS)
        if name not in installed.names:
            hint = plugins.did_you_mean(name, ["torch", *installed.names])
            raise ConfigError(f"{KEY}: no installed package has an engine '{name}'{hint}")
        try:
            engine = installed[name].load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{KEY}: '{name}' cannot be imported: {error}") from error
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise ConfigError(f"{KEY}: {name} is not a subclass of rather.train.engine.Engine")
    return engine
