"""What several ranks check together before they load a model."""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from rather.cluster.group import shared_folder
from rather.cluster.memory import Room
from rather.config.schema import ModelArgs
from rather.errors import ConfigError
from rather.parallel.load import compute_dtype, cpu_has_bf16


def refuse_unlike_cpus(role: str, args: ModelArgs, kind: str, rooms: Sequence[Room]) -> None:
    """Ranks would store different dtypes, and the reference cache be keyed by one of them."""
    has_bf16 = cpu_has_bf16()
    unlike = sorted({room.machine for room in rooms if room.bf16 != has_bf16})
    if unlike and kind == "cpu" and compute_dtype(args, "cpu") == torch.bfloat16:
        raise ConfigError(
            f"{role}.model_args.dtype: bf16 is computed in another way on a CPU without "
            f"bfloat16 instructions: {', '.join(unlike)} and {socket.gethostname()} differ in "
            "this. Set it to fp32, or use machines of one kind."
        )


def refuse_private_folder(
    run_dir: Path, problems_in: Callable[[Path], Iterable[str | None]]
) -> None:
    """Checkpoints would wait for the files of a rank that writes to a folder of its own.

    `problems_in` returns why ranks cannot write to a folder that the first one has just made.
    """
    # The name is new: a network file system may remember for a while that a name is not there.
    with shared_folder(run_dir / secrets.token_hex(8)) as folder:
        problems = set(filter(None, problems_in(folder)))
    if problems:
        raise ConfigError(
            f"output_dir: {run_dir.absolute()} is not a folder that all machines share, and "
            f"every rank writes its part of a checkpoint there ({'; '.join(sorted(problems))}). "
            "Name a folder of a network file system that is mounted on all of them."
        )


def remove_trial_folders(run_dir: Path) -> None:
    """Remove what `refuse_private_folder` leaves if the first rank is killed meanwhile."""
    for folder in run_dir.glob(".pieces-" + "[0-9a-f]" * 16):
        shutil.rmtree(folder, ignore_errors=True)
