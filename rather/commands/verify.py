"""`rather verify`: compare the files of a checkpoint, run folder or reference cache with manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.terminal import command, count

Damage = tuple[Path, str]  # a file and what is wrong with it; "" if it is good


@command
def verify_command(
    path: Annotated[Path, typer.Argument(help="A checkpoint, a run folder or a reference cache.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare only the file sizes of tensors.")
    ] = False,
) -> int:
    """Check every file against what was written. Exit code 4 if a file is damaged."""
    from rather.errors import CheckpointError

    found = check_files(path, full=not quick)
    table = Table("file", "state", box=None, pad_edge=False)
    for file, damage in found:
        state = Text(f"damaged: {damage}", "bold red") if damage else Text("good", "green")
        table.add_row(Text(str(file)), state)
    console, damaged = Console(highlight=False), sum(bool(damage) for _, damage in found)
    console.print(table)
    how = "names, sizes and the state" if quick else "every byte"
    console.print(f"{count(len(found), 'file')}, {damaged} damaged (checked {how})")
    return CheckpointError.exit_code if damaged else 0


def check_files(path: Path, *, full: bool = True) -> list[Damage]:
    """Return every file that belongs to `path`. Without `full`, tensors are not hashed."""
    from rather.checkpoint import checkpoint
    from rather.checkpoint.manifest import MANIFEST
    from rather.errors import ConfigError
    from rather.reference.logps import SEGMENTS
    from rather.report.folder import METRICS

    if checkpoint.has_checkpoint_name(path) or (path / MANIFEST).exists():
        return list(_check_checkpoint(path, full=full))
    if checkpoint.candidates(path) or (path / METRICS).exists():
        return list(_check_run(path, full=full))
    if segments := sorted(path.rglob(SEGMENTS)):
        return [_check_log_probs(segment) for segment in segments]
    raise ConfigError(
        f"{path}: not a checkpoint, run folder or reference cache; pass one, such as output/dpo."
    )


def _check_run(run_dir: Path, *, full: bool) -> Iterator[Damage]:
    from rather.checkpoint import checkpoint
    from rather.report.folder import METRICS
    from rather.run_folder.layout import REFERENCE_LOG

    good: list[Path] = []
    for path in checkpoint.candidates(run_dir):
        found = list(_check_checkpoint(path, full=full))
        good += [] if any(damage for _, damage in found) else [path]
        yield from found
    if latest := checkpoint.latest_name(run_dir):
        missing = not (run_dir / latest).is_dir()
        damage = f"names {latest}, which does not exist" if missing else ""
        yield run_dir / checkpoint.LATEST, damage
    if (run_dir / REFERENCE_LOG).exists():
        yield _check_log_probs(run_dir / REFERENCE_LOG)
    if (run_dir / METRICS).exists() or good:
        yield _check_metrics(run_dir / METRICS, good)


def _check_checkpoint(path: Path, *, full: bool) -> Iterator[Damage]:
    from rather.checkpoint import checkpoint
    from rather.checkpoint.manifest import MANIFEST, damages, read_manifest
    from rather.errors import CheckpointError

    try:
        step, files = read_manifest(path)
        found = {each.path: each.reason for each in damages(path, files, full=full)}
        if not found:
            checkpoint.read_state(path, step, files)
    except CheckpointError as error:
        yield path / MANIFEST, str(error).partition(": ")[2].rstrip(".")
        return
    except OSError as error:
        yield Path(error.filename or path), f"cannot be read ({error.strerror})"
        return
    for name in sorted({path / name for name in (*files, MANIFEST)} | found.keys()):
        yield name, found.get(name, "")


def _check_log_probs(path: Path) -> Damage:
    from rather.reference.logprob_cache import BlockFile

    try:
        damaged = BlockFile(path).read().damaged
    except OSError as error:
        return path, f"cannot be read ({error.strerror})"
    return path, f"{damaged:,} bytes; their log-probs are computed again" if damaged else ""


def _check_metrics(path: Path, good: list[Path]) -> Damage:
    """Every line must be a complete record, and a line must end where each checkpoint says."""
    from rather.checkpoint import checkpoint

    try:
        data = path.read_bytes()
    except OSError as error:
        return path, f"cannot be read ({error.strerror})"
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        record = None
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
        is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
        if not is_record or not line.endswith(b"\n"):
            return path, f"line {number} is not a complete record"
    for each in good:
        position = checkpoint.reopen(each).state.get("metrics_bytes", 0)
        if position and data[position - 1 : position] != b"\n":
            return path, f"no line ends at byte {position:,}, where {each.name} was saved"
    return path, ""
