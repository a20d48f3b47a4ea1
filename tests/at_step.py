"""A worker that does something before a step."""

from __future__ import annotations

from typing import Any

from rather.cluster.worker import ActorWorker


class AtStep(ActorWorker):
    """`before` is called before each step, with its number in this process."""

    steps = 0

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        self.before(self.steps)
        return super().train_step(*args, **kwargs)

    def before(self, step: int) -> None:
        raise NotImplementedError

    @property
    def is_last(self) -> bool:
        return self.member.rank == self.member.world - 1
