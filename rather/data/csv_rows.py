"""Rows of CSV and TSV files, as the JSON text of one object each.

A CSV file does not say which cells are numbers or lists, so the names of columns decide: everything
is text but the columns NUMBERS and NESTED, and cells that hold a JSON list of messages.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rather.data.json_rows import MAX_ROW_BYTES, DropReason, RawRow
from rather.errors import DataError
from rather.files import parse_json

DELIMITERS = {"csv": ",", "tsv": "\t"}
NUMBERS = ("weight", "margin", "soft_label", "score", "label", "kto_tag")
NESTED = ("responses", "ranks", "scores", "tools", "chat_template_kwargs", "history")


def csv_kind(path: Path) -> str | None:
    """Return csv or tsv for a file of that name, which may end in .gz."""
    name = path.name.lower().removesuffix(".gz")
    return next((kind for kind in DELIMITERS if name.endswith(f".{kind}")), None)


def csv_rows(blocks: Iterable[bytes], path: Path, kind: str) -> Iterator[RawRow]:
    """Yield each row below the header with its number; a bad row is the reason why it is bad.

    `blocks` are the file as UTF-8, and may end with a DropReason.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.reader(_lines(blocks), delimiter=DELIMITERS[kind], strict=True)
    number = 0
    try:
        names = next(reader, [])
        if not all(names) or len(set(names)) < len(names):
            raise DataError(
                f"{path}: the first line of a {kind.upper()} file must name its columns, each once."
            )
        if len(names) == 1 and (found := re.search(r"[,;\t|]", names[0])):
            raise DataError(
                f"{path}: its columns seem to be separated by {found[0]!r}; separate those of a "
                f"{kind.upper()} file by {DELIMITERS[kind]!r}."
            )
        for cells in reader:
            number += 1
            if cells:  # an empty line is not a row
                yield number, _row(names, cells)
    except DropReason as fault:
        yield number + 1, fault
    except csv.Error as error:
        raise DataError(
            f"{path}: row {number + 1} is not {kind.upper()} ({error}); is a quote not closed? "
            'Inside quotes, write "" for a quote.'
        ) from error


def _lines(blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield lines with their ends. Bytes that are not text become lone surrogates."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    unfinished = ""
    for block in blocks:
        *lines, unfinished = (unfinished + decoder.decode(block)).split("\n")
        if len(unfinished) > MAX_ROW_BYTES:
            raise DropReason("row_too_large", f"a line of over {MAX_ROW_BYTES >> 20} MiB")
        yield from (f"{line}\n" for line in lines)
    yield unfinished + decoder.decode(b"", final=True)


def _row(names: list[str], cells: list[str]) -> bytes | DropReason:
    if len(cells) != len(names):
        return DropReason(
            "bad_csv",
            f"the row has {len(cells)} cells and the header {len(names)}; quote cells that hold "
            "the delimiter or a line break",
        )
    row = {name: _value(name, cell) for name, cell in zip(names, cells, strict=True)}
    try:
        return json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return DropReason("bad_encoding", "a cell is not text; set data_args.encoding")


def _value(name: str, cell: str) -> Any:
    if name in NUMBERS:
        text = cell.strip().lower()
        return _parsed(text, cell) if text else None
    if name in NESTED:
        return _parsed(cell, cell) if cell.strip() else None
    if cell.lstrip().startswith("[{"):
        messages = _parsed(cell, cell)
        if isinstance(messages, list) and all("role" in x or "from" in x for x in messages):
            return messages
    return cell


def _parsed(text: str, otherwise: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return otherwise
