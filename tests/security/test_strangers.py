"""Folders of strangers, given to every command: nothing in them runs, nothing outside is written.

A stranger's run, model, adapter and dataset try to run code by every means that they have. Each
registered command has a case in COMMANDS; one without a case fails.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import typer.main
import yaml

from rather.cli import app
from rather.config.found import Trust
from rather.config.load import load_found
from rather.errors import ConfigError
from rather.run_folder.layout import OWN_FILES
from rather.tools import tune
from rather.tools.board.serve import ROUTES, Board, RequestRefused
from rather.tracking.json_lines import LEDGER
from tests.commands.conftest import exits, rather
from tests.security.conftest import Bait, change, run_values

CODE = {
    "auto_map": {
        "AutoConfig": "evil.EvilConfig",
        "AutoModelForCausalLM": "evil.EvilModel",
        "AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"],
    },
    "model_type": "evil",
}
CLASSES = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class EvilConfig(LlamaConfig):
    model_type = "evil"

class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig

class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""
KINDS = ("run", "linked", "model", "adapter", "data")
TRUSTED = "--trust-paths"  # else a stranger's run is refused before anything in it is opened
EACH = {  # a line with such a word is a line for each of these, with its number as {n}
    "{yaml}": [f"{{yaml:{kind}}}" for kind in KINDS],
    "{kind}": [f"{{{kind}}}" for kind in KINDS],
    "{folder}": ["{run}", "{linked}"],
    "{source}": ["{run}", "{run}/checkpoint-1", "{linked}", "{model}", "{adapter}"],
}
COMMANDS = """
    train {yaml}
    train {folder}
    sweep {yaml:run} beta=0.1,0.2
    sweep {yaml:model} beta=0.1,0.2
    rounds {yaml:run}
    rounds status {yaml:run}
    tune {yaml:run} --budget 1s --out tuned.yaml
    tune {yaml:model} --budget 1s --out tuned.yaml
    eval {yaml:run} --model {kind}
    demo --out {folder}
    data {yaml}
    data {yaml:data} --save {linked}
    plan {yaml}
    doctor {yaml}
    init {data} --model {model} --out init-1.yaml
    init {data} --model {good} --out init-2.yaml
    init {data} --model {good} --out {linked}/link.yaml
    migrate {run}/config.yaml --from roll --out new.yaml
    migrate {model}/config.json --from trl --out new2.yaml
    board {folder} --no-browser
    health {folder}
    report {folder}
    pairs {folder}
    pairs {folder} --plant 0.2 --trust-paths
    stop {folder}
    stop {yaml:run}
    save-now {folder}
    save-now {yaml:run}
    verify {folder}
    verify {run}/checkpoint-1
    chat {source} --prompt w1 --trust-paths
    judge {answers} --with {source} --trust-paths
    judge {answers} {data}/pairs.arrow --with http://127.0.0.1:1 --judge-model m
    generate {source} {data} --out answers-{n}.jsonl --max-new-tokens 4 --trust-paths
    score {source} {data} --trust-paths
    score {good} {data}
    export {source} out-{n} --trust-paths
    export {adapter} out-adapter --adapter
    push {folder} org/name --dry-run
    merge {adapter} --out merged-1
    merge {adapter} --base {model} --out merged-2
    config show {yaml}
    config explain beta {yaml}
    config schema
    config reference
    recipes list
    recipes show dpo
    recipes copy dpo {linked}/link.yaml
