"""The token cache: damaged and crafted entries are found, with one line, and built again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rather.config.run_config import DPOConfig
from rather.data import cache
from rather.data.pairs import SCHEMA
from rather.data.prepare import prepare
from tests.data.test_prepare import many


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache entry with 20 pairs, as it is built."""
    folder = tmp_path_factory.mktemp("cache")
    file = folder / "pairs.arrow"
    lists = {name: [[1, 2]] * 20 for name in ("chosen_scored", "rejected_scored")}
    rows = {
        **lists,
        "prompt": [[5, 6]] * 20,
        "chosen": [[7]] * 20,
        "rejected": [[8]] * 20,
        "id": [""] * 20,
    }
    columns = [pa.array(rows.get(field.name, [1] * 20), field.type) for field in SCHEMA]
    with pa.ipc.new_file(file, SCHEMA) as writer:
        writer.write_table(pa.table(columns, schema=SCHEMA))
    counted = {"kind": "jsonl", "unit": "line", "rows": 20, "pairs": 20}
    report = {
        "rows": 20, "pairs": 20, "files": [counted], "dropped": {}, "changed": {}, "warned": {},
        "ignored_columns": [], "template": {"name": "none", "sha256": ""}, "unknown_tokens": [0, 1],
    }  # fmt: skip
    checked = {"sha256": cache._sha(file, report), "report": report}
    file.with_suffix(".json").write_text(json.dumps(checked))
    return file


def crafted(path: Path, change: str) -> None:
    """Change a cache entry and give it the checksum of what it then is."""
    entry = json.loads(path.with_suffix(".json").read_text())
    table = pa.ipc.open_file(path).read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd" if change == "packed" else None)
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    if change == "packed":
        many = pa.array(np.zeros(30_000_000, np.int32))
        offsets = np.linspace(0, len(many), len(table) + 1).astype(np.int32)
        columns["prompt"] = pa.ListArray.from_arrays(offsets, many)
    if change == "negative id":
        columns["chosen"] = pa.array([[-5]] * len(table), pa.list_(pa.int32()))
    if change == "span":
        columns["chosen_scored"] = pa.array([[1, 10**6]] * len(table), pa.list_(pa.int32()))
    if change == "half a span":
        columns["chosen_scored"] = pa.array([[1]] * len(table), pa.list_(pa.int32()))
    if change == "nulls":
        columns["weight"] = pa.nulls(len(table), pa.float64())
    table = pa.table(columns, schema=table.schema)
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table)
    if change == "negative offset":
        data = path.read_bytes()
        first = columns["prompt"].offsets.to_numpy()[:4]
        bad = np.array([first[0], -7, *first[2:]], np.int32)
        assert first.tobytes() in data
        path.write_bytes(data.replace(first.tobytes(), bad.tobytes(), 1))
    report = entry["report"]
    if change == "report is a list":
        report = [report]
    elif change == "report without files":
        del report["files"]
    elif change == "report of other pairs":
        report["files"][0]["pairs"] = report["pairs"] = 10**9
    elif change == "report with a text as number":
        report["rows"] = "many"
    entry = {"sha256": cache._sha(path, report), "report": report}
    path.with_suffix(".json").write_text(json.dumps(entry))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(
            "negative offset", "Offset invariant failure", marks=pytest.mark.defect("X11")
        ),
        pytest.param("packed", "larger than the file", marks=pytest.mark.defect("X23")),
        ("negative id", "a token id is negative"),
        ("span", "outside its sequence"),
        ("half a span", "has no end"),
        ("nulls", "a column has nulls"),
        ("report is a list", "list indices"),
        ("report without files", "files"),
        ("report of other pairs", "counts other pairs than the 20"),
        ("report with a text as number", "a count of the report is not a number"),
    ],
)
def test_a_crafted_entry_is_built_again(
    entry: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str, reason: str
) -> None:
    file = tmp_path / entry.name
    for suffix in (".arrow", ".json"):
        shutil.copy(entry.with_suffix(suffix), file.with_suffix(suffix))
    assert cache._find(file)
    crafted(file, change)
    assert cache._find(file) is None
    (said,) = caplog.messages
    assert said.startswith(f"{file}: the tokenised pairs or their report are damaged; building")
    assert reason in said


@pytest.mark.defect("X11")
@pytest.mark.parametrize("content", ["[]", "3", "null", "{", "FILE: 3", "FILE: []"])
def test_damaged_hashes_of_files_are_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("{}")
    own = cache.Cache(tmp_path / "cache")
    sha = own.sha(data)
    memory = own.folder / "files.json"
    before = memory.read_text()
    if content.startswith("FILE: "):
        content = json.dumps({str(data): json.loads(content[6:])})
    memory.write_text(content)
    assert own.sha(data) == sha
    assert memory.read_text() == before
    said = [text for text in caplog.messages if "hashing the data files again" in text]
    assert len(said) == (not content.startswith('{"'))


def test_what_is_built_passes_the_check(
    config: Callable[..., DPOConfig], write: Callable[..., Path]
) -> None:
    made = prepare(config(write(many(20)))).train.file
    assert cache._find(made.path)
