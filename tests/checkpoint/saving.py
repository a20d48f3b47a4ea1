"""Save a checkpoint in one call, as a run does over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rather.checkpoint import checkpoint
from rather.checkpoint.manifest import Written
from rather.checkpoint.sharded_tensors import tensor_of


def save_checkpoint(
    run_dir: Path,
    step: int,
    groups: checkpoint.Groups,
    state: Mapping[str, Any],
    *,
    ranks: Callable[[Path], Written] | None = None,
    shard_bytes: int = checkpoint.SHARD_BYTES,
) -> Path:
    """`ranks` lets each of several ranks write its shards, and returns what they have written."""
    needed = sum(tensor_of(t).nbytes for tensors in groups.values() for t in tensors.values())
    draft = checkpoint.Draft(run_dir, step, needed)

    def write() -> Written:
        written = dict(ranks(draft.folder)) if ranks else {}
        with patch.object(checkpoint, "SHARD_BYTES", shard_bytes):
            return written | checkpoint.write_groups(draft.folder, groups)

    return draft.complete(write, state)
