"""How much code one optimizer step runs through, and the loop around it: what a reader has to read."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import rather
from rather.cluster.worker import ActorWorker
from rather.pipeline.loop import TrainingLoop
from rather.pipeline.pipeline import DPOPipeline
from tests.tiny import make_config

PACKAGE = Path(rather.__file__).parent


def follow(*sets: set[CodeType]) -> None:
    """Add the functions of the package that this thread enters from now on."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            for found in sets:
                found.add(frame.f_code)

    sys.setprofile(note if sets else None)


def lines_of(functions: set[CodeType]) -> dict[str, set[int]]:
    """Return the lines of these functions by file; those of nested ones count once."""
    lines: dict[str, set[int]] = {}
    for code in functions:
        last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
        name = str(Path(code.co_filename).relative_to(PACKAGE))
        lines.setdefault(name, set()).update(range(code.co_firstlineno, last + 1))
    return lines


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[int]]]:
    """One run of three steps: the functions of the second step, and of the loop over the last two."""
    config = make_config(
        tmp_path_factory.mktemp("traced"),
        max_steps=3,
        save_steps=3,
        logging_steps=1,
        validation={"data_args": {}},
    )
    step: set[CodeType] = set()
    loop: set[CodeType] = set()
    train_step, train = ActorWorker.train_step, TrainingLoop._train_to_the_end
    steps: list[int] = []

    def traced_step(self: ActorWorker, *args: Any, **options: Any) -> Any:
        steps.append(len(steps) + 1)
        if steps[-1] == 2:
            follow(step, loop)
        result = train_step(self, *args, **options)
        if steps[-1] == 2:
            follow(loop)
        return result

    def traced_loop(self: TrainingLoop) -> Any:
        try:
            return train(self)
        finally:
            follow()

    with pytest.MonkeyPatch.context() as patch:
        # Other tests in this process may have left handlers of logs.
        patch.setattr(logging.getLogger("rather"), "handlers", [])
        patch.setattr(ActorWorker, "train_step", traced_step)
        patch.setattr(TrainingLoop, "_train_to_the_end", traced_loop)
        assert DPOPipeline(config).run() == 0
    assert steps == [1, 2, 3]
    return {"step": lines_of(step), "loop": lines_of(loop | {train.__code__})}


def test_one_step_is_a_few_files(traced: dict[str, dict[str, set[int]]]) -> None:
    step = {name: lines for name, lines in traced["step"].items() if not name.startswith("model/")}
    assert "train/rank_trainer.py" in step
    assert len(step) <= 8, sorted(step)


def test_the_loop_is_a_few_files(traced: dict[str, dict[str, set[int]]]) -> None:
    loop = traced["loop"]
    assert {"pipeline/loop.py", "pipeline/saving.py", "checkpoint/checkpoint.py"} <= set(loop)
    assert len(loop) <= 39, "\n".join(sorted(loop))
    sizes = {name: (PACKAGE / name).read_text(encoding="utf-8").count("\n") for name in loop}
    assert max(sizes.values()) <= 500, sizes
