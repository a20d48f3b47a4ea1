"""Checkpoints come back bit for bit, or they are named as damaged and not used."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rather.checkpoint import checkpoint
from rather.checkpoint import sharded_tensors as pieces
from rather.errors import CheckpointError, ConfigError, DiskError
from rather.run_folder import control
from tests.cells import cells
from tests.checkpoint.saving import save_checkpoint
from tests.runs import saved_steps

TENSORS = {
    "a.weight": torch.arange(24.0).reshape(4, 6),
    "b.weight": torch.randn(8),
    "c.bias": torch.ones(3),
}


def save(run_dir: Path, step: int, value: float = 1.0, shard: int = 100) -> Path:
    groups = {
        "model": {k: t * value for k, t in TENSORS.items()},
        "optimizer": {"exp_avg": torch.zeros(5)},
    }
    return save_checkpoint(run_dir, step, groups, {"step": step, "value": value}, shard_bytes=shard)


def flip_bit(path: Path, byte: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if byte is None else byte] ^= 1
    path.write_bytes(data)


def seal(folder: Path, **changes: Any) -> None:
    """Gives a hand-made manifest a fitting digest of its own, as somebody with bad intentions could."""
    content = json.loads((folder / "manifest.json").read_text())
    content.pop("manifest_sha256")
    content |= changes
    body = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
    own = f',\n "manifest_sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'
    (folder / "manifest.json").write_bytes(body + own.encode())


# --- what is saved comes back ---


@pytest.mark.parametrize("dtype", sorted(pieces.DTYPES, key=str))
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (48,), dtype=torch.uint8)
    tensor = raw.view(dtype)  # any bits: among floats NaN payloads, infinities and subnormals too
    mixed = {"odd": torch.ones(3, dtype=torch.int8)}
    mixed |= {"t": tensor.reshape(2, -1), "scalar": tensor[0], "none": tensor[:0]}
    back = checkpoint.open_checkpoint(save_checkpoint(tmp_path, 1, {"model": mixed}, {})).tensors(
        "model"
    )
    assert back.keys() == mixed.keys()
    for name, original in mixed.items():
        assert back[name].dtype == original.dtype
        assert back[name].shape == original.shape
        assert torch.equal(
            back[name].reshape(-1).view(torch.uint8), original.reshape(-1).view(torch.uint8)
        )
        assert back[name].data_ptr() % original.element_size() == 0


def test_views_and_tied_weights_and_gradients_are_saved_as_their_values(tmp_path: Path) -> None:
    base = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    path = save_checkpoint(
        tmp_path, 1, {"model": {"w": base, "tied": base, "t": base.T, "row": base[1]}}, {}
    )
    back = checkpoint.open_checkpoint(path).tensors("model")
    assert torch.equal(back["w"], base)
    assert torch.equal(back["tied"], base)
    assert torch.equal(back["t"], base.T)
    assert torch.equal(back["row"], base[1])


def test_shards_are_small_and_plain_safetensors(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    names = sorted(p.name for p in path.iterdir())
    assert names == ["manifest.json", "model-00001.safetensors", "model-00002.safetensors",
                     "optimizer-00001.safetensors", "state.json"]  # fmt: skip
    assert load_file(path / "model-00001.safetensors").keys() == {"a.weight"}
    assert (tmp_path / "LATEST").read_text() == "checkpoint-3\n"


def test_an_empty_group_is_there_and_a_missing_one_is_named(tmp_path: Path) -> None:
    found = checkpoint.open_checkpoint(save_checkpoint(tmp_path, 0, {"optimizer": {}}, {}))
    assert found.tensors("optimizer") == {}
    with pytest.raises(CheckpointError, match="no tensor group 'model'; its groups are: optimizer"):
        found.tensors("model")


def test_state_floats_are_exact(tmp_path: Path) -> None:
    state = {
        "sum": 0.1 + 0.2,
        "tiny": 5e-324,
        "big": 2**80,
        "inf": math.inf,
        "in": [{"x": -0.0, "n": None}],
    }
    back = checkpoint.open_checkpoint(
        save_checkpoint(tmp_path, 1, {}, {**state, "nan": math.nan})
    ).state
    assert math.isnan(back.pop("nan"))
    assert back == state
    assert math.copysign(1, back["in"][0]["x"]) == -1


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"rng": (1, 2)}, "state.rng"),
        ({"by_rank": {0: 1}}, "state.by_rank"),
        ({"a": [torch.ones(1)]}, r"state.a\[0\]"),
    ],
)
def test_state_that_json_would_change_is_refused(
    tmp_path: Path, state: dict[str, Any], where: str
) -> None:
    with pytest.raises(TypeError, match=where):
        save_checkpoint(tmp_path, 1, {}, state)
    assert not list(tmp_path.iterdir())


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 4, 1.0, shard=1)
    save(tmp_path, 4, 2.0)
    found = checkpoint.newest_good(tmp_path)
    assert found is not None
    assert found.state["value"] == 2.0
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["LATEST", "checkpoint-4"]


def test_everything_is_synced_before_latest_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill cannot show a missing fsync, a power failure would: so the order of the calls is checked."""
    events: list[str] = []

    def noted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            target = os.readlink(f"/proc/self/fd/{args[0]}") if kind == "fsync" else str(args[1])
            events.append(f"{kind} {Path(target).name.split('-' + str(os.getpid()))[0]}")
            return function(*args)

        return call

    for kind in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, kind, noted(kind, getattr(os, kind)))
    save(tmp_path, 7, shard=1 << 20)
    assert events == [
        "fsync model-00001.safetensors", "fsync optimizer-00001.safetensors", "fsync state.json",
        "fsync manifest.json", "fsync .tmp-checkpoint-7", "rename checkpoint-7", f"fsync {tmp_path.name}",
        "fsync .tmp-checkpoint-LATEST", "replace LATEST", f"fsync {tmp_path.name}",
    ]  # fmt: skip


