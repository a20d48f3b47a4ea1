"""How many files one optimizer step runs through: what a reader has to read."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import rather
from rather.cluster.worker import ActorWorker
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


@pytest.fixture(scope="module")
def files_of_a_step(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """One run of three steps: the files of the functions that the second step calls."""
    config = make_config(
        tmp_path_factory.mktemp("traced"),
        max_steps=3,
        save_steps=3,
        logging_steps=1,
        validation={"data_args": {}},
    )
    functions: set[CodeType] = set()
    train_step = ActorWorker.train_step
    steps: list[int] = []

    def traced_step(self: ActorWorker, *args: Any, **options: Any) -> Any:
        steps.append(len(steps) + 1)
        if steps[-1] == 2:
            follow(functions)
        result = train_step(self, *args, **options)
        follow()
        return result

    with pytest.MonkeyPatch.context() as patch:
        # Other tests in this process may have left handlers of logs.
        patch.setattr(logging.getLogger("rather"), "handlers", [])
        patch.setattr(ActorWorker, "train_step", traced_step)
        assert DPOPipeline(config).run() == 0
    assert steps == [1, 2, 3]
    return {str(Path(code.co_filename).relative_to(PACKAGE)) for code in functions}


def test_one_step_is_a_few_files(files_of_a_step: set[str]) -> None:
    files = {name for name in files_of_a_step if not name.startswith("model/")}
    assert "train/rank_trainer.py" in files
    assert len(files) <= 11, "\n".join(sorted(files))
