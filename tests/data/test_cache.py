"""The token cache: damaged and crafted entries are found, with one line, and built again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rather.data import cache
from rather.data.prepare import prepare
from tests.data.conftest import data_config
from tests.data.test_prepare import many
from tests.tiny import write_rows


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    """A cache entry with 20 pairs, as it is built."""
    folder = tmp_path_factory.mktemp("cache")
    rows = write_rows(folder / "pairs.jsonl", many(20))
    return prepare(data_config(folder, folders["chat"], rows)).train.file.path


IDS = {  # what a column of lists holds instead
    "negative id": ("chosen", [-5]),
    "span": ("chosen_scored", [1, 10**6]),
    "half a span": ("chosen_scored", [1]),
}


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
    if change in IDS:
        name, ids = IDS[change]
        columns[name] = pa.array([ids] * len(table), pa.list_(pa.int32()))
    if change == "nulls":
        columns["weight"] = pa.nulls(len(table), pa.float64())
    table = pa.table(columns, schema=table.schema)
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write(table)
    if change == "negative offset":
        data = path.read_bytes()
        first = columns["prompt"].offsets.to_numpy()[:4]
        bad = np.array([first[0], -7, *first[2:]], np.int32)
        assert first.tobytes() in data
        path.write_bytes(data.replace(first.tobytes(), bad.tobytes(), 1))
    report = entry["report"]
    many_pairs = {"pairs": 10**9, "files": [report["files"][0] | {"pairs": 10**9}]}
    changed = {
        "report is a list": [report],
        "report without files": {key: report[key] for key in report if key != "files"},
        "report of other pairs": report | many_pairs,
        "report with a text as number": report | {"rows": "many"},
    }
    report = changed.get(change, report)
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
