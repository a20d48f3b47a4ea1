"""`rather verify`: every file of a checkpoint, of a run folder or of a reference cache, good or damaged and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rather.checkpoint import checkpoint
from rather.checkpoint.manifest import MANIFEST, damages, read_manifest
from rather.errors import CheckpointError, ConfigError
from rather.reference.logprob_cache import BlockFile
from rather.reference.logps import SEGMENTS
from rather.run_folder.layout import REFERENCE_LOG

METRICS = "metrics.jsonl"


class Finding(NamedTuple):
    """A file, and what is wrong with it: nothing where it is good."""

    path: Path
    damage: str = ""


def findings(path: Path, *, full: bool = True) -> list[Finding]:
    """Of every file that belongs together under `path`. Without `full` the tensors of checkpoints are not hashed."""
    if checkpoint.has_checkpoint_name(path) or (path / MANIFEST).exists():
        return list(_checkpoint(path, full=full))
    if checkpoint.candidates(path) or (path / METRICS).exists():
        return list(_run(path, full=full))
    if segments := sorted(path.rglob(SEGMENTS)):
        return [_log_probs(segment) for segment in segments]
    raise ConfigError(
        f"{path}: is no checkpoint, no run folder and no reference cache; name one of them, such as output/dpo."
    )


def _run(run_dir: Path, *, full: bool) -> Iterator[Finding]:
    good: list[Path] = []
    for path in checkpoint.candidates(run_dir):
        found = list(_checkpoint(path, full=full))
        good += [path] if not any(each.damage for each in found) else []
        yield from found
    latest = checkpoint.latest_name(run_dir)
    if latest and not (run_dir / latest).is_dir():
        yield Finding(run_dir / checkpoint.LATEST, f"names {latest}, which is not there")
    elif latest:
        yield Finding(run_dir / checkpoint.LATEST)
    if (run_dir / REFERENCE_LOG).exists():
        yield _log_probs(run_dir / REFERENCE_LOG)
    if (run_dir / METRICS).exists() or good:
        yield _metrics(run_dir / METRICS, good)


def _checkpoint(path: Path, *, full: bool) -> Iterator[Finding]:
    try:
        step, files = read_manifest(path)
        found = {each.path: each.reason for each in damages(path, files, full=full)}
        if not found:
            checkpoint.read_state(path, step, files)
    except CheckpointError as error:
        yield Finding(path / MANIFEST, str(error).partition(": ")[2].rstrip("."))
        return
    except OSError as error:
        yield Finding(Path(error.filename or path), f"cannot be read ({error.strerror})")
        return
    for name in sorted({path / name for name in (*files, MANIFEST)} | found.keys()):
        yield Finding(name, found.get(name, ""))


def _log_probs(path: Path) -> Finding:
    try:
        damaged = BlockFile(path).read().damaged
    except OSError as error:
        return Finding(path, f"cannot be read ({error.strerror})")
    return Finding(
        path, f"{damaged:,} bytes are damaged; what they held is computed again" if damaged else ""
    )


def _metrics(path: Path, good: list[Path]) -> Finding:
    """Whole lines of JSON, and a line that ends where each checkpoint says."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return Finding(path, f"cannot be read ({error.strerror})")
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        record = None
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
        if not (
            isinstance(record, dict)
            and isinstance(record.get("step"), int)
            and line.endswith(b"\n")
        ):
            return Finding(path, f"line {number} is no whole record")
    for each in good:
        position = checkpoint.reopen(each).state.get("metrics_bytes", 0)
        if position and data[position - 1 : position] != b"\n":
            return Finding(path, f"no line ends at byte {position:,}, where {each.name} was saved")
    return Finding(path)
