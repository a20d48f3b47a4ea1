"""The `.metadata` of a `torch_dist` checkpoint: a pickle, read by a child process within limits.

Ten bytes of a pickle can ask for gigabytes, and four hundred can compute without end, where Ctrl-C
does not reach. A closed list of names stands for plain records, so that no code runs. The answer
of the child is JSON.
"""

from __future__ import annotations

import json
import os
import pickle  # nosec B403
import re
import reprlib
import signal
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from rather.child import start_child
from rather.files import limit_memory, parse_json, regular

MOST_BYTES = 1 << 28  # of the file
# What the child may use: so much for any file, and so much for each byte of it.
MEMORY, MEMORY_PER_BYTE = 128 << 20, 48
SECONDS, SECONDS_PER_BYTE = 5, 2e-6
ANSWER, ANSWER_PER_BYTE = 1 << 16, 4
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
DTYPES = re.compile(r"(b?float|u?int|complex)\d\w*|bool")


def read_metadata(path: Path) -> dict[str, Any]:
    """Return size, dtype and chunks of each tensor; raise OSError or ValueError."""
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise ValueError(f"{path.name} has more than {MOST_BYTES:,} bytes")
        connection, childs = Pipe(duplex=False)
        with childs:
            child = start_child(__name__, (childs.fileno(), file.fileno()))
    try:
        answer = parse_json(connection.recv_bytes(ANSWER + ANSWER_PER_BYTE * size))
    except (EOFError, OSError):
        raise ValueError(
            f"{path.name} takes too much memory or computing for its {size:,} bytes"
        ) from None
    finally:
        child.kill()
        child.wait()
        connection.close()
    if isinstance(answer, str):
        raise ValueError(answer)
    return answer  # type: ignore[no-any-return]


def problem_of(error: Exception) -> str:
    """Return one short line."""
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0][:300]


# ---- in the child


class _Record:
    """An object of the metadata: only its state."""

    state: Any = ()  # most are made without a call

    def __init__(self, *_arguments: Any) -> None:
        """Drop the arguments: those of enumerations and layouts are not read."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes records, tuples and names of dtypes, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in RECORDS:
            return _Record
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and DTYPES.fullmatch(name):
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data")


def main(connection: int, file: int) -> None:
    """Answer with the tensors, or with the reason why they cannot be read."""
    size = os.fstat(file).st_size
    limit_memory(MEMORY + MEMORY_PER_BYTE * size)
    signal.setitimer(signal.ITIMER_PROF, SECONDS + SECONDS_PER_BYTE * size)
    try:
        with open(file, "rb") as opened:
            answer = json.dumps(_tensors(_Unpickler(opened).load().state))
    except MemoryError:
        return
    except Exception as error:
        answer = json.dumps(problem_of(error))
    Connection(connection).send_bytes(answer.encode())


def _tensors(metadata: dict[str, Any]) -> dict[str, Any]:
    places: dict[Any, dict[str, Any]] = {}
    for index, storage in metadata["storage_data"].items():
        if index.state.get("offset") is not None:
            places[index.state["fqn"], _numbers(index.state["offset"])] = storage.state
    tensors = {}
    for key, entry in metadata["state_dict_metadata"].items():
        if not (isinstance(key, str) and key.isprintable() and len(key) < 200):
            raise ValueError(f"a tensor is named {reprlib.repr(key)}")
        if "chunks" not in entry.state:
            continue
        chunks = []
        for chunk in entry.state["chunks"]:
            offsets, sizes = (_numbers(chunk.state[name]) for name in ("offsets", "sizes"))
            chunks.append((offsets, sizes, *_place(places[key, offsets])))
        tensors[key] = (_numbers(entry.state["size"]), entry.state["properties"].state[0], chunks)
    return tensors


def _place(storage: dict[str, Any]) -> tuple[str, int, int]:
    """Return the name of a file next to the metadata, and the bytes of a chunk in it."""
    name = storage["relative_path"]
    if not re.fullmatch(r"[\w.-]{1,200}\.distcp", name, re.ASCII):
        raise ValueError(
            f"it names the file {reprlib.repr(name)}; only .distcp files next to it are read"
        )
    if storage.get("transform_descriptors"):
        raise ValueError(f"{name}: a tensor is not plain")
    return (name, *_numbers((storage["offset"], storage["length"])))


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(
        type(x) is not int or not 0 <= x < 2**62 for x in values
    ):
        raise ValueError(f"these are not sizes: {reprlib.repr(values)}")
    return values
