"""Sharded tensors: the block that a rank holds, and reading any block from any file layout.

A file of shards is plain safetensors; its header gives the whole shape and the offsets of each
tensor that is not whole. Files are written as a stream, never assembled in memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from operator import add, sub
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rather.errors import CheckpointError
from rather.files import parse_json, regular

HEADER_KEY = "pieces"  # in the metadata of a safetensors file: JSON, name -> [whole shape, offsets]
Numbers = tuple[int, ...]
Cast = Any  # rather.model.export.FileCast, which converts blocks of tensors to its dtype
CHUNK = 16 << 20  # bytes in memory at a time while a tensor is streamed
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
class ShardSpec:
    """A block of a tensor of shape `whole`: where it begins and how large it is."""

    whole: Numbers
    offsets: Numbers
    sizes: Numbers

    @staticmethod
    def full(shape: Iterable[int]) -> ShardSpec:
        """Return the block that is the whole tensor."""
        sizes = tuple(shape)
        return ShardSpec(sizes, (0,) * len(sizes), sizes)

    @property
    def ends(self) -> Numbers:
        return tuple(map(add, self.offsets, self.sizes))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.offsets, self.ends))

    def relative_to(self, origin: Numbers) -> tuple[slice, ...]:
        """Return the slices of this block in a tensor that begins at `origin`."""
        return tuple(map(slice, map(sub, self.offsets, origin), map(sub, self.ends, origin)))

    def narrow(self, dim: int, first: int, size: int) -> ShardSpec:
        """Return a smaller block: `size` rows of this one along `dim`."""
        offsets = list(self.offsets)
        sizes = list(self.sizes)
        offsets[dim] += first
        sizes[dim] = size
        return ShardSpec(self.whole, tuple(offsets), tuple(sizes))

    def overlap(self, other: ShardSpec) -> ShardSpec | None:
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(sub, map(min, self.ends, other.ends), offsets))
        return ShardSpec(self.whole, offsets, sizes) if all(size > 0 for size in sizes) else None


@dataclass(frozen=True)
class Shard:
    """A block of a tensor, as one rank holds it, or makes it when it is written."""

    tensor: Any  # a Tensor or a TensorStream
    spec: ShardSpec


class ShardedFiles(Mapping[str, Tensor]):
    """The tensors of some safetensors files, stored whole or as shards; each is read on access."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._shards: dict[str, dict[Numbers, tuple[Any, ShardSpec]]] = {}
        for file in files:
            os.close(regular(file, os.O_RDONLY))  # do not wait for a pipe
            try:
                self._add(safe_open(file, framework="pt"))
            except (SafetensorError, ValueError, TypeError, AttributeError) as error:
                raise CheckpointError(
                    f"{file}: is not a readable safetensors file ({error})."
                ) from error

    def _add(self, file: Any) -> None:
        header = parse_json((file.metadata() or {}).get(HEADER_KEY, "{}"))
        for name in file.keys():  # noqa: SIM118  the file is not a mapping
            sizes = tuple(file.get_slice(name).get_shape())
            full_shape, offsets = map(tuple, header.get(name, (sizes, (0,) * len(sizes))))
            shards = self._shards.setdefault(name, {})
            shards[offsets] = (file, ShardSpec(full_shape, offsets, sizes))

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, ShardSpec.full(self.shape(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __contains__(self, name: object) -> bool:
        return name in self._shards  # a Mapping's own would read the tensor

    def shape(self, name: str) -> Numbers:
        return next(iter(self._shards[name].values()))[1].whole

    def dtype(self, name: str) -> torch.dtype:
        file, spec = next(iter(self._shards[name].values()))
        if hasattr(file, "dtype"):  # of another format
            return file.dtype  # type: ignore[no-any-return]
        empty: Tensor = file.get_slice(name)[(slice(0, 0),) * len(spec.whole)]
        return empty.dtype

    def read(self, name: str, wanted: ShardSpec) -> Tensor:
        """Return one block in memory of its own; nothing else is read."""
        if wanted.whole != self.shape(name):
            raise CheckpointError(
                f"{name}: has the shape {self.shape(name)} in the files, expected {wanted.whole}."
            )
        shards = self._shards[name].values()
        if not wanted.whole:
            return next(iter(shards))[0].get_tensor(name).clone()  # type: ignore[no-any-return]
        block = torch.empty(wanted.sizes, dtype=self.dtype(name))
        filled = 0
        for file, stored in shards:
            if common := wanted.overlap(stored):
                values = file.get_slice(name)[common.relative_to(stored.offsets)]
                block[common.relative_to(wanted.offsets)] = values
                filled += values.numel()
        if filled != block.numel():
            raise CheckpointError(f"{name}: some of its shards are missing from the files.")
        return block

    def stream(self, name: str, cast: Cast) -> TensorStream:
        """Return a whole tensor in another dtype, some rows at a time."""
        spec = ShardSpec.full(self.shape(name))
        dtype = cast.dtype
        if not spec.whole:
            return TensorStream(dtype, (), lambda: iter([cast(name, self[name], spec)]))
        count = spec.whole[0]
        rows = max(1, CHUNK // (4 * max(1, prod(spec.whole[1:]))))

        def parts() -> Iterator[Tensor]:
            for first in range(0, count, rows):
                chunk_spec = spec.narrow(0, first, min(rows, count - first))
                yield cast(name, self.read(name, chunk_spec), chunk_spec)

        return TensorStream(dtype, spec.whole, parts)


@dataclass(frozen=True)
class TensorStream:
    """A tensor to write: its parts in order, each made when it is needed."""

    dtype: torch.dtype
    shape: Numbers
    parts: Callable[[], Iterator[Tensor]]

    @staticmethod
    def of(tensor: Tensor) -> TensorStream:
        return TensorStream(tensor.dtype, tuple(tensor.shape), lambda: iter([tensor]))

    @staticmethod
    def late(dtype: torch.dtype, shape: Numbers, make: Callable[[], Tensor]) -> TensorStream:
        """Return a tensor of one part, made each time it is read."""
        return TensorStream(dtype, shape, lambda: iter([make()]))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def safetensors_file(
    tensors: Mapping[str, TensorStream], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file of these tensors.

    The library's own writer hashes nothing on the way and raises no OSError, and its in-memory form
    doubles a shard. Wide dtypes come first, so that each tensor is aligned to its width.
    """
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
        for tensor_chunk in tensor.parts():
            flat = tensor_chunk.detach().cpu().contiguous().reshape(-1)
            buffer = flat.view(torch.uint8).numpy().data
            for start in range(0, len(buffer), CHUNK):
                yield buffer[start : start + CHUNK]


class LocalShards(UserDict[str, Tensor]):
    """The shards of whole or stored tensors that belong to this rank.

    `specs` are those of parameters; an optimizer moment, `<parameter>.<kind>`, is sharded like its
    parameter.
    """

    def __init__(self, source: Mapping[str, Tensor], specs: Mapping[str, ShardSpec]) -> None:
        self.data = source  # type: ignore[assignment]
        self._specs = specs

    def __getitem__(self, key: str) -> Tensor:
        spec = self._specs.get(key) or self._specs.get(key.rpartition(".")[0])
        source = self.data
        if spec is None or key.endswith(".step"):  # a step is a scalar
            return source[key]
        if isinstance(source, ShardedFiles):
            return source.read(key, spec)
        return source[key][spec.slices]


def shards_file(shards: Mapping[str, Tensor | Shard]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file of shards; its metadata says where those that are cut belong."""
    cut = {
        name: [shard.spec.whole, shard.spec.offsets]
        for name, shard in shards.items()
        if isinstance(shard, Shard) and shard.spec.sizes != shard.spec.whole
    }
    streams: dict[str, TensorStream] = {}
    for name, shard in shards.items():
        tensor = tensor_of(shard)
        streams[name] = tensor if isinstance(tensor, TensorStream) else TensorStream.of(tensor)
    return safetensors_file(streams, {HEADER_KEY: json.dumps(cut)} if cut else {})


def tensor_of(shard: Shard | Tensor) -> Any:
    """Return what is to be written: a Tensor or a TensorStream."""
    return shard.tensor if isinstance(shard, Shard) else shard


def split_by_size(
    tensors: Mapping[str, Tensor | Shard], limit: int
) -> list[dict[str, Tensor | Shard]]:
    """Split tensors into files in the given order; a tensor larger than the limit gets its own."""
    shards: list[dict[str, Tensor | Shard]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        size = tensor_of(tensor).nbytes
        if shards[-1] and size > room:
            shards.append({})
            room = limit
        shards[-1][name] = tensor
        room -= size
    return shards
