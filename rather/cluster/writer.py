"""Writer: writes a rank's part of checkpoints, in the background if there is memory for a copy."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from torch import Tensor

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import Shard, TensorStream, tensor_of
from rather.cluster.memory import GIB, free_memory

State = dict[str, dict[str, Tensor | Shard]]


class Writer:
    """Writes a rank's part of checkpoints, in the background if the host has memory for a copy.

    There is one write at a time. It leaves a note with its outcome in the folder for the driver.
    """

    def __init__(
        self, role: str, rank: int, ranks: int, wanted: str, log: logging.Logger, near: int = 1
    ) -> None:
        """`wanted` is checkpoint_config.async_save; `near` counts the ranks of this machine."""
        self.name, self.near, self.log = f"{role}-{rank:05d}", near, log
        self.rank = rank if ranks > 1 else None
        self.wanted = wanted
        self._thread = threading.Thread()

    def write(self, folder: Path, groups: State) -> None:
        """Write the groups. If they are copied, `groups` is emptied, and its tensors may change."""
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
        except Exception as error:  # a thread has no caller that would report it
            reason = getattr(error, "strerror", None) or repr(error)
            try:
                checkpoint.remove_written(folder, self.rank)  # frees space for the note
                checkpoint.leave_note(folder, self.name, {}, reason)
            except OSError as another:
                if folder.exists():  # else the checkpoint was abandoned
                    facts = (folder, self.name, reason, another)
                    self.log.warning("%s: %s has not written its part (%s), nor why (%s)", *facts)

    def _copies(self, groups: State) -> bool:
        if self.wanted == "auto":
            sizes = [tensor_of(each).nbytes for group in groups.values() for each in group.values()]
            needed, free = self.near * sum(sizes), free_memory()
            self.wanted = "on" if needed + GIB <= free else "off"
            self.log.info(
                "async_save: auto is %s; a copy of the state takes %.3g of %.3g GiB",
                *(self.wanted, needed / GIB, free / GIB),
            )
        return self.wanted == "on"


def _copy(tensors: dict[str, Tensor | Shard]) -> dict[str, Tensor | Shard]:
    """Copy tensors to the host, and release each original at once."""
    found: dict[str, Tensor | Shard] = {}
    for name in list(tensors):
        shard = tensors.pop(name)
        tensor = tensor_of(shard)
        if isinstance(tensor, TensorStream):
            (tensor,) = tensor.parts()
        tensor = tensor.detach()
        copy = tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
        found[name] = Shard(copy, shard.spec) if isinstance(shard, Shard) else copy
    return found
