"""Overlap of training rows with other texts: 13 words in a row that both contain.

The runs of words of the other texts are held in memory, as hashes; the training rows are streamed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rather.data.formats import IMAGES
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
    runs_of_texts: dict[str, set[int]] = {}
    for name, files in others.items():
        rows = (row for _, _, row in _rows(files, encoding))
        runs_of_texts[name] = set(chain.from_iterable(map(_runs_of_row, rows)))
    if split:
        held_out = (row for _, at, row in _rows(train, encoding, max_samples) if at in split)
        runs_of_texts["eval"] = set(chain.from_iterable(map(_runs_of_row, held_out)))
    overlaps: Json = {name: {"rows": 0, "first": []} for name in runs_of_texts}
    total = 0
    for file, at, row in _rows(train, encoding, max_samples):
        if at in split:
            continue
        total += 1
        runs_of_row = set(_runs_of_row(row))
        for name, runs in runs_of_texts.items():
            if not runs.isdisjoint(runs_of_row):
                overlaps[name]["rows"] += 1
                overlaps[name]["first"].append(f"{file.name}:{at[1]}")
                del overlaps[name]["first"][SHOWN:]
    return {"words": WORDS, "train_rows": total, "texts": overlaps}


def _rows(
    files: Sequence[Path], encoding: str, max_samples: int | None = None
) -> Iterator[tuple[Path, Place, Any]]:
    groups = [find_sources(file) for file in files]
    sources = list(chain.from_iterable(groups))
    for chunk in chunks_of(groups, encoding, max_samples):
        for number, row in parsed_rows(chunk):
            if isinstance(row, dict):  # others are counted as dropped
                yield sources[chunk.source].path, (chunk.source, number), row


def _runs_of_row(row: Json) -> Iterator[int]:
    """Yield a hash of each run of words in a row; the same words about another image are others."""
    images = {name: row[name] for name in IMAGES if row.get(name)}
    about = repr(images) if images else ""
    yield from _runs_of_words({name: row[name] for name in row if name not in images}, about)


def _runs_of_words(value: Any, about: str) -> Iterator[int]:
    """Yield a hash of each run of words in the texts of a row; no run spans two texts."""
    if isinstance(value, str):
        words = re.findall(r"\w+", value.casefold())
        for first in range(len(words) - WORDS + 1):
            yield hash((about, *words[first : first + WORDS]))
    elif isinstance(value, dict | list):
        for content in value.values() if isinstance(value, dict) else value:
            yield from _runs_of_words(content, about)
