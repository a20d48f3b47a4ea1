"""Persistent worker processes, one pool for each world size: torch and transformers are imported
once, not per test.

Each run makes and destroys a process group of its own, on gloo. When a rank fails, the others may
wait for it in a collective for ever: the pool is killed, the first traceback is raised, and the
next run starts a new pool.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.tiny import fork_context

PATIENCE = timedelta(minutes=10)


class Pool:
    """`run` calls a function in every process, with a process group around it, and returns what
    each rank returned."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: str | Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """`function` is "package.module:name", or a function at the top of a module."""
        path = (
            function
            if isinstance(function, str)
            else f"{function.__module__}:{function.__qualname__}"
        )
        if not self._workers:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            job = pickle.dumps((path, args, options, str(Path(folder) / "store")))
            for _, pipe in self._workers:
                pipe.send_bytes(job)
            return self._collect()

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []

    def _start(self) -> None:
        context = fork_context()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        while len(results) < self.world:
            waiting = [pipe for pipe, rank in ranks.items() if rank not in results]
            ready = wait(waiting, PATIENCE.total_seconds())
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    good, result = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    good, result = False, "the process died without a word"
                if not good:
                    self.close()
                    raise AssertionError(f"rank {ranks[pipe]} of {self.world}: {result}")
                results[ranks[pipe]] = result
            if not ready:
                missing = sorted(set(range(self.world)) - results.keys())
                self.close()
                raise AssertionError(
                    f"ranks {missing} of {self.world} did not answer within {PATIENCE}"
                )
        return [results[rank] for rank in range(self.world)]


@cache
def pool(world: int) -> Pool:
    """The pool of this many processes; it ends with the test session."""
    made = Pool(world)
    atexit.register(made.close)
    return made


def _serve(rank: int, world: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_attempt(rank, world, *job)))


def _attempt(
    rank: int, world: int, path: str, args: tuple[Any, ...], options: dict[str, Any], store: str
) -> tuple[bool, Any]:
    try:
        module, name = path.split(":")
        function = getattr(importlib.import_module(module), name)
        torch.manual_seed(0)
        files = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=PATIENCE)
        result = function(*args, **options)
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()  # models in cycles keep their groups, whose threads wake 100 times a second
        # It would give the next run's tensors this run's groups, if meshes look alike.
        _clear_sharding_prop_cache()
        return True, result
    except BaseException:
        return False, traceback.format_exc()
