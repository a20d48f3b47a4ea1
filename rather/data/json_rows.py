"""Text -> rows as bytes, without building objects: lines, or the values of a JSON array, in bounded memory."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, NoReturn

from rather.errors import DataError

MAX_ROW_BYTES = 64 << 20
MAX_DEPTH = 200
BLOCK_BYTES = 1 << 20


class Bad(NamedTuple):
    """Why a row gives no pair: one word to count by, one sentence to read."""

    reason: str
    detail: str


HALF = Bad("bad_unicode", "half of a surrogate pair (\\ud800 ... \\udfff) stands alone")


class Blocks:
    """The bytes of a text file as UTF-8, block by block. `fault` says why it ended early, if it did."""

    def __init__(self, file: BufferedReader | gzip.GzipFile, path: Path, encoding: str) -> None:
        self.file, self.path = file, path
        self.fault: Bad | None = None
        self.read = 0
        self.skipped = 0  # bytes before the first that is given out
        try:
            name = codecs.lookup(encoding).name
        except LookupError as error:
            raise DataError(
                f"data_args.encoding: {encoding!r} is not known to Python; try utf-8 or latin-1."
            ) from error
        self.decoder = (
            None if name in ("utf-8", "ascii") else codecs.getincrementaldecoder(encoding)()
        )

    def __iter__(self) -> Iterator[bytes]:
        first = True
        while not self.fault and (raw := self._raw()):
            if (
                first
                and self.decoder is None
                and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            ):
                raise DataError(
                    f"{self.path}: this is UTF-16 text; set data_args.encoding: utf-16."
                )
            block = self._decoded(raw, False) if self.decoder else raw
            if first and block.startswith(codecs.BOM_UTF8):
                self.skipped = len(codecs.BOM_UTF8)
                block = block[self.skipped :]
            yield block
            self.read += len(raw)
            first = False
        if self.decoder and not self.fault:
            self._decoded(b"", True)

    def _raw(self) -> bytes:
        """One block. Of damaged gzip data everything before the fault, which `read` alone would lose."""
        pieces: list[bytes] = []
        size = 0
        try:
            while size < BLOCK_BYTES and (piece := self.file.read1(BLOCK_BYTES - size)):
                pieces.append(piece)
                size += len(piece)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.fault = Bad(
                "damaged_gzip", f"the gzip data breaks off here ({error}); later rows are lost"
            )
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror or error}).") from error
        return b"".join(pieces)

    def _decoded(self, raw: bytes, final: bool) -> bytes:
        assert self.decoder is not None
        try:
            return self.decoder.decode(raw, final).encode("utf-8")
        except UnicodeDecodeError as error:
            self._refuse(self.read + error.start, error)
        except UnicodeEncodeError as error:
            self._refuse(self.read, error)

    def _refuse(self, offset: int, error: UnicodeError) -> NoReturn:
        raise DataError(
            f"{self.path}: byte {offset} is not valid in the encoding that data_args.encoding names ({error})."
        ) from error


Cut = tuple[int, int, bytes | Bad, bool]  # number, byte offset, row, whether its end was seen


def lines(blocks: Blocks) -> Iterator[Cut]:
    rest, number, offset = b"", 0, 0
    too_large = False
    for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            number += 1
            if too_large:
                yield number, offset, _too_large(), True
                too_large = False
            elif line.strip():
                yield number, offset + blocks.skipped, line, True
            offset += len(line) + 1
        if len(rest) > MAX_ROW_BYTES:
            too_large = True
            offset, rest = offset + len(rest), b""
    if too_large or blocks.fault:
        yield number + 1, offset, blocks.fault or _too_large(), True
    elif rest.strip():
        yield number + 1, offset, rest, False


def _too_large() -> Bad:
    return Bad("row_too_large", f"more than {MAX_ROW_BYTES >> 20} MiB in one row")


_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.S)
_STRING_END = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.S)


class _Scanner:
    """Finds where the values of an array (level 1), or values one after another (level 0), begin and end.

    It only counts brackets outside strings, so it needs no recursion, holds at most one row, and one row that is
    not valid JSON does not hide the next.
    """

    def __init__(self, level: int) -> None:
        self.level, self.depth = level, 0
        self.buffer, self.at, self.offset = (
            b"",
            0,
            0,
        )  # offset of the buffer's first byte in the file
        self.start: int | None = None  # of the open row in the buffer
        self.gap = 0  # where the last row ended
        self.in_string = False
        self.fault: Bad | None = None
        self.number = 0
        self.trailing = False

    def feed(self, block: bytes) -> Iterator[Cut]:
        self._forget()
        self.buffer += block
        if (
            self.level < 0
        ):  # behind the end of the array only white space may stand, and none of it is kept
            self.trailing, self.at = (
                self.trailing or bool(self.buffer[self.gap :].strip()),
                len(self.buffer),
            )
            self.gap = self.at
        while self.at < len(self.buffer):
            if self.in_string and not self._leave_string():
                break
            token = _STRUCTURE.search(self.buffer, self.at)
            if token is None:
                self.at = len(self.buffer)
            elif token[0] == b'"':
                self.in_string, self.at = True, token.end()
            else:
                self.at = token.end()
                if len(token[0]) == 1:
                    yield from self._bracket(token[0], token.start())
        if len(self.buffer) - (self.gap if self.start is None else self.start) > MAX_ROW_BYTES:
            self.fault = self.fault or _too_large()
            self.start = self.gap if self.start is None else self.start

    def _leave_string(self) -> bool:
        end = _STRING_END.match(self.buffer, self.at)
        if (
            end is None
        ):  # go on behind what was seen, but not between a backslash and what it escapes
            tail = len(self.buffer) - len(self.buffer.rstrip(b"\\"))
            self.at = max(self.at, len(self.buffer) - tail % 2)
            return False
        self.in_string, self.at = False, end.end()
        return True

    def _bracket(self, bracket: bytes, place: int) -> Iterator[Cut]:
        if bracket in b"[{":
            if self.depth == self.level:
                yield from self._between(place)
                self.start = place
            self.depth += 1
            if self.depth > MAX_DEPTH + self.level:
                self.fault = self.fault or Bad(
                    "too_deep", f"more than {MAX_DEPTH} values inside each other"
                )
            elif self.depth == self.level:
                self.gap = place + 1
            return
        self.depth -= 1
        if self.depth == self.level and self.start is not None:
            self.number += 1
            row = self.fault or self.buffer[self.start : place + 1]
            yield self.number, self.offset + self.start, row, True
            self.start, self.fault, self.gap = None, None, place + 1
        elif self.depth < self.level:
            yield from self._between(place)
            self.level, self.gap = -1, place + 1  # the array is closed: whatever follows is a fault

    def _between(self, place: int) -> Iterator[Cut]:
        """What stands between two rows must be one comma or nothing; a bare number or word is a row that is none."""
        text = self.buffer[self.gap : place].strip(b" \t\r\n,")
        if text and self.level >= 0:
            self.number += 1
            shown = text[:40].decode("utf-8", "replace")
            yield (
                self.number,
                self.offset + self.gap,
                Bad("bad_json", f"found {shown!r} where a row begins"),
                True,
            )

    def _forget(self) -> None:
        keep = self.gap if self.start is None else self.start
        if self.fault and self.start is not None:  # the row is lost anyway: do not hold it
            keep = min(self.at, len(self.buffer))
            self.start = 0
        else:
            self.start = None if self.start is None else 0
        self.buffer, self.at, self.offset = self.buffer[keep:], self.at - keep, self.offset + keep
        self.gap = max(0, self.gap - keep)

    def finish(self, fault: Bad | None) -> Iterator[Cut]:
        if fault:
            yield self.number + 1, self.offset, fault, True
        elif self.start is not None or self.in_string or self.depth > 0:
            detail = f"the file ends in the middle of row {self.number + 1}; its writer was probably stopped"
            yield self.number + 1, self.offset, self.fault or Bad("truncated", detail), True
        elif self.level < 0 and (self.trailing or self.buffer[self.gap :].strip()):
            yield (
                self.number + 1,
                self.offset,
                Bad("bad_json", "text after the end of the array"),
                True,
            )
        else:
            yield from self._between(len(self.buffer))


def objects(blocks: Blocks, level: int) -> Iterator[Cut]:
    scanner = _Scanner(level)
    for block in blocks:
        for number, offset, row, ended in scanner.feed(block):
            yield number, offset + blocks.skipped, row, ended
    yield from scanner.finish(blocks.fault)
