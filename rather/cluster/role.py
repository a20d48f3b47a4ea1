"""Role: the calls that the training loop makes on a policy or a reference, wherever its ranks run.

`ActorWorker` answers them in this process, `Cluster` sends them to Ray actors, and `SpmdCluster`
makes them in all processes that torchrun started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rather.config.schema import RoleConfig
from rather.data.batch import Columns, PairBatch, PairFacts
from rather.train.nonfinite import StepLimits
from rather.train.rank_trainer import StepResult


@dataclass(frozen=True)
class RankInfo:
    """The rank of a worker among `world`, and its device (None: the first of device_mapping)."""

    rank: int = 0
    world: int = 1
    device: str | None = None


class Role(Protocol):
    """A policy or a reference.

    If memory runs out, `train_step` and `compute_log_probs` raise torch.OutOfMemoryError or
    BatchTooLarge only if the call can be repeated with smaller micro-batches after `forget`.
    Otherwise they raise MemoryShortage.
    """

    role: str  # actor_train or reference

    @property
    def worker_config(self) -> RoleConfig: ...

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        """Load the model; `model` replaces the configured one."""

    def embedding_rows(self) -> int: ...

    def plan(self, largest_pair: int, make_room: Callable[[], bool] | None = None) -> int:
        """Return the tokens of a training micro-batch. `make_room` is called if memory would be
        short."""

    def train_step(
        self,
        batches: Sequence[PairBatch],
        reference: Columns | None,
        *,
        limits: StepLimits | None = None,
    ) -> StepResult: ...

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns: ...

    def score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]: ...

    def park(self) -> bool:
        """Keep a frozen model on the host between its turns; False if it cannot be moved there."""

    def forget(self) -> None:
        """Drop what a call that ran out of memory left behind."""

    def peak_memory(self) -> int:
        """Return the bytes of the rank that used most."""

    def numbers(self) -> dict[str, Any]:
        """Return the state that is not a tensor and is the same on all ranks."""

    def write_state(self, folder: Path) -> None: ...

    def write_reference(self, folder: Path) -> None: ...

    def finish_writing(self) -> None:
        """Wait until every rank has written its part, or a note that says why not."""

    def read_state(self, path: Path, numbers: dict[str, Any]) -> None: ...

    def write_weights(self, folder: Path, group: str) -> dict[str, tuple[int, str]]: ...

    def mix_weights(self, weights: Path, share: float) -> None:
        """Move every weight by `share` of the way to those stored in a folder."""

    def save_model(self, folder: Path, tokenizer: Any, card: str) -> None: ...