# --- damage is named, and the next older one is used ---


@pytest.mark.parametrize("distance", cells([7], [1]))  # 7: every byte, at another bit
def test_every_single_bit_of_the_manifest_counts(tmp_path: Path, distance: int) -> None:
    path = save_checkpoint(tmp_path, 1, {}, {})
    manifest = path / "manifest.json"
    good = manifest.read_bytes()
    for place in range(0, 8 * len(good), distance):
        changed = bytearray(good)
        changed[place // 8] ^= 1 << place % 8
        manifest.write_bytes(changed)
        with pytest.raises(
            CheckpointError, match=r"manifest\.json: the manifest itself is damaged"
        ):
            checkpoint.open_checkpoint(path)
    manifest.write_bytes(good)
    assert checkpoint.open_checkpoint(path).step == 1


def test_swapped_shards_extra_files_and_renamed_folders_are_named(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4), "b": torch.ones(4)}
    path = save_checkpoint(tmp_path, 1, {"model": tensors}, {}, shard_bytes=1)
    one, two = path / "model-00001.safetensors", path / "model-00002.safetensors"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(CheckpointError, match=r"model-00001\.safetensors: is damaged: its SHA-256"):
        checkpoint.open_checkpoint(path)
    one.write_bytes(first)
    two.write_bytes(second)
    (path / "model-00003.safetensors").write_bytes(first)
    with pytest.raises(CheckpointError, match=r"model-00003\.safetensors: is not part"):
        checkpoint.open_checkpoint(path)
    (path / "model-00003.safetensors").unlink()
    os.rename(path, tmp_path / "checkpoint-8")
    with pytest.raises(CheckpointError, match="is of step 1"):
        checkpoint.open_checkpoint(tmp_path / "checkpoint-8")
    os.rename(tmp_path / "checkpoint-8", tmp_path / "my-best")
    assert checkpoint.open_checkpoint(tmp_path / "my-best").step == 1


@pytest.mark.parametrize(
    "name", ["../a-00001.safetensors", "/etc/passwd", "b/a-00001.safetensors", "a.py"]
)
def test_a_manifest_cannot_point_outside(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    seal(path, files={**files, name: {"size": 0, "sha256": "0" * 64}})
    with pytest.raises(CheckpointError, match="is not a file of a checkpoint"):
        checkpoint.open_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "has schema 2, but this version of Rather reads 1"),
        ({"files": {}}, r"does not list state\.json"),
        ({"files": [1]}, "not a checkpoint manifest"),
        ({"step": "x"}, "not a checkpoint manifest"),
        ({"files": {"state.json": {"size": 1}}}, "not a checkpoint manifest"),
    ],
)
def test_foreign_manifests_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = save(tmp_path, 1)
    seal(path, **change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.open_checkpoint(path)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000])
