"""`rather data --save`: writes prepared pairs as folders that `datasets` and Rather open,
completely or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rather.data.pairs import PairDataset
from rather.data.prepare import Prepared
from rather.data.tokenised import COLUMNS
from rather.errors import ConfigError, DiskError

if TYPE_CHECKING:
    from rather.data.batch import TokenPair

DATA = "data-00000-of-00001.arrow"
ROWS = 1024  # in memory at a time
STATE: dict[str, Any] = {  # what `datasets` looks for
    "_format_columns": None, "_format_kwargs": {}, "_format_type": None, 
    "_output_all_columns": False, "_split": None,
    "_data_files": [{"filename": DATA}],
}  # fmt: skip
DEFAULTS = {"weight": 1.0, "margin": np.nan, "soft_label": np.nan}


def save(prepared: Prepared, folder: Path) -> list[Path]:
    """Write training pairs to `folder` and each evaluation set to a folder inside; return the
    folders.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--save {folder}: is not empty; name a new folder.")
    sets = {"": prepared.train}
    sets |= {f"validation-{name}".rstrip("-"): pairs for name, pairs in prepared.evals.items()}
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


def _write(pairs: PairDataset, folder: Path) -> None:
    extras = [
        name
        for name, default in DEFAULTS.items()
        if not np.array_equal(pairs.column(name), np.full(len(pairs), default), equal_nan=True)
    ]
    if any(pair.id for pair in _all(pairs)):
        extras.append("id")
    types: dict[str, Any] = {
        name: pa.list_(pa.int32() if name.endswith("_ids") else pa.int8()) for name in COLUMNS
    }
    types |= {name: pa.string() if name == "id" else pa.float64() for name in extras}
    schema = pa.schema(list(types.items()))
    with (folder / DATA).open("wb") as data, pa.ipc.new_stream(data, schema) as writer:
        rows = (_row(pair, extras) for pair in _all(pairs))
        while some := list(islice(rows, ROWS)):
            writer.write_batch(pa.RecordBatch.from_pylist(some, schema))
    info = {"description": "", "citation": ""}
    state = {**STATE, "_fingerprint": pairs.fingerprint[:16]}
    for name, content in (("dataset_info", info), ("state", state)):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    for file in folder.glob("*.*"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _all(pairs: PairDataset) -> Iterator[TokenPair]:
    for first in range(0, len(pairs), ROWS):
        yield from pairs.take(range(first, min(first + ROWS, len(pairs))))


def _row(pair: TokenPair, extras: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for side in ("chosen", "rejected"):
        ids = [*pair.prompt.tolist(), *getattr(pair, side).tolist()]
        mask = [0] * len(ids)
        for a, b in getattr(pair, f"{side}_scored"):
            mask[a:b] = [1] * (b - a)
        columns = {"input_ids": ids, "attention_mask": [1] * len(ids), "loss_mask": mask}
        row |= {f"{side}_{name}": value for name, value in columns.items()}
    for name in extras:
        value = getattr(pair, name)
        row[name] = None if value != value or value == "" else value
    return row
