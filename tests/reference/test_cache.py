"""The reference is asked once for all runs: what is shared, what is computed again, what is found out."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rather.cluster.worker import ActorWorker
from rather.data.batch import Columns, TokenPair
from rather.data.shares import Batches
from rather.errors import ConfigError
from rather.losses.objective import from_config
from rather.model import files
from rather.pipeline.pipeline import DPOPipeline
from rather.reference.logprob_cache import BlockFile, block_of
from rather.reference.logps import ReferenceLogps
from tests.runs import assert_equal, exported, trained
from tests.tiny import in_child, make_config, make_pairs, metrics, untimed

TOKENS = {"pref_loss": "sigmoid", "ld_alpha": 0.4}
EPOCHS = "actor_train__training_args__num_train_epochs"
BATCH = "actor_train__training_args__per_device_train_batch_size"
pytestmark = pytest.mark.usefixtures("no_self_check")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Model, 40 pairs to train on, in 5 steps, and 9 held out; no cache of log-probs."""
    make_config(tmp_path)
    return tmp_path


def run(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """What the report of a run says of its reference."""
    config = trained(folder, name, **changes)
    told: dict[str, Any] = json.loads((config.run_dir / "report.json").read_text())["reference"]
    return told


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return untimed(metrics(make_config(folder, exp_name=name)))


def counters(told: dict[str, Any]) -> tuple[int, int, int]:
    return told["pairs_from_cache"], told["pairs_computed"], told["forwards"]


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "output" / ".cache" / "reference").glob("*/*.logps"))


def unloadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, loading a reference is an error."""
    really = ActorWorker.initialize

    def initialize(self: ActorWorker, *args: Any, **given: Any) -> None:
        assert self.role != "reference", "the reference was loaded"
        really(self, *args, **given)

    monkeypatch.setattr(ActorWorker, "initialize", initialize)


# --- what is shared ---


def test_another_beta_does_no_forward_and_loads_no_reference(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert counters(run(folder, "first")) == (0, 49, 6)
    off = run(folder, "off", beta=0.5, reference__cache__enabled=False)
    assert (off["cache"], *counters(off)) == (None, 0, 49, 6)
    unloadable(monkeypatch)
    with caplog.at_level(logging.INFO, "rather"):
        told = run(folder, "second", beta=0.5, seed=42)
    assert counters(told) == (49, 0, 0)
    assert "holds the log-probs of all pairs; the model is not loaded" in caplog.text
    assert "49 pairs from the cache, 0 computed (forward passes: 0)" in caplog.text
    assert told["cache"].startswith(str(folder / "output" / ".cache" / "reference"))
    for one, other in zip(lines(folder, "second"), lines(folder, "off"), strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-12)
    assert_equal(*(exported(make_config(folder, exp_name=name)) for name in ("second", "off")))
    with pytest.raises(AssertionError, match="the reference was loaded"):
        run(folder, "third", reference__cache__enabled=False)


def test_every_loss_seed_and_batch_shares_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder, "first")
    unloadable(monkeypatch)
    for name, changes in {
        "seed": {"seed": 7},
        "loss": {"pref_loss": "ipo"},
        "rate": {"actor_train__training_args__learning_rate": 1e-5, BATCH: 12},
        "elsewhere": {"reference__cache__path": str(folder / "output" / ".cache" / "reference")},
        "weighted": {"use_weighting": True},
    }.items():
        assert run(folder, name, **changes)["forwards"] == 0


def test_two_epochs_do_one_forward_per_pair(folder: Path) -> None:
    assert counters(run(folder, "epochs", **{EPOCHS: 2.0})) == (40, 49, 6)


def test_partly_filled_by_a_shorter_run(folder: Path) -> None:
    assert counters(run(folder, "short", max_steps=2)) == (0, 25, 3)
    assert counters(run(folder, "short-again", max_steps=2)) == (25, 0, 0)
    assert counters(run(folder, "long")) == (25, 24, 3)
    assert counters(run(folder, "all")) == (49, 0, 0)


def test_two_runs_fill_it_at_the_same_time(folder: Path) -> None:
    os.mkfifo(folder / "meeting")
    with ThreadPoolExecutor(2) as both:
        codes = list(both.map(lambda seed: in_child(train, folder, seed), (1, 2)))
    assert codes == [0, 0]
    assert len(segments(folder)) == 2
    assert counters(run(folder, "after", seed=3)) == (49, 0, 0)


def train(folder: Path, seed: int) -> int:
    """Opens the cache, then waits until the other run has opened it too."""
    opened = ReferenceLogps.open

    def meeting(self: ReferenceLogps, own_file: Path | None = None) -> None:
        opened(self, own_file)
        with (folder / "meeting").open(
            "w" if seed == 1 else "r"
        ):  # blocks until the other end is open
            pass

    ReferenceLogps.open = meeting  # type: ignore[method-assign]
    return DPOPipeline(make_config(folder, exp_name=f"seed-{seed}", seed=seed)).run()


# --- token log-probs ---


def test_a_loss_that_reads_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder, "off", **TOKENS, reference__cache__enabled=False)
    assert run(folder, "sums")["forwards"] == 6
    assert counters(run(folder, "tokens", **TOKENS, **{EPOCHS: 2.0})) == (
        40,
        49,
        6,
    )  # sums alone do not serve it
    unloadable(monkeypatch)
    assert counters(run(folder, "known", **TOKENS)) == (49, 0, 0)
    assert run(folder, "other", pref_loss="sigmoid", ld_alpha=0.9)["forwards"] == 0
    assert run(folder, "plain", seed=3)["forwards"] == 0
    assert lines(folder, "known") == lines(folder, "off")


# --- what is computed again ---


def test_other_weights_are_another_model(folder: Path) -> None:
    first = run(folder, "first")
    file = folder / "base" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the last bit of an exponent's neighbour: still a finite number
    file.write_bytes(data)
    second = run(folder, "second")
    assert (counters(second), second["cache"] != first["cache"]) == ((0, 49, 6), True)


def test_only_what_enters_a_forward_distinguishes_models(folder: Path) -> None:
    def digested() -> str | None:
        return files.model_digest(folder / "base", lambda file: str(hash(file.read_bytes())))

    def change(**values: Any) -> None:
        file = folder / "base" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    before = digested()
    change(transformers_version="9.9", dtype="bfloat16", use_cache=False, eos_token_id=7)
    assert digested() == before
    change(rms_norm_eps=1e-3)
    assert digested() != before
    (folder / "base" / "model.safetensors").unlink()
    assert digested() is None


def test_precision_is_part_of_the_key(folder: Path) -> None:
    exact = run(folder, "exact")
    half = run(folder, "half", actor_train__model_args__dtype="bf16")
    assert half["forwards"] == 6
    assert half["cache"] != exact["cache"]


def test_a_hub_name_is_its_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = folder / "hub" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    shutil.copytree(folder / "base", repository / "snapshots" / "abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    assert files.model_folder("someone/tiny", None) == repository / "snapshots" / "abc123"
    assert files.model_folder("someone/other", None) is None
    assert files.model_folder(str(folder / "base"), None) == folder / "base"


# --- what is found out ---


def forge(folder: Path) -> Path:
    """Every cached log-prob is off by one; the checksums are right."""
    (segment,) = segments(folder)
    stored, _ = BlockFile(segment).read()
    segment.unlink()
    BlockFile(segment).append(block_of(stored["key"], stored["sum"] - 1))
    return segment.parent


def test_step_zero_finds_a_forged_value(folder: Path) -> None:
    run(folder, "first")
    cache = forge(folder)
    with pytest.raises(ConfigError, match=f"or the cached log-probs are wrong: delete {cache}"):
        run(folder, "second")
    assert not (folder / "output" / "second" / "model").exists()


# --- where there is none ---


def test_a_moving_reference_is_not_cached(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 2}
    with caplog.at_level(logging.INFO, "rather"):
        told = run(folder, "moving", **moving)
    assert (
        caplog.text.count("sync_ref_model: the reference moves, so its log-probs are not cached")
        == 1
    )
    assert told["cache"] is None
    assert not (folder / "output" / ".cache" / "reference").exists()
    assert not (folder / "output" / "moving" / "reference.log").exists()


class OwnReference(ActorWorker):
    """A worker of the user's own could compute anything."""


