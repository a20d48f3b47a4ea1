"""Datasets of the hub by name, against a stand-in of its HTTP interface."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

from rather.config.load import load_found
from rather.config.paths import check_paths
from rather.data.hub import LONGEST_PATTERN, choose, download
from rather.data.template import load_tokenizer
from rather.errors import CheckpointError, ConfigError, DataError
from rather.files import ask_hub, check_hub_model
from rather.pipeline.pipeline import DPOPipeline
from tests.cells import read_table
from tests.commands.conftest import rather
from tests.hub import Hub, serving
from tests.tiny import make_config, make_model

REPO = "hf://datasets/shop/pairs"
CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - {split: train_prefs, path: data/train_prefs-*}
  - {split: test_prefs, path: [data/test_prefs-*]}
- config_name: all
  data_files: "**/*.jsonl"
---
# Pairs of a shop
"""
NAMES = {"data/train_prefs-00000-of-00002.jsonl": 12, "data/train_prefs-00001-of-00002.jsonl": 8,
         "data/test_prefs-00000-of-00001.jsonl": 5, "data/train_sft-00000-of-00001.jsonl": 3}  # fmt: skip


def rows(count: int, first: int = 0) -> bytes:
    made = range(first, first + count)
    lines = [{"prompt": f"Where is {i}?", "chosen": f"It is {i}.", "rejected": "No."} for i in made]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def files(first: int = 0) -> dict[str, bytes]:
    return {"README.md": CARD.encode(), "dataset_infos.json": b"{}"} | {
        name: rows(count, first + 100 * i) for i, (name, count) in enumerate(NAMES.items())
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The client read its environment long ago; the last test sets it for a new process."""
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
        huggingface_hub.close_session()
        yield server
    huggingface_hub.close_session()


def names(found: list[Path]) -> list[str]:
    return [file.name.split("-of-")[0] for file in found]


def test_a_split_is_downloaded_once_and_read_without_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.add("shop/pairs", files())
    address = f"{REPO}:train_prefs"
    found = download(address)
    assert (found[0], names(found[1])) == (commit, ["train_prefs-00000", "train_prefs-00001"])
    read = [request for request in hub.requests if "/resolve/" in request]
    assert not any("test_prefs" in request or "sft" in request for request in read)
    hub.requests.clear()
    assert download(address) == found
    assert hub.requests == ["GET /api/datasets/shop/pairs/revision/main"]
    newer = hub.add("shop/pairs", files(first=500))
    assert download(address)[0] == newer
    assert download(f"{REPO}@{commit}:train_prefs")[0] == commit
    hub.requests.clear()
    assert download(f"{REPO}@{commit}:train_prefs")[0] == commit
    assert hub.requests == [], "a commit never changes"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert download(address)[0] == newer
    assert f"using commit {newer}" in caplog.text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert download(address)[0] == newer
    with pytest.raises(DataError, match=f"{REPO}:test_prefs: .*HF_HUB_OFFLINE is set"):
        download(f"{REPO}:test_prefs")


def test_a_cache_that_lost_a_file_is_not_used(hub: Hub) -> None:
    hub.add("shop/pairs", files())
    _, found = download(f"{REPO}:train_prefs")
    found[1].unlink()
    assert download(f"{REPO}:train_prefs")[1] == found
    assert found[1].is_file()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hf://datasets/shop/none", "unknown, or private: check the name"),
        (f"{REPO}@nowhere", "unknown, or private"),
        (REPO, "no files of split 'train' \\(its splits are train_prefs, test_prefs\\)"),
        (f"{REPO}:some/train", "choose one of its configs.*they are default, all"),
        ("hf://pairs", "write hf://datasets/ORG/NAME"),
    ],
)
def test_what_cannot_be_found_is_one_message(hub: Hub, address: str, said: str) -> None:
    hub.add("shop/pairs", files())
    with pytest.raises(DataError, match=said):
        download(address)


# The files of a dataset | its card | the split that is named | the files that are chosen.
SPLITS = """
    train.jsonl test.jsonl | {} | | train.jsonl
    a/train.jsonl.gz a/test.jsonl.gz b/train.jsonl.gz | {} | | a/train.jsonl.gz b/train.jsonl.gz
    a/train.jsonl.gz b/train.jsonl.gz | {} | b/train | b/train.jsonl.gz
    default/train/0000.parquet default/test/0000.parquet | {} | test | default/test/0000.parquet
    pairs.json dataset_infos.json .x.json sub/.y.json | {} | | pairs.json
    shop-dev.json shop-training.json | {} | validation | shop-dev.json
    train_prefs-00000-of-00001.parquet train_sft-00000-of-00001.parquet | {} | train |
    one.json two.json | {} | |
    one.json two.json | {} | two.json | two.json
    x/one.json two.json | {configs: [{data_files: x/*}]} | | x/one.json
    x/one.json y/x/two.json | {configs: [{data_files: {train: '**/x/*'}}]} | | x/one.json y/x/two.json
    x/y/one.json | {configs: [{data_files: x/*}]} | |
    x/train.json y/train.json | {configs: [{data_dir: y}]} | | y/train.json
    a.json b.json | {configs: [{data_files: a.json}, {data_files: b.json, default: true}]} | | b.json
    train.json | {configs: nonsense} | | train.json
"""


@pytest.mark.parametrize(("files", "card", "split", "chosen"), read_table(SPLITS))
def test_the_files_of_a_split(files: str, card: str, split: str, chosen: str) -> None:
    if chosen:
        assert choose(files.split(), yaml.safe_load(card), split, "here") == chosen.split()
    else:
        with pytest.raises(DataError, match=files.split()[0]):
            choose(files.split(), yaml.safe_load(card), split, "here")


def test_the_commit_is_part_of_the_run(hub: Hub, tmp_path: Path) -> None:
    """A run refuses to resume with another commit, and says which one it had."""
    commit = hub.add("shop/pairs", files())
    make = {"max_steps": 1, "sequence_length": 128, "validation__data_args__file_name": None}

    def config(revision: str, steps: int) -> Any:
        name = {"actor_train__data_args__file_name": f"{REPO}{revision}:train_prefs"}
        return make_config(tmp_path, **{**make, "max_steps": steps}, **name)

    first = config("", 1)
    check_paths(first)
    assert DPOPipeline(first).run() == 0
    report = json.loads((first.run_dir / "data_report.json").read_text())["train"]
    assert (report["rows"], report["commits"]) == (20, {f"{REPO}:train_prefs": commit})
    newer = hub.add("shop/pairs", {**files(), "README.md": CARD.encode() + b"More.\n"})
    with pytest.raises(CheckpointError, match=rf"data commits: \['{commit}'\] then, \['{newer}'\]"):
        DPOPipeline(config("", 2)).run()
    assert DPOPipeline(config(f"@{commit}", 2)).run() == 0
    hub.requests.clear()
    with pytest.raises(ConfigError, match="is an address"):
        load_found(first.run_dir / "config.yaml")
    assert hub.requests == [], "a config that was found downloads nothing"


def test_the_command_asks_the_hub_for_nothing_else(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("shop/pairs", files())
    config = make_config(tmp_path, actor_train__data_args__file_name="x")
    text = f"pretrain: {config.pretrain}\nsequence_length: 128\noutput_dir: {tmp_path}/output\n"
    file = tmp_path / "dpo.yaml"
    file.write_text(text + f'actor_train: {{data_args: {{file_name: "{REPO}:all/train"}}}}\n')
    own = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "rather", "data", str(file)]
    done = subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"at commit {commit}" in " ".join(done.stdout.split())
    assert "28" in done.stdout
    assert all(" /api/datasets/shop/pairs/" in each or "/resolve/" in each for each in hub.requests)


@pytest.fixture
def silence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Calling it replaces the hub by a port that never answers, and returns the requests so far."""
    monkeypatch.setattr("rather.files.HUB_SECONDS", 0.2)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # restored, whatever the code sets
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)

        def asked() -> int:
            address = f"http://127.0.0.1:{server.getsockname()[1]}"
            monkeypatch.setattr(constants, "ENDPOINT", address)
            template = address + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            count = 0
            with suppress(BlockingIOError):
                while server.accept():
                    count += 1
            return count

        yield asked


@pytest.mark.parametrize("command", ["train", "data", "chat"])
def test_a_hub_that_never_answers_is_asked_once(
    silence: Callable[[], int], tmp_path: Path, command: str
) -> None:
    silence()
    (tmp_path / "pairs.jsonl").write_bytes(rows(3))
    file = tmp_path / "dpo.yaml"
    data = f"actor_train: {{data_args: {{file_name: {tmp_path}/pairs.jsonl}}}}\n"
    file.write_text(f"pretrain: shop/nosuch\noutput_dir: {tmp_path}/output\n{data}")
    done = rather(command, *(["shop/nosuch", "--prompt", "hello"] if command == "chat" else [file]))
    assert done.exit_code == 2, done.output
    assert done.stderr.splitlines() == [
        "rather: shop/nosuch: neither a local folder nor a model that the hub provides (the hub "
        "does not answer within 0.2 s: check the network, or HF_ENDPOINT)"
    ]
    assert silence() == 1
    assert not [*tmp_path.glob("output/[!.]*")], "a run folder was made"


def test_a_name_server_that_never_answers(silence: Callable[[], int]) -> None:
    never = Event()
    with pytest.raises(TimeoutError):
        ask_hub(never.wait)
    never.set()


def test_a_model_of_the_cache_is_used_if_the_hub_never_answers(
    hub: Hub, silence: Callable[[], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path / "model")
    hub.add("shop/model", {file.name: file.read_bytes() for file in model.iterdir()})
    load_tokenizer("shop/model")
    check_hub_model.cache_clear()
    silence()
    assert load_tokenizer("shop/model").eos_token
    assert silence() == 1, "the cache is enough for everything else"
    assert "only what is in its cache is used" in caplog.text


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("**/" * 12 + "no.jsonl", ""),
        ("**/" * 12 + "*.jsonl", "a.jsonl data/b.jsonl data/deep/c.jsonl"),
        ("*a*a*a*a*a*a*a*a*a*a*b.jsonl", ""),
        ("data/**", "data/b.jsonl data/deep/c.jsonl"),
        ("./data/?.jsonl", "data/b.jsonl"),
        ("data?b.jsonl", ""),
        ("data/*", "data/b.jsonl"),
        ("**c.jsonl", "data/deep/c.jsonl"),
        ("data/**/*.jsonl", "data/b.jsonl data/deep/c.jsonl"),
    ],
)
@pytest.mark.defect("R9")
def test_patterns_of_a_card_cross_folders_only_with_two_stars(pattern: str, fits: str) -> None:
    """The time is that of pattern times path, also for patterns made to take long."""
    long_one = f"{'deep/' * 30}{'a' * 60}.json"
    names = ["a.jsonl", "data/b.jsonl", "data/deep/c.jsonl", long_one]
    card = {"configs": [{"data_files": [{"split": "train", "path": [pattern, "no file"]}]}]}
    if fits:
        assert choose(names, card, "train", "here") == fits.split()
        return
    with pytest.raises(DataError, match="no files of split"):
        choose(names, card, "train", "here")


def test_a_pattern_of_a_card_has_a_limit() -> None:
    card = {"configs": [{"data_files": "*" * (LONGEST_PATTERN + 1)}]}
    with pytest.raises(DataError, match="a pattern of the dataset's card has 1001 characters"):
        choose(["a.jsonl"], card, "train", "here")
