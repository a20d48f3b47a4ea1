"""The ledger of pairs: what it holds, that it changes nothing, and what the doctor makes of it."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import struct
import threading
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch

from rather.cluster.worker import ActorWorker
from rather.commands.verify import check_files
from rather.config.run_config import DPOConfig
from rather.data.pairs import Correction, hex_id
from rather.data.prepare import prepare
from rather.data.template import load_tokenizer
from rather.errors import ConfigError, DataError
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.report import pairs
from rather.tools.report.pair_texts import PairTexts
from rather.tools.report.pairs import (
    Doctor,
    PairHistory,
    auc,
    calibrate,
    is_of_one_source,
    read_ledger,
)
from rather.tracking.ledger import LEDGER_SCHEMA, ledger_part
from tests.commands.conftest import json_of, rows_of, succeed, write
from tests.tiny import make_config, metrics

BETA = 0.1


def config_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    own = {"exp_name": name, "max_steps": 10, "beta": BETA, "report_html": False}
    own["actor_train__training_args__num_train_epochs"] = 2.0  # of five steps
    return make_config(folder, **{**own, **changes})


class Watched(NamedTuple):
    """A run, the threads that wrote its ledger, and what its worker answered to each step."""

    config: DPOConfig
    threads: list[threading.Thread]
    results: list[Any]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("ledger")
    config = config_of(folder, "whole")
    rows = rows_of(folder / "pairs.jsonl")
    write(
        folder / "pairs.jsonl", *({**row, "id": f"row-{place}"} for place, row in enumerate(rows))
    )
    run, train_step = Watched(config, [], []), ActorWorker.train_step

    def part(batch: Any, *, is_first: bool) -> bytes:
        run.threads.append(threading.current_thread())
        return ledger_part(batch, is_first=is_first)

    def step(self: ActorWorker, *args: Any, **options: Any) -> Any:
        run.results.append(train_step(self, *args, **options))
        return run.results[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rather.tracking.run.ledger_part", part)
        patch.setattr(ActorWorker, "train_step", step)
        assert DPOPipeline(config).run() == 0
    return run


@pytest.fixture(scope="module")
def run(watched: Watched) -> DPOConfig:
    return watched.config


def test_every_pair_is_there_once_an_epoch_in_the_order_of_the_steps(run: DPOConfig) -> None:
    ledger, train = read_ledger(run.run_dir), prepare(run).train
    assert ledger.column("step").to_pylist() == [s for s in range(1, 11) for _ in range(8)]
    ids, digests = ledger.column("id").to_numpy(), train.column("pair_hash")
    pipeline_order = DPOPipeline(config_of(Path(run.output_dir).parent, "order")).source.order
    assert np.array_equal(ids, np.concatenate([digests[pipeline_order.step(s)] for s in range(10)]))
    lengths = dict(zip(digests.tolist(), train.lengths("chosen").tolist(), strict=True))
    assert ledger.column("chosen_tokens").to_pylist() == [lengths[each] for each in ids.tolist()]


def test_margin_and_gradient_weight_are_those_of_the_loss(run: DPOConfig) -> None:
    ledger = read_ledger(run.run_dir)
    rows = {name: ledger.column(name).to_numpy() for name in ledger.column_names}
    assert np.allclose(rows["margin"], rows["chosen"] - rows["rejected"])
    assert np.allclose(rows["margin"][:8], 0, atol=1e-5)  # policy = reference before the first step
    assert np.abs(rows["margin"][40:]).min() > 1e-4
    weight = BETA / (1 + np.exp(BETA * rows["margin"]))
    assert np.allclose(rows["gradient_weight"], weight, rtol=1e-5)
    margins = [each["rewards/margins"] for each in metrics(run) if "rewards/margins" in each]
    assert np.allclose(margins, BETA * rows["margin"].reshape(10, 8).mean(1), atol=1e-6)


def test_the_thread_that_trains_does_not_write_it(watched: Watched) -> None:
    assert len(watched.threads) >= 10
    assert threading.main_thread() not in watched.threads


def test_what_fails_in_that_thread_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> bytes:
        raise ValueError("no such column")

    monkeypatch.setattr("rather.tracking.run.ledger_part", broken)
    with pytest.raises(ValueError, match="no such column"):
        DPOPipeline(config_of(tmp_path, "run", max_steps=1)).run()


def test_a_worker_answers_with_twelve_bytes_a_pair(watched: Watched) -> None:
    sent = vars(pickle.loads(pickle.dumps(watched.results[1]))).values()
    tensors = [value for value in sent if isinstance(value, torch.Tensor)]
    # What is pickled is the whole storage, also of a slice.
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 12 * 8


def test_off_means_no_file_and_the_same_weights(run: DPOConfig) -> None:
    off = config_of(Path(run.output_dir).parent, "off", pair_ledger=False)
    assert DPOPipeline(off).run() == 0
    assert not (off.run_dir / "ledger.arrows").exists()
    one, other = (c.run_dir / "model" / "model.safetensors" for c in (run, off))
    assert one.read_bytes() == other.read_bytes()
    with pytest.raises(ConfigError, match="pair_ledger is false"):
        read_ledger(off.run_dir)


def test_without_a_reference_values_are_per_token(run: DPOConfig) -> None:
    simpo = {"pref_loss": "simpo", "beta": 2.5, "max_steps": 1}
    config = config_of(Path(run.output_dir).parent, "simpo", **simpo)
    assert DPOPipeline(config).run() == 0
    rows = read_ledger(config.run_dir).to_pydict()
    rewards = next(each["rewards/chosen"] for each in metrics(config) if each["step"] == 1)
    assert 2.5 * np.mean(rows["chosen"][:8]) == pytest.approx(rewards, rel=1e-6)
    assert all(weight > 0 for weight in rows["gradient_weight"])


def test_half_a_step_at_the_end_is_left_out(run: DPOConfig, tmp_path: Path) -> None:
    whole = (run.run_dir / "ledger.arrows").read_bytes()
    held_out_pairs = len(prepare(run).evals[""])
    for cut in range(1, len(whole) - 1000, 997):
        (tmp_path / "ledger.arrows").write_bytes(whole[:-cut])
        training, held_out = pairs.read_ledgers(tmp_path)
        assert training.num_rows % 8 == 0
        assert held_out.num_rows % held_out_pairs == 0
        assert set(held_out.column("step").to_pylist()) < {0, 5, 10}
    other = pa.table({"step": [1]})
    with pa.ipc.new_stream(tmp_path / "ledger.arrows", other.schema) as stream:
        stream.write_table(other)
    with pytest.raises(ConfigError, match="other columns than a ledger"):
        read_ledger(tmp_path)
    (tmp_path / "ledger.arrows").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"ledger\.arrows"):
        read_ledger(tmp_path)


@pytest.mark.defect("X24")
def test_a_flipped_bit_is_found(run: DPOConfig, tmp_path: Path) -> None:
    """In any step but the last, and in the numbers of that one, with or without checkpoints."""
    whole = (run.run_dir / "ledger.arrows").read_bytes()
    table = read_ledger(run.run_dir)
    draw = Random(0)
    found = 0
    places = [draw.randrange(400, len(whole) - 1500) for _ in range(60)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        (tmp_path / "ledger.arrows").write_bytes(damaged)
        try:
            assert read_ledger(tmp_path).equals(table)  # padding between buffers
        except ConfigError:
            found += 1
    assert found > 40
    number = table.column("margin")[-1].as_py()
    at = whole.index(struct.pack("<d", number))
    (tmp_path / "ledger.arrows").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(ConfigError, match="has changed since it was written"):
        read_ledger(tmp_path)


@pytest.mark.defect("X24")
def test_verify_reads_the_ledger(run: DPOConfig, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run.run_dir, tmp_path / "run"))
    file = copy / "ledger.arrows"
    assert dict(check_files(copy, full=True))[file] == ""
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])  # the last step: only the checkpoint knows that it was whole
    assert "bytes have changed since checkpoint-" in dict(check_files(copy, full=True))[file]
    at = len(whole) // 2
    file.write_bytes(whole[:at] + bytes(200) + whole[at + 200 :])
    assert dict(check_files(copy, full=True))[file]


@pytest.mark.defect("X13")
@pytest.mark.defect("X23")
def test_a_ledger_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    columns = [
        pa.array(np.zeros(3_000_000, kind.to_pandas_dtype())) for kind in LEDGER_SCHEMA.types
    ]
    batch = pa.record_batch(columns, schema=LEDGER_SCHEMA)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    file = tmp_path / "ledger.arrows"
    with pa.ipc.new_stream(file, LEDGER_SCHEMA, options=options) as writer:
        writer.write_batch(batch)
    assert file.stat().st_size < 100_000
    with pytest.raises(ConfigError, match="its numbers are larger than the file"):
        read_ledger(tmp_path)


def history(margins: dict[int, list[float]]) -> PairHistory:
    """The history of pairs whose margins are given by visit."""
    rows = [
        {"step": step, "id": pair, "margin": values[step], "chosen": -step, "rejected": 0.0}
        | {"gradient_weight": 0.1, "chosen_tokens": 3, "rejected_tokens": pair}
        for step in range(3)
        for pair, values in margins.items()
    ]
    return PairHistory.of(pa.Table.from_pylist(rows))


def test_findings_and_score() -> None:
    found = history({1: [0.1, 2, 3], 2: [0.2, -1, -2], 3: [-0.1, -1, -1], 4: [-0.5, 1, 2]})
    flags = {name: found.ids[each].tolist() for name, each in found.findings.items()}
    assert flags["never_learned"] == [3]
    assert flags["unlearned"] == [2]
    assert flags["chosen_falls"] == [1, 2, 3, 4]
    assert found.ids[np.argsort(-found.flip_score)].tolist() == [3, 4, 2, 1]
    unit = np.std([0.1, 0.2, -0.1, -0.5])
    doubts = [1 / (1 + math.exp(margin / unit)) for margin in (0.2, -1, -2)]
    expected = (doubts[0] + 0.4 * doubts[1] + 0.16 * doubts[2]) / 1.56
    assert found.flip_score[1] == pytest.approx(expected)
    assert history({1: [0.0] * 3, 2: [0.0] * 3}).flip_score.tolist() == [0.5, 0.5]
    assert found.first.tolist() == [0.1, 0.2, -0.1, -0.5]
    assert auc(found.flip_score, np.isin(found.ids, [3, 4])) == 1.0
    assert auc(found.flip_score, np.isin(found.ids, [3, 1])) == 0.5
    assert auc(np.zeros(4), np.isin(found.ids, [2])) == 0.5
    doctor = Doctor(found, {})
    known = calibrate(doctor, np.array([3, 4], np.uint64))
    assert (known["precision"], known["recall"]) == (1.0, 1.0)
    none = calibrate(doctor, np.array([1], np.uint64))  # the least suspicious of all
    assert (none["chance"], none["recall"]) == (1.0, 0.0)


def test_corrections_drop_weight_and_flip_by_identity(run: DPOConfig, tmp_path: Path) -> None:
    plain = prepare(run)
    digests = [hex_id(each) for each in plain.train.column("pair_hash").tolist()]
    lines = [{"id": digests[0], "weight": 0}, {"id": digests[1], "flip": True}]
    lines += [{"id": digests[2], "weight": 0.5}, {"id": "0" * 16, "weight": 0}]
    file, again = write(tmp_path / "a.jsonl", *lines), write(tmp_path / "b.jsonl", lines[1])

    def train(*files: Path) -> tuple[list[Any], Any]:
        names = {"actor_train__data_args__corrections": [str(each) for each in files]}
        found = prepare(config_of(Path(run.output_dir).parent, "corrected", **names))
        assert plain.train.fingerprint != found.train.fingerprint
        return found.train.take(range(len(found.train))), found.report["corrections"]

    before = plain.train.take(range(40))
    pairs, counts = train(file)
    assert len(pairs) == 39
    assert pairs[0].chosen.tolist() == before[1].rejected.tolist()
    assert pairs[0].rejected_scored == before[1].chosen_scored
    assert pairs[0].digest == before[1].digest  # the identity of the row in the file
    assert [pair.weight for pair in pairs[:3]] == [1.0, 0.5, 1.0]
    kept = {key: counts[key] for key in ("dropped", "flipped", "weighted", "unknown_ids")}
    assert kept == {"dropped": 1, "flipped": 1, "weighted": 1, "unknown_ids": 1}
    assert train(file, again)[0][0].chosen.tolist() == before[1].chosen.tolist()  # flipped twice
    write(again, {"id": "12"})
    with pytest.raises(DataError, match=r"b\.jsonl:1"):
        train(again)
    write(again, lines[3])
    with pytest.raises(DataError, match="no id belongs to a training pair"):
        train(again)


def test_a_flipped_pair_has_the_other_margin_and_soft_label(run: DPOConfig) -> None:
    (pair,) = prepare(run).train.take([0])
    once = Correction(flip=True).apply(pair)
    assert np.isnan(once.margin)
    assert torch.equal(torch.tensor(once.chosen), torch.tensor(pair.rejected))


def invoke_pairs(run: DPOConfig, *arguments: object) -> str:
    result = succeed("pairs", run.run_dir, *arguments)
    return str(result.stdout)


@pytest.mark.defect("U4")
def test_the_command_writes_no_doubtful_correction(run: DPOConfig, tmp_path: Path) -> None:
    """Ten steps of a tiny model disagree with labels, which is no evidence against them."""
    file = tmp_path / "corrections.jsonl"
    text = invoke_pairs(run, "--write", file, "--shown", 3)
    assert not file.exists()
    assert "nothing to correct" in text
    assert "No pair is called likely flipped" in text
    assert "Held-out accuracy of the model: " in text


@pytest.mark.defect("U25")
def test_the_command_shows_texts_and_row_ids(run: DPOConfig) -> None:
    rows = [json.loads(line) for line in invoke_pairs(run, "--json").splitlines()]
    assert len(rows) == 40
    scores = [row["flip_score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert {row["place"] for row in rows} == set(range(40))
    assert all(row["row_id"] == f"row-{row['place']}" for row in rows)
    pair = prepare(run).train.take([rows[0]["place"]])[0]
    tokenizer = load_tokenizer(run.actor_train.tokenizer_path, None, False)
    start = tokenizer.decode(pair.chosen.tolist(), skip_special_tokens=True)[:60]
    assert start in invoke_pairs(run, "--shown", 3)


def test_planted_flips_calibrate_the_command(run: DPOConfig) -> None:
    invoke_pairs(run, "--plant", 0.2)
    known = json_of(run.run_dir / "pairs.json")
    assert 0 <= known["auc"] <= 1
    assert known["share"] == 0.2
    assert "Planted flips: AUC" in invoke_pairs(run)
    planted = read_ledger(run.run_dir.with_name("whole-planted"))
    assert planted.num_rows == 80


def test_corrections_are_written_for_likely_flipped_pairs(
    run: DPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = np.arange(40) < 3
    monkeypatch.setattr(Doctor, "findings", {"likely_flipped": flags})
    monkeypatch.setattr("rather.tools.report.pairs.MEANINGS", {"likely_flipped": "wrong"})
    file = tmp_path / "corrections.jsonl"
    printed, lines = invoke_pairs(run, "--write", file, "--action", "flip"), rows_of(file)
    ids = PairHistory.of(read_ledger(run.run_dir)).ids[flags]
    assert {line["id"] for line in lines} == {hex_id(int(each)) for each in ids}
    assert all(line["flip"] is True for line in lines)
    assert f"3 corrections in {file}" in printed


@pytest.mark.defect("E12")
def test_sources_are_columns_or_files(run: DPOConfig, tmp_path: Path) -> None:
    rows = rows_of(Path(run.output_dir).parent / "pairs.jsonl")
    file = write(tmp_path / "two.jsonl", *({**row, "source": "a"} for row in rows[:30]))
    held_out = write(tmp_path / "other.jsonl", *rows[30:])
    names = {"actor_train__data_args__file_name": str(file)}
    config = config_of(tmp_path, "split", **names, validation__data_args={"split": 5}, max_steps=1)
    assert DPOPipeline(config).run() == 0
    assert is_of_one_source(config.run_dir)
    names["validation__data_args__file_name"] = str(held_out)
    config = config_of(tmp_path, "two", **names, max_steps=1)
    assert DPOPipeline(config).run() == 0
    assert not is_of_one_source(config.run_dir)
    texts = PairTexts.of(config.run_dir)
    assert set(texts.source_of.values()) == {"a", str(held_out)}
    assert "a: No pair is called likely flipped" in invoke_pairs(config)
    conclusion = Doctor.of(config.run_dir).conclusion
    assert conclusion.startswith("the sources of the pairs are not known here: No pair")
