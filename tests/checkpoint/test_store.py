"""Checkpoints and exports to and from an object store, whatever happens to machines and connections."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from rather.checkpoint import manifest
from rather.checkpoint.checkpoint import newest_good, prune
from rather.checkpoint.manifest import verify
from rather.checkpoint.store import CHECKPOINT, Store, completed, step_of
from rather.config.found import Trust
from rather.config.load import load_found
from rather.config.paths import check_paths
from rather.data.prepare import prepare
from rather.errors import CheckpointError, ConfigError, DiskError
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.saving import Saving
from tests.at_step import AtStep
from tests.cells import cells
from tests.checkpoint.object_store import BUCKET, Proxy, served, upload, uploads
from tests.checkpoint.runs import config_of, train
from tests.runs import assert_same, incidents, saved_steps
from tests.tiny import fork_context

pytest.importorskip("moto", reason="moto is not installed; pip install 'rather[dev]'")

STORE = f"s3://{BUCKET}/runs"
TO_STORE = {"checkpoint_config__output_dir": STORE}


@pytest.fixture(scope="module")
def served_store() -> Iterator[Proxy]:
    with served() as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def proxy(served_store: Proxy) -> Iterator[Proxy]:
    served_store.reset()
    yield served_store
    served_store.reset()


@pytest.fixture
def whole(folder: Path) -> Path:
    return config_of(folder, "whole").run_dir


class Stops(AtStep):
    """From its first step on the store answers nothing; its fifth is the last of this machine."""

    proxy: Proxy

    def before(self, step: int) -> None:
        self.proxy.open.clear()
        if step == 5:
            raise KeyboardInterrupt


def test_a_run_resumes_on_another_machine(
    folder: Path, tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains without waiting for its uploads, and ends on a machine that has no file of it."""
    saved: list[Path] = []
    close, waits = Saving.close, {"checkpoint_config__async_save": "off"}

    def close_later(self: Saving) -> None:
        saved.extend(self.run_dir.glob("checkpoint-*"))
        proxy.open.set()
        close(self)

    with monkeypatch.context() as patch:
        patch.setattr(Saving, "close", close_later)
        patch.setattr(Stops, "proxy", proxy, raising=False)
        with pytest.raises(KeyboardInterrupt):
            train(folder, "moved", actor_train__worker_cls=Stops, **waits, **TO_STORE)
    assert {path.name for path in saved} == {"checkpoint-2", "checkpoint-4"}
    assert stored_steps("moved") == {2, 4}
    other = config_of(folder, "moved", output_dir=str(tmp_path), **TO_STORE)
    assert DPOPipeline(other).run() == 0
    assert incidents(other) == []
    assert_same(config_of(folder, "whole"), other)
    assert not (other.run_dir / "checkpoint-2").exists()  # only the newest was downloaded
    assert stored_steps("moved") == {2, 4, 6}
    store, weights = Store(f"{STORE}/moved"), "model.safetensors"
    (model,) = completed(store.objects(), "model")
    store.get(f"{store.key}/{model}/{weights}", tmp_path / weights)
    assert (tmp_path / weights).read_bytes() == (other.run_dir / "model" / weights).read_bytes()


def stored_steps(name: str) -> set[int]:
    return set(map(step_of, completed(Store(f"{STORE}/{name}").objects(), CHECKPOINT)))


# --- a machine that dies ---

REQUESTS = 12  # of an upload: a list, a file of the run, four files, a manifest, five deletions
MANIFEST = 6


def test_the_requests_of_an_upload(whole: Path, proxy: Proxy) -> None:
    upload(f"{STORE}/counted", whole, 2)
    proxy.requests = 0
    upload(f"{STORE}/counted", whole, 4)
    assert proxy.requests == REQUESTS


