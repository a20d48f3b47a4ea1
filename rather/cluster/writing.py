"""Writer: what a rank adds to checkpoints, written in a thread of its own where the host has memory for a copy."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path

from torch import Tensor

from rather import faults
from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import Shard, tensor_of
from rather.cluster.preflight import GIB, free_memory

State = dict[str, dict[str, Tensor | Shard]]


class Writer:
    """One write at a time. What came of it lies in the folder as a note, for the driver to find."""

    def __init__(self, name: str, rank: int, ranks: int, wanted: str, log: logging.Logger) -> None:
        """`ranks` count those that may copy on the same host; `wanted` is checkpoint_config.async_save."""
        self.name, self.rank, self.ranks, self.log = f"{name}-{rank:05d}", rank, ranks, log
        self.wanted = wanted
        self._thread: threading.Thread | None = None

    def write(self, folder: Path, groups: State) -> None:
        """Where this copies, `groups` is empty when it returns and what it held may change."""
        self.wait()
        copies = self._copies(groups)
        held = {name: _copied(tensors) for name, tensors in groups.items()} if copies else groups
        work = partial(self._written, folder, held, faults.step())
        if not copies:
            work()
            return
        self._thread = threading.Thread(target=work, name=f"write {self.name}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None

    def _written(self, folder: Path, groups: State, step: int) -> None:
        faults.at_step(step)
        try:
            written = checkpoint.write_groups(
                folder, groups, rank=self.rank if self.ranks > 1 else None
            )
            checkpoint.leave_note(folder, self.name, written)
        except OSError as error:
            self._failed(folder, error.strerror or str(error))
        except Exception as error:  # a thread has nobody above it who would tell
            self._failed(folder, repr(error))

    def _failed(self, folder: Path, reason: str) -> None:
        """Makes room for the note. A folder that is gone was given up."""
        try:
            checkpoint.remove_written(folder, self.rank if self.ranks > 1 else None)
            checkpoint.leave_note(folder, self.name, {}, reason)
        except OSError as error:
            if folder.exists():
                self.log.warning(
                    "%s: %s has not written its part (%s), nor why (%s)",
                    folder,
                    self.name,
                    reason,
                    error,
                )

    def _copies(self, groups: State) -> bool:
        if self.wanted != "auto":
            return self.wanted == "on"
        needed = self.ranks * sum(
            tensor_of(t).nbytes for tensors in groups.values() for t in tensors.values()
        )
        free = free_memory()
        self.wanted = "on" if needed + GIB <= free else "off"
        beside = "beside training" if self.wanted == "on" else "while training waits"
        told = (self.wanted, beside, needed / GIB, free / GIB)
        self.log.info(
            "async_save: auto is %s, checkpoints are written %s; a copy takes %.3g of %.3g GiB",
            *told,
        )
        return self.wanted == "on"


def _copied(tensors: dict[str, Tensor | Shard]) -> dict[str, Tensor | Shard]:
    """On the host, with what they are copied from let go of one by one."""
    found: dict[str, Tensor | Shard] = {}
    for name in list(tensors):
        piece = tensors.pop(name)
        tensor = tensor_of(piece).detach()
        copy = tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
        found[name] = Shard(copy, piece.spec) if isinstance(piece, Shard) else copy
    return found
