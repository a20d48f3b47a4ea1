"""Processes of this machine: which of them have ended, and how."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CHECK_EVERY = 1.0  # seconds between two checks of the driver


@dataclass(frozen=True)
class Process:
    """A process, distinguishable from a later one with the same pid."""

    machine: str
    pid: int
    started: str
    kernel: str  # which numbers the process: two machines may have one name

    @staticmethod
    def this() -> Process:
        pid = os.getpid()
        started = "".join(_stat(pid)[STARTED : STARTED + 1])
        return Process(socket.gethostname(), pid, started, _kernel())

    @property
    def is_here(self) -> bool:
        return self.kernel == _kernel()

    @property
    def is_gone(self) -> bool:
        """Return whether it has ended, even if its parent has not collected it yet."""
        if not self.is_here:
            return False
        fields = _stat(self.pid)
        return len(fields) <= STARTED or fields[STARTED] != self.started or fields[0] in "ZX"

    @property
    def signal(self) -> int | None:
        """Return the signal that ended it; None if unknown, as after its parent collected it."""
        fields = _stat(self.pid)
        is_ended = len(fields) > EXIT_STATUS and fields[STARTED] == self.started
        return int(fields[EXIT_STATUS]) & 0x7F or None if is_ended and fields[0] == "Z" else None

    def kill(self) -> None:
        """End a process of this machine, also a stopped one."""
        if self.is_here and not self.is_gone:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class SignalWatch:
    """Learns which signal ends a process of this machine, even if another process collects it."""

    def __init__(self, process: Process) -> None:
        self._descriptor: int | None = None
        if process.is_here and hasattr(os, "pidfd_open"):
            with suppress(OSError):  # it has ended
                self._descriptor = os.pidfd_open(process.pid)
                weakref.finalize(self, os.close, self._descriptor)

    @property
    def signal(self) -> int | None:
        """Return the signal; None if unknown, as on Linux before 6.15, or if it ended otherwise."""
        if self._descriptor is None:
            return None
        info = bytearray(PIDFD_INFO.size)
        PIDFD_INFO.pack_into(info, 0, PIDFD_EXIT, 0)
        with suppress(OSError):
            fcntl.ioctl(self._descriptor, PIDFD_GET_INFO, info)
            known, status = PIDFD_INFO.unpack(info)
            if known & PIDFD_EXIT:
                return status & 0x7F or None
        return None


# struct pidfd_info of Linux: what is known, and the exit status at its end.
PIDFD_INFO = struct.Struct("=Q52xi")
PIDFD_GET_INFO, PIDFD_EXIT = 0xC040FF0B, 1 << 3


def all_gone(processes: Sequence[Process], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (gone := all(each.is_gone for each in processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return gone


STARTED, EXIT_STATUS = 19, 49  # in _stat


def _stat(pid: int) -> list[str]:
    """Return what the kernel says about a process, from its state on; nothing if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _kernel() -> str:
    """Return what identifies the kernel, and within it the container, that numbers processes."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def end_with_others(driver: Process | None = None) -> None:
    """End this process once the driver or its parent is gone: nothing may hold a device."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and not (driver and driver.is_gone):
            time.sleep(CHECK_EVERY)
        os._exit(1)

    threading.Thread(target=watch, name="watch", daemon=True).start()
