"""Checkpoints: atomic, hashed, free of pickle. Safetensors and JSON only, so nothing in one can run code.

    <run_dir>/LATEST                          the name of the newest checkpoint
    <run_dir>/checkpoint-<step>/
        <group>-00001.safetensors ...         tensors by group (model, optimizer, rng, ...), cut into shards
        <group>-00003-00001.safetensors ...   the same of rank 3 of several, each of which writes what it holds
        state.json                            counters, data position, open log sums, identity, ...
        manifest.json                         size and SHA-256 of every file; its own digest is the last field

A checkpoint is written under another name and renamed when all of it is on the disk: one that can be seen is
complete. What happens to it later is found by the hashes: safetensors alone loads a flipped bit silently.

Ranks write pieces of tensors (rather.pieces), and any part of any tensor can be read from the pieces: a run saved under
one layout goes on under any other, and nobody holds a whole model.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rather.errors import CheckpointError, ConfigError, DiskError
from rather.pieces import CHUNK, Piece, Stored, Streamed, header_of, safetensors_file, tensor_of

log = logging.getLogger(__name__)

SCHEMA = 1
STATE, MANIFEST, LATEST = "state.json", "manifest.json", "LATEST"
DEFAULT_SHARD_BYTES = 4 << 30
_OWN_DIGEST = b',\n "manifest_sha256": '
_SLACK = 1 << 20  # room for headers, state, manifest and folder entries, beyond the tensors themselves

_NAME = re.compile(r"checkpoint-(0|[1-9]\d*)")
_ASIDE = re.compile(r"\.old-checkpoint-(0|[1-9]\d*)")
_GROUP = re.compile(r"[a-z][a-z0-9_]*")
_SHARD = re.compile(r"([a-z][a-z0-9_]*)-(?:\d{5}-)?\d{5}\.safetensors")

Groups = Mapping[str, Mapping[str, Tensor | Piece]]
Written = Mapping[str, tuple[int, str]]  # size and SHA-256 by file


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte has been verified."""

    path: Path
    step: int
    state: dict[str, Any]
    files: tuple[str, ...]

    def tensors(self, group: str) -> dict[str, Tensor]:
        """All tensors of one group, on the CPU, bit for bit as they were saved."""
        return dict(self.stored(group))

    def stored(self, group: str) -> Stored:
        """The same, each read when it is asked for, whole or in part."""
        shards = [name for name in self.files if (m := _SHARD.fullmatch(name)) and m[1] == group]
        if not shards:
            held = sorted({m[1] for name in self.files if (m := _SHARD.fullmatch(name))})
            found = ", ".join(held) or "none"
            raise CheckpointError(f"{self.path}: holds no tensors of '{group}'; those it holds: {found}.")
        return Stored(self.path / shard for shard in shards)


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
    _must_survive_json(state, "state")
    needed = sum(_nbytes(tensor_of(t)) for tensors in groups.values() for t in tensors.values())

    def fill(folder: Path) -> None:
        written = dict(ranks(folder)) if ranks else {}
        written |= write_groups(folder, groups, max_shard_bytes=max_shard_bytes)
        written[STATE] = _write(folder / STATE, [json.dumps(state, indent=1).encode()])
        _write(folder / MANIFEST, [_manifest_bytes(step, written)])

    return _publish(Path(run_dir), step, needed, fill)


