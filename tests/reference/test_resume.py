"""Killed at any moment with a half-filled cache, a run resumes to the same bits."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from rather.cluster.worker import ActorWorker
from rather.parallel import load
from rather.pipeline.pipeline import DPOPipeline
from rather.reference import logprob_cache as store
from rather.reference.logprob_cache import BlockFile
from tests.runs import assert_equal, saved
from tests.tiny import in_child, make_config
from tests.train.test_resume import RUN, assert_whole, config_of
from tests.train.test_resume import train as train_quietly

TOKENS = {"pref_loss": "sigmoid", "ld_alpha": 0.4}


def make_bins_matter() -> None:
    """In a child: a log-prob depends on its bin by more than a last bit, which a tiny model hardly shows."""
    really = ActorWorker.compute_log_probs

    def compute(self: ActorWorker, batches: Any) -> Any:
        if self.role != "reference":
            return really(self, batches)
        order = torch.argsort(torch.cat([batch.pair_P for batch in batches]))
        trainer = self.trainer
        parts = [(trainer.log_probs([batch]), (len(batch.ids_N) % 7) * 1e-6) for batch in batches]
        joined = {
            name: torch.cat([part[name] + shift for part, shift in parts])[order]
            for name in parts[0][0]
        }
        found = {name: column.float().double() for name, column in joined.items()}
        return batches.share(0, 1).spread(found)  # as log-probs of tokens come

    ActorWorker.compute_log_probs = compute
    load.check_family = load.check_model = lambda _: None


def train(*args: Any) -> int:
    make_bins_matter()
    return train_quietly(*args)


def fill(folder: Path, cache: str) -> int:
    """Values of other bins than the runs'."""
    make_bins_matter()
    sizes = {"actor_train__training_args__per_device_train_batch_size": 5, "max_steps": 4}
    changes = {
        "exp_name": "filler",
        "seed": 3,
        "validation__data_args__file_name": None,
        **sizes,
        **TOKENS,
    }
    return DPOPipeline(make_config(folder, reference__cache__path=cache, **changes)).run()


def changes_of(folder: Path, name: str) -> dict[str, Any]:
    """A run over its own copy of the half-filled cache. Saved at once: killed at step 7, it goes on from step 5."""
    cache = folder / f"cache-{name}"
    if not cache.exists():
        shutil.copytree(folder / "half", cache)
    own = {
        "exp_name": name,
        "reference__cache__path": str(cache),
        "checkpoint_config__async_save": "off",
    }
    return {**RUN, **TOKENS, **own}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that knows 20 of 40 pairs, and an uninterrupted run over it."""
    folder = tmp_path_factory.mktemp("cached")
    make_config(folder)
    assert in_child(fill, folder, str(folder / "half")) == 0
    assert in_child(train, folder, changes_of(folder, "whole")) == 0
    return folder


def test_cached_values_can_be_distinguished_from_others(folder: Path) -> None:
    """Else the other tests would prove nothing."""
    plain = {**RUN, **TOKENS, "exp_name": "plain", "reference__cache__enabled": False}
    assert in_child(train, folder, plain) == 0
    one, other = (saved(config_of(folder, name), 12) for name in ("plain", "whole"))
    assert not all(torch.equal(one[key], other[key]) for key in one)
    assert all(torch.allclose(one[key].double(), other[key].double(), atol=1e-4) for key in one)


@pytest.mark.parametrize("step", [6, 11])
def test_killed_after_a_step(folder: Path, step: int) -> None:
    name = f"killed-{step}"
    assert in_child(train, folder, changes_of(folder, name), str(step)) == -signal.SIGKILL
    assert in_child(train, folder, changes_of(folder, name)) == 0
    assert_whole(folder, name)


def train_until_write(folder: Path, changes: dict[str, Any], number: int) -> int:
    """Dies in the middle of the so-manieth block."""
    really, calls = os.write, [0]

    def write(descriptor: int, data: bytes) -> int:
        if not data.startswith(store.MAGIC):  # something else than a block
            return really(descriptor, data)
        calls[0] += 1
        if calls[0] == number:
            really(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return really(descriptor, data)

    os.write = write
    return train(folder, changes)


@pytest.mark.parametrize("number", [2, 7])
def test_killed_in_the_middle_of_a_block(folder: Path, number: int) -> None:
    name = f"torn-{number}"
    changes = changes_of(folder, name)
    assert in_child(train_until_write, folder, changes, number) == -signal.SIGKILL
    damaged = [BlockFile(file).read()[1] for file in (folder / f"cache-{name}").glob("*/*.logps")]
    damaged.append(BlockFile(folder / "output" / name / "reference.log").read()[1])
    assert sum(map(bool, damaged)) == 1
    assert in_child(train, folder, changes) == 0
    assert_whole(folder, name)


def test_what_the_run_used_is_stored_in_the_run_folder(folder: Path) -> None:
    """The cache may be deleted, or hold other values, in the meantime."""
    changes = changes_of(folder, "deleted")
    assert in_child(train, folder, changes, "7") == -signal.SIGKILL
    shutil.rmtree(folder / "cache-deleted")
    assert in_child(train, folder, changes) == 0
    assert_whole(folder, "deleted")


def test_a_checkpoint_of_another_run_brings_its_values(folder: Path) -> None:
    checkpoint = str(folder / "output" / "whole" / "checkpoint-5")
    changes = {**changes_of(folder, "taken-over"), "resume_from_checkpoint": checkpoint}
    shutil.rmtree(folder / "cache-taken-over")
    assert in_child(train, folder, changes) == 0
    assert_equal(*(saved(config_of(folder, name), 12) for name in ("taken-over", "whole")))


def test_starting_from_scratch_discards_them(folder: Path) -> None:
    name = {
        "exp_name": "anew",
        "reference__cache__path": str(folder / "cache-anew"),
        "max_steps": 2,
    }
    pipeline = DPOPipeline(make_config(folder, **name))
    assert pipeline.run() == 0
    shutil.rmtree(folder / "cache-anew")
    again = DPOPipeline(make_config(folder, **name, overwrite=True))
    assert again.run() == 0
    assert again.reference_stream.logps is not None
    assert again.reference_stream.logps.counts.forwards > 0
