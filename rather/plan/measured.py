"""The peak memory that a worker used, to compare with its forecast."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import torch


class Peak:
    """Measures since its construction: the tensors of a GPU, or the growth of this process."""

    def __init__(self, device: str) -> None:
        self._cuda, self._before = device.startswith("cuda"), 0
        if not self._cuda:
            with suppress(OSError, AttributeError):  # not Linux with glibc
                ctypes.CDLL(None).malloc_trim(0)  # freed memory would be used again, unnoticed
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
            self._before = _status("VmRSS")

    def begin_training(self) -> None:
        """Do not count what planning has tried."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    @property
    def bytes(self) -> int:
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        return max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    """Return bytes from /proc; 0 if the system has none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0
