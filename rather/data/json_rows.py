"""Cut text into rows of bytes, in bounded memory: lines, or the values of a JSON array.

Nothing is parsed here. Rows are parsed in the child processes (see `read.parsed_rows`).
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path

from rather.errors import DataError

MAX_ROW_BYTES = 64 << 20
MAX_DEPTH = 200
BLOCK_BYTES = 1 << 20
SUSPICIOUS = 128 << 20  # unpacked bytes from which gzip data is a bomb ...
MOST_UNPACKED = 200  # ... if it has become this many times larger


class DropReason(Exception):
    """Why a row or pair is dropped: one word to count by, one sentence to read.

    It is raised where the fault is found, and kept as a value where faults are collected.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


# The number of a row, and its content as it is in the file, or why it cannot be read.
RawRow = tuple[int, bytes | DropReason]


def read_blocks(file: BufferedReader | gzip.GzipFile, path: Path, encoding: str) -> Iterator[bytes]:
    """Yield a text file as UTF-8; raise DropReason behind the last bytes of damaged gzip data."""
    try:
        known = codecs.lookup(encoding)
    except LookupError as error:
        raise DataError(
            f"data_args.encoding: Python does not know {encoding!r}; try utf-8 or latin-1."
        ) from error
    decoder = None if known.name in ("utf-8", "ascii") else known.incrementaldecoder()
    read = 0
    fault: DropReason | None = None
    while fault is None:
        raw = bytearray()
        try:  # piece by piece: of damaged gzip data, one large read would lose what came before
            while len(raw) < BLOCK_BYTES and (piece := file.read1(BLOCK_BYTES - len(raw))):
                raw += piece
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            detail = f"the gzip data is damaged from here on ({error}); later rows are lost"
            fault = DropReason("damaged_gzip", detail)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
        try:
            block = decoder.decode(raw, final=not raw).encode() if decoder else bytes(raw)
        except UnicodeError as error:
            raise DataError(
                f"{path}: byte {read + getattr(error, 'start', 0)} is not valid in the encoding "
                f"set by data_args.encoding ({error})."
            ) from error
        if not raw and fault is None:
            return
        if not read:
            if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f"{path}: this is UTF-16 text; set data_args.encoding: utf-16.")
            block = block.removeprefix(codecs.BOM_UTF8)
        yield block
        read += len(raw)
        if read > SUSPICIOUS and read > MOST_UNPACKED * path.stat().st_size:
            raise DataError(
                f"{path}: unpacks to more than {MOST_UNPACKED} times its size; unpack it yourself "
                "(gzip -d) if this is right."
            )
    raise fault


def _too_large() -> DropReason:
    return DropReason("row_too_large", f"more than {MAX_ROW_BYTES >> 20} MiB in one row")


def split_lines(blocks: Iterable[bytes]) -> Iterator[RawRow]:
    """Yield the lines that are not blank."""
    rest, number, too_large = b"", 1, False
    try:
        for block in blocks:
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                if too_large or line.strip():
                    yield number, _too_large() if too_large else line
                number, too_large = number + 1, False
            if len(rest) > MAX_ROW_BYTES:
                too_large, rest = True, b""
    except DropReason as fault:
        yield number, fault
        return
    if too_large:
        yield number, _too_large()
    elif rest.strip():
        detail = "the last line is not complete; its writer was probably stopped"
        is_whole = rest.rstrip().endswith(b"}")
        yield number, rest if is_whole else DropReason("truncated", detail)


_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.S)
_STRING_END = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.S)


def split_values(blocks: Iterable[bytes], level: int) -> Iterator[RawRow]:
    """Yield the values of an array (level 1), or values that follow each other (level 0).

    Only brackets outside strings are counted. So there is no recursion, at most one row is in
    memory, and a row that is not valid JSON does not hide the next.
    """
    number, depth = 1, 0
    held = bytearray()  # what came since the last row began or ended
    in_string = is_escaped = False
    fault: DropReason | None = None
    try:
        for block in blocks:
            at, first = int(is_escaped), 0  # `held` continues in this block at `first`
            body = block[at:]
            while True:
                token = (_STRING_END.match if in_string else _TOKEN.search)(block, at)
                if token is None:
                    break
                at = token.end()
                in_string = not in_string and token[0] == b'"'
                if token[0][-1:] == b'"':
                    continue
                before, depth = depth, max(0, depth + (1 if token[0] in b"[{" else -1))
                if before == level:  # between two rows: the next begins, or the array ends
                    if stray := _stray_text(held + block[first : token.start()]):
                        yield number, stray
                        number += 1
                    held, first = bytearray(), token.start()
                    if depth <= before:
                        level, first = 0, at
                elif depth == level:  # a row ends, or the array begins
                    if depth < before:
                        yield number, fault or bytes(held + block[first:at])
                        number, fault = number + 1, None
                    held, first = bytearray(), at
                elif depth > MAX_DEPTH + level:
                    detail = f"more than {MAX_DEPTH} values inside each other"
                    fault = fault or DropReason("too_deep", detail)
            is_escaped = in_string and (len(body) - len(body.rstrip(b"\\"))) % 2 == 1
            held += block[first:]
            if len(held) > MAX_ROW_BYTES:
                fault = fault or _too_large()
            if fault:
                held.clear()  # the row is lost: do not hold it
    except DropReason as damage:
        yield number, damage
        return
    if depth > 0 or in_string or fault:
        yield (
            number,
            fault
            or DropReason(
                "truncated", f"the file ends inside row {number}; its writer was probably stopped"
            ),
        )
    elif stray := _stray_text(held):
        yield number, stray


def _stray_text(between: bytearray) -> DropReason | None:
    """Return the fault of a bare number or word between two rows, where only a comma may be."""
    text = between.strip(b" \t\r\n,")
    shown = text[:40].decode("utf-8", "replace")
    return DropReason("bad_json", f"found {shown!r} where a row begins") if text else None
