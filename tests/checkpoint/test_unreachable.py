"""A second disk that cannot be reached costs its copies, never the run."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rather.checkpoint.checkpoint import newest_good
from tests.checkpoint.runs import config_of, train
from tests.runs import incidents


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_training_continues_without_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Also asking how much room there is fails then."""
    away, usage = tmp_path / "away", shutil.disk_usage

    def disk_usage(path: Any) -> Any:
        if Path(path).is_relative_to(away):
            raise OSError(code, os.strerror(code))
        return usage(path)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    changes = {"checkpoint_config__output_dir": str(away), "checkpoint_config__max_missed_saves": 9}
    assert (
        train(tmp_path, "run", **changes) == 9
    )  # at the end it is said, after a good checkpoint of its own
    config = config_of(tmp_path, "run", **changes)
    newest = newest_good(config.run_dir)
    assert newest is not None
    assert newest.step == 6
    assert newest_good(config.checkpoint_copy_dir) is None
    missed = [each for each in incidents(config) if each["kind"] == "missed_save"]
    assert [each["step"] for each in missed] == [2, 4, 6]
    assert all(
        os.strerror(code) in each["reason"] and str(away) in each["folder"] for each in missed
    )