""".strip().splitlines()


def lines_of(command: str) -> list[str]:
    """Return the lines of a command, one for each of the folders that it is given."""
    lines = []
    for line in map(str.strip, COMMANDS):
        if f"{line} ".startswith(f"{command} "):
            word = next((word for word in EACH if word in line), "")
            for n, folder in enumerate(EACH.get(word, [""])):
                lines.append(line.replace(word, folder).replace("{n}", str(n)) if word else line)
    return lines


def registered(group: Any = None, before: str = "") -> Iterator[str]:
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from registered(command, f"{before}{name} ")
        else:
            yield f"{before}{name}"


def digests(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file): sha256(file.read_bytes()).hexdigest() for file in files}


class Strangers:
    """The folders of strangers, and the user's own YAML files that name them."""

    def __init__(self, home: Path, good: Path, lora: Path, finished: Path, python: str) -> None:
        self.home, self.python = home, python
        self.outside = home / "outside"
        self.outside.mkdir()
        self.folders = {name: home / "strangers" / name for name in KINDS} | {"good": good / "base"}
        self.model(good)
        self.adapter(lora)
        self.run(finished)
        self.data(good)
        self.yamls(good)

    def code(self, folder: Path) -> None:
        """What Python or a library might import there."""
        for name in ("evil", "sitecustomize", "conftest", "pairs", "__init__"):
            (folder / f"{name}.py").write_text(self.python + CLASSES)
        torch.save({"x": Bait(self.home / "code-ran-here")}, folder / "pytorch_model.bin")

    def model(self, good: Path) -> None:
        folder = Path(shutil.copytree(good / "base", self.folders["model"]))
        self.code(folder)
        for name in ("config.json", "tokenizer_config.json"):
            change(folder / name, **CODE)

    def adapter(self, lora: Path) -> None:
        folder = Path(shutil.copytree(lora, self.folders["adapter"]))
        base = str(self.folders["model"])
        change(folder / "adapter_config.json", base_model_name_or_path=base, auto_mapping=CODE)
        self.code(folder)

    def run(self, finished: Path) -> None:
        folder = Path(shutil.copytree(finished, self.folders["run"]))
        self.code(folder)
        values = yaml.safe_load((folder / "config.yaml").read_text())
        values["pretrain"] = values["actor_train"]["model_args"]["model_name_or_path"] = str(
            self.folders["model"]
        )
        values["system_envs"] = {"PYTHONSTARTUP": str(folder / "evil.py")}
        for role in ("actor_train", "reference"):
            values[role]["model_args"]["trust_remote_code"] = True
            values[role]["worker_cls"] = "evil.EvilModel"
        (folder / "config.yaml").write_text(yaml.safe_dump(values))
        shutil.rmtree(folder / "model")  # its checkpoint is used
        linked = Path(shutil.copytree(finished, self.folders["linked"]))
        for name in (*OWN_FILES, ".lock", "link.yaml"):
            (self.outside / name).write_text("mine\n")
            (linked / name).unlink(missing_ok=True)
            (linked / name).symlink_to(self.outside / name)
        shutil.rmtree(linked / "model")
        (linked / "model").symlink_to(self.outside)

    def data(self, good: Path) -> None:
        folder = self.folders["data"]
        folder.mkdir()
        self.code(folder)
        shutil.copy(good / "pairs.jsonl", folder / "pairs.arrow")
        (folder / "answers.jsonl").write_text('{"prompt": "w1", "responses": ["w2"]}\n')
        (folder / "state.json").write_text('{"_data_files": [{"filename": "../model/evil.py"}]}')

    def yamls(self, good: Path) -> None:
        for kind, folder in self.folders.items():
            held_out = {"data_args": {"file_name": str(good / "pairs.jsonl")}}
            values = run_values(good, self.home) | {"track_with": None, "validation": held_out}
            if kind in ("run", "linked"):
                values |= {"exp_name": folder.name, "output_dir": str(folder.parent)}
            else:
                values |= {"exp_name": "mine", "max_steps": 1}
            if kind == "model":
                values["pretrain"] = str(folder)
            elif kind == "adapter":
                values["actor_train"]["model_args"] = {"adapter_name_or_path": str(folder)}
            elif kind == "data":
                values["actor_train"]["data_args"]["file_name"] = str(folder)
            (self.home / f"{kind}.yaml").write_text(yaml.safe_dump(values))

    def words(self, words: list[str]) -> list[str]:
        texts = {f"{{{name}}}": str(folder) for name, folder in self.folders.items()}
        texts["{answers}"] = str(self.folders["data"] / "answers.jsonl")
        texts |= {f"{{yaml:{name}}}": str(self.home / f"{name}.yaml") for name in self.folders}
        for text, value in texts.items():
            words = [word.replace(text, value) for word in words]
        return words


