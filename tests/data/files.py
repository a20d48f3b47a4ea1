"""Files of rows: tables are written, and any file is read as `rather data` reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from rather.data.json_rows import DropReason
from rather.data.read import chunks, find_sources, parsed_rows


def rows_of(path: Path, encoding: str = "utf-8") -> list[tuple[int, Any]]:
    """Return the rows of a file, or the reasons why they are dropped, with their numbers."""
    return [
        row
        for source in find_sources(path)
        for chunk in chunks(source, 0, encoding)
        for row in parsed_rows(chunk)
    ]


def reasons(path: Path) -> list[tuple[int, str]]:
    return [(number, row.reason) for number, row in rows_of(path) if isinstance(row, DropReason)]


def write_arrow(path: Path, table: Any, new: Any = pa.ipc.new_file) -> Path:
    """Write a table, or a batch of one, as an Arrow file or with `new_stream` as a stream."""
    with new(str(path), table.schema) as writer:
        writer.write(table)
    return path


def save_to_disk(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a folder as `Dataset.save_to_disk` of Hugging Face leaves it."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    write_arrow(folder / name, pa.Table.from_pylist(rows), pa.ipc.new_stream)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder
