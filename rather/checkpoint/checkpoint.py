"""Checkpoints: atomic, hashed, and only safetensors and JSON, so nothing in one can run code.

    <run_dir>/LATEST                          the name of the newest checkpoint
    <run_dir>/checkpoint-<step>/
        <group>-00001.safetensors ...         tensors by group (model, optimizer, rng, ...)
        <group>-00003-00001.safetensors ...   those of rank 3, if several ranks write their shards
        state.json                            counters, data position, open log sums, identity, ...
        manifest.json                         size and SHA-256 of every file; its own digest last

A checkpoint is written under a temporary name and renamed when all of it is on the disk: a visible
checkpoint is complete. The hashes find later damage: safetensors alone loads a flipped bit.

Any block of any tensor can be read from the shards (rather.checkpoint.sharded_tensors): a run saved
under one layout resumes under any other, and no rank holds a whole model.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rather.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    SHARD,
    STATE,
    Written,
    manifest_bytes,
    read_manifest,
    verify,
)
from rather.checkpoint.sharded_tensors import (
    CHUNK,
    Shard,
    ShardedFiles,
    shards_file,
    split_by_size,
)
from rather.errors import CheckpointError, DiskError
from rather.files import own, read_bytes, read_json, read_object, replace_own, sync

log = logging.getLogger(__name__)

LATEST = "LATEST"
SHARD_BYTES = 4 << 30  # the largest size of one file
POLL_SECONDS = 0.02  # between two checks for the parts that other writers add
_SLACK = 1 << 20  # bytes for headers, state, manifest and folder entries

_ASIDE = re.compile(r"\.old-checkpoint-(0|[1-9]\d*)")

Groups = Mapping[str, Mapping[str, Tensor | Shard]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte has been verified."""

    path: Path
    step: int
    state: dict[str, Any]
    groups: dict[str, list[Path]]  # the files of each group of tensors

    def tensors(self, group: str) -> dict[str, Tensor]:
        """Return all tensors of one group, on the CPU, bit for bit as they were saved."""
        return dict(self.stored(group))

    def stored(self, group: str) -> ShardedFiles:
        """Return the tensors of one group, each read on access, whole or in part."""
        if group not in self.groups:
            names = ", ".join(self.groups) or "none"
            raise CheckpointError(
                f"{self.path}: has no tensor group '{group}'; its groups are: {names}."
            )
        return ShardedFiles(self.groups[group])


# --- saving ---


class Draft:
    """A checkpoint in its temporary folder. Earlier checkpoints stay intact whatever happens."""

    def __init__(self, run_dir: Path, step: int, needed: int) -> None:
        """Create the folder of a new checkpoint of `needed` bytes."""
        self.run_dir = run_dir
        self.step = step
        self.needed = needed
        self.folder = run_dir / f".tmp-checkpoint-{step}-{os.getpid()}"
        self.final = run_dir / f"checkpoint-{step}"
        with self.removed_on_error():
            run_dir.mkdir(parents=True, exist_ok=True)
            clean(run_dir)
            if shutil.disk_usage(run_dir).free < needed + _SLACK:
                raise self.disk_error("the disk is too full")
            self.folder.mkdir()

    def complete(self, write: Callable[[], Written], state: Mapping[str, Any]) -> Path:
        """Write the tensors with `write`, add state and manifest, and publish the checkpoint.

        `state` may hold what JSON returns unchanged: dicts with string keys, lists, strings,
        integers, booleans, None and floats (exact; also NaN and infinities in Python's spelling,
        since only Rather reads the file).
        """
        with self.published():
            _must_survive_json(state, "state")
            written = dict(write())
            written[STATE] = _write(self.folder / STATE, [json.dumps(state, indent=1).encode()])
            _write(self.folder / MANIFEST, [manifest_bytes(self.step, written)])
        return self.final

    @contextmanager
    def published(self) -> Iterator[None]:
        """Once the block has filled the folder, rename it to its final name and update LATEST."""
        aside = self.run_dir / f".old-checkpoint-{self.step}"
        with self.removed_on_error():
            yield
            sync(self.folder)
            if self.final.exists():
                os.rename(self.final, aside)  # `candidates` still finds it there
            os.rename(self.folder, self.final)
            sync(self.run_dir)
            write_latest(self.run_dir, self.final.name)
            shutil.rmtree(aside, ignore_errors=True)

    @contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """Remove the folder on any error; report a disk error with the bytes needed and free."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise self.disk_error(error.strerror or str(error)) from error
            raise

    def disk_error(self, cause: str) -> DiskError:
        try:
            free = shutil.disk_usage(self.run_dir).free
        except OSError:  # the folder itself may be unreachable
            free = 0
        return DiskError(
            f"{self.final}: could not be written ({cause}); it needs {self.needed + _SLACK:,} "
            f"bytes and {free:,} are free. Free some space, lower max_ckpt_to_keep, or move "
            "output_dir; earlier checkpoints are unchanged."
        )


def write_groups(
    folder: Path, groups: Groups, *, rank: int | None = None
) -> dict[str, tuple[int, str]]:
    """Write this process's tensors into a folder; file names contain the `rank`, if given."""
    rank_prefix = "" if rank is None else f"{rank:05d}-"
    written = {}
    for group, tensors in groups.items():
        if rank is not None and not tensors:
            continue
        for number, shards in enumerate(split_by_size(tensors, SHARD_BYTES), start=1):
            name = f"{group}-{rank_prefix}{number:05d}.safetensors"
            written[name] = _write(folder / name, shards_file(shards))
    return written