@pytest.fixture
def strangers(
    tmp_path: Path,
    good: Path,
    lora: Path,
    finished: Path,
    python: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Strangers:
    found = Strangers(tmp_path, good, lora, finished, python)
    for folder in ("run", "data"):
        monkeypatch.syspath_prepend(str(found.folders[folder]))  # even if Python would find it
    monkeypatch.setattr(Board, "serve_forever", ask_everything)
    for name in ("RANGE", "AROUND"):
        monkeypatch.setattr(tune, name, (1.0,))  # two runs instead of fourteen
    return found


def ask_everything(board: Board) -> None:
    ids = [row["id"] for row in board.runs.rows()]
    for answer in ROUTES.values():
        try:
            answer(board, {"run": ids[:1], "runs": ids, "metric": ["loss"]})
        except RequestRefused:
            continue


def test_every_registered_command_has_a_case() -> None:
    commands = tuple(f"{command} " for command in registered())
    assert all(lines_of(command.strip()) for command in commands)
    assert all(f"{line.strip()} ".startswith(commands) for line in COMMANDS)


@pytest.mark.parametrize("command", registered())
def test_nothing_of_a_stranger_runs_or_writes_outside(
    strangers: Strangers, command: str, subtests: Any
) -> None:
    before = digests(strangers.outside)
    for line in lines_of(command):
        with subtests.test(line=line):
            done = rather(*strangers.words(line.split()))
            assert done.exception is None or isinstance(done.exception, SystemExit), line
            assert done.exit_code in (*range(10), 130), (line, done.output)
            assert "Traceback" not in done.output, line
    assert digests(strangers.outside) == before


def test_what_the_folders_hold_would_run_if_it_were_trusted(
    strangers: Strangers, marker: Path
) -> None:
    """Else the tests above could not fail. --trust-remote-code never asks on the console."""
    source, words = strangers.folders["run"], ["--trust-remote-code", TRUSTED]
    for command in (["chat", source, "--prompt", "w1"], ["export", source, "trusted"]):
        assert "Do you wish to run" not in exits(0, *command, *words)
        assert marker.exists(), command
        marker.unlink()


def test_a_found_config_switches_nothing_on(
    strangers: Strangers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "canary-0001")
    file = strangers.folders["run"] / "config.yaml"
    values = yaml.safe_load(file.read_text())
    values["exp_name"] = "${oc.env:MY_TOKEN}"
    values["pretrain"] = "${oc.env:${system_envs.NAME}}"
    # A section may be a copy of something in one that takes any key.
    hidden = {**values["reference"]["model_args"], "trust_remote_code": True}
    values["system_envs"] |= {"NAME": "MY_TOKEN", "x": hidden}
    values["reference"]["model_args"] = "${system_envs.x}"
    values["output_dir"] = values["actor_train"]["data_args"]["cache_dir"] = "/"
    values |= {"logging_dir": "/", "track_with": "wandb", "checkpoint_config": {"output_dir": "/"}}
    values["reference"]["cache"]["path"] = "/"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"pretrain: .* is not filled in from the environment"):
        load_found(file)
    values["pretrain"] = str(strangers.folders["good"])
    file.write_text(yaml.safe_dump(values))
    config = load_found(file, Trust(paths=True))
    assert config.exp_name == "run"  # the folder's
    assert "canary" not in str(config.model_dump())
    assert config.system_envs == {}
    assert config.track_with is None
    folders = config.log_dir, config.tracker_dir, config.run_dir, config.checkpoint_copy_dir
    assert all(folder.is_relative_to(file.parents[1]) for folder in folders)
    caches = config.data_cache_dir(config.actor_train.data_args), config.reference_cache_dir
    assert all(folder.is_relative_to(file.parents[1]) for folder in caches)
    for role in (config.actor_train, config.reference):
        assert not role.model_args.trust_remote_code
        assert "evil" not in str(role.worker_cls)
    for more in ("defaults: [evil]\n", "hydra: {run: {dir: .}}\n"):
        file.write_text(yaml.safe_dump(values) + more)
        assert load_found(file, Trust(paths=True)).model_dump() == config.model_dump()


def test_a_found_config_does_not_fill_the_memory(strangers: Strangers) -> None:
    """An adapter of this rank would need 4 GiB for every layer, before its weights are read."""
    run = strangers.folders["run"]
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["pretrain"] = str(strangers.folders["good"])
    values["actor_train"]["model_args"] = {"lora_rank": 9_000_000}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert "lora_rank: 9000000 must be at most" in exits(2, "chat", run, "--prompt", "w1", TRUSTED)


def test_a_ledger_of_another_kind(strangers: Strangers) -> None:
    run = strangers.folders["run"]
    file = run / LEDGER
    whole = file.read_bytes()
    with pa.ipc.new_stream(str(run / "other"), pa.schema([("id", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([["a"]], names=["id"]))
    for content in (b"", b"\xff" * 300, whole[:100], (run / "other").read_bytes()):
        file.write_bytes(content)
        assert "ledger" in exits(2, "pairs", run)
    file.write_bytes(whole)
    (run / "pairs.json").write_text('{"cut": []}')
    exits(0, "pairs", run)


def test_migrate_does_not_copy_trust(tmp_path: Path) -> None:
    source = tmp_path / "trl.yaml"
    source.write_text("model_name_or_path: a/b\nloss_type: sigmoid\ntrust_remote_code: true\n")
    done = rather("migrate", source, "--from", "trl", "--out", tmp_path / "dpo.yaml")
    (written,) = tmp_path.glob("dpo*.yaml")  # without data and learning rate it is incomplete
    text = written.read_text()
    assert done.exit_code == 2, done.output
    assert "trust_remote_code" not in yaml.safe_load(text).get("actor_train", {}).get(
        "model_args", {}
    )
    assert "left out: trust_remote_code = true; it runs Python code" in text
