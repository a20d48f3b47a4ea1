"""The tensors of a `torch_dist` checkpoint, as Megatron-Core and NeMo write it, with torch alone.

`common.pt`, optimizer state and other objects are never opened. A tensor consists of chunks, each a
zip archive at an offset of a file; only the chunks that a block needs are read, and every byte of
them is compared with its CRC. The pickle in a chunk is not loaded: its operations must be those
that build a plain tensor.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.checkpoint.dist_metadata import problem_of, read_metadata
from rather.checkpoint.sharded_tensors import Numbers, ShardedFiles, ShardSpec
from rather.errors import ConfigError
from rather.files import read_json, refuse_outside, regular

METADATA = ".metadata"
FORMAT = "metadata.json"
HEADER = 1 << 16  # bytes of a chunk besides its numbers
# The operations of `torch.save(tensor)`: storage, key, offset, sizes, strides.
PLAIN = re.compile(
    r"torch\._utils _rebuild_tensor_v2,MARK,MARK,storage,torch (\w+)Storage,(\w+),[^,]+,\d+,TUPLE,"
    r"BINPERSID,(\d+),(?:MARK,)?([\d,]+),TUPLE\d?,(?:MARK,)?([\d,]+),TUPLE\d?,NEW(?:TRUE|FALSE),"
    r"collections OrderedDict,EMPTY_TUPLE,REDUCE,TUPLE,REDUCE,STOP"
)


@dataclass(frozen=True)
class _Chunk:
    """A block of a tensor in a file, read like one of a safetensors file."""

    file: Path
    offset: int
    length: int
    dtype: torch.dtype
    sizes: Numbers

    def get_slice(self, _name: str) -> _Chunk:
        return self

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        try:
            parts = self._parts()
            folder = next(iter(parts)).partition("/")[0]
            operations = [
                operation.name if argument is None else str(argument)
                for operation, argument, _ in pickletools.genops(parts[f"{folder}/data.pkl"])
                if operation.name not in ("PROTO", "BINPUT")
            ]
            plain = PLAIN.fullmatch(",".join(operations))
            if plain is None or parts.get(f"{folder}/byteorder", b"little") != b"little":
                raise ValueError("it is not a plain tensor")
            storage, key, offset, *lists = plain.groups()
            sizes, strides = (tuple(map(int, numbers.split(","))) for numbers in lists)
            kind = torch.empty(0, dtype=self.dtype).type()
            if (f"torch.{storage}Tensor", sizes) != (kind, self.sizes):
                raise ValueError("it is not the tensor that the metadata describes")
            stored = bytearray(parts.pop(f"{folder}/data/{key}"))
            tensor = torch.frombuffer(stored, dtype=self.dtype)
            tensor = tensor.as_strided(sizes, strides, int(offset))
        except Exception as error:  # an untrusted file may hold anything
            raise ConfigError(
                f"{self.file}: the tensor at byte {self.offset} cannot be read: {problem_of(error)}"
            ) from error
        return tensor[slices]

    def _parts(self) -> dict[str, bytes]:
        """Return the files of the archive; raise BadZipFile if one differs from its CRC."""
        with open(self.file, "rb", opener=regular) as opened:
            opened.seek(self.offset)
            archive = zipfile.ZipFile(BytesIO(opened.read(self.length)))
        entries = archive.infolist()
        size = sum(entry.file_size for entry in entries)
        if size > self.length or any(entry.compress_type for entry in entries):
            raise ValueError("it is compressed")
        return {entry.filename: archive.read(entry) for entry in entries}


class TorchDistFiles(ShardedFiles):
    """The tensors of a checkpoint folder by Megatron's names; other objects are not read."""

    def __init__(self, folder: Path) -> None:
        super().__init__([])
        self.folder = folder
        try:
            backend = read_json(folder / FORMAT)["sharded_backend"]
            if backend != "torch_dist":
                raise ValueError(f"{FORMAT} says {backend!r}; only torch_dist is read")
            refuse_outside(folder, folder / METADATA)
            for key, (size, dtype, chunks) in read_metadata(folder / METADATA).items():
                self._add_tensor(key, tuple(size), getattr(torch, dtype), chunks)
        except Exception as error:
            raise ConfigError(
                f"{folder}: is not a Megatron checkpoint that can be read: {problem_of(error)}"
            ) from error

    def _add_tensor(self, key: str, shape: Numbers, dtype: torch.dtype, chunks: Any) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"a tensor of {dtype} is not a weight")
        shards = {}
        for stored_offsets, stored_sizes, name, place, length in chunks:
            offsets, sizes = tuple(stored_offsets), tuple(stored_sizes)
            if length > prod(sizes) * dtype.itemsize + HEADER:
                raise ValueError(f"{name}: a tensor of {sizes} in {length} bytes is not plain")
            refuse_outside(self.folder, self.folder / name)
            chunk = _Chunk(self.folder / name, place, length, dtype, sizes)
            shards[offsets] = (chunk, ShardSpec(shape, offsets, sizes))
        if not _fills([spec for _, spec in shards.values()], shape):
            raise ValueError(f"the chunks of {key} do not make up its shape {shape}")
        self._shards[key] = shards


def _fills(specs: list[ShardSpec], whole: Numbers) -> bool:
    """Return whether blocks, no two at one place, are the cells of a grid over a tensor."""
    cells = 1
    for dim, size in enumerate(whole):
        spans = sorted({(spec.offsets[dim], spec.ends[dim]) for spec in specs})
        cells *= len(spans)
        if [0, *(end for _, end in spans)] != [*(start for start, _ in spans), size]:
            return False
    return bool(whole) and cells == len(specs)
