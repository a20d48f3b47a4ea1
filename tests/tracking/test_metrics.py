"""metrics.jsonl loses and doubles no line; JSON for every reader, also after a torn line."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from rather.errors import DiskError
from rather.run_folder.layout import Incidents
from rather.run_folder.names import INCIDENTS
from rather.tracking.json_lines import MetricsFile, append_line, json_line, strict_json
from tests.commands.conftest import rows_of as lines


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """full_disk(n): the disk takes n more bytes; full_disk(None): there is room again."""
    room: int | None = None
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        nonlocal room
        if room is None:
            return write(descriptor, data)
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(descriptor, data[:room])
        room -= taken
        return taken

    def leave(bytes_left: int | None) -> None:
        nonlocal room
        room = bytes_left

    monkeypatch.setattr(os, "write", limited)
    return leave


def test_lines_are_there_at_once_in_the_order_of_their_fields(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    file.append({"step": 1, "loss": 0.1 + 0.2, "a": 1})
    file.append({"step": 2})
    assert (
        file.path.read_text() == '{"step": 1, "loss": 0.30000000000000004, "a": 1}\n{"step": 2}\n'
    )
    digest = sha256(file.path.read_bytes()).hexdigest()
    assert file.position() == (file.path.stat().st_size, digest)
    file.close()


def test_a_resume_cuts_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1})
    saved = file.position()
    file.append({"step": 2})
    file.close()
    with open(file.path, "ab") as half:
        half.write(b'{"step": 3, "lo')  # killed while writing
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate(*saved)
    file.append({"step": 2})
    file.close()
    assert lines(file.path) == [{"step": 1}, {"step": 2}]


CHANGES = {
    "shorter": '{"step": 1}\n{"step": 2}',
    "other lines": '{"step": 1, "edited": true}\n',
    "gone": "",
    "a flipped bit": '{"step": 1}\n{"step": 3}\n',
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_does_not_fit_the_checkpoint_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1})
    file.append({"step": 2})
    saved = file.position()
    file.close()
    file.path.write_text(CHANGES[change])
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate(*saved)
    assert "it was cut, changed or removed. It is now metrics.lost.jsonl" in caplog.text
    assert (tmp_path / "metrics.lost.jsonl").read_text() == CHANGES[change]
    file.append({"step": 3})
    assert lines(file.path) == [{"step": 3}]
    assert file.position()[1] == sha256(file.path.read_bytes()).hexdigest()
    file.close()


def test_a_checkpoint_of_an_earlier_version_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.truncate(12, None)
    assert lines(file.path) == [{"step": 1}]
    file.close()


def test_values_that_json_lacks_are_named(tmp_path: Path) -> None:
    line = json_line(
        {"step": 3, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "pairs": 8}
    )
    assert strictly(line) == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "lr": None,
        "pairs": 8,
        "nonfinite": {"loss": "nan", "grad_norm": "inf", "lr": "-inf"},
    }


@pytest.mark.parametrize("room", [0, 1, 11, 12, 20])
def test_a_full_disk_costs_no_line(
    tmp_path: Path,
    full_disk: Callable[[int | None], None],
    caplog: pytest.LogCaptureFixture,
    room: int,
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1})
    full_disk(room)
    for step in (2, 3, 4):
        file.append({"step": step})
        lines(file.path)  # whole lines only, also in between
    assert caplog.text.count("No space left on device") == 1
    with pytest.raises(DiskError, match="wait for room on the disk"):
        file.position()
    full_disk(None)
    size, digest = file.position()
    assert size == file.path.stat().st_size
    assert digest == sha256(file.path.read_bytes()).hexdigest()
    assert lines(file.path) == [{"step": step} for step in (1, 2, 3, 4)]
    file.close()


# --- JSON of any depth ---


def strictly(text: str) -> Any:
    """As a reader that knows the standard alone: Python's own would take NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_nonfinite_numbers_are_strings_at_any_depth() -> None:
    told = strictly(
        strict_json({"a": math.nan, "b": [1.5, (math.inf, {"c": -math.inf})]}, indent=1)
    )
    assert told == {"a": "nan", "b": [1.5, ["inf", {"c": "-inf"}]]}


def test_a_lone_surrogate_can_be_written_and_read() -> None:
    text = strict_json({"text": "é\ud83d"})
    assert text.encode("utf-8") == b'{"text": "\xc3\xa9\\ud83d"}'
    assert strictly(text) == {"text": "é\ud83d"}


def test_one_record_is_one_line_to_every_reader() -> None:
    text = "a\u2028b\u2029c\x85d\re\nf"
    assert len(strict_json({"text": text}).splitlines()) == 1
    assert strictly(strict_json({"text": text})) == {"text": text}


@pytest.mark.parametrize(
    "before", [b"", b'{"step": 1}\n', b'{"step": 1}\n{"ste'], ids=["none", "whole", "torn"]
)
def test_an_appended_line_is_a_line_of_its_own(tmp_path: Path, before: bytes) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(before)
    append_line(file, {"step": 2})
    append_line(file, {"step": 3})
    assert file.read_bytes().endswith(b'{"step": 2}\n{"step": 3}\n')
    assert file.read_bytes().startswith(before)
    assert file.read_bytes().splitlines()[-2:] == [b'{"step": 2}', b'{"step": 3}']


def test_an_incident_after_a_torn_one_is_read(tmp_path: Path) -> None:
    (tmp_path / INCIDENTS).write_text('{"kind": "spi')
    Incidents(tmp_path).add("nonfinite", 7, loss=math.nan)
    last = strictly((tmp_path / INCIDENTS).read_text().splitlines()[-1])
    assert (last["kind"], last["step"], last["loss"]) == ("nonfinite", 7, "nan")
