"""`python -m rather` is the command `rather`."""

from __future__ import annotations

import os
import sys

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends


def end_with_torchrun() -> None:
    """Let the kernel end this process with torchrun: nothing may hold a device.

    Rather watches torchrun itself once it is imported, which takes long on a busy machine.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_with_torchrun()

    from rather.cli import main

    main()
