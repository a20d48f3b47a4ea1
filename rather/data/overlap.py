"""Overlap of training rows with other texts: 13 words in a row that both contain.

The runs of words of the other texts are held in memory, as hashes; the training rows are streamed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rather.data.read import chunks_of, find_sources, parsed_rows
from rather.data.report import Json

WORDS = 13
SHOWN = 5  # places of each text

Place = tuple[int, int]  # index of the file, number of the row


def find_overlap(
    train: Sequence[Path],
    others: Mapping[str, Sequence[Path]],
    split: Collection[Place],
    encoding: str,
    max_samples: int | None = None,
) -> Json:
    """Return how many training rows share 13 words in a row with each of the other texts.

    `split`: rows of the training files that are held out; they are compared as `eval`.
    `max_samples`: how many rows of each training file are used.
    """
    known = {
        name: {run for _, _, row in _rows(files, encoding) for run in _runs_of_words(row)}
        for name, files in others.items()
    }
    if split:
        held = (row for _, place, row in _rows(train, encoding, max_samples) if place in split)
        known["eval"] = {run for row in held for run in _runs_of_words(row)}
    found: Json = {name: {"rows": 0, "first": []} for name in known}
    total = 0
    for file, place, row in _rows(train, encoding, max_samples):
        if place in split:
            continue
        total += 1
        own = set(_runs_of_words(row))
        for name, runs in known.items():
            if not runs.isdisjoint(own):
                found[name]["rows"] += 1
                found[name]["first"].append(f"{file.name}:{place[1]}")
                del found[name]["first"][SHOWN:]
    return {"words": WORDS, "train_rows": total, "texts": found}


def _rows(
    files: Sequence[Path], encoding: str, max_samples: int | None = None
) -> Iterator[tuple[Path, Place, Any]]:
    groups = [find_sources(file) for file in files]
    sources = [source for group in groups for source in group]
    for chunk in chunks_of(groups, encoding, max_samples):
        for number, row in parsed_rows(chunk):
            if isinstance(row, dict):  # others are counted as dropped
                yield sources[chunk.source].path, (chunk.source, number), row


def _runs_of_words(value: Any) -> Iterator[int]:
    """Yield a hash of each run of words in the texts of a row; no run spans two texts."""
    if isinstance(value, str):
        words = re.findall(r"\w+", value.casefold())
        for first in range(len(words) - WORDS + 1):
            yield hash(tuple(words[first : first + WORDS]))
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _runs_of_words(each)
