"""JSON for every reader, and lines after a line that a kill has torn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rather.run_folder.layout import Incidents
from rather.run_folder.names import INCIDENTS
from rather.tracking.json_lines import append_line, strict_json


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
