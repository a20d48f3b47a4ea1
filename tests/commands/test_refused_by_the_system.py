"""A full disk, too little memory and folders that cannot be made are one line and an exit code."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rather.commands.terminal import guarded
from rather.config.run_config import DPOConfig
from tests.commands.conftest import rather

DISK, MEMORY = 9, 8


def refuse(error: BaseException) -> None:
    raise error


def caused_by(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


SHORTAGES = [
    (OSError(errno.ENOSPC, "No space left on device"), DISK),
    (OSError(errno.EFBIG, "File too large", "report.html"), DISK),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), DISK),
    (ValueError("I/O error: No space left on device (os error 28)"), DISK),
    (MemoryError(), MEMORY),
    (OSError(errno.ENOMEM, "Cannot allocate memory", "x"), MEMORY),
    (ImportError("libtorch_cpu.so: failed to map segment from shared object"), MEMORY),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8"), MEMORY),
    (RuntimeError("can't start new thread"), MEMORY),
    (caused_by(RuntimeError("Failed to import transformers"), MemoryError()), MEMORY),
]


@pytest.mark.defect("X15")
@pytest.mark.parametrize(("error", "code"), SHORTAGES, ids=[str(case[0]) for case in SHORTAGES])
def test_a_full_disk_and_too_little_memory_are_one_line(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(lambda: refuse(error)) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rather: ")


def test_other_errors_are_bugs() -> None:
    for bug in (ValueError("x"), FileNotFoundError(errno.ENOENT, "No such file", "x"), OSError()):
        with pytest.raises(type(bug)):
            guarded(lambda bug=bug: refuse(bug))


@pytest.mark.defect("X15")
def test_a_report_that_does_not_fit(run: DPOConfig, tmp_path: Path) -> None:
    """The limit on file sizes fails like a full disk: after some bytes were written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / "report.html"
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        result = rather("report", run.run_dir, "--out", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == DISK
    assert f"rather: {out}: File too large. Free some disk space" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.defect("X15")
def test_a_small_address_space_is_refused_before_libraries_fail_in_it() -> None:
    source = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30,) * 2)\n"
        "from rather.commands.terminal import guarded\n"
        "raise SystemExit(guarded(lambda: 0))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == MEMORY
    assert "(ulimit -v) is 2048 MiB, and PyTorch needs up to 3072 MiB" in done.stderr


@pytest.mark.defect("X17")
def test_a_number_that_python_does_not_hold(run: DPOConfig) -> None:
    config = run.run_dir / "config.yaml"
    result = rather("config", "show", config, "beta=" + "9" * 5000)
    assert result.exit_code == 2
    assert result.stderr.startswith("rather: beta (command line): Exceeds the limit (4300 digits)")
