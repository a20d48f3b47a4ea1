"""A run writes only to regular files of its own folder: links, pipes and folders are refused first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rather.data.cache import Cache, batch_writer
from rather.data.pairs import SCHEMA
from rather.files import own, read_bytes, write_own
from rather.run_folder.control import LOCK
from rather.run_folder.layout import OWN_FILES
from rather.tracking.logs import close_logging, setup_logging
from tests.security.conftest import rather

Config = Callable[..., Path]


@pytest.mark.parametrize("name", [*OWN_FILES, LOCK])
def test_a_linked_file_of_a_run_is_refused_before_anything_is_written(
    config: Config, finished: Path, tmp_path: Path, name: str
) -> None:
    run, mine = tmp_path / "out" / "run", tmp_path / "mine"
    shutil.copytree(finished, run)
    mine.write_text("mine\n")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(mine)
    before = {file.name: file.lstat().st_mtime_ns for file in run.iterdir()}
    done = rather("train", config(max_steps=2))
    assert done.exit_code == 2, done.output
    assert f"{run / name} is a link or not a regular file" in done.stderr
    assert mine.read_text() == "mine\n"
    assert {file.name: file.lstat().st_mtime_ns for file in run.iterdir()} == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_pipe_or_folder_among_the_files_of_a_run_is_refused(
    config: Config, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "out" / "run").mkdir(parents=True)
    make(tmp_path / "out" / "run" / "metrics.jsonl")
    assert rather("train", config()).exit_code == 2


def test_a_link_that_appears_later_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine\n")
    (tmp_path / "link").symlink_to(mine)
    with pytest.raises(OSError, match="is a symbolic link"):
        write_own(tmp_path / "link", "theirs")
    with pytest.raises(OSError, match="is a symbolic link"):
        read_bytes(tmp_path / "link", opener=own)
    assert mine.read_text() == "mine\n"
    assert read_bytes(tmp_path / "link") == b"mine\n"  # a link that the user named


def test_a_linked_log_file_is_refused(config: Config, tmp_path: Path) -> None:
    mine, log = tmp_path / "mine", tmp_path / "logs" / "run" / "driver.log"
    mine.write_text("mine\n")
    log.parent.mkdir(parents=True)
    log.symlink_to(mine)
    done = rather("train", config())
    assert done.exit_code == 2
    assert "driver.log cannot be written (is a symbolic link)" in done.stderr
    assert mine.read_text() == "mine\n"
    setup_logging(tmp_path / "logs" / "other")
    close_logging()
    assert (tmp_path / "logs" / "other" / "driver.log").is_file()


def test_the_log_probs_next_to_a_checkpoint_are_not_a_link(
    config: Config, finished: Path, tmp_path: Path
) -> None:
    """Else a private file would be copied into the new run."""
    given = Path(shutil.copytree(finished, tmp_path / "given"))
    (tmp_path / "mine").write_text("mine\n")
    (given / "reference.log").unlink()
    (given / "reference.log").symlink_to(tmp_path / "mine")
    done = rather("train", config(), f"resume_from_checkpoint={given / 'checkpoint-1'}")
    assert done.exit_code != 0
    assert "reference.log" in done.stderr
    copied = tmp_path / "out" / "run" / "reference.log"
    assert not copied.exists() or b"mine" not in copied.read_bytes()


def build(path: Path) -> dict[str, Any]:
    """Write tokens without a row."""
    with batch_writer(path) as add:
        add(pa.RecordBatch.from_pylist([], schema=SCHEMA))
    return {"files": []}


@pytest.mark.defect("X26")
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_the_token_cache_writes_through_no_link(tmp_path: Path, plant: Any) -> None:
    """The names of its temporary files cannot be foreseen, and they are new files."""
    cache, victim, address = Cache(tmp_path / "cache"), tmp_path / "victim", "a" * 64
    victim.write_text("mine")
    data = tmp_path / "data"
    data.write_text("rows")
    names = [f".{address[:32]}.{os.getpid()}.building", f".files.json.{os.getpid()}.part"]
    for name in names:
        plant(victim, cache.folder / name)

    cache.find_or_build(address, build)
    assert cache.sha(data) == sha256(b"rows").hexdigest()
    assert victim.read_text() == "mine"
    with pytest.raises(FileExistsError), batch_writer(cache.folder / names[0]):
        pass
    assert victim.read_text() == "mine"


@pytest.mark.defect("X26")
def test_a_linked_entry_of_the_token_cache_is_built_again(tmp_path: Path) -> None:
    cache, address = Cache(tmp_path / "cache"), "a" * 64

    cache.find_or_build(address, build)
    entry = cache.folder / f"{address[:32]}.arrow"
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    cache.find_or_build(address, build)
    assert not entry.is_symlink()