@pytest.mark.parametrize(
    ("moment", "number"),
    cells(
        [("before", 3), ("after", MANIFEST + 1)],
        [("before", 0), ("before", MANIFEST), ("after", MANIFEST), ("after", REQUESTS - 1)],
    ),
)
def test_a_process_killed_during_an_upload(
    whole: Path, proxy: Proxy, tmp_path: Path, moment: str, number: int
) -> None:
    """When half of a request has arrived, or when it was answered and nobody hears it."""
    context = fork_context()
    address = f"{STORE}/{moment}-{number}"
    upload(address, whole, 2)
    process = context.Process(target=upload, args=(address, whole, 4, proxy.address))
    proxy.requests = 0
    setattr(proxy, moment, partial(kill, process, number))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    proxy.reset()
    is_complete = number + (moment == "after") > MANIFEST
    assert restored_step(address, tmp_path / "first") == (4 if is_complete else 2)
    upload(address, whole, 4)  # the next attempt completes what is left
    assert restored_step(address, tmp_path / "second") == 4
    assert stored_steps(f"{moment}-{number}") == {4}


def kill(process: BaseProcess, number: int, request: int) -> bool:
    if request == number:
        process.kill()
        wait([process.sentinel])  # a join here would take the exit code from the test's own join
    return request >= number


def restored_step(address: str, folder: Path) -> int:
    """The step that another machine would resume from, every byte of it verified."""
    folder.mkdir()
    Store(address).restore(folder, ("metrics.jsonl",))
    newest = newest_good(folder)
    assert newest is not None
    assert verify(newest.path)[0] == newest.step
    return newest.step


# --- connections ---


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the attempts of the client."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)


@pytest.mark.usefixtures("no_pauses")
def test_a_cut_connection_is_opened_again(whole: Path, proxy: Proxy, tmp_path: Path) -> None:
    found: list[Any] = []
    proxy.before = lambda number: number in (0, 3, 4)
    proxy.after = lambda number: number in (6, 8, 10, 11)
    work = uploads(f"{STORE}/cut", whole, found)
    work.add(whole / "checkpoint-4", 4)
    work.close()
    assert proxy.requests > 12
    assert found == []
    proxy.requests = 0
    proxy.before = lambda number: number in (1, 4, 7)
    assert restored_step(f"{STORE}/cut", tmp_path / "here") == 4
    assert proxy.requests > 8


@pytest.mark.usefixtures("no_pauses")
def test_a_failed_upload_is_an_incident_and_tried_again(
    whole: Path, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Any] = []
    work = uploads(f"{STORE}/down", whole, found)
    proxy.down = True
    for name in ("model", "checkpoint-2"):
        work.add(whole / name, 2)
        work._pool.submit(int).result()  # after the upload
    assert {each[:2] for each in found} == {("missed_upload", 2)}
    assert f"MISSED UPLOAD of {whole / 'checkpoint-2'}: {STORE}/down" in caplog.text
    proxy.down = False
    work.add(whole / "checkpoint-4", 4)
    work.close()
    assert stored_steps("down") == {4}
    assert completed(work.store.objects(), "model")
    proxy.down = True
    work.add(whole / "checkpoint-6", 6)
    assert work.close() == [whole / "checkpoint-6"]


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.defect("X25")
def test_a_run_whose_last_upload_fails_does_not_end_well(folder: Path, proxy: Proxy) -> None:
    proxy.before = lambda number: number > 0  # only the first request, a list, is answered
    changes = {**TO_STORE, "max_steps": 1}
    pipeline = DPOPipeline(config_of(folder, "unreached", **changes))
    with pytest.raises(DiskError, match="the last upload of checkpoint-1, model failed"):
        pipeline.run()
    proxy.reset()
    assert stored_steps("unreached") == set()
    assert train(folder, "unreached", **changes) == 0, "the same command again uploads them"
    assert stored_steps("unreached") == {1}


