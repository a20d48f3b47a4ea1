"""A kill -9 at any file operation of a save or a prune leaves a good checkpoint: the old or the new one."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import Shard, ShardSpec
from tests.checkpoint.saving import save_checkpoint
from tests.tiny import in_child

GROUPS = 3
OPERATIONS = ["fsync", "rename", "replace", "mkdir", "unlink", "rmdir"]


def save(run_dir: Path, step: int, content: float) -> None:
    tensors = {f"layer.{i}": torch.full((16,), content) for i in range(GROUPS)}
    groups = {"model": tensors, "optimizer": {k: t * 2 for k, t in tensors.items()}}
    save_checkpoint(run_dir, step, groups, {"content": content}, shard_bytes=128)


def save_by_ranks(run_dir: Path, step: int, content: float) -> None:
    """The same tensors in pieces: two ranks have written theirs into the folder before it is finished."""

    def by_all(folder: Path) -> dict[str, tuple[int, str]]:
        written = {}
        for rank in range(2):
            halves = {
                f"layer.{i}": Shard(torch.full((8,), content), ShardSpec((16,), (8 * rank,), (8,)))
                for i in range(GROUPS)
            }
            doubled = {name: Shard(half.tensor * 2, half.spec) for name, half in halves.items()}
            written |= checkpoint.write_groups(
                folder, {"model": halves, "optimizer": doubled}, rank=rank
            )
        return written

    save_checkpoint(run_dir, step, {}, {"content": content}, ranks=by_all)


def content_of(found: checkpoint.Checkpoint | None) -> float | None:
    if found is None:
        return None
    assert all(t.shape == (16,) for t in found.tensors("model").values())
    values = {t.unique().item() for t in found.tensors("model").values()}
    values |= {t.unique().item() / 2 for t in found.tensors("optimizer").values()}
    assert values == {found.state["content"]}, (
        "the parts of one checkpoint belong to different saves"
    )
    return float(found.state["content"])


def die_at(point: int) -> None:
    """From here on the process kills itself right before its file operation number `point`."""
    calls = iter(range(1, point + 1))

    def tick() -> None:
        if next(calls) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tick()
            return function(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    pieces = checkpoint.shards_file

    def counted_pieces(tensors: dict[str, torch.Tensor]) -> Iterator[Any]:
        for piece in pieces(tensors):
            yield piece
            tick()  # some of the file is written, the rest is not

    checkpoint.shards_file = counted_pieces  # type: ignore[assignment]


# name -> what was saved before, what is killed
SCENARIOS: dict[str, tuple[list[tuple[int, float]], Callable[[Path], None]]] = {
    "first_save": ([], lambda run_dir: save(run_dir, 2, 2.0)),
    "next_save": ([(1, 1.0)], lambda run_dir: save(run_dir, 2, 2.0)),
    "by_ranks": ([(1, 1.0)], lambda run_dir: save_by_ranks(run_dir, 2, 2.0)),
    "same_step_again": ([(1, 1.0)], lambda run_dir: save(run_dir, 1, 2.0)),
    "prune": ([(1, 1.0), (2, 1.5), (3, 2.0)], lambda run_dir: checkpoint.prune(run_dir, 1)),
}


def killed_at(action: Callable[[Path], None], run_dir: Path, point: int) -> bool:
    child = os.fork()
    if child == 0:
        try:
            die_at(point)
            action(run_dir)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def kill_everywhere(root: Path) -> int:
    """Kill each action at each of its operations, in forks; write what can be resumed then.

    For each point: whether it was killed, the content that is found, that of a save afterwards, and
    what is left.
    """
    faulthandler.dump_traceback_later(600, exit=True)  # a deadlock fails
    # The page cache outlives a killed process, and syncing took most of the time.
    os.fsync = lambda _: None
    run_dir, outcomes = root / "run", {}
    for scenario, (saved_before, action) in SCENARIOS.items():
        outcomes[scenario], killed = [], True
        while killed:
            shutil.rmtree(run_dir, ignore_errors=True)
            for step, content in saved_before:
                save(run_dir, step, content)
            killed = killed_at(action, run_dir, len(outcomes[scenario]) + 1)
            found = content_of(checkpoint.newest_good(run_dir))
            save(run_dir, 9, 9.0)
            after = content_of(checkpoint.newest_good(run_dir))
            remaining = [path.name for path in run_dir.glob(".*")]
            outcomes[scenario].append((killed, found, after, remaining))
    (root / "outcomes.json").write_text(json.dumps(outcomes))
    return 0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    root = tmp_path_factory.mktemp("kills")
    assert in_child(kill_everywhere, root) == 0
    found: dict[str, list[Any]] = json.loads((root / "outcomes.json").read_text())
    return found


@pytest.mark.parametrize(
    ("scenario", "before", "points"),
    [
        ("first_save", None, 15),
        ("next_save", 1.0, 15),
        ("by_ranks", 1.0, 15),
        ("same_step_again", 1.0, 20),
        ("prune", 2.0, 10),
    ],
)
def test_killed_at_every_operation(
    outcomes: dict[str, list[Any]], scenario: str, before: float | None, points: int
) -> None:
    killed, contents, after, remaining = zip(*outcomes[scenario], strict=True)
    assert sum(killed) >= points
    assert contents[0] == before, "nothing had been done at the first point"
    assert contents[-1] == 2.0, "the last one was not killed"
    assert set(contents) == {before, 2.0}
    assert set(after) == {9.0}, "the next save works"
    assert not any(remaining), "and cleans up"
