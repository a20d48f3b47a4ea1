"""Tensors in pieces: which part of a whole tensor a rank holds, and any part of it read from any layout of files.

A file of pieces is plain safetensors; its header says of each tensor that is not whole which part it is. Files are
written as a stream, so that nothing has to be in memory at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rather.errors import CheckpointError

HEADER_KEY = "pieces"  # in the metadata of a safetensors file: JSON, name -> [whole shape, offsets]
Numbers = tuple[int, ...]
CHUNK = 16 << 20  # bytes in memory at a time, where tensors are streamed
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Place:
    """The part of a whole tensor of shape `whole` that begins at `offsets` and is as large as `sizes`."""

    whole: Numbers
    offsets: Numbers
    sizes: Numbers

    @staticmethod
    def all_of(shape: Iterable[int]) -> Place:
        whole = tuple(shape)
        return Place(whole, (0,) * len(whole), whole)

    @property
    def is_all(self) -> bool:
        return self.sizes == self.whole

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def part(self, dim: int, first: int, size: int) -> Place:
        """A smaller part: `size` rows of this one along `dim`."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += first
        sizes[dim] = size
        return Place(self.whole, tuple(offsets), tuple(sizes))

    def overlap(self, other: Place) -> Place | None:
        spans = list(zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True))
        first = tuple(max(a, b) for a, _, b, _ in spans)
        sizes = tuple(min(a + n, b + m) - f for (a, n, b, m), f in zip(spans, first, strict=True))
        return Place(self.whole, first, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Place) -> tuple[slice, ...]:
        """Where this part lies, counted from the beginning of a larger one."""
        begins = (o - p for o, p in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(o, o + n) for o, n in zip(begins, self.sizes, strict=True))


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, as one rank holds it."""

    tensor: Tensor
    place: Place


class Stored(Mapping[str, Tensor]):
    """Tensors of some safetensors files, whole or in pieces; each is read when it is asked for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._parts: dict[str, dict[Numbers, tuple[Path, Place]]] = {}
        self._open: dict[Path, Any] = {}
        for file in files:
            try:
                self._add(file)
            except (SafetensorError, ValueError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{file}: is no file of tensors ({error}).") from error

    def _add(self, file: Path) -> None:
        handle: Any = safe_open(file, framework="pt")
        self._open[file] = handle
        cut = json.loads((handle.metadata() or {}).get(HEADER_KEY, "{}"))
        for name in handle.keys():  # noqa: SIM118  the handle is no mapping
            sizes = tuple(handle.get_slice(name).get_shape())
            whole, offsets = map(tuple, cut.get(name, (sizes, (0,) * len(sizes))))
            self._parts.setdefault(name, {})[offsets] = (file, Place(whole, offsets, sizes))

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, Place.all_of(self.shape(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def shape(self, name: str) -> Numbers:
        return next(iter(self._parts[name].values()))[1].whole

    def read(self, name: str, place: Place) -> Tensor:
        """One part, in memory of its own; no more than that is read."""
        if place.whole != self.shape(name):
            raise CheckpointError(
                f"{name}: is stored as {self.shape(name)}, but {place.whole} is asked for."
            )
        found: Tensor | None = None
        filled = 0
        for file, held in self._parts[name].values():
            common = place.overlap(held)
            if common is None:
                continue
            part = self._part(file, name, common.inside(held))
            if common.sizes == place.sizes:
                return part.clone()  # it may be a view of the file, which somebody may overwrite
            if found is None:
                found = part.new_empty(place.sizes)
            found[common.inside(place)] = part
            filled += part.numel()
        if found is None and 0 in place.sizes:
            file, _ = next(iter(self._parts[name].values()))
            return self._part(file, name, tuple(slice(0, 0) for _ in place.sizes)).new_empty(
                place.sizes
            )
        if found is None or filled != found.numel():
            raise CheckpointError(f"{name}: parts of it are in none of the files.")
        return found

    def _part(self, file: Path, name: str, slices: tuple[slice, ...]) -> Tensor:
        handle = self._open[file]
        part: Tensor = handle.get_slice(name)[slices] if slices else handle.get_tensor(name)
        return part

    def streamed(self, name: str, dtype: torch.dtype) -> Streamed:
        """A whole tensor in another dtype, some rows at a time."""
        place = Place.all_of(self.shape(name))
        if not place.whole:
            return Streamed(dtype, place.whole, lambda: iter([self[name].to(dtype)]))
        rows = max(1, CHUNK // (4 * max(1, prod(place.whole[1:]))))

        def parts() -> Iterator[Tensor]:
            for first in range(0, place.whole[0], rows):
                yield self.read(name, place.part(0, first, min(rows, place.whole[0] - first))).to(
                    dtype
                )

        return Streamed(dtype, place.whole, parts)


@dataclass(frozen=True)
class Streamed:
    """A tensor to write: its parts one after another, made when their turn comes."""

    dtype: torch.dtype
    shape: Numbers
    parts: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def safetensors_file(
    tensors: Mapping[str, Streamed], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The file of these tensors, in pieces. The library's writer gives no hash on the way and no OSError, and its
    in-memory form doubles a shard. Wide types first: each tensor is aligned to its width."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()  # as the library writes it
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        for part in tensor.parts():
            data = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK):
                yield data[start : start + CHUNK]


class Here(Mapping[str, Tensor]):
    """The parts of whole or stored tensors that belong to this rank. `places` has the name that a key begins with."""

    def __init__(self, source: Mapping[str, Tensor], places: Mapping[str, Place]) -> None:
        self._source, self._places = source, places

    def __getitem__(self, key: str) -> Tensor:
        place = self._places.get(key) or self._places.get(key.rpartition(".")[0])
        if place is None or key.endswith(".step"):
            return self._source[key]
        if isinstance(self._source, Stored):
            return self._source.read(key, place)
        return self._source[key][place.slices]

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


def header_of(pieces: Mapping[str, Piece | Tensor]) -> dict[str, str]:
    """What a file's metadata says of its pieces; nothing where all are whole."""
    cut = {
        name: [piece.place.whole, piece.place.offsets]
        for name, piece in pieces.items()
        if isinstance(piece, Piece) and not piece.place.is_all
    }
    return {HEADER_KEY: json.dumps(cut)} if cut else {}


def tensor_of(piece: Piece | Tensor) -> Tensor:
    return piece.tensor if isinstance(piece, Piece) else piece
