"""Callbacks: a user's own code at points of a run, in the process that writes its metrics.

    from rather.pipeline.callbacks import Callback, callback

    @callback
    class StopAtMargin(Callback):
        def on_evaluate(self, run, record):
            if record["eval/rewards/margins"] > 5:
                run.stop()

`--import my_callback.py` registers it for `rather train`. A script registers it in the same way, or
gives objects to `DPOTrainer(callbacks=[...])`.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rather.config.plugins import Registry
from rather.errors import ConfigError
from rather.run_folder.control import StopRequest

CALLBACKS: Registry[type[Callback]] = Registry("callback", "rather.pipeline")


@dataclass
class RunView:
    """What a callback may know about a run, and ask of it."""

    folder: Path | None  # the run folder; None if nothing is written
    total_steps: int | None  # None if it is unknown until the pairs end
    requests: StopRequest
    step: int = 0  # the last finished step

    def stop(self) -> None:
        """End the run after this step, with a checkpoint, as `rather stop` does."""
        self.requests.end()

    def save(self) -> None:
        """Save a checkpoint after this step, as `rather save-now` does."""
        self.requests.save_now = True


class Callback:
    """Override the methods that you need. A run that resumes makes new objects.

    An exception ends the run.
    """

    def on_train_begin(self, run: RunView) -> None:
        """Called before the first step, also of a run that resumes."""

    def on_log(self, run: RunView, record: Mapping[str, Any]) -> None:
        """Called with each record of training metrics, every `logging_steps`."""

    def on_evaluate(self, run: RunView, record: Mapping[str, Any]) -> None:
        """Called with the metrics of each evaluation, whose names begin with `eval/`."""

    def on_save(self, run: RunView) -> None:
        """Called when a checkpoint of `run.step` was taken; it may still be being written."""

    def on_train_end(self, run: RunView) -> None:
        """Called after the last step, or when the run was stopped."""


def callback(cls: type[Callback]) -> type[Callback]:
    """Register a class of callbacks, which each run makes without arguments."""
    if not (isinstance(cls, type) and issubclass(cls, Callback)):
        raise ConfigError(f"callback: {cls!r} is not a class that inherits from Callback.")
    CALLBACKS.add(cls.__name__, cls, cls.__module__)
    return cls


def registered_callbacks() -> list[Callback]:
    """Make an object of every registered class."""
    return [_make(cls) for cls in CALLBACKS.values()]


def _make(cls: type[Callback]) -> Callback:
    try:
        return cls()
    except Exception as error:
        raise ConfigError(f"callback {cls.__name__}: cannot be made: {_in_short(error)}") from error


@dataclass
class Callbacks:
    """Calls the same method of several callbacks."""

    callbacks: Sequence[Callback]
    run: RunView

    def call(self, method: str, step: int, *arguments: Any) -> None:
        """Call a method by name; an error names the callback and the user's line."""
        self.run.step = step
        for one in self.callbacks:
            try:
                getattr(one, method)(self.run, *arguments)
            except Exception as error:
                name = f"callback {type(one).__name__}.{method}"
                raise ConfigError(f"{name} failed at step {step}: {_in_short(error)}") from error


def _in_short(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    return " ".join(text.split())