def copy_to(path: Path, folder: Path) -> None:
    """Copy a checkpoint to <folder>/checkpoint-<step> atomically, checked against its manifest."""
    step, files = read_manifest(path)
    draft = Draft(folder, step, sum(size for size, _ in files.values()))
    with draft.published():
        for name in (*files, MANIFEST):
            with open(path / name, "rb", opener=own) as source:
                written = _write(draft.folder / name, iter(partial(source.read, CHUNK), b""))
            if written != files.get(name, written):
                raise CheckpointError(f"{path / name}: is damaged and was not copied.")


# --- several writers ---


def leave_note(folder: Path, writer: str, written: Written, trouble: str = "") -> None:
    """Record what one of several writers has added to a checkpoint, or why it could not."""
    note = json.dumps({"written": written, "trouble": trouble})
    replace_own(folder / f"{writer}.note", note)


def remove_written(folder: Path, rank: int | None) -> None:
    """Remove what a writer has added to a checkpoint that will not be completed."""
    for path in folder.glob("*.safetensors" if rank is None else f"*-{rank:05d}-*.safetensors"):
        path.unlink()


def collect_parts(
    folder: Path, writers: Sequence[str], seconds: float, is_over: Callable[[], bool]
) -> Written:
    """Wait for the note of each writer and return all that they have written.

    Raises OSError if a writer failed, or left no note in time.
    """
    deadline = time.monotonic() + seconds
    written: dict[str, Any] = {}
    for writer in writers:
        note = folder / f"{writer}.note"
        while not note.exists():
            # Asked in this order: a note that appeared before the end counts.
            if (is_over() and not note.exists()) or time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"{writer} has not written its part")
            time.sleep(POLL_SECONDS)
        content = read_json(note, own)
        if content["trouble"]:
            raise OSError(errno.EIO, f"{writer}: {content['trouble']}")
        written |= content["written"]
        note.unlink()
    return written


# --- files ---


