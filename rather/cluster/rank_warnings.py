"""What ranks log reaches the log of the first one, through the store, each text once."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from rather.config.redaction import redact
from rather.files import text_sha


class RankWarnings(logging.Handler):
    """Sends the warnings of this rank; on the first rank it logs those of the others.

    A lower level sends more than warnings.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        super().__init__(logging.WARNING)
        self._store, self._rank, self._world = store, rank, world
        self._process = os.getpid()
        self._own: set[str] = set()  # texts that this rank has logged itself
        self._taken = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = redact(record.getMessage())
        if self._rank == 0:
            self._own.add(text)
            return
        if os.getpid() != self._process:  # a fork has no connection of its own
            return
        message = json.dumps([record.name, record.levelno, self._rank, text])
        with suppress(dist.DistError):  # the job ends
            if self._store.add(f"warned {text_sha(json.dumps(text))}", 1) == 1:
                self._store.set(f"warning {self._store.add('warnings', 1)}", message)

    def log_those_of_others(self) -> None:
        """Log what other ranks have sent since the last call, unless this one has said the same."""
        with suppress(dist.DistError):
            while self._taken < self._store.add("warnings", 0):
                name, level, rank, text = json.loads(self._store.get(f"warning {self._taken + 1}"))
                self._taken += 1
                who = f"rank {rank} of {self._world}: " if level >= logging.WARNING else ""
                if text not in self._own:
                    logging.getLogger(name).log(level, "%s%s", who, text)