def test_a_foreign_state_is_refused(tmp_path: Path, text: str) -> None:
    path = save_checkpoint(tmp_path, 1, {}, {})
    (path / "state.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    seal(path, files={"state.json": {"size": len(text), "sha256": digest}})
    with pytest.raises(CheckpointError, match=r"state\.json: cannot be used"):
        checkpoint.open_checkpoint(path)


def test_paths_that_are_not_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint folder"):
        checkpoint.open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.open_checkpoint(tmp_path)
    (tmp_path / "link").symlink_to(save(tmp_path, 1))
    with pytest.raises(CheckpointError, match="symbolic link"):
        checkpoint.open_checkpoint(tmp_path / "link")


def test_no_checkpoint_differs_from_no_good_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest_good(tmp_path / "not there") is None
    (tmp_path / ".tmp-checkpoint-5-1").mkdir()
    assert checkpoint.newest_good(tmp_path) is None
    for step in (1, 2):
        os.truncate(save(tmp_path, step) / "state.json", 1)
    both = r"all of its checkpoints \(2\) are damaged:\n.*checkpoint-2.*\n.*checkpoint-1"
    with pytest.raises(CheckpointError, match=both):
        checkpoint.newest_good(tmp_path)


def test_latest_decides_what_is_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Continued from step 10 after 20 had been reached: the folder holds 20 still, the run is at 12."""
    for step in (9, 10, 20, 12):
        save(tmp_path, step)
    found = checkpoint.newest_good(tmp_path)
    assert found is not None
    assert found.step == 12
    assert "checkpoint-20: is not used" in caplog.text
    flip_bit(tmp_path / "checkpoint-12" / "state.json")
    assert [p.name for p in checkpoint.candidates(tmp_path)][1] == "checkpoint-10"
    (tmp_path / "LATEST").write_text("checkpoint-99\n")
    found = checkpoint.newest_good(tmp_path)
    assert found is not None
    assert found.step == 20
    (tmp_path / "LATEST").unlink()
    assert checkpoint.newest_good(tmp_path) == found


# --- the disk ---


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 64 KiB: a real failing write, without filling a disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(
        DiskError, match=r"checkpoint-2: could not be written \(File too large\); it needs"
    ):
        save_checkpoint(tmp_path, 2, {"model": {"big": torch.zeros(1 << 15)}}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "checkpoint-1"]
    found = checkpoint.newest_good(tmp_path)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("call", range(1, 6))
def test_a_full_disk_at_any_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    save(tmp_path, 1)
    calls = iter(range(1, 100))

    def full(descriptor: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match="No space left on device") as caught:
        save(tmp_path, 2)
    assert caught.value.exit_code == 9
    assert not list(tmp_path.glob(".tmp*"))
    found = checkpoint.newest_good(tmp_path)
    assert found is not None
    assert found.step == 1


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert not list(tmp_path.iterdir())


# --- housekeeping ---


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [1, 2, 3, 10]), (1, [10]), (3, [2, 3, 10]), (9, [1, 2, 3, 10])]
)
def test_prune_keeps_the_newest(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, keep)
    assert saved_steps(tmp_path) == left
    assert not list(tmp_path.glob(".*"))


def test_prune_never_takes_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    for step in (3, 4):
        flip_bit(tmp_path / f"checkpoint-{step}" / "state.json")
    checkpoint.prune(tmp_path, 1)
    assert saved_steps(tmp_path) == [2, 3, 4]
    assert "checkpoint-4/state.json" in caplog.text
    flip_bit(tmp_path / "checkpoint-2" / "state.json")
    checkpoint.prune(tmp_path, 1)
    assert saved_steps(tmp_path) == [2, 3, 4]


def test_prune_keeps_what_latest_names(tmp_path: Path) -> None:
    for step in (5, 6, 1):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 1)
    assert saved_steps(tmp_path) == [1]


def test_prune_follows_no_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither one in the place of a checkpoint, nor one inside of a checkpoint that goes."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    kept = save(elsewhere, 1)
    for step in (2, 3):
        save(run, step)
    (run / "checkpoint-1").symlink_to(kept)
    (run / "checkpoint-2" / "more").symlink_to(kept)
    checkpoint.prune(run, 1)
    assert "checkpoint-1: is a symbolic link and is kept; remove it by hand" in caplog.text
    assert sorted(path.name for path in run.iterdir()) == ["LATEST", "checkpoint-1", "checkpoint-3"]
    assert checkpoint.open_checkpoint(kept).step == 1


def test_a_failed_deletion_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path, step)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    checkpoint.prune(tmp_path, 1)
    assert saved_steps(tmp_path) == [1, 2]
    assert "checkpoint-1: cannot be deleted (Permission denied)" in caplog.text


def test_copy_to_a_second_folder(tmp_path: Path) -> None:
    path = save(tmp_path / "run", 3)
    checkpoint.copy_to(path, tmp_path / "second" / "place")
    copy = tmp_path / "second" / "place" / path.name
    assert copy == tmp_path / "second" / "place" / "checkpoint-3"
    found = checkpoint.newest_good(copy.parent)
    assert found is not None
    assert torch.equal(found.tensors("model")["a.weight"], TENSORS["a.weight"])
    checkpoint.copy_to(path, copy.parent)
    flip_bit(path / "model-00002.safetensors")
    with pytest.raises(
        CheckpointError, match=r"run/checkpoint-3/model-00002\.safetensors: is damaged"
    ):
        checkpoint.copy_to(path, copy.parent)
    assert checkpoint.newest_good(copy.parent) == found
    assert not list(copy.parent.glob(".*"))


def test_the_lock_names_its_holder(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with control.lock(run_dir):
        holder = f"in use by process {os.getpid()} on {os.uname().nodename}"
        with pytest.raises(ConfigError, match=holder), control.lock(run_dir):
            pass
        child = os.fork()
        if child == 0:
            try:
                with control.lock(run_dir):
                    os._exit(0)
            except ConfigError:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    with control.lock(run_dir):
        pass
