"""Checkpoints: atomic, hashed, free of pickle. Safetensors and JSON only, so nothing in one can run code.

    <run_dir>/LATEST                          the name of the newest checkpoint
    <run_dir>/checkpoint-<step>/
        <group>-00001.safetensors ...         tensors by group (model, optimizer, rng, ...), cut into shards
        <group>-00003-00001.safetensors ...   the same of rank 3 of several, each of which writes what it holds
        state.json                            counters, data position, open log sums, identity, ...
        manifest.json                         size and SHA-256 of every file; its own digest is the last field

A checkpoint is written under another name and renamed when all of it is on the disk: one that can be seen is
complete. What happens to it later is found by the hashes: safetensors alone loads a flipped bit silently.

Ranks write pieces of tensors (rather.checkpoint.sharded_tensors), and any part of any tensor can be read from the pieces: a run saved under
one layout goes on under any other, and nobody holds a whole model.
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

from rather import faults
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
    TensorStream,
    safetensors_file,
    shard_header,
    tensor_of,
)
from rather.errors import CheckpointError, DiskError

log = logging.getLogger(__name__)

LATEST = "LATEST"
DEFAULT_SHARD_BYTES = 4 << 30
LOOK_EVERY = 0.02  # seconds between two looks for what others have written
_SLACK = (
    1 << 20
)  # room for headers, state, manifest and folder entries, beyond the tensors themselves

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
        """The files of each group of tensors."""
        found: dict[str, list[str]] = {}
        for name in self.files:
            if match := SHARD.fullmatch(name):
                found.setdefault(match[1], []).append(name)
        return found

    def tensors(self, group: str) -> dict[str, Tensor]:
        """All tensors of one group, on the CPU, bit for bit as they were saved."""
        return dict(self.stored(group))

    def stored(self, group: str) -> ShardedFiles:
        """The same, each read when it is asked for, whole or in part."""
        shards = self.groups.get(group)
        if not shards:
            found = ", ".join(sorted(self.groups)) or "none"
            raise CheckpointError(
                f"{self.path}: holds no tensors of '{group}'; those it holds: {found}."
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
    """Writes checkpoint-<step>; when it returns, the checkpoint is on the disk and LATEST names it.

    `state` takes what JSON gives back unchanged: dicts with string keys, lists, strings, integers, booleans,
    None and floats (exact; NaN and infinities too, in Python's spelling, for only Rather reads the file).
    `ranks` makes each of several ranks `write_groups` into the given folder, and returns what they have written.
    """
    needed = sum(_nbytes(tensor_of(t)) for tensors in groups.values() for t in tensors.values())
    draft = begin(Path(run_dir), step, needed)

    def write() -> Written:
        written = dict(ranks(draft.folder)) if ranks else {}
        return written | write_groups(draft.folder, groups, max_shard_bytes=max_shard_bytes)

    return draft.completed(write, state)


@dataclass(frozen=True)
class Draft:
    """A checkpoint in its temporary folder. What was good before stays good throughout."""

    run_dir: Path
    step: int
    needed: int

    @property
    def folder(self) -> Path:
        return self.run_dir / f".tmp-checkpoint-{self.step}-{os.getpid()}"

    @property
    def final(self) -> Path:
        return self.run_dir / f"checkpoint-{self.step}"

    def completed(self, write: Callable[[], Written], state: Mapping[str, Any]) -> Path:
        """`write` fills the folder with tensors; state and manifest are added, and it gets its name."""

        def fill() -> None:
            _must_survive_json(state, "state")
            written = dict(write())
            written[STATE] = _write(self.folder / STATE, [json.dumps(state, indent=1).encode()])
            _write(self.folder / MANIFEST, [manifest_bytes(self.step, written)])

        return self.published(fill)

    def published(self, fill: Callable[[], None]) -> Path:
        aside = self.run_dir / f".old-checkpoint-{self.step}"
        with self.or_nothing():
            fill()
            faults.point("save.sync")
            _sync_folder(self.folder)
            if self.final.exists():
                faults.point("save.aside")
                os.rename(self.final, aside)  # `candidates` still finds it there
                faults.point("save.aside.done")
            faults.point("save.rename")
            os.rename(self.folder, self.final)
            faults.point("save.rename.done")
            _sync_folder(self.run_dir)
            write_latest(self.run_dir, self.final.name)
            faults.point("save.aside.delete")
            shutil.rmtree(aside, ignore_errors=True)
        return self.final

    @contextmanager
    def or_nothing(self) -> Iterator[None]:
        """What goes wrong here leaves no folder; an error of the disk is told with its numbers."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise DiskError(self.no_room(error.strerror or str(error))) from error
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def no_room(self, cause: str) -> str:
        try:
            free = shutil.disk_usage(self.run_dir).free
        except OSError:  # the folder may be what cannot be reached
            free = 0
        return (
            f"{self.final}: could not be written ({cause}); it needs {self.needed + _SLACK:,} bytes and {free:,} are "
            "free. Make room, lower max_ckpt_to_keep, or move output_dir; the checkpoints saved before are untouched."
        )


def begin(run_dir: Path, step: int, needed: int) -> Draft:
    """The temporary folder of a new checkpoint of `needed` bytes."""
    draft = Draft(run_dir, step, needed)
    with draft.or_nothing():
        run_dir.mkdir(parents=True, exist_ok=True)
        clean(run_dir)
        if shutil.disk_usage(run_dir).free < needed + _SLACK:
            raise DiskError(draft.no_room("the disk is too full"))
        faults.point("save.folder")
        draft.folder.mkdir()
    return draft


def write_groups(
    folder: Path,
    groups: Groups,
    *,
    rank: int | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> dict[str, tuple[int, str]]:
    """What a process adds to a checkpoint that is being written; `rank` tells the files of several apart."""
    own = "" if rank is None else f"{rank:05d}-"
    written = {}
    for group, tensors in groups.items():
        if not _GROUP.fullmatch(group):
            raise ValueError(f"a group of tensors is named by a-z, 0-9 and _, not {group!r}")
        if rank is not None and not tensors:
            continue
        for number, shard in enumerate(_shards(tensors, max_shard_bytes), start=1):
            name = f"{group}-{own}{number:05d}.safetensors"
            written[name] = _write(Path(folder) / name, _safetensors(shard))
    return written


def copy_to(checkpoint_path: Path, folder: Path) -> Path:
    """A second copy, <folder>/checkpoint-<step>: as atomic as the first, and verified by the manifest."""
    checkpoint_path = Path(checkpoint_path)
    step, files = read_manifest(checkpoint_path)

    draft = begin(Path(folder), step, sum(size for size, _ in files.values()))

    def fill() -> None:
        for name in (*files, MANIFEST):
            with open(checkpoint_path / name, "rb") as source:
                written = _write(draft.folder / name, iter(partial(source.read, CHUNK), b""))
            if written != files.get(name, written):
                raise CheckpointError(
                    f"{checkpoint_path / name}: is damaged, the copy was given up."
                )

    return draft.published(fill)


# --- several writers ---


def leave_note(folder: Path, writer: str, written: Written, trouble: str = "") -> None:
    """What one of several writers has added to a checkpoint, or why it could not, for the one who completes it."""
    temporary = folder / f".{writer}.note"
    temporary.write_text(json.dumps({"written": written, "trouble": trouble}), encoding="utf-8")
    faults.point("save.note")
    os.rename(temporary, folder / f"{writer}.note")
    faults.point("save.note.done")


def remove_written(folder: Path, rank: int | None) -> None:
    """What a writer has added to a checkpoint that will not be completed."""
    for path in folder.glob("*.safetensors" if rank is None else f"*-{rank:05d}-*.safetensors"):
        path.unlink()


def collected(
    folder: Path, writers: Sequence[str], seconds: float, is_over: Callable[[], bool]
) -> Written:
    """What all writers have added, once each has left its note; an OSError where one could not, or does not answer."""
    deadline = time.monotonic() + seconds
    written: dict[str, tuple[int, str]] = {}
    for writer in writers:
        note = folder / f"{writer}.note"
        while not note.exists():
            if is_over() or time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, f"{writer} has not written its part")
            time.sleep(LOOK_EVERY)
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
    """Removes what an interrupted save left; a checkpoint it had moved aside goes back to its place."""
    for path in run_dir.glob(".tmp-checkpoint-*"):
        faults.point("save.clean")
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in run_dir.iterdir():
        if match := _ASIDE.fullmatch(path.name):
            final = run_dir / f"checkpoint-{match[1]}"
            faults.point("save.clean.aside")
            shutil.rmtree(path) if final.exists() else os.rename(path, final)
    faults.point("save.clean.done")


def write_latest(run_dir: Path, name: str) -> None:
    """What this names is the newest; a later one that lies there belongs to a past that was given up."""
    temporary = run_dir / f".tmp-checkpoint-{LATEST}-{os.getpid()}"
    _write(temporary, [f"{name}\n".encode()])
    faults.point("save.latest")
    os.replace(temporary, run_dir / LATEST)
    faults.point("save.latest.done")
    _sync_folder(run_dir)


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """One new file, on the disk when this returns. Its digest is taken from memory, not from reading it back:
    a write that went wrong must not get a fitting hash."""
    digest, size = hashlib.sha256(), 0
    faults.point("save.write")
    with open(path, "xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        faults.point("save.write.sync")
        os.fsync(file.fileno())
    faults.point("save.write.done")
    return size, digest.hexdigest()


def _sync_folder(path: Path) -> None:
    """Without it a renamed or new name may be gone after a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _safetensors(pieces: Mapping[str, Tensor | Shard]) -> Iterator[bytes | memoryview]:
    tensors = {name: tensor_of(piece) for name, piece in pieces.items()}
    streams = {
        name: TensorStream(t.dtype, tuple(t.shape), partial(iter, [t]))
        for name, t in tensors.items()
    }
    return safetensors_file(streams, shard_header(pieces))


def _shards(tensors: Mapping[str, Tensor | Shard], limit: int) -> list[dict[str, Tensor | Shard]]:
    """In the given order, each shard as full as the limit allows; a tensor beyond it has its own shard."""
    shards: list[dict[str, Tensor | Shard]] = [{}]
    room = limit
    for name, piece in tensors.items():
        size = _nbytes(tensor_of(piece))
        if shards[-1] and size > room:
            shards.append({})
            room = limit
        shards[-1][name] = piece
        room -= size
    return shards


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _must_survive_json(value: Any, where: str) -> None:
    """A tuple would come back as a list, a number used as key as a string: the resumed run would differ."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: the key {key!r} would come back from JSON as a string")
            _must_survive_json(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _must_survive_json(inner, f"{where}[{index}]")
    elif not isinstance(value, str | int | float | None):
        raise TypeError(f"{where}: {type(value).__name__} does not come back from JSON as it was")


# --- verifying ---


def newest_good(run_dir: Path, *, full: bool = True) -> Checkpoint | None:
    """The newest checkpoint whose every byte is as it was written, or None where there is none at all.

    Damaged ones are named in a warning and passed over. A folder with damaged ones only is an error: to start
    from zero there would throw the run away without asking.
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
                log.warning("%s: is not used, it lies after the step that LATEST names.", unused)
        return good
    if damages:
        listed = "\n".join(f"  {damage}" for damage in damages)
        raise CheckpointError(
            f"{run_dir}: none of its {len(damages)} checkpoints is good:\n{listed}\nName a good copy in "
            "resume_from_checkpoint, or begin anew with --overwrite or another exp_name."
        )
    return None


def open_checkpoint(path: Path, *, full: bool = True) -> Checkpoint:
    """One checkpoint, verified; the error names the file that differs. Without `full` tensors are not hashed."""
    path = Path(path)
    return opened(path, *verify(path, full=full))


def reopen(path: Path) -> Checkpoint:
    """One that another process has just verified: a hundred ranks need not hash the same files."""
    path = Path(path)
    return opened(path, *read_manifest(path))


def opened(path: Path, step: int, files: Mapping[str, tuple[int, str]]) -> Checkpoint:
    try:
        state = json.loads((path / STATE).read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE}: is not JSON ({error}).") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE}: holds a {type(state).__name__}, not an object.")
    return Checkpoint(path, step, state, tuple(sorted(files)))


def candidates(run_dir: Path) -> list[Path]:
    """Every checkpoint of the folder, newest first: what LATEST names, then older steps, then later ones.

    Steps after LATEST belong to a run that was since continued from an earlier step, or to a save killed
    between its rename and LATEST; in that case they are simply done again, with the same result.
    """
    names = [path.name for path in run_dir.iterdir()] if run_dir.is_dir() else []
    found = [run_dir / name for name in names if is_named_as_one(Path(name))]
    found.sort(key=lambda path: (-_step(path), path.name.startswith(".")))
    latest = [
        _step(path) for path in found if path.name.removeprefix(".old-") == latest_name(run_dir)
    ]
    return sorted(found, key=lambda path: bool(latest) and _step(path) > latest[0])  # a stable sort


def is_named_as_one(path: Path) -> bool:
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
    """Deletes all but the newest `keep` checkpoints (0 keeps all) and the one that is `spared`.

    Nothing is deleted before a newer one has been verified, hashes and all; damaged ones newer than that do
    not count. What LATEST names always stays, and so does a link, which is not of our making.
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
            log.warning("%s: is a symbolic link and stays; remove it by hand.", path)
        elif path.name != latest and path.resolve() != spared:
            _delete(path)


def _is_good(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError as error:
        log.warning("DAMAGED CHECKPOINT, older ones are kept for it: %s", error)
        return False
    return True


def _delete(path: Path) -> None:
    """First out of sight, then away: a kill between leaves a temporary, never half a checkpoint."""
    try:
        doomed = path.with_name(f".tmp-checkpoint-doomed-{_step(path)}")
        faults.point("save.prune")
        os.rename(path, doomed)
        faults.point("save.prune.delete")
        shutil.rmtree(doomed)
        faults.point("save.prune.done")
    except OSError as error:
        log.warning(
            "%s: cannot be deleted (%s); remove this old checkpoint by hand.", path, error.strerror
        )
