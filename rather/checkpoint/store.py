"""Object stores: addresses `s3://bucket/name`, by boto3 (`pip install 'rather[s3]'`).

    <address>/metrics.jsonl ...              files of the run folder, as of the last upload
    <address>/checkpoint-<step>-<digest>/    the files of a checkpoint, its manifest last
    <address>/model-<digest>/                an export, with a manifest of the same form

The digest is that of the manifest: an upload never replaces a file of another one, and what has a
manifest is complete. The newest is the one whose manifest was uploaded last.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

from rather.checkpoint.checkpoint import Draft, candidates
from rather.checkpoint.manifest import (
    FOLDER,
    MANIFEST,
    Written,
    manifest_bytes,
    read_manifest,
    verify,
)
from rather.errors import CheckpointError, ConfigError, DiskError, RatherError
from rather.files import file_sha, own, read_bytes, sync

log = logging.getLogger(__name__)

CHECKPOINT = r"checkpoint-(\d+)"
ABANDONED = timedelta(days=1)  # after which files without a manifest are those of a killed upload

Objects = dict[str, tuple[int, datetime]]  # size and time by name


@cache
def client() -> Any:
    """Return the client, which finds credentials and endpoint as all programs with boto3 do."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigError("An s3:// address needs boto3: pip install 'rather[s3]'.") from error
    retries = {"mode": "standard", "total_max_attempts": 4}
    options = Config(connect_timeout=10, read_timeout=60, retries=retries)
    return boto3.session.Session().client("s3", config=options)


class Store:
    """A folder, or one object, of an object store. Its failures are DiskErrors."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.bucket, _, self.key = address.removeprefix("s3://").partition("/")
        with self.errors():
            self.client = client()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise what the client raises as a DiskError."""
        try:
            yield
        except (RatherError, OSError):
            raise
        except Exception as error:  # boto3, botocore, s3transfer and urllib3 have no common base
            raise DiskError(
                f"{self.address}: {error}. Check the address, the credentials and the network."
            ) from error

    def objects(self) -> Objects:
        """Return all objects below the address."""
        start = f"{self.key}/"
        with self.errors():
            pages = self.client.get_paginator("list_objects_v2")
            return {
                entry["Key"].removeprefix(start): (entry["Size"], entry["LastModified"])
                for page in pages.paginate(Bucket=self.bucket, Prefix=start)
                for entry in page.get("Contents", ())
            }

    def put(self, name: str, file: Path) -> None:
        with self.errors(), open(file, "rb", opener=own) as source:
            self.client.upload_fileobj(source, self.bucket, f"{self.key}/{name}")

    def get(self, key: str, file: Path) -> None:
        """Download an object; the file is complete or absent."""
        temporary = file.with_name(f".{file.name}.{os.getpid()}.building")
        try:
            with self.errors(), open(temporary, "wb", opener=own) as target:
                self.client.download_fileobj(self.bucket, key, target)
            sync(temporary)
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)

    def delete(self, there: Objects, folders: Iterable[str]) -> None:
        """Delete folders, the manifest of each first."""
        for folder in folders:
            names = [name for name in there if name.startswith(f"{folder}/")]
            for name in sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST}")):
                with self.errors():
                    self.client.delete_object(Bucket=self.bucket, Key=f"{self.key}/{name}")

    def upload(self, folder: Path, step: int, keep: int) -> None:
        """Upload a checkpoint or an export, and delete all but the newest `keep` of its kind."""
        kind = CHECKPOINT if FOLDER.fullmatch(folder.name) else folder.name
        files, manifest = _contents(folder, step)
        target = f"{folder.name}-{hashlib.sha256(manifest).hexdigest()[:16]}"
        there = self.objects()
        complete = completed(there, kind)
        if target not in complete:
            for name, (size, _) in files.items():
                if there.get(f"{target}/{name}", (None,))[0] != size:
                    self.put(f"{target}/{name}", folder / name)
            if _contents(folder, step, full=False)[1] != manifest:
                raise DiskError(f"{folder}: was replaced while it was uploaded.")
            with self.errors():
                self.client.put_object(
                    Bucket=self.bucket, Key=f"{self.key}/{target}/{MANIFEST}", Body=manifest
                )
            complete.insert(0, target)
        latest = max((time for _, time in there.values()), default=datetime.max)
        past = {name for name, (_, time) in there.items() if time < latest - ABANDONED}
        old = {name.split("/")[0] for name in past}
        abandoned = {name for name in old if re.fullmatch(f"{kind}-[0-9a-f]{{16}}", name)}
        self.delete(there, abandoned.difference(complete))
        self.delete(there, complete[keep:] if keep else ())

    def restore(self, run_dir: Path, run_files: Iterable[str]) -> None:
        """Download the newest good checkpoint, and before it what the run folder does not have."""
        there = self.objects()
        for name in run_files:
            if name in there and not (run_dir / name).exists():
                self.get(f"{self.key}/{name}", run_dir / name)
        for folder in (folders := completed(there, CHECKPOINT)):
            try:
                self._download(folder, there, run_dir)
            except CheckpointError as error:
                log.warning("DAMAGED CHECKPOINT, not used: %s/%s: %s", self.address, folder, error)
            else:
                log.info("%s/%s was downloaded to %s", self.address, folder, run_dir)
                return
        raise CheckpointError(
            f"{self.address}: all of its checkpoints ({len(folders)}) are damaged."
        )

    def _download(self, folder: str, there: Objects, run_dir: Path) -> None:
        inside = {name: size for name, (size, _) in there.items() if name.startswith(f"{folder}/")}
        draft = Draft(run_dir, step_of(folder), sum(inside.values()))
        with draft.published():
            self.get(f"{self.key}/{folder}/{MANIFEST}", draft.folder / MANIFEST)
            step, files = read_manifest(draft.folder)
            for name, (size, _) in files.items():
                if step != draft.step or inside.get(f"{folder}/{name}") != size:
                    raise CheckpointError(f"{name}: is missing or of another size or step.")
                self.get(f"{self.key}/{folder}/{name}", draft.folder / name)
            verify(draft.folder)


