"""Child processes that make the pixels of images before a step needs them.

Questions are JSON, answers safetensors: nothing is pickled. A child ends when its parent does,
however that happens.

An answer lies in a file in memory and is read by one call. Through a pipe it takes dozens, between
which the thread that reads takes the interpreter from the thread that trains.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from typing import IO, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from rather.child import start_child
from rather.data.batch import PromptImage
from rather.data.image_tokens import ImageRecipe
from rather.data.pixels import PixelMaker
from rather.errors import DataError

MOST_AHEAD = 256  # images whose pixels wait; one of 448 x 448 has 5 MB

Pixels = Mapping[str, Tensor]


class Maker(Protocol):
    """Makes the keyword arguments of a model's `get_image_features`."""

    def pixels(self, images: list[PromptImage]) -> dict[str, Tensor]: ...


class PixelLoader:
    """Makes pixels on demand, or ahead in child processes."""

    def __init__(self, maker: Maker, processes: int = 0) -> None:
        self.maker, self.processes = maker, processes
        self._begun: dict[str, Future[Pixels]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._local = threading.local()  # the child of each thread

    def begin(self, images: Iterable[PromptImage]) -> None:
        """Make pixels that `take` will ask for, as far as there are processes for it."""
        if not self.processes:
            return
        self._threads = self._threads or ThreadPoolExecutor(self.processes, "pixels")
        for image in images:
            if image.digest not in self._begun and len(self._begun) < MOST_AHEAD:
                self._begun[image.digest] = self._threads.submit(self._ask, image)

    def take(self, image: PromptImage) -> Pixels:
        begun = self._begun.pop(image.digest, None)
        return begun.result() if begun else self.maker.pixels([image])

    def drop(self, image: PromptImage) -> None:
        """Forget what was begun: the features of the image are known meanwhile."""
        begun = self._begun.pop(image.digest, None)
        if begun:
            begun.cancel()

    def _ask(self, image: PromptImage) -> Pixels:
        if not hasattr(self._local, "child"):
            assert isinstance(self.maker, PixelMaker)
            self._local.child = _Child(self.maker.recipe)
        answer: Pixels = self._local.child.pixels(image)
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return answer
        # Here instead of where they are used, so that the thread that trains does not copy.
        return {name: tensor.pin_memory() for name, tensor in answer.items()}

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._threads, self._begun = None, {}


class _Child:
    """A process that answers one question at a time."""

    def __init__(self, recipe: ImageRecipe) -> None:
        self.connection, theirs = Pipe()
        self.answers = _file_in_memory()
        handles = [theirs.fileno(), self.answers.fileno()]
        with theirs:
            self.process = start_child(
                __name__, handles, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""
            )
        self.connection.send_bytes(json.dumps(asdict(recipe)).encode())

    def pixels(self, image: PromptImage) -> Pixels:
        content = image.source if isinstance(image.source, bytes) else b""
        head = asdict(image) | ({"source": None} if content else {})
        try:
            self.connection.send_bytes(json.dumps(head).encode())
            self.connection.send_bytes(content)
            error = self.connection.recv_bytes().decode()
        except (EOFError, OSError):
            raise DataError(
                f"the process that makes pixels ended with code {self.process.wait()} at the image "
                f"{image.source if isinstance(image.source, str) else image.digest}."
            ) from None
        if error:
            raise DataError(error)
        self.answers.seek(0)
        return load(self.answers.read())


def _file_in_memory() -> IO[bytes]:
    """Return a file without a name, which is in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("pixels"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def main(questions: int, handle: int) -> None:
    """Answer questions, in the file of this handle, until the parent has gone."""
    connection = Connection(questions)
    answers = os.fdopen(handle, "r+b", buffering=0)
    with suppress(EOFError, OSError):
        maker = PixelMaker(ImageRecipe(**json.loads(connection.recv_bytes())))
        while True:
            head = json.loads(connection.recv_bytes())
            content = connection.recv_bytes()
            source = content if head["source"] is None else head["source"]
            image = PromptImage(head["digest"], source, tuple(head["grid"]), head["tokens"])
            error = ""
            try:
                made = {name: tensor.contiguous() for name, tensor in maker.pixels([image]).items()}
                answers.seek(0)
                answers.write(save(made))
                answers.truncate()
            except DataError as problem:
                error = str(problem)
            connection.send_bytes(error.encode())
