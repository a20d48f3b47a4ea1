"""The peak of memory that a worker really took, beside which its forecast is laid."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """From its making on. Of a GPU what tensors take; of a CPU the growth of this process: a reference in it counts."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._before = 0
        if not self._cuda:
            with suppress(OSError, AttributeError):  # not Linux with glibc
                ctypes.CDLL(None).malloc_trim(
                    0
                )  # what was freed before would be used again, unseen
                CLEAR.write_text("5")  # the high-water mark starts from here
            self._before = _status("VmRSS")

    def begin_training(self) -> None:
        """What planning tried out is not counted."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    @property
    def bytes(self) -> int:
        return (
            torch.cuda.max_memory_allocated()
            if self._cuda
            else max(0, _status("VmHWM") - self._before)
        )


def _status(name: str) -> int:
    """Bytes; 0 where the system does not tell."""
    with suppress(OSError):
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0
