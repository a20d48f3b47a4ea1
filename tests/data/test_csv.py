"""CSV and TSV files: the same pairs as JSON lines with the same values, and bad rows counted."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from rather.data.json_rows import DropReason
from rather.errors import DataError
from tests.data.files import rows_of

ROWS: list[dict[str, Any]] = [
    {"prompt": 'say "hi",\nplease', "chosen": "hi", "rejected": "no; 1,5", "weight": 2, "id": "7"},
    {"prompt": "12", "chosen": "[1, 2]", "rejected": "true", "weight": 0.5, "id": "x"},
    {"prompt": "Grüße", "chosen": "\t", "rejected": "日本", "weight": None, "id": ""},
]


def written(path: Path, rows: list[dict[str, Any]], encoding: str = "utf-8") -> Path:
    text = io.StringIO(newline="")
    delimiter = "\t" if ".tsv" in path.name else ","
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    content = text.getvalue().encode(encoding)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(path: Path, encoding: str = "utf-8") -> list[Any]:
    return [row for _, row in rows_of(path, encoding)]


@pytest.mark.defect("U15")
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "A.CSV"])
def test_the_values_are_those_of_json_lines(tmp_path: Path, name: str) -> None:
    assert read(written(tmp_path / name, ROWS)) == ROWS


@pytest.mark.defect("U15")
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_encodings_are_those_of_other_text_files(tmp_path: Path, encoding: str) -> None:
    rows = [*ROWS[:2], {**ROWS[2], "rejected": "é"}]
    given = "utf-8" if encoding == "utf-8-sig" else encoding
    assert read(written(tmp_path / "a.csv", rows, encoding), given) == rows


def test_messages_and_lists_are_read_from_json_cells(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}]
    row = {
        "prompt": json.dumps(turns),
        "responses": '["a", "b"]',
        "ranks": "[1, 2]",
        "label": "TRUE",
    }
    [found] = read(written(tmp_path / "a.csv", [row]))
    assert found == {"prompt": turns, "responses": ["a", "b"], "ranks": [1, 2], "label": True}


def test_a_bad_row_does_not_hide_the_others(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"prompt,chosen,rejected\na,b,c\na,b\n\nd,e\xff,f\ng,h,i\n")
    first, short, bad, last = read(file)
    assert (first["prompt"], last["prompt"]) == ("a", "g")
    assert isinstance(short, DropReason)
    assert (short.reason, bad.reason) == ("bad_csv", "bad_encoding")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b'prompt,chosen\na,"never closed\n', "row 1 .*quote"),
        (b"prompt,prompt\na,b\n", "columns"),
        (b"prompt,,x\na,b,c\n", "columns"),
        (b"prompt;chosen;rejected\na;b;c\n", "';'.*','"),
    ],
)
def test_a_file_that_is_not_csv_is_refused(tmp_path: Path, content: bytes, place: str) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.csv: .*{place}"):
        read(file)


def test_json_lines_with_the_name_of_a_csv_file_stay_json(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('{"prompt": "a"}\n', "utf-8")
    assert read(file) == [{"prompt": "a"}]
