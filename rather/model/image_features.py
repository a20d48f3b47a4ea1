"""Features of images on the disk."""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rather.data.batch import PromptImage
from rather.files import own, read_bytes, text_sha

log = logging.getLogger(__name__)

GB = 10**9
LARGEST = 1 << 30  # bytes of a stored image: more than any model makes of one
MOST_WAITING = 64  # images whose features are not yet on the disk


class FeatureStore:
    """Features of a frozen tower, one file for each image; processes may share the folder.

    A thread writes them, so that the device is not waited for. Until then they are read from
    memory.
    """

    def __init__(self, folder: Path, limit: float) -> None:
        """`limit` is the size of the folder in GB; beyond it, features are computed each time."""
        self.folder = folder
        self._left = limit * GB - sum(file.stat().st_size for file in folder.glob("*.features"))
        self._unwritten: dict[str, Tensor] = {}  # by digest, on the device
        self._writes: deque[Future[None]] = deque()
        self._writer = ThreadPoolExecutor(1, "features")

    def _path(self, image: PromptImage) -> Path:
        return self.folder / f"{text_sha(image.digest)[:40]}.features"

    def has(self, image: PromptImage) -> bool:
        return image.digest in self._unwritten or self._path(image).exists()

    def read(self, image: PromptImage) -> Tensor | None:
        """Return the features of an image; None if they are not here, or damaged."""
        unwritten = self._unwritten.get(image.digest)
        if unwritten is not None:
            return unwritten
        path = self._path(image)
        try:
            features = load(read_bytes(path, LARGEST, own))["features"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            log.warning("%s: cannot be read and is computed again (%s)", path, error)
            return None
        if features.ndim != 3 or features.shape[1] != image.tokens:
            log.warning("%s: belongs to another image and is computed again", path)
            return None
        return features

    def write(self, image: PromptImage, features: Tensor) -> None:
        """Begin to store features, complete or not at all, unless the folder is full."""
        if self._left < 0:
            return
        self._left -= features.numel() * features.element_size()
        if self._left < 0:
            log.warning(
                "vision_cache_gb: %s is full; further images are computed each time", self.folder
            )
            return
        features = features.detach()
        on_host = features.to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if features.is_cuda else None
        if copied:
            copied.record()
        self._unwritten[image.digest] = features
        self._writes.append(self._writer.submit(self._save, image, on_host, copied))
        if len(self._writes) > MOST_WAITING:
            self._writes.popleft().result()

    def _save(self, image: PromptImage, features: Tensor, copied: torch.cuda.Event | None) -> None:
        if copied:
            copied.synchronize()
        path = self._path(image)
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        try:
            with open(part, "xb", opener=own) as file:
                file.write(save({"features": features.contiguous()}))
            os.replace(part, path)
        except OSError as error:
            log.warning("%s: cannot be written (%s); no more is cached", path, error.strerror)
            self._left = -1
        finally:
            part.unlink(missing_ok=True)
            self._unwritten.pop(image.digest, None)

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        while self._writes:
            self._writes.popleft().result()
