"""`rather verify`: compare a checkpoint, run folder or reference cache with its manifests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from rather.checkpoint import checkpoint
from rather.checkpoint.manifest import MANIFEST, damages, read_manifest
from rather.errors import CheckpointError, ConfigError
from rather.files import own, parse_json, read_bytes
from rather.reference.logprob_cache import BlockFile
from rather.reference.logps import SEGMENTS
from rather.run_folder.names import METRICS, REFERENCE_LOG
from rather.tracking.json_lines import LEDGER
from rather.tracking.ledger import read_batches

LARGEST_METRICS = 1 << 34  # bytes
BLOCK = 1 << 20
Damage = tuple[Path, str]  # a file and what is wrong with it; "" if it is good


def check_files(path: Path, *, full: bool) -> Iterator[Damage]:
    """Yield every file that belongs to `path`. Without `full`, tensors are not hashed."""
    if checkpoint.has_checkpoint_name(path) or (path / MANIFEST).exists():
        yield from _check_checkpoint(path, full=full)
    elif checkpoint.candidates(path) or (path / METRICS).exists():
        yield from _check_run(path, full=full)
    elif segments := sorted(path.rglob(SEGMENTS)):
        yield from map(_check_log_probs, segments)
    else:
        raise ConfigError(
            f"{path}: not a checkpoint, run folder or reference cache; pass one, such as "
            "output/dpo."
        )


def _check_run(run_dir: Path, *, full: bool) -> Iterator[Damage]:
    good: list[Path] = []
    for path in checkpoint.candidates(run_dir):
        damaged = list(_check_checkpoint(path, full=full))
        good += [] if any(damage for _, damage in damaged) else [path]
        yield from damaged
    if latest := checkpoint.latest_name(run_dir):
        exists = (run_dir / latest).is_dir()
        yield run_dir / checkpoint.LATEST, "" if exists else f"names {latest}, which does not exist"
    if (run_dir / REFERENCE_LOG).exists():
        yield _check_log_probs(run_dir / REFERENCE_LOG)
    try:
        metrics = read_bytes(run_dir / METRICS, LARGEST_METRICS, own)
        yield run_dir / METRICS, _metrics_damage(metrics, good)
    except (OSError, ValueError) as error:
        yield run_dir / METRICS, f"cannot be read ({getattr(error, 'strerror', error)})"
    if os.path.lexists(run_dir / LEDGER):
        yield run_dir / LEDGER, _ledger_damage(run_dir / LEDGER, good)


def _check_checkpoint(path: Path, *, full: bool) -> Iterator[Damage]:
    try:
        step, files = read_manifest(path)
        damaged = dict(damages(path, files, full=full))
        if not damaged:
            checkpoint.read_state(path, step, files)
    except CheckpointError as error:
        yield path / MANIFEST, str(error).partition(": ")[2].rstrip(".")
    except OSError as error:
        yield Path(error.filename or path), f"cannot be read ({error.strerror})"
    else:
        for name in sorted({path / name for name in (*files, MANIFEST)} | damaged.keys()):
            yield name, damaged.get(name, "")


def _check_log_probs(path: Path) -> Damage:
    try:
        _, damaged = BlockFile(path).read()
    except OSError as error:
        return path, f"cannot be read ({error.strerror})"
    return path, f"{damaged:,} bytes; their log-probs are computed again" if damaged else ""


def _ledger_damage(file: Path, good: Sequence[Path]) -> str:
    """Every step must have its digest, and the bytes at a checkpoint those that it recorded."""
    try:
        for _ in read_batches(file):
            pass
        positions = {}
        for path in good:
            state = checkpoint.reopen(path).state
            if saved := state.get("ledger_sha256"):
                positions[int(state.get("ledger_bytes", 0))] = saved, path.name
        digest, read = sha256(), 0
        with open(file, "rb", opener=own) as ledger:
            for position, (saved, name) in sorted(positions.items()):
                while read < position and (block := ledger.read(min(BLOCK, position - read))):
                    digest.update(block)
                    read += len(block)
                if read < position or digest.hexdigest() != saved:
                    return f"its first {position:,} bytes have changed since {name} was saved"
    except (OSError, ValueError) as error:
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    return ""


def _metrics_damage(data: bytes, good: Sequence[Path]) -> str:
    """Every line must be a complete record, and a line must end where each checkpoint says."""
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        try:
            is_complete = "step" in parse_json(line) and line.endswith(b"\n")
        except (ValueError, TypeError):
            is_complete = False
        if not is_complete:
            return f"line {number} is not a complete record"
    for path in good:
        state = checkpoint.reopen(path).state
        position, saved = state.get("metrics_bytes", 0), state.get("metrics_sha256")
        if position and data[position - 1 : position] != b"\n":
            return f"no line ends at byte {position:,}, where {path.name} was saved"
        if saved not in (None, sha256(data[:position]).hexdigest()):
            return f"its first {position:,} bytes have changed since {path.name} was saved"
    return ""
