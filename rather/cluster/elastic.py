"""torchrun's own store, which is there before its processes and outlives them: a way to speak when all else stands."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def agent_store(seconds: float) -> Any:
    """Where torchrun itself is gone, a DistError after so many seconds."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]


def own_store(seconds: float) -> Any:
    """The part of it that belongs to this start of the processes."""
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    return dist.PrefixStore(f"rather/{start}", agent_store(seconds))  # type: ignore[attr-defined]


def come(store: Any, keys: Sequence[str], seconds: float) -> bool:
    """Whether all are there in time. Asked again and again: the store's own waiting ends with warnings on stderr."""
    deadline = time.monotonic() + seconds
    while not (there := store.check(list(keys))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(there)