def completed(there: Objects, kind: str) -> list[str]:
    """Return the folders with a manifest, the newest first."""
    pattern = re.compile(f"({kind}-[0-9a-f]{{16}})/{MANIFEST}")
    times = {name.split("/")[0]: there[name][1] for name in filter(pattern.fullmatch, there)}
    return sorted(times, key=lambda name: (times[name], step_of(name)), reverse=True)


def step_of(folder: str) -> int:
    match = re.match(CHECKPOINT, folder)
    return int(match[1]) if match else 0


def _contents(folder: Path, step: int, *, full: bool = True) -> tuple[Written, bytes]:
    """Return the files of a checkpoint or an export, and a manifest of them."""
    if FOLDER.fullmatch(folder.name):
        return verify(folder, full=full)[1], read_bytes(folder / MANIFEST, opener=own)
    os.stat(folder)
    files = {
        str(path.relative_to(folder)): (path.stat().st_size, file_sha(path, own))
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }
    return files, manifest_bytes(step, files)


def download(file: Path, folder: Path) -> Path:
    """Return a copy of the object `s3:/bucket/name`, downloaded again only after a change."""
    store = Store(f"s3://{'/'.join(file.parts[1:])}")
    with store.errors():
        tag = store.client.head_object(Bucket=store.bucket, Key=store.key)["ETag"]
    digest = hashlib.sha256(f"{store.address} {tag}".encode()).hexdigest()
    copy = folder / f"{digest[:16]}-{file.name}"
    if not copy.exists():
        store.get(store.key, copy)
    return copy


@dataclass
class Uploads:
    """Uploads in the background, one folder at a time: training does not wait for them.

    What fails is tried again with the next upload, and at the end. A newer checkpoint replaces one
    that waits.
    """

    store: Store
    run_dir: Path
    run_files: Sequence[str]
    keep: int  # checkpoints
    add_incident: Callable[..., None]
    current: Path | None = None  # must not be pruned
    _waiting: dict[str, tuple[Path, int]] = field(default_factory=dict)  # folder and step by kind
    _turn: threading.Lock = field(default_factory=threading.Lock)  # for `_waiting`
    _pool: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "upload"))

    def begin(self, *, overwrite: bool) -> None:
        """Download the run if its folder has no checkpoint, or delete its stored checkpoints."""
        own_steps = [step_of(path.name.removeprefix(".old-")) for path in candidates(self.run_dir)]
        try:
            there = self.store.objects()
        except DiskError as error:
            if not own_steps or overwrite:  # a run that may exist is not begun from scratch
                raise
            log.warning("%s The next save tries again.", error)
            return
        stored = completed(there, CHECKPOINT)
        if overwrite:
            self.store.delete(there, stored)
        elif stored and not own_steps:
            self.store.restore(self.run_dir, self.run_files)
        elif stored and step_of(stored[0]) > max(own_steps):
            log.warning(
                "%s/%s is later than the checkpoints in %s; move that folder away to resume it",
                self.store.address,
                stored[0],
                self.run_dir,
            )

    def add(self, folder: Path, step: int) -> None:
        with self._turn:
            self._waiting[folder.name.partition("-")[0]] = folder, step
        self._pool.submit(self._work)

    def close(self) -> list[Path]:
        """Wait for all uploads, try those that failed again, and return what is not uploaded."""
        self._pool.submit(self._work).result()
        return [folder for folder, _ in self._waiting.values()]

    def _work(self) -> None:
        """Upload what waits; what fails waits again, unless something newer has come."""
        with self._turn:
            uploads, self._waiting = self._waiting, {}
        for kind, (folder, step) in uploads.items():
            self.current = folder
            try:
                for name in self.run_files:
                    if (self.run_dir / name).is_file():
                        self.store.put(name, self.run_dir / name)
                self.store.upload(folder, step, self.keep if kind == "checkpoint" else 1)
            except Exception as error:  # of any kind: the run continues
                with self._turn:
                    self._waiting.setdefault(kind, (folder, step))
                facts = {"folder": str(folder), "reason": str(error)}
                self.add_incident("missed_upload", step, **facts)
                log.warning("MISSED UPLOAD of %s: %s", folder, error)
        self.current = None
