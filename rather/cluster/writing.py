"""Writer: what a rank adds to checkpoints, written in a background thread if the host has memory
for a copy."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from torch import Tensor

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import Shard, tensor_of
from rather.cluster.preflight import GIB, free_memory

State = dict[str, dict[str, Tensor | Shard]]


class Writer:
    """One write at a time. Its outcome is left in the folder as a note, for the driver to find."""

    def __init__(self, name: str, rank: int, ranks: int, wanted: str, log: logging.Logger) -> None:
        """`ranks` counts those that may copy on the same host; `wanted` is
        checkpoint_config.async_save."""
        self.name, self.ranks, self.log = f"{name}-{rank:05d}", ranks, log
        self.rank = rank if ranks > 1 else None
        self.wanted = wanted
        self._thread = threading.Thread()

    def write(self, folder: Path, groups: State) -> None:
        """If this copies, `groups` is empty when it returns, and its tensors may change."""
        self.wait()
        if not self._copies(groups):
            self._write(folder, groups)
            return
        copies = {name: _copy(tensors) for name, tensors in groups.items()}
        self._thread = threading.Thread(target=self._write, args=(folder, copies), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread.is_alive():
            self._thread.join()

    def _write(self, folder: Path, groups: State) -> None:
        try:
            written = checkpoint.write_groups(folder, groups, rank=self.rank)
            checkpoint.leave_note(folder, self.name, written)
        except OSError as error:
            self._fail(folder, error.strerror or str(error))
        except Exception as error:  # nobody above a thread would report it
            self._fail(folder, repr(error))

    def _fail(self, folder: Path, reason: str) -> None:
        """Make room for the note. A folder that is gone was given up."""
        try:
            checkpoint.remove_written(folder, self.rank)
            checkpoint.leave_note(folder, self.name, {}, reason)
        except OSError as error:
            if folder.exists():
                said = (folder, self.name, reason, error)
                self.log.warning("%s: %s has not written its part (%s), nor why (%s)", *said)

    def _copies(self, groups: State) -> bool:
        if self.wanted == "auto":
            tensors = [tensor_of(each) for group in groups.values() for each in group.values()]
            needed, free = self.ranks * sum(tensor.nbytes for tensor in tensors), free_memory()
            self.wanted = "on" if needed + GIB <= free else "off"
            how = "during training" if self.wanted == "on" else "while training waits"
            said = (self.wanted, how, needed / GIB, free / GIB)
            self.log.info(
                "async_save: auto is %s, checkpoints are written %s; a copy takes %.3g of %.3g GiB",
                *said,
            )
        return self.wanted == "on"


def _copy(tensors: dict[str, Tensor | Shard]) -> dict[str, Tensor | Shard]:
    """Copy tensors to the host, and release each original at once."""
    found: dict[str, Tensor | Shard] = {}
    for name in list(tensors):
        shard = tensors.pop(name)
        tensor = tensor_of(shard).detach()
        copy = tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
        found[name] = Shard(copy, shard.spec) if isinstance(shard, Shard) else copy
    return found
