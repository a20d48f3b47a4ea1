"""A run writes only to regular files of its own folder: links, pipes and folders are refused first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
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
from tests.commands.conftest import exits, rather
from tests.security.conftest import Config


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """A file that no link may change."""
    file = tmp_path / "mine"
    file.write_text("mine\n")
    yield file
    assert file.read_text() == "mine\n"


@pytest.mark.parametrize("name", [*OWN_FILES, LOCK])
def test_a_linked_file_of_a_run_is_refused_before_anything_is_written(
    config: Config, finished: Path, tmp_path: Path, mine: Path, name: str
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "out" / "run"))
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(mine)
    before = {file.name: file.lstat().st_mtime_ns for file in run.iterdir()}
    assert f"{run / name} is a link or not a regular file" in exits(2, "train", config(max_steps=2))
    assert {file.name: file.lstat().st_mtime_ns for file in run.iterdir()} == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_pipe_or_folder_among_the_files_of_a_run_is_refused(
    config: Config, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "out" / "run").mkdir(parents=True)
    make(tmp_path / "out" / "run" / "metrics.jsonl")
    exits(2, "train", config())


def test_a_link_that_appears_later_is_not_followed(tmp_path: Path, mine: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(mine)
    with pytest.raises(OSError, match="is a symbolic link"):
        write_own(link, "theirs")
    with pytest.raises(OSError, match="is a symbolic link"):
        read_bytes(link, opener=own)
    assert read_bytes(link) == b"mine\n"  # a link that the user named


def test_a_linked_log_file_is_refused(config: Config, tmp_path: Path, mine: Path) -> None:
    log = tmp_path / "logs" / "run" / "driver.log"
    log.parent.mkdir(parents=True)
    log.symlink_to(mine)
    assert "driver.log cannot be written (is a symbolic link)" in exits(2, "train", config())
    setup_logging(tmp_path / "logs" / "other")
    close_logging()
    assert (tmp_path / "logs" / "other" / "driver.log").is_file()


def test_the_log_probs_next_to_a_checkpoint_are_not_a_link(
    config: Config, finished: Path, tmp_path: Path, mine: Path
) -> None:
    """Else a private file would be copied into the new run."""
    given = Path(shutil.copytree(finished, tmp_path / "given"))
    (given / "reference.log").unlink()
    (given / "reference.log").symlink_to(mine)
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
def test_the_token_cache_writes_through_no_link(tmp_path: Path, mine: Path, plant: Any) -> None:
    """The names of its temporary files cannot be foreseen, and they are new files."""
    cache, address = Cache(tmp_path / "cache"), "a" * 64
    data = tmp_path / "data"
    data.write_text("rows")
    names = [f".{address[:32]}.{os.getpid()}.building", f".files.json.{os.getpid()}.part"]
    for name in names:
        plant(mine, cache.folder / name)

    cache.find_or_build(address, build)
    assert cache.sha(data) == sha256(b"rows").hexdigest()
    assert mine.read_text() == "mine\n"
    with pytest.raises(FileExistsError), batch_writer(cache.folder / names[0]):
        pass


@pytest.mark.defect("X26")
def test_a_linked_entry_of_the_token_cache_is_built_again(tmp_path: Path) -> None:
    cache, address = Cache(tmp_path / "cache"), "a" * 64

    cache.find_or_build(address, build)
    entry = cache.folder / f"{address[:32]}.arrow"
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    cache.find_or_build(address, build)
    assert not entry.is_symlink()
