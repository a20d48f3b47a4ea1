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
)  # fmt: skip
from rather.checkpoint.sharded_tensors import (
    CHUNK,
    Shard,
    ShardedFiles,
    TensorStream,
    safetensors_file,
    shard_header,
    split_by_size,
    tensor_of,
)
from rather.errors import CheckpointError, DiskError

log = logging.getLogger(__name__)

LATEST = "LATEST"
DEFAULT_SHARD_BYTES = 4 << 30
POLL_SECONDS = 0.02  # between two checks for the parts that other writers add
_SLACK = 1 << 20  # bytes for headers, state, manifest and folder entries

_ASIDE = re.compile(r"\.old-checkpoint-(0|[1-9]\d*)")
_GROUP = re.compile(r"[a-z][a-z0-9_]*")

Groups = Mapping[str, Mapping[str, Tensor | Shard]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte has been verified."""

    path: Path
    step: int
    state: dict[str, Any]
    files: tuple[str, ...]

    @property
    def groups(self) -> dict[str, list[str]]:
        """Return the files of each group of tensors."""
        found: dict[str, list[str]] = {}
        for name in self.files:
            if match := SHARD.fullmatch(name):
                found.setdefault(match[1], []).append(name)
        return found

    def tensors(self, group: str) -> dict[str, Tensor]:
        """Return all tensors of one group, on the CPU, bit for bit as they were saved."""
        return dict(self.stored(group))

    def stored(self, group: str) -> ShardedFiles:
        """Return the tensors of one group, each read on access, whole or in part."""
        shards = self.groups.get(group)
        if not shards:
            found = ", ".join(sorted(self.groups)) or "none"
            raise CheckpointError(
                f"{self.path}: has no tensor group '{group}'; its groups are: {found}."
            )
        return ShardedFiles(self.path / shard for shard in shards)


# --- saving ---


def save(
    run_dir: Path,
    step: int,
    groups: Groups,
    state: Mapping[str, Any],
    *,
    ranks: Callable[[Path], Written] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write checkpoint-<step>; on return it is on the disk and LATEST names it.

    `state` may hold what JSON returns unchanged: dicts with string keys, lists, strings, integers,
    booleans, None and floats (exact; also NaN and infinities in Python's spelling, since only
    Rather reads the file). `ranks` makes each of several ranks `write_groups` into the given
    folder, and returns what they have written.
    """
    needed = sum(tensor_of(t).nbytes for tensors in groups.values() for t in tensors.values())
    draft = begin(Path(run_dir), step, needed)

    def write() -> Written:
        written = dict(ranks(draft.folder)) if ranks else {}
        return written | write_groups(draft.folder, groups, max_shard_bytes=max_shard_bytes)

    return draft.complete(write, state)


@dataclass(frozen=True)
class Draft:
    """A checkpoint in its temporary folder. Earlier checkpoints stay intact whatever happens."""

    run_dir: Path
    step: int
    needed: int

    @property
    def folder(self) -> Path:
        return self.run_dir / f".tmp-checkpoint-{self.step}-{os.getpid()}"

    @property
    def final(self) -> Path:
        return self.run_dir / f"checkpoint-{self.step}"

    def complete(self, write: Callable[[], Written], state: Mapping[str, Any]) -> Path:
        """Write the tensors with `write`, add state and manifest, and publish the checkpoint."""

        def fill() -> None:
            _must_survive_json(state, "state")
            written = dict(write())
            written[STATE] = _write(self.folder / STATE, [json.dumps(state, indent=1).encode()])
            _write(self.folder / MANIFEST, [manifest_bytes(self.step, written)])

        return self.publish(fill)

    def publish(self, fill: Callable[[], None]) -> Path:
        """Fill the folder, rename it to its final name and let LATEST name it."""
        aside = self.run_dir / f".old-checkpoint-{self.step}"
        with self.removed_on_error():
            fill()
            _sync_folder(self.folder)
            if self.final.exists():
                os.rename(self.final, aside)  # `candidates` still finds it there
            os.rename(self.folder, self.final)
            _sync_folder(self.run_dir)
            write_latest(self.run_dir, self.final.name)
            shutil.rmtree(aside, ignore_errors=True)
        return self.final

    @contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """Remove the folder on any error; report a disk error with the bytes needed and free."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise DiskError(self.disk_message(error.strerror or str(error))) from error
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def disk_message(self, cause: str) -> str:
        try:
            free = shutil.disk_usage(self.run_dir).free
        except OSError:  # the folder itself may be unreachable
            free = 0
        return (
            f"{self.final}: could not be written ({cause}); it needs {self.needed + _SLACK:,} "
            f"bytes and {free:,} are free. Free some space, lower max_ckpt_to_keep, or move "
            "output_dir; earlier checkpoints are unchanged."
        )


def begin(run_dir: Path, step: int, needed: int) -> Draft:
    """Create the temporary folder of a new checkpoint of `needed` bytes."""
    draft = Draft(run_dir, step, needed)
    with draft.removed_on_error():
        run_dir.mkdir(parents=True, exist_ok=True)
        clean(run_dir)
        if shutil.disk_usage(run_dir).free < needed + _SLACK:
            raise DiskError(draft.disk_message("the disk is too full"))
        draft.folder.mkdir()
    return draft


def write_groups(
    folder: Path,
    groups: Groups,
    *,
    rank: int | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> dict[str, tuple[int, str]]:
    """Write this process's tensors into a checkpoint folder; `rank` keeps the files of several
    apart.
    """
    own = "" if rank is None else f"{rank:05d}-"
    written = {}
    for group, tensors in groups.items():
        if not _GROUP.fullmatch(group):
            raise ValueError(f"the name of a tensor group has only a-z, 0-9 and _, not {group!r}")
        if rank is not None and not tensors:
            continue
        for number, shard in enumerate(split_by_size(tensors, max_shard_bytes), start=1):
            name = f"{group}-{own}{number:05d}.safetensors"
            written[name] = _write(Path(folder) / name, _safetensors(shard))
    return written


def copy_to(checkpoint_path: Path, folder: Path) -> Path:
    """Copy a checkpoint to <folder>/checkpoint-<step> atomically; verify it by its manifest."""
    checkpoint_path = Path(checkpoint_path)
    step, files = read_manifest(checkpoint_path)

    draft = begin(Path(folder), step, sum(size for size, _ in files.values()))

    def fill() -> None:
        for name in (*files, MANIFEST):
            with open(checkpoint_path / name, "rb") as source:
                written = _write(draft.folder / name, iter(partial(source.read, CHUNK), b""))
            if written != files.get(name, written):
                raise CheckpointError(f"{checkpoint_path / name}: is damaged and was not copied.")

    return draft.publish(fill)


# --- several writers ---


def leave_note(folder: Path, writer: str, written: Written, trouble: str = "") -> None:
    """Record what one of several writers has added to a checkpoint, or why it could not."""
    temporary = folder / f".{writer}.note"
    temporary.write_text(json.dumps({"written": written, "trouble": trouble}), encoding="utf-8")
    os.rename(temporary, folder / f"{writer}.note")


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
    written: dict[str, tuple[int, str]] = {}
    for writer in writers:
        note = folder / f"{writer}.note"
        while not note.exists():
            if is_over() or time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"{writer} has not written its part")
            time.sleep(POLL_SECONDS)
        content = json.loads(note.read_bytes())
        if content["trouble"]:
            raise OSError(errno.EIO, f"{writer}: {content['trouble']}")
        written |= {
            name: (int(size), str(digest)) for name, (size, digest) in content["written"].items()
        }
        note.unlink()
    return written


# --- files ---


def clean(run_dir: Path) -> None:
    """Remove what an interrupted save left; restore a checkpoint that it had moved aside."""
    for path in run_dir.glob(".tmp-checkpoint-*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in run_dir.iterdir():
        if match := _ASIDE.fullmatch(path.name):
            final = run_dir / f"checkpoint-{match[1]}"
            shutil.rmtree(path) if final.exists() else os.rename(path, final)


def write_latest(run_dir: Path, name: str) -> None:
    """Let LATEST name the newest checkpoint; a rollback has given up later ones."""
    temporary = run_dir / f".tmp-checkpoint-{LATEST}-{os.getpid()}"
    _write(temporary, [f"{name}\n".encode()])
    os.replace(temporary, run_dir / LATEST)
    _sync_folder(run_dir)


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write one new file; on return it is on the disk. Return its size and SHA-256.

    The digest is computed from memory, not by reading back: a bad write must not get a matching
    hash.
    """
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _sync_folder(path: Path) -> None:
    """Sync the folder: otherwise a new or renamed entry may be gone after a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _safetensors(shards: Mapping[str, Tensor | Shard]) -> Iterator[bytes | memoryview]:
    streams = {name: TensorStream.of(tensor_of(shard)) for name, shard in shards.items()}
    return safetensors_file(streams, shard_header(shards))


def _must_survive_json(value: Any, where: str) -> None:
    """Refuse what JSON changes, such as a tuple or an integer key: the resumed run would differ."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: JSON would turn the key {key!r} into a string")
            _must_survive_json(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _must_survive_json(inner, f"{where}[{index}]")
    elif not isinstance(value, str | int | float | None):
        raise TypeError(f"{where}: JSON does not preserve a {type(value).__name__}")


# --- verifying ---


def newest_good(run_dir: Path, *, full: bool = True) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, or None if the folder has no checkpoint.

    Damaged ones are reported in a warning and skipped. If all are damaged, that is an error:
    starting from zero would throw the run away without asking.
    """
    damages = []
    found = candidates(Path(run_dir))
    for path in found:
        try:
            good = open_checkpoint(path, full=full)
        except CheckpointError as error:
            log.warning("DAMAGED CHECKPOINT, not used: %s", error)
            damages.append(str(error))
            continue
        if damages:
            log.warning(
                "%s is used instead: the newest good checkpoint, step %d.", good.path, good.step
            )
        for unused in found[len(damages) + 1 :]:
            if _step(unused) > good.step:
                log.warning("%s: is not used, it is later than the step in LATEST.", unused)
        return good
    if damages:
        listed = "\n".join(f"  {damage}" for damage in damages)
        raise CheckpointError(
            f"{run_dir}: all of its checkpoints ({len(damages)}) are damaged:\n{listed}\n"
            "Set resume_from_checkpoint to a good copy, or start from scratch with --overwrite or "
            "another exp_name."
        )
    return None


def open_checkpoint(path: Path, *, full: bool = True) -> Checkpoint:
    """Verify and open a checkpoint. Without `full`, tensor files are not hashed."""
    path = Path(path)
    return read_state(path, *verify(path, full=full))


def reopen(path: Path) -> Checkpoint:
    """Open a checkpoint that another process has just verified, without hashing its files again."""
    path = Path(path)
    return read_state(path, *read_manifest(path))


def read_state(path: Path, step: int, files: Written) -> Checkpoint:
    """Return the checkpoint of a verified manifest."""
    try:
        state = json.loads((path / STATE).read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE}: is not JSON ({error}).") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE}: holds a {type(state).__name__}, not an object.")
    return Checkpoint(path, step, state, tuple(sorted(files)))


def candidates(run_dir: Path) -> list[Path]:
    """Return all checkpoints of a folder: the one in LATEST, then older steps, then later ones.

    Later steps come from before a rollback, or from a save killed between its rename and LATEST;
    the steps of the latter are simply done again, with the same result.
    """
    names = [path.name for path in run_dir.iterdir()] if run_dir.is_dir() else []
    found = [run_dir / name for name in names if has_checkpoint_name(Path(name))]
    found.sort(key=lambda path: (-_step(path), path.name.startswith(".")))
    latest = [
        _step(path) for path in found if path.name.removeprefix(".old-") == latest_name(run_dir)
    ]
    return sorted(found, key=lambda path: bool(latest) and _step(path) > latest[0])  # a stable sort


def has_checkpoint_name(path: Path) -> bool:
    return bool(FOLDER.fullmatch(path.name))


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def latest_name(run_dir: Path) -> str:
    try:
        return (run_dir / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# --- housekeeping ---


def prune(run_dir: Path, keep: int, spared: Path | None = None) -> None:
    """Delete all but the newest `keep` checkpoints (0 keeps all) and the one that is `spared`.

    Nothing is deleted before a newer one has been fully verified; damaged ones newer than that do
    not count. The one in LATEST always stays, and so does a symbolic link, which Rather never
    creates.
    """
    found = candidates(Path(run_dir))
    if keep == 0 or len(found) <= keep:
        return
    damaged = 0
    while damaged < len(found) and not _is_good(found[damaged]):
        damaged += 1
    latest = latest_name(Path(run_dir))
    for path in found[damaged + keep :]:
        if path.is_symlink():
            log.warning("%s: is a symbolic link and is kept; remove it by hand.", path)
        elif path.name != latest and path.resolve() != spared:
            _delete(path)


def _is_good(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError as error:
        log.warning("DAMAGED CHECKPOINT, older ones are kept instead: %s", error)
        return False
    return True


def _delete(path: Path) -> None:
    """Rename before deleting: a kill in between never leaves half a checkpoint."""
    try:
        doomed = path.with_name(f".tmp-checkpoint-doomed-{_step(path)}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        log.warning(
            "%s: cannot be deleted (%s); remove this old checkpoint by hand.", path, error.strerror
        )
