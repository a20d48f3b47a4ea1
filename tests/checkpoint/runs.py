"""Small runs for tests of their checkpoints: what they leave, and a disk that is full when a test says so."""

from __future__ import annotations

import errno
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from rather.checkpoint import checkpoint
from rather.config.run_config import DPOConfig
from rather.errors import RatherError
from rather.pipeline.pipeline import DPOPipeline
from tests.runs import assert_same
from tests.tiny import make_config

RUN: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "eval_steps": 3, "max_ckpt_to_keep": 0}
RUN["actor_train__training_args__num_train_epochs"] = 2.0  # of five steps


def config_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    return make_config(folder, exp_name=name, **{**RUN, **changes})


def train(folder: Path, name: str, **changes: Any) -> int:
    """The exit code, also of a run that fails."""
    try:
        return DPOPipeline(config_of(folder, name, **changes)).run()
    except RatherError as error:
        return error.exit_code


def finish(folder: Path, config: DPOConfig) -> None:
    """Train or resume a run; what it leaves is what the run without a fault has left."""
    assert DPOPipeline(config).run() == 0
    assert_same(config, config_of(folder, "whole"))


def copy_of_whole(folder: Path, name: str, *without: str, **changes: Any) -> DPOConfig:
    """Copy the run without a fault under another name, but for some of its folders."""
    config = config_of(folder, name, **changes)
    ignored = shutil.ignore_patterns(*without) if without else None
    shutil.copytree(config_of(folder, "whole").run_dir, config.run_dir, ignore=ignored)
    return config


def fill_disk(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """Files of checkpoints whose path matches a pattern of fnmatch are refused by a full disk."""
    write = checkpoint._write

    def full(path: Path, chunks: Any) -> tuple[int, str]:
        if fnmatch(str(path), pattern):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, chunks)

    monkeypatch.setattr(checkpoint, "_write", full)
