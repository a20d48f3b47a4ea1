"""ledger.arrows: numbers of each pair and epoch, as an Arrow stream of one record batch per step.

Each batch has a digest of its numbers, so that a flipped bit is found also in a run that was killed
between two checkpoints. The stream has no end mark: readers take the end of the file for it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rather.files import memory_limit, own

LEDGER_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("id", pa.uint64()),  # the digest of the pair's texts
        *((name, pa.float64()) for name in ("margin", "chosen", "rejected")),
        ("gradient_weight", pa.float32()),  # null: a held-out pair, of an evaluation after `step`
        *((name, pa.int32()) for name in ("chosen_tokens", "rejected_tokens")),
    ]
)
DIGEST = b"blake2b"
END_MARK = 8  # bytes that a writer of streams adds when it is closed
ROOM = 64 << 20  # bytes to read a batch, besides those of the file
MARK = 8  # bytes with which all batches of a ledger begin


def ledger_part(batch: Any, *, is_first: bool) -> bytes:
    """Return a record batch as bytes of the stream; the first one begins with the schema."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, LEDGER_SCHEMA) as writer:
        writer.write_batch(batch, custom_metadata={DIGEST: _digest(batch)})
    stream: bytes = sink.getvalue().to_pybytes()
    start = 0 if is_first else len(LEDGER_SCHEMA.serialize().to_pybytes())
    return stream[start:-END_MARK]


def _digest(batch: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for column in batch.columns:
        digest.update(np.ascontiguousarray(column.to_numpy(zero_copy_only=False)).tobytes())
    return digest.hexdigest()


def read_batches(file: Path) -> Iterator[Any]:
    """Yield the batches of a ledger; raise OSError or ValueError if it is damaged.

    A run that writes, or was killed, may leave half a batch at the end, which is left out. Batches
    of earlier versions have no digest.
    """
    os.close(own(file, os.O_RDONLY))  # raises if it is a link or a pipe
    with pa.memory_map(str(file)) as mapped:
        size, read = mapped.size(), 0
        try:
            reader = pa.ipc.open_stream(mapped)
        except pa.ArrowException as error:
            raise ValueError(str(error)) from error
        if reader.schema != LEDGER_SCHEMA:
            raise ValueError("it has other columns than a ledger")
        one_row = pa.RecordBatch.from_pylist([dict.fromkeys(LEDGER_SCHEMA.names, 0)], LEDGER_SCHEMA)
        mark = ledger_part(one_row, is_first=False)[:MARK]
        while True:
            start = mapped.tell()
            reason = "the stream ends there"
            try:
                with memory_limit(size + ROOM):
                    batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                break
            except MemoryError:  # compressed: a ledger never is
                raise ValueError("its numbers are larger than the file") from None
            except (OSError, pa.ArrowException) as error:
                reason = str(error).partition("\n")[0]
                break
            read += batch.nbytes
            if read > size:
                raise ValueError("its numbers are larger than the file")
            batch.validate(full=True)
            if metadata and metadata.get(DIGEST, b"").decode("latin-1") not in ("", _digest(batch)):
                raise ValueError(f"the step at byte {start:,} has changed since it was written")
            mark = mapped.read_at(MARK, start)
            yield batch
        # Half a batch is the last one.
        if mark in mapped.read_at(size - start, start)[MARK:]:
            raise ValueError(f"it is damaged from byte {start:,} on: {reason}")
