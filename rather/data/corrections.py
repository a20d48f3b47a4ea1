"""Corrections of training pairs: which to drop, weight or flip, by the digest of their texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rather.data.cache import file_sha, text_sha
from rather.data.messages import Json
from rather.data.pairs import Correction, PairDataset
from rather.errors import DataError
from rather.files import parse_json, regular

LONGEST_LINE = 1000  # bytes


def hex_id(digest: int) -> str:
    """Return the identity of a pair as people and JSON write it."""
    return f"{digest:016x}"


def corrected(train: PairDataset, files: Sequence[Path]) -> tuple[PairDataset, Json]:
    """Return the training pairs with the corrections of these files, and how many there are.

    Held-out pairs stay as they are: they are drawn before.
    """
    wanted: dict[int, Correction] = {}
    for file in files:
        for digest, each in _read(file):
            before = wanted.get(digest, Correction())
            wanted[digest] = Correction(before.weight * each.weight, before.flip != each.flip)
    rows = np.arange(len(train.file)) if train.rows is None else train.rows
    digests = train.column("pair_hash")
    found = np.flatnonzero(np.isin(digests, np.array(list(wanted), np.uint64)))
    if not len(found):
        names = ", ".join(map(str, files))
        raise DataError(
            f"actor_train.data_args.corrections: {names}: no id belongs to a training pair; were "
            "they written for other data files?"
        )
    by_row = {int(rows[i]): wanted[int(digests[i])] for i in found}
    dropped = {row for row, each in by_row.items() if each.weight == 0}
    kept = np.array([i for i, row in enumerate(rows.tolist()) if row not in dropped], np.int64)
    shas = "".join(map(file_sha, files))
    parts = [
        (int(np.searchsorted(kept, first)), int(np.searchsorted(kept, end)), weight)
        for first, end, weight in train.parts
    ]
    name = text_sha(f"{train.fingerprint}:corrections={shas}")
    result = PairDataset(train.file, name, parts, rows[kept], by_row)
    left = [each for row, each in by_row.items() if row not in dropped]
    counts: Json = {"files": [str(file) for file in files], "dropped": len(dropped)}
    counts["flipped"] = sum(each.flip for each in left)
    counts["weighted"] = sum(each.weight != 1 for each in left)
    return result, counts | {"unknown_ids": len(set(wanted) - set(digests[found].tolist()))}


def _read(file: Path) -> Iterator[tuple[int, Correction]]:
    """Yield the digest and the correction of each line."""
    try:
        with open(file, "rb", opener=regular) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE), b""), 1):
                if line.strip():
                    try:
                        yield _parse(line)
                    except (ValueError, KeyError, TypeError) as error:
                        raise DataError(
                            f"{file}:{number}: expected an object with id (16 hex digits), and "
                            f"weight (0 or more) or flip (true or false): {error}"
                        ) from None
    except OSError as error:
        raise DataError(
            f"actor_train.data_args.corrections: {file} cannot be read ({error.strerror})."
        ) from error


def _parse(line: bytes) -> tuple[int, Correction]:
    row = parse_json(line)
    digest, weight, flip = row["id"], row.get("weight", 1.0), row.get("flip", False)
    if len(digest) != 16 or not isinstance(flip, bool) or not 0 <= weight < float("inf"):
        raise ValueError(f"got {line.decode('utf-8', 'replace').strip()[:100]}")
    if not {"weight", "flip"} & row.keys():
        raise ValueError("neither weight nor flip")
    return int(digest, 16), Correction(float(weight), flip)
