"""The tensors of a `torch_dist` checkpoint, as Megatron-Core and NeMo write it, with torch alone.

Its `.metadata` is a pickle. Here a closed list of names stands for plain records, so that no code
runs. `common.pt`, optimizer state and other objects are never opened. A tensor consists of chunks,
each a zip archive at an offset of a file; only the chunks that a block needs are read.
"""

from __future__ import annotations

import pickle  # nosec B403
import re
import reprlib
import zipfile
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rather.checkpoint.sharded_tensors import Numbers, ShardedFiles, ShardSpec
from rather.errors import ConfigError
from rather.files import read_bytes, read_json, refuse_outside, regular

METADATA = ".metadata"
FORMAT = "metadata.json"
MOST_BYTES = 1 << 29  # of the metadata
HEADER = 1 << 16  # bytes of a chunk besides its numbers
# Names that stand for plain records; `pathlib` names the folder that was written.
RECORDS = [
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.planner.SavePlan",
    "torch.distributed.checkpoint.planner.TensorWriteData",
    "torch.distributed.checkpoint.planner.WriteItem",
    "torch.distributed.checkpoint.planner.WriteItemType",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
]


class _Record:
    """An object of the metadata: only its state."""

    state: Any = ()  # most are made without a call

    def __init__(self, *_arguments: Any) -> None:
        """Drop the arguments: those of enumerations and layouts are not read."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes records, tuples and dtypes, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in RECORDS:
            return _Record
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data")


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
            with open(self.file, "rb", opener=regular) as opened:
                opened.seek(self.offset)
                archive = opened.read(self.length)
            entries = zipfile.ZipFile(BytesIO(archive)).infolist()
            if any(entry.compress_type or entry.file_size > self.length for entry in entries):
                raise ValueError("it is compressed")
            tensor = torch.load(BytesIO(archive), map_location="cpu", weights_only=True)  # nosec B614
            is_plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout == torch.strided
            if not is_plain or (tensor.dtype, tuple(tensor.shape)) != (self.dtype, self.sizes):
                raise ValueError("it is not the tensor that the metadata describes")
        except Exception as error:  # an untrusted file may hold anything
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(
                f"{self.file}: the tensor at byte {self.offset} cannot be read: {reason}"
            ) from error
        return tensor[slices]  # type: ignore[no-any-return]


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
            pickled = BytesIO(read_bytes(folder / METADATA, MOST_BYTES))
            self._add_tensors(_Unpickler(pickled).load().state)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            raise ConfigError(
                f"{folder}: is not a Megatron checkpoint that can be read: {reason}"
            ) from error

    def _add_tensors(self, metadata: dict[str, Any]) -> None:
        stored: dict[tuple[str, Numbers], dict[str, Any]] = {}
        for index, storage in metadata["storage_data"].items():
            if index.state.get("offset") is not None:
                stored[index.state["fqn"], _numbers(index.state["offset"])] = storage.state
        for key, entry in metadata["state_dict_metadata"].items():
            if not (isinstance(key, str) and key.isprintable() and len(key) < 200):
                raise ValueError(f"a tensor is named {reprlib.repr(key)}")
            if "chunks" not in entry.state:
                continue
            shape = _numbers(entry.state["size"])
            dtype = entry.state["properties"].state[0]
            shards = {}
            for chunk in entry.state["chunks"]:
                offsets, sizes = (_numbers(chunk.state[name]) for name in ("offsets", "sizes"))
                stored_chunk = self._chunk(stored[key, offsets], dtype, sizes)
                shards[offsets] = (stored_chunk, ShardSpec(shape, offsets, sizes))
            if not _fills([spec for _, spec in shards.values()], shape):
                raise ValueError(f"the chunks of {key} do not make up its shape {shape}")
            self._shards[key] = shards

    def _chunk(self, storage: dict[str, Any], dtype: Any, sizes: Numbers) -> _Chunk:
        name = storage["relative_path"]
        offset, length = _numbers((storage["offset"], storage["length"]))
        if not dtype.is_floating_point:
            raise ValueError(f"a tensor of {dtype} is not a weight")
        if not re.fullmatch(r"[\w.-]{1,200}\.distcp", name, re.ASCII):
            raise ValueError(f"it names the file {name!r}; only .distcp files next to it are read")
        if storage.get("transform_descriptors") or length > prod(sizes) * dtype.itemsize + HEADER:
            raise ValueError(f"{name}: a tensor of {sizes} in {length} bytes is not plain")
        refuse_outside(self.folder, self.folder / name)
        return _Chunk(self.folder / name, offset, length, dtype, sizes)


def _numbers(values: Any) -> Numbers:
    if not isinstance(values, tuple) or any(
        type(x) is not int or not 0 <= x < 2**62 for x in values
    ):
        raise ValueError(f"these are not sizes: {reprlib.repr(values)}")
    return values


def _fills(specs: list[ShardSpec], whole: Numbers) -> bool:
    """Return whether blocks, no two at one place, are the cells of a grid over a tensor."""
    cells = 1
    for dim, size in enumerate(whole):
        spans = sorted({(spec.offsets[dim], spec.ends[dim]) for spec in specs})
        cells *= len(spans)
        if [0, *(end for _, end in spans)] != [*(start for start, _ in spans), size]:
            return False
    return bool(whole) and cells == len(specs)
