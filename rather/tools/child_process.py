"""Processes that end with the command that started them, even if that is killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# A killed command cannot pass a signal on: the kernel does. PR_SET_PDEATHSIG survives exec and refers
# to the thread that started the process. Not a preexec_fn, which would run Python between fork and
# exec.
TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return a command that ends when this process ends; on Linux only."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-S", "-c", TIED, str(os.getpid()), *command]
