"""The manifest of a checkpoint: size and SHA-256 of every file, and what differs from it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rather.errors import CheckpointError

SCHEMA = 1
STATE, MANIFEST = "state.json", "manifest.json"
SHARD = re.compile(r"([a-z][a-z0-9_]*)-(?:\d{5}-)?\d{5}\.safetensors")
FOLDER = re.compile(
    r"(?:\.old-)?checkpoint-(0|[1-9]\d*)"
)  # of a run's own checkpoint; a copy may have any name
_OWN_DIGEST = b',\n "manifest_sha256": '

Written = Mapping[str, tuple[int, str]]  # size and SHA-256 by file


class Damage(NamedTuple):
    """What is wrong with one file."""

    path: Path
    reason: str

    @property
    def told(self) -> str:
        return f"{self.path}: {self.reason}."


def manifest_bytes(step: int, files: Written) -> bytes:
    listed = {name: {"size": size, "sha256": digest} for name, (size, digest) in files.items()}
    text = json.dumps({"schema": SCHEMA, "step": step, "files": listed}, indent=1).encode()
    body = text.removesuffix(b"\n}")
    return body + _OWN_DIGEST + f'"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def verify(path: Path, *, full: bool = True) -> tuple[int, dict[str, tuple[int, str]]]:
    """Step and files of a checkpoint that is as its manifest says; the error names the first file that differs."""
    try:
        step, files = read_manifest(path)
        for damage in damages(path, files, full=full):
            raise CheckpointError(damage.told)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: cannot be read ({error.strerror})."
        ) from error
    return step, files


def damages(path: Path, files: Written, *, full: bool = True) -> Iterator[Damage]:
    """Every file that is not as the manifest says. Without `full`, of tensors only names and sizes are compared."""
    present = set()
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        present.add(entry.name)
        if not entry.is_file(follow_symlinks=False):
            yield Damage(
                Path(entry.path), "is no plain file; a checkpoint holds no links or folders"
            )
        elif entry.name not in files and entry.name != MANIFEST:
            yield Damage(
                Path(entry.path), "is no part of the checkpoint, its manifest does not name it"
            )
    for name in sorted(files.keys() - present):
        yield Damage(path / name, "is missing, its manifest names it")
    whole = []
    for name in (name for name in files if name in present):
        if (found := (path / name).stat().st_size) != files[name][0]:
            yield Damage(path / name, f"is damaged, {found:,} bytes instead of {files[name][0]:,}")
        elif full or name == STATE:
            whole.append(name)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda name: _sha256(path / name), whole)
        for name, digest in zip(whole, digests, strict=True):
            if digest != files[name][1]:
                yield Damage(path / name, "is damaged, its SHA-256 is not that of the manifest")


def read_manifest(path: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """Step and files as the manifest names them, after its own digest was found right."""
    manifest = path / MANIFEST
    if path.is_symlink():
        raise CheckpointError(f"{path}: is a symbolic link; name the real folder.")
    if manifest.is_symlink():
        raise CheckpointError(
            f"{manifest}: is a symbolic link; a checkpoint holds no links or folders."
        )
    if not path.is_dir():
        raise CheckpointError(f"{path}: is no checkpoint folder; name one, .../checkpoint-<step>.")
    if not manifest.is_file():
        raise CheckpointError(f"{manifest}: is missing, the folder is no complete checkpoint.")
    raw = manifest.read_bytes()
    body, _, digest = raw.rpartition(_OWN_DIGEST)
    if digest != f'"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode():
        raise CheckpointError(
            f"{manifest}: the manifest itself is damaged, its own digest does not match."
        )
    try:
        content = json.loads(raw)
        schema, step = content["schema"], int(content["step"])
        files = {
            name: (int(entry["size"]), str(entry["sha256"]))
            for name, entry in content["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{manifest}: is not a checkpoint manifest ({error!r}).") from error
    if schema != SCHEMA:
        raise CheckpointError(
            f"{manifest}: has schema {schema!r}, this Rather reads {SCHEMA}; use the version that wrote it."
        )
    for name in files:
        if name != STATE and not SHARD.fullmatch(name):
            raise CheckpointError(f"{manifest}: names {name!r}, which is no file of a checkpoint.")
    if STATE not in files:
        raise CheckpointError(f"{manifest}: names no {STATE}.")
    if (named := FOLDER.fullmatch(path.name)) and int(named[1]) != step:
        raise CheckpointError(
            f"{manifest}: is that of step {step}; folder or file were renamed, name them back."
        )
    return step, files


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