def clean(run_dir: Path) -> None:
    """Remove what an interrupted save left; restore a checkpoint that it had moved aside."""
    for path in run_dir.glob(".tmp-checkpoint-*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in run_dir.glob("*"):
        if match := _ASIDE.fullmatch(path.name):
            final = run_dir / f"checkpoint-{match[1]}"
            shutil.rmtree(path) if final.exists() else os.rename(path, final)


def write_latest(run_dir: Path, name: str) -> None:
    """Make LATEST name this checkpoint. After a rollback, later ones may still exist."""
    temporary = run_dir / f".tmp-checkpoint-{LATEST}-{os.getpid()}"
    _write(temporary, [f"{name}\n".encode()])
    os.replace(temporary, run_dir / LATEST)
    sync(run_dir)


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write and sync one new file, and return its size and SHA-256.

    The digest is computed from memory, so that a bad write does not get a matching hash.
    """
    digest = hashlib.sha256()
    size = 0
    with open(path, "xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _must_survive_json(value: Any, where: str) -> None:
    """Refuse what JSON changes, such as a tuple or an integer key: the resumed run would differ."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        inner = {f"{where}.{key}": inner_value for key, inner_value in value.items()}
    elif isinstance(value, list):
        inner = {f"{where}[{index}]": inner_value for index, inner_value in enumerate(value)}
    elif isinstance(value, str | int | float | None):
        return
    else:
        raise TypeError(f"{where}: JSON does not preserve {type(value).__name__} {value!r:.80}")
    for name, inner_value in inner.items():
        _must_survive_json(inner_value, name)


# --- verifying ---


def newest_good(run_dir: Path, *, full: bool = True) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, or None if the folder has no checkpoint.

    Damaged ones are reported in a warning and skipped. If all are damaged, that is an error:
    starting from zero would throw the run away without asking.
    """
    checkpoints = candidates(run_dir)
    damages = ""
    for index, path in enumerate(checkpoints):
        try:
            good = open_checkpoint(path, full=full)
        except CheckpointError as error:
            log.warning("DAMAGED CHECKPOINT, not used: %s", error)
            damages += f"\n  {error}"
            continue
        if damages:
            log.warning("%s is used instead: the newest good checkpoint, step %d.", path, good.step)
        for unused in checkpoints[index + 1 :]:
            if _step(unused) > good.step:
                log.warning("%s: is not used, it is later than the step in LATEST.", unused)
        return good
    if damages:
        raise CheckpointError(
            f"{run_dir}: all of its checkpoints ({len(checkpoints)}) are damaged:{damages}\n"
            "Set resume_from_checkpoint to a good copy, or start from scratch with --overwrite or "
            "another exp_name."
        )
    return None


def open_checkpoint(path: Path, *, full: bool = True) -> Checkpoint:
    """Verify and open a checkpoint. Without `full`, tensor files are not hashed."""
    return read_state(path, *verify(path, full=full))


def reopen(path: Path) -> Checkpoint:
    """Open a checkpoint that another process has just verified, without hashing its files again."""
    return read_state(path, *read_manifest(path))


def read_state(path: Path, step: int, files: Written) -> Checkpoint:
    """Read state.json and return the checkpoint that a verified manifest describes."""
    try:
        state = read_object(path / STATE, own)
    except ValueError as error:
        raise CheckpointError(f"{path / STATE}: cannot be used ({error}).") from error
    groups: dict[str, list[Path]] = {}
    for name in sorted(files):
        if match := SHARD.fullmatch(name):
            groups.setdefault(match[1], []).append(path / name)
    return Checkpoint(path, step, state, groups)


def candidates(run_dir: Path) -> list[Path]:
    """Return all checkpoints of a folder: the one in LATEST, then older steps, then later ones.

    Later steps come from before a rollback, or from a save killed between its rename and LATEST;
    the steps of the latter are simply done again, with the same result.
    """
    if not run_dir.is_dir():
        return []
    checkpoints = [path for path in run_dir.iterdir() if has_checkpoint_name(path)]
    checkpoints.sort(key=lambda path: (-_step(path), path.name.startswith(".")))
    latest = latest_name(run_dir)
    for path in checkpoints:
        if path.name.removeprefix(".old-") == latest:
            latest_step = _step(path)
            # A stable sort: only those after LATEST move behind the others.
            return sorted(checkpoints, key=lambda path: _step(path) > latest_step)
    return checkpoints


def has_checkpoint_name(path: Path) -> bool:
    return bool(FOLDER.fullmatch(path.name))


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def latest_name(run_dir: Path) -> str:
    try:
        return read_bytes(run_dir / LATEST, 300, own).decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        return ""


def prune(run_dir: Path, keep: int, *spared: Path | None) -> None:
    """Delete all but the newest `keep` checkpoints (0 keeps all) and those `spared`.

    Nothing is deleted before a newer checkpoint has been fully verified; damaged ones newer than
    that do not count. The one in LATEST and symbolic links, which Rather never creates, stay.
    """
    checkpoints = candidates(run_dir)
    if keep == 0 or len(checkpoints) <= keep:
        return
    damaged = 0
    for damaged, path in enumerate(checkpoints):  # noqa: B007 - those before the first good one
        try:
            verify(path)
            break
        except CheckpointError as error:
            log.warning("DAMAGED CHECKPOINT, older ones are kept instead: %s", error)
    latest = latest_name(run_dir)
    for path in checkpoints[damaged + keep :]:
        if path.is_symlink():
            log.warning("%s: is a symbolic link and is kept; remove it by hand.", path)
        elif path.name != latest and {path, path.resolve()}.isdisjoint(spared):
            # Renamed before it is deleted: a kill in between never leaves half a checkpoint.
            doomed = path.with_name(f".tmp-checkpoint-doomed-{_step(path)}")
            try:
                os.rename(path, doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                reason = (path, error.strerror)
                log.warning("%s: cannot be deleted (%s); remove it by hand.", *reason)
