"""`rather data --save`: writes prepared pairs as dataset folders, completely or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rather.data.messages import Json
from rather.data.pairs import NUMBERS, PairDataset, stored_numbers
from rather.data.prepare import Prepared
from rather.data.tokens import COLUMNS
from rather.errors import ConfigError, DiskError
from rather.files import read_json, sync

if TYPE_CHECKING:
    from rather.data.batch import TokenPair

DATA = "data-00000-of-00001.arrow"
ROWS = 1024  # in memory at a time
INFO = {"description": "", "citation": ""}
STATE: Json = {  # what `datasets` looks for
    "_format_columns": None, "_format_kwargs": {}, "_format_type": None, 
    "_output_all_columns": False, "_split": None,
    "_data_files": [{"filename": DATA}],
}  # fmt: skip
SCHEMA = pa.schema(
    [
        *((name, pa.list_(pa.int32() if "_ids" in name else pa.int8())) for name in COLUMNS),
        *((name, pa.float64()) for name in NUMBERS),
        ("id", pa.string()),
    ]
)


def save(prepared: Prepared, folder: Path) -> list[Path]:
    """Write training pairs to `folder`, and each evaluation set to a folder inside; return all."""
    if not prepared.train.lengths("rejected").any():
        raise ConfigError(
            "--save: only pairs are saved as tokens; use the files of single answers."
        )
    if any(pairs.has_images for pairs in (prepared.train, *prepared.evals.values())):
        raise ConfigError(
            "--save: pairs with images cannot be saved as tokens; use the files of rows."
        )
    sets = {"": prepared.train}
    sets |= {f"validation-{name}".rstrip("-"): pairs for name, pairs in prepared.evals.items()}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if _is_saved(sets, folder):  # by the same command, which was killed before it ended
            return [folder / name for name in sets]
        raise ConfigError(f"--save {folder}: is not empty; name a new folder.")
    temporary = folder.absolute().with_name(f".tmp-{folder.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # from a save that was killed
        for name, pairs in sets.items():
            (temporary / name).mkdir(parents=True)
            _write(pairs, temporary / name)
        os.rename(temporary, folder)
    except OSError as error:
        raise DiskError(f"--save {folder}: cannot be written ({error.strerror}).") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [folder / name for name in sets]


def _is_saved(sets: dict[str, PairDataset], folder: Path) -> bool:
    """Return whether a folder holds these pairs, complete, and nothing else."""
    expected = {folder / name for name in sets if name}
    for name in sets:
        expected |= {folder / name / file for file in (DATA, "dataset_info.json", "state.json")}
    try:
        if {*folder.rglob("*")} != expected:
            return False
        for name, pairs in sets.items():
            state = read_json(folder / name / "state.json")
            if state.get("_fingerprint") != pairs.fingerprint[:16]:
                return False
            with pa.memory_map(str(folder / name / DATA)) as mapped:
                rows = sum(batch.num_rows for batch in pa.ipc.open_stream(mapped))
            if rows != len(pairs):
                return False
    except (OSError, ValueError, AttributeError, pa.ArrowException):
        return False
    return True


def _write(pairs: PairDataset, folder: Path) -> None:
    with (folder / DATA).open("wb") as target, pa.ipc.new_stream(target, SCHEMA) as writer:
        for first in range(0, len(pairs), ROWS):
            rows = map(_row, pairs.take(range(first, min(first + ROWS, len(pairs)))))
            writer.write_batch(pa.RecordBatch.from_pylist(list(rows), SCHEMA))
    state = {**STATE, "_fingerprint": pairs.fingerprint[:16]}
    (folder / "dataset_info.json").write_text(json.dumps(INFO), encoding="utf-8")
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    for file in folder.glob("*.*"):
        sync(file)


def _row(pair: TokenPair) -> Json:
    row: Json = {}
    for side in ("chosen", "rejected"):
        ids, mask = pair.sequence(side)
        columns = {"input_ids": ids, "attention_mask": [1] * len(ids), "loss_mask": mask}
        row |= {f"{side}_{name}": column for name, column in columns.items()}
    for name, extra in {**stored_numbers(pair), "id": pair.id}.items():
        if extra == extra and extra != "":  # not NaN
            row[name] = extra
    return row
