"""Where a run may write: a folder of its own, whose name is a name, and only one run at a time."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from rather.config.load import load_config
from rather.files import read_bytes
from rather.run_folder import layout
from rather.run_folder.control import lock
from rather.run_folder.layout import RunFolder
from rather.tracking.json_lines import JsonLines
from tests.commands.conftest import exits
from tests.security.conftest import Config


@pytest.mark.parametrize("name", ["run", "a.b_c-1", "x" * 128])
def test_valid_names_are_accepted(config: Config, name: str) -> None:
    exits(0, "config", "show", config(exp_name=name))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "a b", "ä", "a\n", "a\0", "x" * 129, "~", "$HOME"]
)
def test_invalid_names_are_refused(config: Config, name: str) -> None:
    assert "exp_name (" in exits(2, "config", "show", config(exp_name=name))


@pytest.mark.parametrize("folder", ["/", "//", "..", "../", "/tmp/..", " "])
def test_folders_that_are_not_for_runs(config: Config, folder: str) -> None:
    assert "output_dir (" in exits(2, "train", config(output_dir=folder))


def test_a_link_to_the_root_is_the_root(config: Config, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    exits(2, "train", config(output_dir=str(tmp_path / "link")))


def test_a_link_to_itself(config: Config, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for key in ("output_dir", "resume_from_checkpoint", "pretrain"):
        assert "loop" in exits((2, 4, 9), "train", config(**{key: str(tmp_path / "loop")}))


def test_a_file_in_the_place_of_the_folder(config: Config, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a letter")
    assert "output_dir" in exits(9, "train", config())
    assert (tmp_path / "out").read_text() == "a letter"


def test_a_linked_run_folder_is_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run").symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link" in exits(2, "train", config())
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_of_something_else_is_refused_and_untouched(
    config: Config, tmp_path: Path
) -> None:
    letters = tmp_path / "out" / "run"
    letters.mkdir(parents=True)
    (letters / "letter.txt").write_text("dear")
    assert "is not a run folder, it contains letter.txt" in exits(2, "train", config())
    assert [file.name for file in letters.iterdir()] == ["letter.txt"]
    exits(0, "train", config(), "--overwrite")
    assert (letters / "letter.txt").read_text() == "dear"


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/self/attr").exists(), reason="root may write anywhere"
)
def test_a_folder_that_cannot_be_written(config: Config, tmp_path: Path) -> None:
    assert "/proc/rather" in exits((2, 9), "train", config(output_dir="/proc/rather"))


def test_a_folder_in_memory_is_reported(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "mounts").write_text(f"disk / ext4 rw 0 0\nnone {tmp_path}/out tmpfs rw 0 0\n")
    folder = RunFolder.of(load_config(config()))
    folder.claim()
    assert "is in memory" not in caplog.text
    monkeypatch.setattr(layout, "MOUNTS", tmp_path / "mounts")
    folder.claim()
    assert "is in memory, not on a disk" in caplog.text


def test_two_runs_in_one_folder(config: Config, tmp_path: Path) -> None:
    with lock(tmp_path / "out" / "run"):
        assert f"is in use by process {os.getpid()} on" in exits(2, "train", config())


def test_files_of_a_result_have_the_permissions_of_others(finished: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for folder in ("model", "checkpoint-1", "."):
        files = [file for file in (finished / folder).iterdir() if file.is_file()]
        modes = {file.name: oct(file.stat().st_mode & 0o777) for file in files}
        assert set(modes.values()) == {oct(0o666 & ~umask)}, modes


def test_of_a_huge_sparse_file_only_the_beginning_is_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    with file.open("wb") as empty:
        empty.truncate(1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 67,108,864 bytes"):
            read_bytes(file, 64 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    lines = JsonLines(file)
    assert not [*lines.new()]
    assert lines.damaged < 10
    with file.open("ab") as written:
        written.write(b'{"step": 1}\n')
    assert [*lines.new()] == [{"step": 1}]
    assert not lines.was_cut()