def write_groups(
    folder: Path, groups: Groups, *, rank: int | None = None, max_shard_bytes: int = DEFAULT_SHARD_BYTES
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
    step, files = _read_manifest(checkpoint_path)

    def fill(target: Path) -> None:
        for name in (*files, MANIFEST):
            with open(checkpoint_path / name, "rb") as source:
                written = _write(target / name, iter(partial(source.read, CHUNK), b""))
            if written != files.get(name, written):
                raise CheckpointError(f"{checkpoint_path / name}: is damaged, the copy was given up.")

    return _publish(Path(folder), step, sum(size for size, _ in files.values()), fill)


def _publish(run_dir: Path, step: int, needed: int, fill: Callable[[Path], None]) -> Path:
    """Fills a temporary folder and makes it checkpoint-<step>; what was good before stays good throughout."""
    temporary = run_dir / f".tmp-checkpoint-{step}-{os.getpid()}"
    final, aside = run_dir / f"checkpoint-{step}", run_dir / f".old-checkpoint-{step}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _clean(run_dir)
        free = shutil.disk_usage(run_dir).free
        if free < needed + _SLACK:
            raise DiskError(_no_room(final, needed + _SLACK, free, "the disk is too full"))
        temporary.mkdir()
        fill(temporary)
        _sync_folder(temporary)
        if final.exists():
            os.rename(final, aside)  # `_candidates` still finds it there
        os.rename(temporary, final)
        _sync_folder(run_dir)
        _write_latest(run_dir, final.name)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(run_dir).free if run_dir.is_dir() else 0
        raise DiskError(_no_room(final, needed + _SLACK, free, error.strerror or str(error))) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _clean(run_dir: Path) -> None:
    """Removes what an interrupted save left; a checkpoint it had moved aside goes back to its place."""
    for path in run_dir.glob(".tmp-checkpoint-*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in run_dir.iterdir():
        if match := _ASIDE.fullmatch(path.name):
            final = run_dir / f"checkpoint-{match[1]}"
            shutil.rmtree(path) if final.exists() else os.rename(path, final)


def _write_latest(run_dir: Path, name: str) -> None:
    temporary = run_dir / f".tmp-checkpoint-{LATEST}-{os.getpid()}"
    _write(temporary, [f"{name}\n".encode()])
    os.replace(temporary, run_dir / LATEST)
    _sync_folder(run_dir)


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """One new file, on the disk when this returns. Its digest is taken from memory, not from reading it back:
    a write that went wrong must not get a fitting hash."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _sync_folder(path: Path) -> None:
    """Without it a renamed or new name may be gone after a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _safetensors(pieces: Mapping[str, Tensor | Piece]) -> Iterator[bytes | memoryview]:
    tensors = {name: tensor_of(piece) for name, piece in pieces.items()}
    streams = {name: Streamed(t.dtype, tuple(t.shape), partial(iter, [t])) for name, t in tensors.items()}
    return safetensors_file(streams, header_of(pieces))


def _shards(tensors: Mapping[str, Tensor | Piece], limit: int) -> list[dict[str, Tensor | Piece]]:
    """In the given order, each shard as full as the limit allows; a tensor beyond it has its own shard."""
    shards: list[dict[str, Tensor | Piece]] = [{}]
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


def _no_room(path: Path, needed: int, free: int, cause: str) -> str:
    return (
        f"{path}: could not be written ({cause}); it needs {needed:,} bytes and {free:,} are free. Make "
        "room, lower max_ckpt_to_keep, or move output_dir; the checkpoints saved before are untouched."
    )


# --- verifying ---


def newest_good(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint whose every byte is as it was written, or None where there is none at all.

    Damaged ones are named in a warning and passed over. A folder with damaged ones only is an error: to start
    from zero there would throw the run away without asking.
    """
    damages = []
    candidates = _candidates(Path(run_dir))
    for path in candidates:
        try:
            good = open_checkpoint(path)
        except CheckpointError as error:
            log.warning("DAMAGED CHECKPOINT, not used: %s", error)
            damages.append(str(error))
            continue
        if damages:
            log.warning("%s is used instead: the newest good checkpoint, step %d.", good.path, good.step)
        for unused in candidates[len(damages) + 1 :]:
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


def open_checkpoint(path: Path) -> Checkpoint:
    """One checkpoint, verified; the error names the file that differs."""
    path = Path(path)
    return _opened(path, *_verify(path))


def reopen(path: Path) -> Checkpoint:
    """One that another process has just verified: a hundred ranks need not hash the same files."""
    path = Path(path)
    return _opened(path, *_read_manifest(path))


def _opened(path: Path, step: int, files: Mapping[str, tuple[int, str]]) -> Checkpoint:
    name = _NAME.fullmatch(path.name) or _ASIDE.fullmatch(path.name)
    if name and int(name[1]) != step:
        raise CheckpointError(f"{path}: its manifest is that of step {step}, the folder was renamed.")
    try:
        state = json.loads((path / STATE).read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE}: is not JSON ({error}).") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path / STATE}: holds a {type(state).__name__}, not an object.")
    return Checkpoint(path, step, state, tuple(sorted(files)))


def _candidates(run_dir: Path) -> list[Path]:
    """Every checkpoint of the folder, newest first: what LATEST names, then older steps, then later ones.

    Steps after LATEST belong to a run that was since continued from an earlier step, or to a save killed
    between its rename and LATEST; in that case they are simply done again, with the same result.
    """
    names = [path.name for path in run_dir.iterdir()] if run_dir.is_dir() else []
    found = [run_dir / name for name in names if _NAME.fullmatch(name) or _ASIDE.fullmatch(name)]
    found.sort(key=lambda path: (-_step(path), path.name.startswith(".")))
    latest = [_step(path) for path in found if path.name.removeprefix(".old-") == _latest_name(run_dir)]
    return sorted(found, key=lambda path: bool(latest) and _step(path) > latest[0])  # a stable sort


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _latest_name(run_dir: Path) -> str:
    try:
        return (run_dir / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _verify(path: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """Step and files of a checkpoint, after names, sizes and hashes were compared with its manifest."""
    try:
        return _compare(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: cannot be read ({error.strerror}).") from error


def _compare(path: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    step, files = _read_manifest(path)
    present = set()
    for entry in os.scandir(path):
        if not entry.is_file(follow_symlinks=False):
            raise CheckpointError(f"{entry.path}: is no plain file; a checkpoint holds no links or folders.")
        present.add(entry.name)
    for name in sorted(files.keys() - present):
        raise CheckpointError(f"{path / name}: is missing, its manifest names it.")
    for name in sorted(present - files.keys() - {MANIFEST}):
        raise CheckpointError(f"{path / name}: is no part of the checkpoint, its manifest does not name it.")
    for name, (size, _) in files.items():
        if (found := (path / name).stat().st_size) != size:
            raise CheckpointError(f"{path / name}: is damaged, {found:,} bytes instead of {size:,}.")
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: _sha256(path / name), files)
        for (name, (_, expected)), digest in zip(files.items(), digests, strict=True):
            if digest != expected:
                raise CheckpointError(f"{path / name}: is damaged, its SHA-256 is not that of the manifest.")
    return step, files


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_bytes(step: int, files: Mapping[str, tuple[int, str]]) -> bytes:
    listed = {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
    text = json.dumps({"schema": SCHEMA, "step": step, "files": listed}, indent=1).encode()
    body = text.removesuffix(b"\n}")
    return body + _OWN_DIGEST + f'"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def _read_manifest(path: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """Step and files as the manifest names them, after its own digest was found right."""
    manifest = path / MANIFEST
    if path.is_symlink() or manifest.is_symlink():
        raise CheckpointError(f"{path}: is or holds a symbolic link; name the real folder.")
    if not path.is_dir():
        raise CheckpointError(f"{path}: is no checkpoint folder; name one, .../checkpoint-<step>.")
    if not manifest.is_file():
        raise CheckpointError(f"{manifest}: is missing, the folder is no complete checkpoint.")
    raw = manifest.read_bytes()
    body, _, digest = raw.rpartition(_OWN_DIGEST)
    if digest != f'"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode():
        raise CheckpointError(f"{manifest}: the manifest itself is damaged, its own digest does not match.")
    try:
        content = json.loads(raw)
        schema, step = content["schema"], int(content["step"])
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{manifest}: is not a checkpoint manifest ({error!r}).") from error
    if schema != SCHEMA:
        raise CheckpointError(
            f"{manifest}: has schema {schema!r}, this Rather reads {SCHEMA}; use the version that wrote it."
        )
    for name in files:
        if name != STATE and not _SHARD.fullmatch(name):
            raise CheckpointError(f"{manifest}: names {name!r}, which is no file of a checkpoint.")
    if STATE not in files:
        raise CheckpointError(f"{manifest}: names no {STATE}.")
    return step, files


# --- housekeeping ---


def prune(run_dir: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints (0 keeps all).

    Nothing is deleted before a newer one has been verified, hashes and all; damaged ones newer than that do
    not count. What LATEST names always stays.
    """
    candidates = _candidates(Path(run_dir))
    if keep == 0 or len(candidates) <= keep:
        return
    damaged = 0
    while damaged < len(candidates) and not _is_good(candidates[damaged]):
        damaged += 1
    latest = _latest_name(Path(run_dir))
    for path in candidates[damaged + keep :]:
        if path.name != latest:
            _delete(path)


def _is_good(path: Path) -> bool:
    try:
        _verify(path)
    except CheckpointError as error:
        log.warning("DAMAGED CHECKPOINT, older ones are kept for it: %s", error)
        return False
    return True


def _delete(path: Path) -> None:
    """First out of sight, then away: a kill between leaves a temporary, never half a checkpoint."""
    try:
        doomed = path.with_name(f".tmp-checkpoint-doomed-{_step(path)}")
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        log.warning("%s: cannot be deleted (%s); remove this old checkpoint by hand.", path, error.strerror)


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Only one process may write to a run folder. The kernel lets go of the lock when its holder dies."""
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ConfigError(
                f"output_dir/exp_name: {run_dir} is in use by {holder}; "
                "wait for it, stop it, or choose another exp_name."
            ) from error
        except OSError as error:
            log.warning("%s: cannot be locked (%s); start no second run here.", run_dir, error.strerror)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
