"""`rather data --save`: prepared pairs as folders that `datasets` and Rather open, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rather.data.pairs import PairDataset
from rather.data.prepare import Prepared
from rather.data.tokenised import COLUMNS
from rather.errors import ConfigError, DiskError

if TYPE_CHECKING:
    from rather.data.batch import Span, TokenPair

Decode = Callable[[list[int]], Any]  # token ids -> their text

LABELS = "labels.jsonl"
DATA = "data-00000-of-00001.arrow"
ROWS = 1024  # in memory at a time
STATE: dict[str, Any] = {  # what `datasets` looks for
    "_format_columns": None, "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None,
}  # fmt: skip
DEFAULTS = {"weight": 1.0, "margin": np.nan, "soft_label": np.nan}


def save(prepared: Prepared, folder: Path, decode: Decode) -> list[Path]:
    """Training pairs in `folder`, each evaluation set in a folder inside. Returns the folders."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--save {folder}: is not empty; name a new folder.")
    names = {name: f"validation-{name}" if name else "validation" for name in prepared.evals}
    temporary = folder.absolute().with_name(f".tmp-{folder.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of one that was killed
        temporary.mkdir(parents=True)
        _write(prepared.train, temporary, decode)
        for name, pairs in prepared.evals.items():
            (temporary / names[name]).mkdir()
            _write(pairs, temporary / names[name], decode)
        os.rename(temporary, folder)
    except OSError as error:
        raise DiskError(f"--save {folder}: cannot be written ({error.strerror}).") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [folder, *(folder / name for name in names.values())]


def _write(pairs: PairDataset, folder: Path, decode: Decode) -> None:
    extras = _extras(pairs)
    masks = [
        (name, pa.list_(pa.int32() if name.endswith("_ids") else pa.int8())) for name in COLUMNS
    ]
    kinds = [(name, pa.string() if name == "id" else pa.float64()) for name in extras]
    schema = pa.schema([*masks, *kinds])
    with (
        (folder / DATA).open("wb") as data,
        (folder / LABELS).open("w", encoding="utf-8") as labels,
        pa.ipc.new_stream(data, schema) as writer,
    ):
        for first, some in _parts(pairs):
            writer.write_batch(
                pa.RecordBatch.from_pylist([_row(pair, extras) for pair in some], schema)
            )
            labels.writelines(_label(first + i, pair, decode) + "\n" for i, pair in enumerate(some))
    (folder / "dataset_info.json").write_text(
        json.dumps({"description": "", "citation": ""}), encoding="utf-8"
    )
    state = STATE | {"_data_files": [{"filename": DATA}], "_fingerprint": pairs.fingerprint[:16]}
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    for file in folder.glob("*.*"):
        _sync(file)


def _parts(pairs: PairDataset) -> Iterator[tuple[int, list[TokenPair]]]:
    for first in range(0, len(pairs), ROWS):
        yield first, pairs.take(range(first, min(first + ROWS, len(pairs))))


def _extras(pairs: PairDataset) -> list[str]:
    """Columns that say anything."""
    numbers = [
        name for name, usual in DEFAULTS.items() if not np.array_equal(
            pairs.column(name), np.full(len(pairs), usual), equal_nan=True)
    ]  # fmt: skip
    named = any(pair.id for _, some in _parts(pairs) for pair in some)
    return [*numbers, *(["id"] if named else [])]


def _row(pair: TokenPair, extras: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for side, answer, spans in _sides(pair):
        ids = [*pair.prompt.tolist(), *answer]
        row[f"{side}_input_ids"] = ids
        row[f"{side}_attention_mask"] = [1] * len(ids)
        row[f"{side}_loss_mask"] = [int(any(a <= i < b for a, b in spans)) for i in range(len(ids))]
    values = {name: getattr(pair, name) for name in extras}
    return row | {
        name: None if value != value or value == "" else value for name, value in values.items()
    }


def _label(number: int, pair: TokenPair, decode: Decode) -> str:
    """The scored spans of a pair for people: places, and the text there."""
    told: dict[str, Any] = {"pair": number} | ({"id": pair.id} if pair.id else {})
    for side, answer, spans in _sides(pair):
        ids = [*pair.prompt.tolist(), *answer]
        told[f"{side}_spans"] = [list(span) for span in spans]
        told[f"{side}_labels"] = [decode(ids[a:b]) for a, b in spans]
    return json.dumps(told, ensure_ascii=False)


def _sides(pair: TokenPair) -> list[tuple[str, list[int], tuple[Span, ...]]]:
    return [
        ("chosen", pair.chosen.tolist(), pair.chosen_scored),
        ("rejected", pair.rejected.tolist(), pair.rejected_scored),
    ]


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
