"""Small damages to bytes, text and files, drawn by a seeded random generator."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

Mutate = Callable[[bytes, Random], bytes]

# Values that readers get wrong: limits of types, other spellings, references, nesting, commands.
ODD = [
    b"", b"0", b"-1", b"-0.0", b"1e309", b"NaN", b".inf", b"1" * 5000, b"null", b"~", b"true", b"yes", b"'", b'"',
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\r", b"\t", b"\\u0000", b"\\ud800",
    b"[" * 3000, b"{" * 3000, b'{"a":' * 3000, b"- " * 300, b"&a [*a]", b"*a", b"!!python/object:os.system x", b"<<: *a",
    b"${oc.env:HOME}", b"${x}", b"../../../etc/passwd", b"/dev/null", b"%s%n", b"{{ 7 * 7 }}", b"x" * 100_000,
    b"1_000", b"0x10", b"1:30", b"2024-01-01", b"[]", b"{}", b"[1, 2]", b"#", b": ", b"---\n", b"...\n",
]  # fmt: skip


def flip(data: bytes, draw: Random) -> bytes:
    """Flip up to three bits."""
    changed = bytearray(data or b"\0")
    for _ in range(draw.randint(1, 3)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def flip_at_an_end(data: bytes, draw: Random) -> bytes:
    """Flip a bit near the start or the end, where formats have their headers."""
    size = min(len(data), 600)
    if draw.random() < 0.5:
        return flip(data[:size], draw) + data[size:]
    return data[: len(data) - size] + flip(data[len(data) - size :], draw)


def cut(data: bytes, draw: Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def remove(data: bytes, draw: Random) -> bytes:
    start, end = _span(data, draw)
    return data[:start] + data[end:]


def repeat(data: bytes, draw: Random) -> bytes:
    start, end = _span(data, draw)
    return data[:end] + data[start:end] * draw.choice([1, 1, 2, 50]) + data[end:]


def zero(data: bytes, draw: Random) -> bytes:
    start, end = _span(data, draw)
    return data[:start] + bytes(end - start) + data[end:]


def insert(data: bytes, draw: Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.choice([*ODD, draw.randbytes(8)]) + data[place:]


def number(data: bytes, draw: Random) -> bytes:
    """Overwrite four or eight bytes with a number at the limit of a type."""
    value = draw.choice([0, 1, -1, 2**31 - 1, 2**31, 2**62, 2**63 - 1, len(data), len(data) * 8])
    size = draw.choice([4, 8])
    place = draw.randrange(len(data) + 1)
    return data[:place] + (value % 2 ** (8 * size)).to_bytes(size, "little") + data[place + size :]


def word(data: bytes, draw: Random) -> bytes:
    """Replace a word of text by an odd value."""
    words = list(re.finditer(rb"[\w./-]+", data))
    if not words:
        return insert(data, draw)
    found = draw.choice(words)
    return data[: found.start()] + draw.choice(ODD) + data[found.end() :]


def lines(data: bytes, draw: Random) -> bytes:
    """Repeat, remove, swap, indent or join lines."""
    found = data.split(b"\n")
    here, there = draw.randrange(len(found)), draw.randrange(len(found))
    kind = draw.randrange(5)
    if kind == 0:
        found.insert(there, found[here])
    elif kind == 1:
        del found[here]
    elif kind == 2:
        found[here], found[there] = found[there], found[here]
    elif kind == 3:
        found[here] = b"  " + found[here]
    else:
        found[here : here + 2] = [b"".join(found[here : here + 2])]
    return b"\n".join(found)


BYTES: dict[str, Mutate] = {
    "flip": flip, "flip at an end": flip_at_an_end, "cut": cut, "remove": remove, "repeat": repeat, "zero": zero,
    "insert": insert, "number": number,
}  # fmt: skip
TEXT: dict[str, Mutate] = {
    "flip": flip, "cut": cut, "remove": remove, "repeat": repeat, "insert": insert, "word": word, "another word": word,
    "lines": lines, "other lines": lines,
}  # fmt: skip


def damage(file: Path, draw: Random, table: dict[str, Mutate]) -> str:
    """Change the content of a file by one or two mutators; return their names."""
    names = draw.choices(list(table), k=draw.choice([1, 1, 2]))
    data = file.read_bytes()
    for name in names:
        data = table[name](data, draw)
    file.write_bytes(data)
    return f"{' and '.join(names)} in {file.name}"


def replace(file: Path, draw: Random, canary: Path) -> str:
    """Put something else in the place of a file; return what."""
    kinds = (
        "nothing",
        "empty",
        "folder",
        "link",
        "link",
        "link",
        "loop",
        "pipe",
        "endless",
        "huge",
    )
    kind = draw.choice(kinds)
    file.unlink()
    if kind == "empty":
        file.touch()
    elif kind == "folder":
        file.mkdir()
    elif kind == "link":
        file.symlink_to(canary)
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "endless":
        file.symlink_to("/dev/zero")
    elif kind == "huge":
        with file.open("wb") as empty:
            empty.truncate(1 << 40)
    return f"{kind} as {file.name}"


def swap(folder: Path, draw: Random) -> str:
    """Exchange two files of a folder."""
    one, other = draw.sample(sorted(path for path in folder.iterdir() if path.is_file()), 2)
    shutil.move(one, folder / ".swap")
    shutil.move(other, one)
    shutil.move(folder / ".swap", other)
    return f"swap of {one.name} and {other.name}"


def _span(data: bytes, draw: Random) -> tuple[int, int]:
    start = draw.randrange(len(data) + 1)
    return start, min(len(data), start + draw.choice([1, 2, 8, 100, 4000]))
