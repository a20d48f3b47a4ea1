"""The manifest of a checkpoint: size and SHA-256 of every file, and the check against it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rather.errors import CheckpointError
from rather.files import file_sha, own, parse_json, read_bytes

SCHEMA = 1
STATE = "state.json"
MANIFEST = "manifest.json"
SHARD = re.compile(r"([a-z][a-z0-9_]*)-(?:\d{5}-)?\d{5}\.safetensors")
# The folder name of a run's own checkpoint; a copy may have any name.
FOLDER = re.compile(r"(?:\.old-)?checkpoint-(0|[1-9]\d*)")

Written = Mapping[str, tuple[int, str]]  # size and SHA-256 by file


def manifest_bytes(step: int, files: Written) -> bytes:
    listed = {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
    text = json.dumps({"schema": SCHEMA, "step": step, "files": listed}, indent=1).encode()
    body = text.removesuffix(b"\n}")
    return body + _own_digest(body)


def _own_digest(body: bytes) -> bytes:
    return f',\n "manifest_sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def verify(path: Path, *, full: bool = True) -> tuple[int, Written]:
    """Return step and files of an undamaged checkpoint; the error names the first bad file."""
    try:
        step, files = read_manifest(path)
        for file, reason in damages(path, files, full=full):
            raise CheckpointError(f"{file}: {reason}.")
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: cannot be read ({error.strerror})."
        ) from error
    return step, files


def damages(path: Path, files: Written, *, full: bool = True) -> Iterator[tuple[Path, str]]:
    """Yield the files that differ from the manifest; hash tensor files only if `full`."""
    present = {entry.name: entry for entry in os.scandir(path)}
    for name, entry in sorted(present.items()):
        if not entry.is_file(follow_symlinks=False):
            yield path / name, "is not a regular file; a checkpoint has no links or folders"
        elif name not in files and name != MANIFEST:
            yield path / name, "is not part of the checkpoint: the manifest does not list it"
    for name in sorted(files.keys() - present.keys()):
        yield path / name, "is missing, but listed in the manifest"
    yield from _damaged_contents(path, {n: files[n] for n in files if n in present}, full=full)


def _damaged_contents(path: Path, files: Written, *, full: bool) -> Iterator[tuple[Path, str]]:
    names_to_hash = []
    for name, (expected, _) in files.items():
        if (size := (path / name).stat().st_size) != expected:
            yield path / name, f"is damaged: {size:,} bytes instead of {expected:,}"
        elif full or name == STATE:
            names_to_hash.append(name)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: file_sha(path / name, own), names_to_hash)
        for name, digest in zip(names_to_hash, digests, strict=True):
            if digest != files[name][1]:
                yield path / name, "is damaged: its SHA-256 differs from the manifest"


def read_manifest(path: Path) -> tuple[int, Written]:
    """Return step and files of a manifest, after checking its own digest."""
    manifest = path / MANIFEST
    raw = _intact_bytes(path, manifest)
    try:
        content = parse_json(raw)
        schema = content["schema"]
        step = int(content["step"])
        files = {
            name: (int(entry["size"]), str(entry["sha256"]))
            for name, entry in content["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest}: is not a checkpoint manifest ({error!r}).") from error
    if schema != SCHEMA:
        raise CheckpointError(
            f"{manifest}: has schema {schema!r}, but this version of Rather reads {SCHEMA}; use "
            "the version that wrote it."
        )
    if STATE not in files:
        raise CheckpointError(f"{manifest}: does not list {STATE}.")
    for name in files:
        if name != STATE and not SHARD.fullmatch(name):
            raise CheckpointError(
                f"{manifest}: lists {name!r}, which is not a file of a checkpoint."
            )
    if (folder_name := FOLDER.fullmatch(path.name)) and int(folder_name[1]) != step:
        raise CheckpointError(
            f"{manifest}: is of step {step}; the folder was renamed, change its name back."
        )
    return step, files


def _intact_bytes(path: Path, manifest: Path) -> bytes:
    """Return the bytes of a manifest whose own digest matches."""
    for link in (path, manifest):
        if link.is_symlink():
            raise CheckpointError(f"{link}: is a symbolic link; use the real folder and files.")
    if not path.is_dir():
        raise CheckpointError(f"{path}: is not a checkpoint folder (.../checkpoint-<step>).")
    if not manifest.is_file():
        raise CheckpointError(f"{manifest}: is missing, so the checkpoint is incomplete.")
    try:
        raw = read_bytes(manifest, opener=own)
    except ValueError as error:  # too large
        raise CheckpointError(f"{manifest}: {error}") from error
    body = raw[: -len(_own_digest(b""))]
    if body + _own_digest(body) != raw:
        raise CheckpointError(
            f"{manifest}: the manifest itself is damaged: its own digest does not match."
        )
    return raw