@pytest.mark.usefixtures("no_pauses")
def test_a_run_that_may_exist_is_not_begun_again(
    folder: Path, whole: Path, proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.down = True
    assert train(folder, "away", output_dir=str(tmp_path), **TO_STORE) == 9
    assert not list(tmp_path.glob("away/checkpoint-*"))
    uploads(f"{STORE}/away", whole).begin(overwrite=False)  # its folder has checkpoints
    assert "The next save tries again" in caplog.text
    with pytest.raises(DiskError, match="credentials"):
        uploads(f"{STORE}/away", whole).begin(overwrite=True)


# --- what is in the store ---


def test_a_damaged_checkpoint_is_not_used(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(f"{STORE}/damaged")
    for step in (2, 4, 6):
        store.upload(whole / f"checkpoint-{step}", step, keep=0)
    four, six = (
        next(
            name
            for name in store.objects()
            if name.startswith(f"checkpoint-{step}-") and "/model" in name
        )
        for step in (4, 6)
    )
    key = {"Bucket": BUCKET, "Key": f"{store.key}/{six}"}
    content = bytearray(store.client.get_object(**key)["Body"].read())
    content[-1] ^= 1
    store.client.put_object(**key, Body=bytes(content))  # the size is right
    store.client.delete_object(Bucket=BUCKET, Key=f"{store.key}/{four}")
    assert restored_step(store.address, tmp_path / "here") == 2
    assert caplog.text.count("DAMAGED CHECKPOINT, not used") == 2
    assert not list((tmp_path / "here").glob(".tmp-*"))
    store.delete(
        store.objects(), [name for name in completed(store.objects(), CHECKPOINT) if "-2-" in name]
    )
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match=r"all of its checkpoints \(2\) are damaged"):
        store.restore(tmp_path / "there", ())


def test_old_ones_are_deleted_and_what_a_killed_upload_left(
    whole: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(f"{STORE}/pruned")
    left = f"checkpoint-1-{'0' * 16}/state.json"
    for name in (left, "model-of-someone/weights", "checkpoint-1/state.json"):
        store.client.put_object(Bucket=BUCKET, Key=f"{store.key}/{name}", Body=b"{}")
    for step in (2, 4):
        store.upload(whole / f"checkpoint-{step}", step, keep=2)
    assert left in store.objects()
    monkeypatch.setattr("rather.checkpoint.store.ABANDONED", timedelta(seconds=-1))
    store.upload(whole / "checkpoint-6", 6, keep=2)
    there = store.objects()
    assert stored_steps("pruned") == {4, 6}
    assert {name.split("/")[0] for name in there if re.match("checkpoint-[12]\\b", name)} == {
        "checkpoint-1"
    }
    assert "model-of-someone/weights" in there


def test_overwrite_deletes_what_is_stored_and_a_later_step_is_named(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"{STORE}/later"
    upload(address, whole, 4)
    shutil.copytree(whole / "checkpoint-2", tmp_path / "checkpoint-2")
    uploads(address, tmp_path).begin(overwrite=False)
    assert re.search(r"checkpoint-4-\w+ is later than the checkpoints in", caplog.text)
    assert not (tmp_path / "checkpoint-4").exists()
    uploads(address, tmp_path).begin(overwrite=True)
    assert stored_steps("later") == set()


def test_an_export_that_is_replaced_meanwhile_has_no_manifest(proxy: Proxy, tmp_path: Path) -> None:
    folder, store = tmp_path / "best_model", Store(f"{STORE}/replaced")
    folder.mkdir()
    (folder / "a").write_text("one")
    (folder / "b").write_text("one")
    proxy.requests = 0
    proxy.after = lambda number: (folder / "b").write_text("two") and False
    with pytest.raises(DiskError, match="was replaced"):
        store.upload(folder, 1, keep=1)
    assert completed(store.objects(), "best_model") == []
    proxy.reset()
    store.upload(folder, 1, keep=1)
    assert len(completed(store.objects(), "best_model")) == 1


@pytest.mark.defect("R10")
def test_a_checkpoint_that_comes_at_the_end_of_an_upload_is_uploaded(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of an upload and forgetting it, the next checkpoint is added."""
    waiting = uploads(f"{STORE}/race", whole, keep=0)
    added = False

    class Waiting(dict[str, Any]):
        def __delitem__(self, kind: str) -> None:
            nonlocal added
            if not added:
                added = True
                waiting.add(whole / "checkpoint-4", 4)
            super().__delitem__(kind)

    upload_one = Store.upload

    def then_add(self: Store, folder: Path, step: int, keep: int) -> None:
        nonlocal added
        upload_one(self, folder, step, keep)
        if not isinstance(waiting._waiting, Waiting) and not added:
            added = True
            waiting.add(whole / "checkpoint-4", 4)

    waiting._waiting = Waiting()
    monkeypatch.setattr(Store, "upload", then_add)
    waiting.add(whole / "checkpoint-2", 2)
    waiting.close()
    assert stored_steps("race") == {2, 4}


def test_a_manifest_is_deleted_before_its_files(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what a deletion interrupts would look complete."""
    store = Store(f"{STORE}/deleted")
    store.upload(whole / "checkpoint-2", 2, keep=0)
    deleted: list[str] = []
    monkeypatch.setattr(store.client, "delete_object", lambda **key: deleted.append(key["Key"]))
    store.delete(store.objects(), completed(store.objects(), CHECKPOINT))
    assert len(deleted) > 2
    assert [name.endswith(f"/{manifest.MANIFEST}") for name in deleted] == [True] + [False] * (
        len(deleted) - 1
    )


# --- data ---


def test_data_is_downloaded_into_the_cache(folder: Path, tmp_path: Path, proxy: Proxy) -> None:
    store, rows = Store(f"s3://{BUCKET}/data"), (folder / "pairs.jsonl").read_bytes()
    place = {"Bucket": BUCKET, "Key": "data/pairs.jsonl"}
    store.client.put_object(**place, Body=rows)
    changes = {"actor_train__data_args__file_name": f"s3://{BUCKET}/data/pairs.jsonl"}
    changes |= {"actor_train__data_args__dataset_dir": str(tmp_path), "output_dir": str(tmp_path)}
    config = config_of(folder, "stored", **changes)
    check_paths(config)
    assert len(prepare(config).train) == 40
    proxy.requests = 0
    assert len(prepare(config).train) == 40
    assert proxy.requests == 1  # has it changed?
    store.client.put_object(**place, Body=b"".join(rows.splitlines(keepends=True)[:30]))
    assert len(prepare(config).train) == 30
    store.client.delete_object(**place)
    with pytest.raises(DiskError, match=rf"s3://{BUCKET}/data/pairs.jsonl: .*Not Found"):
        prepare(config)


@pytest.mark.parametrize("place", [f"s3://{BUCKET}/secret", f"s3:/{BUCKET}/secret"])
def test_a_config_that_was_found_downloads_nothing(
    folder: Path, tmp_path: Path, proxy: Proxy, place: str
) -> None:
    file = tmp_path / "run" / "config.yaml"
    file.parent.mkdir()
    names = {"file_name": [place], "dataset_dir": f"s3://{BUCKET}"}
    file.write_text(
        f"pretrain: {folder / 'base'}\nactor_train: {json.dumps({'data_args': names})}\n"
    )
    proxy.requests = 0
    with pytest.raises(ConfigError, match=r"file_name: .* is an address"):
        load_found(file, Trust(paths=True))
    assert proxy.requests == 0


def test_what_is_being_uploaded_is_not_pruned(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a run may be named relative to another one."""
    monkeypatch.chdir(tmp_path)
    for step in (2, 4, 6):
        shutil.copytree(whole / f"checkpoint-{step}", tmp_path / "run" / f"checkpoint-{step}")
    prune(Path("run"), 1, None, Path("run/checkpoint-2"))
    assert saved_steps(tmp_path / "run") == [2, 6]
