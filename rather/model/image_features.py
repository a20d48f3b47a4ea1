"""Features of images on the disk."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rather.data.batch import PromptImage
from rather.files import own, read_bytes, text_sha

log = logging.getLogger(__name__)

GB = 10**9
LARGEST = 1 << 30  # bytes of a stored image: more than any model makes of one


class FeatureStore:
    """Features of a frozen tower, one file for each image; processes may share the folder."""

    def __init__(self, folder: Path, limit: float) -> None:
        """`limit` is the size of the folder in GB; beyond it, features are computed each time."""
        self.folder, self.hits = folder, 0
        self._left = limit * GB - sum(file.stat().st_size for file in folder.glob("*.features"))

    def _path(self, image: PromptImage) -> Path:
        return self.folder / f"{text_sha(image.digest)[:40]}.features"

    def has(self, image: PromptImage) -> bool:
        return self._path(image).exists()

    def read(self, image: PromptImage) -> Tensor | None:
        """Return the features of an image; None if they are not here, or damaged."""
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
        self.hits += 1
        return features

    def write(self, image: PromptImage, features: Tensor) -> None:
        """Store features, complete or not at all, unless the folder is full."""
        content = save({"features": features.detach().cpu().contiguous()})
        if self._left < 0:
            return
        self._left -= len(content)
        if self._left < 0:
            log.warning(
                "vision_cache_gb: %s is full; further images are computed each time", self.folder
            )
            return
        path = self._path(image)
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        try:
            with open(part, "xb", opener=own) as file:
                file.write(content)
            os.replace(part, path)
        except OSError as error:
            log.warning("%s: cannot be written (%s); no more is cached", path, error.strerror)
            self._left = -1
        finally:
            part.unlink(missing_ok=True)
