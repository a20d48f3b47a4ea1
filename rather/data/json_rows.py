"""Cut text into rows of bytes, in bounded memory: lines, or the values of a JSON array.

Nothing is parsed here. Rows are parsed in the child processes (see `read.parsed_rows`).
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path

from rather.errors import DataError

MAX_ROW_BYTES = 64 << 20
MAX_DEPTH = 200
BLOCK_BYTES = 1 << 20
WIDE_MARKS = {  # that of UTF-32 begins like that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
WIDE_ZEROS: dict[tuple[bool, ...], str] = {  # which of the first four bytes are zero: JSON begins with ASCII
    (False, True, True, True): "utf-32-le", (True, True, True, False): "utf-32-be",
    (False, True, False, True): "utf-16-le", (True, False, True, False): "utf-16-be",
}  # fmt: skip
SUSPICIOUS = 32 << 20  # unpacked bytes from which gzip data is a bomb ...
MOST_UNPACKED = 200  # ... if it has become this many times larger


class DropReason(Exception):
    """Why a row or pair is dropped: one word to count by, one sentence to read.

    It is raised where the fault is found, and kept as a value where faults are collected.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


# The number of a row, and its content as it is in the file, or why it cannot be read.
RawRow = tuple[int, bytes | DropReason]


def read_blocks(file: BufferedReader | gzip.GzipFile, path: Path, encoding: str) -> Iterator[bytes]:
    """Yield a text file as UTF-8; raise DropReason behind the last bytes of damaged gzip data."""
    decoder = _decoder(encoding)
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
            if name := _wide_encoding(block):
                kind = name[:6].upper()
                raise DataError(f"{path}: this is {kind} text; set data_args.encoding: {name}.")
            block = block.removeprefix(codecs.BOM_UTF8)
        yield block
        read += len(raw)
        if read > SUSPICIOUS and read > MOST_UNPACKED * path.stat().st_size:
            raise DataError(
                f"{path}: unpacks to more than {MOST_UNPACKED} times its size; unpack it yourself "
                "(gzip -d) if this is right."
            )
    raise fault


def _decoder(encoding: str) -> codecs.IncrementalDecoder | None:
    """Return what turns bytes into text; None for UTF-8, which is checked row by row."""
    try:
        TextIOWrapper(BytesIO(), encoding)  # refuses rot13, base64 and others that make no text
        codec = codecs.lookup(encoding)
        if codec.incrementaldecoder is None:
            raise LookupError
    except (LookupError, ValueError) as error:
        raise DataError(
            f"data_args.encoding: {encoding!r} is not a text encoding that Python knows; try utf-8 "
            "or latin-1."
        ) from error
    return None if codec.name in ("utf-8", "ascii") else codec.incrementaldecoder()


def _wide_encoding(start: bytes) -> str | None:
    """Return the UTF-16 or UTF-32 that a text is in: by its mark, or by zeros in its first letters."""
    for mark, name in WIDE_MARKS.items():
        if start.startswith(mark):
            return name
    return WIDE_ZEROS.get(tuple(not byte for byte in start[:4]))


def row_too_large() -> DropReason:
    return DropReason("row_too_large", f"more than {MAX_ROW_BYTES >> 20} MiB in one row")


def split_lines(blocks: Iterable[bytes]) -> Iterator[RawRow]:
    """Yield the lines that are not blank. Blank ones cost next to nothing, however many there are."""
    number = 1
    line = bytearray()  # what has come of the current line
    size = 0  # of it, also if it is too large to be held
    try:
        for block in blocks:
            start = 0
            while (end := block.find(b"\n", start)) >= 0:
                if size + end - start > MAX_ROW_BYTES:
                    yield number, row_too_large()
                else:
                    row = bytes(line) + block[start:end]
                    if row.strip():
                        yield number, row
                line.clear()
                size = 0
                number += 1
                start = end + 1
                if block[start : start + 1].isspace():  # count blank lines without a loop
                    text = _NOT_BLANK.search(block, start)
                    following = block.rfind(b"\n", start, text.start() if text else len(block)) + 1
                    if following:
                        number += block.count(b"\n", start, following)
                        start = following
            size += len(block) - start
            if size <= MAX_ROW_BYTES:
                line += block[start:]
            else:
                line.clear()
    except DropReason as fault:
        yield number, fault
        return
    if size > MAX_ROW_BYTES:
        yield number, row_too_large()
    elif line.strip():
        detail = "the last line is not complete; its writer was probably stopped"
        is_whole = line.rstrip().endswith(b"}")
        yield number, bytes(line) if is_whole else DropReason("truncated", detail)


_NOT_BLANK = re.compile(rb"\S")
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.S)
_STRING_END = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.S)


class _Brackets:
    """Finds brackets outside strings, in blocks of bytes that may end inside a string."""

    def __init__(self) -> None:
        self.in_string = False
        self._is_escaped = False  # the next block begins with an escaped character

    def find(self, block: bytes) -> Iterator[re.Match[bytes]]:
        at = int(self._is_escaped)
        body = block[at:]
        while True:
            token = (_STRING_END.match if self.in_string else _TOKEN.search)(block, at)
            if token is None:
                break
            at = token.end()
            self.in_string = not self.in_string and token[0] == b'"'
            if token[0][-1:] != b'"':
                yield token
        backslashes = len(body) - len(body.rstrip(b"\\"))
        self._is_escaped = self.in_string and backslashes % 2 == 1


def split_values(blocks: Iterable[bytes], level: int) -> Iterator[RawRow]:
    """Yield the values of an array (level 1), or values that follow each other (level 0).

    Only brackets outside strings are counted. So there is no recursion, at most one row is in
    memory, and a row that is not valid JSON does not hide the next.
    """
    number = 1
    depth = 0
    held = bytearray()  # what came since the last row began or ended
    brackets = _Brackets()
    fault: DropReason | None = None
    try:
        for block in blocks:
            first = 0  # `held` continues here in this block
            for bracket in brackets.find(block):
                before = depth
                depth = max(0, depth + _DEPTH_CHANGE[bracket[0]])
                if before == level:  # between two rows: the next begins, or the array ends
                    stray = _stray_text(held + block[first : bracket.start()])
                    if stray:
                        yield number, stray
                        number += 1
                    held = bytearray()
                    first = bracket.start()
                    if depth <= before:
                        level = 0
                        first = bracket.end()
                elif depth == level:  # a row ends, or the array begins
                    if depth < before:
                        yield number, fault or bytes(held + block[first : bracket.end()])
                        number += 1
                        fault = None
                    held = bytearray()
                    first = bracket.end()
                elif depth > MAX_DEPTH + level:
                    fault = fault or DropReason(
                        "too_deep", f"more than {MAX_DEPTH} values inside each other"
                    )
            held += block[first:]
            if len(held) > MAX_ROW_BYTES:
                fault = fault or row_too_large()
            if fault:
                held.clear()  # the row is lost: do not hold it
    except DropReason as damage:
        yield number, damage
        return
    if not fault and (depth > 0 or brackets.in_string):
        detail = f"the file ends inside row {number}; its writer was probably stopped"
        fault = DropReason("truncated", detail)
    fault = fault or _stray_text(held)
    if fault:
        yield number, fault


_DEPTH_CHANGE = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


def _stray_text(between: bytearray) -> DropReason | None:
    """Return the fault of a bare number or word between two rows, where only a comma may be."""
    text = between.strip(b" \t\r\n,")
    shown = text[:40].decode("utf-8", "replace")
    return DropReason("bad_json", f"found {shown!r} where a row begins") if text else None
