"""Log files are complete however the process ends, and contain no secrets."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rather.config.redaction import redact
from rather.errors import ConfigError, DataError
from rather.tracking import logs
from rather.tracking.logs import close_logging, setup_logging, worker_log

ROOT = Path(sys.modules[setup_logging.__module__].__file__ or "").parents[2]
log = logging.getLogger("rather.somewhere")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_logging()


def text(folder: Path, name: str = "driver.log") -> str:
    return (folder / name).read_text()


def in_a_process(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    begin = (
        "import logging, os, sys, threading, faulthandler\nfrom pathlib import Path\n"
        "from rather.tracking.logs import setup_logging, worker_log\n"
        "setup_logging(Path(sys.argv[1]))\nlogging.getLogger('rather.x').info('the last words')\n"
    )
    command = [sys.executable, "-c", begin + script, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=60, check=False
    )


def test_a_line_has_time_origin_and_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(tmp_path / "logs")
    log.info("step %d", 3)
    log.warning("careful")
    log.debug("not this")
    first, second = text(tmp_path / "logs").splitlines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"{stamp} \[driver\] INFO rather\.somewhere: step 3", first)
    assert re.fullmatch(rf"{stamp} \[driver\] WARNING rather\.somewhere: careful", second)
    assert capsys.readouterr().err == "step 3\nwarning: careful\n"


def test_setting_up_twice_changes_nothing_and_again_appends(tmp_path: Path) -> None:
    setup_logging(tmp_path)
    setup_logging(tmp_path)
    log.info("once")
    close_logging()
    setup_logging(tmp_path)
    log.info("resumed")
    assert [line.rpartition(" ")[2] for line in text(tmp_path).splitlines()] == ["once", "resumed"]


def test_another_folder_takes_over(tmp_path: Path) -> None:
    setup_logging(tmp_path / "a")
    setup_logging(tmp_path / "b")
    log.info("here")
    assert text(tmp_path / "a") == ""
    assert "here" in text(tmp_path / "b")


def test_closing_undoes_everything(tmp_path: Path) -> None:
    root = logging.getLogger("rather")

    def state() -> list[object]:
        hooks = [sys.excepthook, threading.excepthook, faulthandler.is_enabled()]
        return [*hooks, list(root.handlers), root.level]

    before = state()
    setup_logging(tmp_path)
    worker_log(tmp_path, "actor_train", 0)
    assert state()[:2] != before[:2]
    close_logging()
    assert state() == before
    assert not logging.getLogger("rather.worker.actor_train-0").handlers
    log.info("after")
    assert "after" not in text(tmp_path)


def test_workers_in_the_driver_process_have_their_own_files(tmp_path: Path) -> None:
    setup_logging(tmp_path)
    worker_log(tmp_path, "actor_train", 0).info("trained")
    assert worker_log(tmp_path, "reference", 0) is worker_log(tmp_path, "reference", 0)
    log.info("driven")
    assert "[actor_train-0] INFO rather.worker.actor_train-0: trained" in text(
        tmp_path, "actor_train-0.log"
    )
    assert "driven" not in text(tmp_path, "actor_train-0.log")
    assert text(tmp_path, "reference-0.log") == ""
    assert text(tmp_path).count("trained") == 1


def test_a_worker_in_its_own_process_logs_everything(tmp_path: Path) -> None:
    worker_log(tmp_path, "reference", 3)
    log.info("from any module")
    assert "[reference-3] INFO rather.somewhere: from any module" in text(
        tmp_path, "reference-3.log"
    )
    assert not (tmp_path / "driver.log").exists()


def test_complete_after_sudden_death(tmp_path: Path) -> None:
    script = "worker_log(Path(sys.argv[1]), 'actor_train', 0).info('working')\nos._exit(9)"
    assert in_a_process(script, tmp_path).returncode == 9
    assert [line.rpartition(": ")[2] for line in text(tmp_path).splitlines()] == [
        "the last words",
        "working",
    ]
    assert "working" in text(tmp_path, "actor_train-0.log")


def test_uncaught_exceptions_and_native_crashes_are_in_the_file(tmp_path: Path) -> None:
    script = (
        "thread = threading.Thread(target=lambda: [][7])\nthread.start()\nthread.join()\n"
        "def deep(): raise ValueError('https://me:secret@host')\ndeep()"
    )
    done = in_a_process(script, tmp_path / "python")
    assert done.returncode == 1
    assert "in deep" in done.stderr
    assert "secret" not in done.stderr
    written = text(tmp_path / "python")
    assert "IndexError: list index out of range" in written
    assert "CRITICAL rather: the run ends: ValueError: https://[hidden]@host" in written
    assert "in deep" in written
    assert "secret" not in written
    in_a_process("faulthandler._sigsegv()", tmp_path / "native")
    assert re.search(
        r"Fatal Python error: Segmentation fault(.|\n)*in <module>", text(tmp_path / "native")
    )


def test_an_exception_passing_the_close_is_written_down(tmp_path: Path) -> None:
    def run(error: Exception) -> None:
        setup_logging(tmp_path)
        try:
            raise error
        finally:
            close_logging()

    with pytest.raises(DataError):
        run(DataError("p.jsonl:3: no answer."))
    assert text(tmp_path).endswith(
        "CRITICAL rather: the run ends: DataError: p.jsonl:3: no answer.\n"
    )
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError("a bug"))
    assert "Traceback (most recent call last)" in text(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "own", lambda *_: os.open("/dev/full", os.O_WRONLY))
    setup_logging(tmp_path)
    for _ in range(3):
        log.info("a line")
    close_logging()
    err = capsys.readouterr().err
    assert err.count("lines are being lost ([Errno 28] No space left on device)") == 1
    assert err.count("a line") == 3


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"logging_dir: .*driver\.log cannot be written \("):
        setup_logging(tmp_path / "file")


SECRETS = [
    "hf_" + "aB3" * 11 + "x",
    "sk-proj-" + "Zz9_" * 8,
    "0123456789abcdef" * 2 + "01234567",
    "wandb_v1_" + "a1B2" * 10,
]


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_reach_neither_file_nor_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], secret: str
) -> None:
    setup_logging(tmp_path)
    log.info("token=%s, and", secret)
    try:
        raise RuntimeError(f"401 for '{secret}'")
    except RuntimeError:
        log.exception("refused")
    shown = text(tmp_path) + capsys.readouterr().err
    assert secret not in shown
    assert "token=[hidden], and" in shown
    assert "401 for '[hidden]'" in shown


@pytest.mark.parametrize(
    "harmless",
    ["hf_infer", "risk-free", "a" * 64, "step 3", "https://host/a@b", "mail me@host", "task-1234"],
)
def test_ordinary_words_stay(harmless: str) -> None:
    assert redact(harmless) == harmless


def test_user_info_of_an_address_is_hidden() -> None:
    assert (
        redact("git+https://bob:pw@host/x, http://tok@y")
        == "git+https://[hidden]@host/x, http://[hidden]@y"
    )