def test_a_custom_worker_class_is_not_cached(folder: Path) -> None:
    for name in ("one", "two"):
        assert run(folder, name, reference__worker_cls=OwnReference)["forwards"] == 6


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"reference__cache__enabled": False, "reference__cache__path": "x"},
            "path: cannot be combined with .*enabled",
        ),
        (
            {"sync_ref_model": True, "reference__cache__path": "x"},
            "path: cannot be combined with sync_ref_model",
        ),
        (
            {"reference__worker_cls": "a.B", "reference__cache__path": "x"},
            "path: cannot be .*worker_cls",
        ),
        ({"reference__cache__recheck": 3}, "recheck: was removed; .* delete reference.cache.path"),
    ],
)
def test_settings_without_effect_are_refused(
    folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_config(folder, **changes)


@pytest.mark.defect("X10")
@pytest.mark.parametrize("part", ["", "*", "*/*.logps"])
def test_a_cache_that_others_can_write_is_refused(folder: Path, part: str) -> None:
    """Whoever writes log-probs with good checksums decides what is trained."""
    run(folder, "first")
    root = folder / "output" / ".cache" / "reference"
    for path in root.glob(part) if part else [root]:
        path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"reference\.cache\.path: .* can be written by other"):
        run(folder, "second")
    for path in root.glob(part) if part else [root]:
        path.chmod(0o700)
    assert run(folder, "third")["pairs_from_cache"] > 0


@pytest.mark.defect("X10")
def test_a_cache_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rather.reference import logprob_cache as module

    file = tmp_path / "file"
    file.touch()
    file.chmod(0o600)
    module.refuse_foreign(file)
    module.refuse_foreign(tmp_path / "missing")
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(ConfigError, match="is a link"):
        module.refuse_foreign(tmp_path / "link")
    owner = file.stat().st_uid
    if owner == 0:  # root is trusted; only root can give a file away
        os.chown(file, owner := 4242, -1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(ConfigError, match=f"belongs to another user \\({owner}\\)"):
            module.refuse_foreign(file)


@pytest.mark.parametrize(
    ("group", "members", "is_private"),
    [("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("users", [], False)],
)
def test_the_users_own_group_may_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    members: list[str],
    is_private: bool,
) -> None:
    """umask 002 with private groups is the default of many systems."""
    from rather.reference import logprob_cache as module

    monkeypatch.setattr(module, "getpwuid", lambda _: SimpleNamespace(pw_name="me"))
    entry = SimpleNamespace(gr_name=group, gr_mem=members)
    monkeypatch.setattr(module, "getgrgid", lambda _: entry)
    tmp_path.chmod(0o770)
    with nullcontext() if is_private else pytest.raises(ConfigError, match="mode 770"):
        module.refuse_foreign(tmp_path)


def test_a_folder_that_cannot_be_used(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(
        ConfigError, match=r"reference\.cache\.path: .*file/x cannot be used .*enabled: false"
    ):
        run(folder, "nowhere", reference__cache__path=str(folder / "file" / "x"))


def test_a_full_disk_ends_the_cache_and_not_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really = BlockFile.append

    def full(self: BlockFile, block: bytes) -> None:
        if self.path.suffix == ".logps":
            raise OSError(28, "No space left on device")
        really(self, block)

    monkeypatch.setattr(BlockFile, "append", full)
    assert counters(run(folder, "full", **{EPOCHS: 2.0})) == (40, 49, 6)
    assert caplog.text.count("nothing more is cached") == 1


def test_the_report_of_a_run(folder: Path) -> None:
    run(folder, "told", max_steps=2)
    report = json.loads((folder / "output" / "told" / "report.json").read_text())
    assert report["steps"] == 2
    assert 0 < report["packing"]["fill"] <= 1
    assert report["packing"]["seconds_waited"] >= 0
    assert report["seconds"] > 0
    assert report["peak_memory_bytes"] > 1e6
    assert report["pairs_per_second"] > 0
    assert report["tokens_per_second"] > report["pairs_per_second"]


# --- bins, against a model that counts ---


class Counting:
    """A model whose answers tell when they were computed, so that a value says where it came from."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, batches: Batches) -> Columns:
        self.calls.append([len(batch.pair_P) for batch in batches])
        order = torch.argsort(torch.cat([batch.pair_P for batch in batches]))
        answers = [
            torch.full((len(b.pair_P), 2), -float(len(self.calls)) - i / 8)
            for i, b in enumerate(batches)
        ]
        return batches.share(0, 1).spread({"sum": torch.cat(answers).double()[order]})


def some_pairs(numbers: Sequence[int]) -> list[TokenPair]:
    def ids(seed: int) -> Any:
        return np.random.default_rng(seed).integers(0, 50, 8).astype(np.int32)

    spans = ((4, 16),)
    return [TokenPair(ids(n), ids(n + 1000), ids(n + 2000), spans, spans) for n in numbers]


def counted(folder: Path, **changes: Any) -> tuple[ReferenceLogps, Counting]:
    config, model = make_config(folder, **changes), Counting()
    return ReferenceLogps(config, from_config(config), lambda b: partial(model, b)), model


def test_a_bin_with_any_unknown_entry_runs_whole_and_what_is_known_wins(folder: Path) -> None:
    logps, model = counted(folder)
    pairs = some_pairs(range(8))
    assert logps.columns(Batches(pairs[:3], 10_000))["sum"].unique().tolist() == [-1]
    logps.keep()
    bins = Batches(pairs, 48)  # of two pairs each
    columns = logps.columns(bins)["sum"]
    assert model.calls == [[3], [2, 2, 2]]  # the bin of the first two pairs did not run
    assert (columns[:3] == -1).all()  # the third pair was computed again, and its old value is used
    assert (columns[3:] <= -2).all()
    logps.keep()
    assert torch.equal(logps.columns(bins)["sum"], columns)
    assert len(model.calls) == 2
    assert (logps.counts.pairs_from_cache, logps.counts.pairs_computed, logps.counts.forwards) == (
        11,
        8,
        2,
    )
    again, model = counted(folder)
    assert torch.equal(again.columns(Batches(pairs, 10_000))["sum"], columns)
    assert model.calls == []


@pytest.mark.parametrize("changes", [{}, TOKENS], ids=["sums", "tokens"])
def test_a_response_in_two_bins_has_one_value(folder: Path, changes: dict[str, Any]) -> None:
    """Else the value that is kept would differ from one that was used."""
    logps, _ = counted(folder, **changes)
    pairs = some_pairs([0, 1, 2, 0])
    bins = Batches(pairs, 24, 1)
    columns = logps.columns(bins)
    assert len(columns["sum"].unique()) == 3
    logps.keep()
    for name, known in logps.columns(bins).items():
        assert torch.equal(known, columns[name])


def test_what_is_scored_is_part_of_the_key(folder: Path) -> None:
    logps, model = counted(folder)
    (pair,) = some_pairs([0])
    other = TokenPair(pair.prompt, pair.chosen, pair.rejected, ((4, 15),), ((4, 16),))
    moved = TokenPair(pair.prompt[:7], pair.chosen, pair.rejected, ((4, 15),), ((4, 15),))
    for each in (pair, other, moved):
        logps.columns(Batches([each], 100))
        logps.keep()
    assert len(model.calls) == 3
    longer = TokenPair(
        np.concatenate([pair.prompt, pair.chosen[:2]]),
        pair.chosen[2:],
        pair.chosen[2:],
        ((4, 16),),
        ((4, 16),),
    )
    assert logps.knows([pair, other, moved, longer])  # where the prompt ends decides nothing


def test_pairs_in_both_sets_are_fine(folder: Path) -> None:
    """What the evaluation before the first step tells is known from the second step on."""
    make_pairs(folder / "held_out.jsonl", 40)  # the training pairs themselves
    assert counters(run(folder, "twice")) == (32, 48, 2)
    assert counters(run(folder, "again")) == (80, 0, 0)
