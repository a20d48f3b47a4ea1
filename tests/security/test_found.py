"""The config.yaml of a stranger's run folder: each key in turn tries to lead out of the folder.

It may hold an address, an environment variable, a path outside or a link to one. No command
connects anywhere, opens or writes anything outside, or starts more processes than it always does.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from rather.config.found import signed
from rather.config.keys import table
from rather.config.load import load_config, load_found
from rather.config.values import accepted_types
from rather.errors import ConfigError, RatherError
from tests.commands.conftest import exits, rather
from tests.data.files import save_to_disk

SECRET = "canary-of-the-environment"
PRIVATE = "canary-of-a-private-file"
NOT_READ = """
    exp_name output_dir logging_dir overwrite compile logging_steps
    eval_prompts.prompts eval_prompts.file eval_prompts.max_new_tokens
    eval_prompts.judge.with eval_prompts.judge.model eval_prompts.judge.template
    eval_prompts.judge.max_tokens eval_prompts.judge.columns eval_prompts.judge.rule_timeout
    forgetting forgetting_limit
    drift_limit save_steps max_ckpt_to_keep
    resume_from_checkpoint resume.allow checkpoint_config.type checkpoint_config.output_dir
    checkpoint_config.verify checkpoint_config.async_save checkpoint_config.max_missed_saves
    save_best train_batch_size val_batch_size track_with tracker_kwargs.log_dir
    tracker_kwargs.project tracker_kwargs.name tracker_kwargs.tags tracker_kwargs.notes
    tracker_kwargs.mode tracker_kwargs.uri pair_ledger report_html ray.address
    timeouts.connect timeouts.link timeouts.start timeouts.first_step timeouts.step timeouts.eval
    timeouts.save timeouts.prepare max_failures failure_backoff ref_tp system_envs num_nodes
    num_gpus_per_node actor_train.worker_cls actor_train.engine
    actor_train.model_args.trust_remote_code actor_train.model_args.freeze
    actor_train.model_args.vision_cache actor_train.model_args.vision_cache_gb
    actor_train.model_args.lora_config actor_train.model_args.disable_gradient_checkpointing
    actor_train.strategy_args.strategy_name actor_train.strategy_args.strategy_config
    actor_train.strategy_args.tp_size actor_train.strategy_args.pp_size
    actor_train.strategy_args.cp_size actor_train.strategy_args.ep_size
    actor_train.strategy_args.gpu_memory_utilization actor_train.device_mapping
    actor_train.infer_batch_size actor_train.max_tokens_per_microbatch_in_infer
    actor_train.max_tokens_per_microbatch_in_train actor_train.system_envs
    actor_train.data_args.dataset_dir actor_train.data_args.preprocessing_num_workers
    actor_train.data_args.cache_dir actor_train.data_args.image_dir
    validation.data_args.image_dir reference.worker_cls reference.model_args.trust_remote_code
    reference.model_args.disable_gradient_checkpointing reference.strategy_args.strategy_name
    reference.strategy_args.strategy_config reference.strategy_args.tp_size
    reference.strategy_args.pp_size reference.strategy_args.cp_size
    reference.strategy_args.ep_size reference.strategy_args.gpu_memory_utilization
    reference.device_mapping reference.infer_batch_size
    reference.max_tokens_per_microbatch_in_infer reference.system_envs reference.cache.path
    reference.offload validation.data_args.dataset_dir
    validation.data_args.preprocessing_num_workers validation.data_args.cache_dir
    spike.window spike.sigma spike.action
""".split()  # noqa: SIM905 - a table of names; spike is kept as a whole
# Keys that are kept with any text: names of columns, losses and layers, and text between answers.
ONLY_TEXT = """
    pref_loss chosen_key rejected_key metric_for_best_model revision format columns separator
    encoding lora_target modules_to_save additional_target lr_scheduler_kwargs loss_args
    init_lora_weights default_system chat_template_kwargs
""".split()  # noqa: SIM905


def leaves() -> list[str]:
    return [path for path, key in table().items() if not key.section]


def takes_text(path: str) -> bool:
    """Whether a key holds a path, an address or any other free text."""
    section, _, name = path.rpartition(".")
    owner = table()[section].section if section else None
    if owner is None:
        from rather.config.run_config import DPOConfig

        owner = DPOConfig
    kinds = accepted_types(owner.model_fields[name].annotation)
    return any(kind in (str, Any) or "str" in str(kind) for kind in kinds)


TEXTS = [path for path in leaves() if takes_text(path)]


class Watch:
    """Connections, processes and opened files since the last look. An audit hook stays for good."""

    def __init__(self) -> None:
        self.on, self.outside = False, "/"
        self.connections: list[object] = []
        self.processes: list[object] = []
        self.opened: list[str] = []
        sys.addaudithook(self.note)

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in ("socket.connect", "socket.getaddrinfo"):
            if args[-1 if event == "socket.connect" else 0] != "":
                self.connections.append(args[1:])
        elif event in ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"):
            self.processes.append(args[:1])
        elif event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(args[0]))
            if path.startswith(self.outside):
                self.opened.append(path)

    def saw_nothing(self, server: Server) -> bool:
        return not (self.opened or self.connections or server.connections)

    @contextmanager
    def __call__(self, outside: Path) -> Iterator[None]:
        self.outside = f"{os.path.realpath(outside)}/"
        self.connections, self.processes, self.opened = [], [], []
        self.on = True
        try:
            yield
        finally:
            self.on = False


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


class Server:
    """Counts who connects: Ray and other native code pass no audit hook."""

    def __init__(self) -> None:
        self.connections = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        while True:
            try:
                self.socket.accept()[0].close()
            except OSError:
                return
            self.connections += 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{found.address}")
    monkeypatch.setenv("DATABASE_URL", SECRET)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    yield found
    found.socket.close()


class Folder:
    """A stranger's run with its own model and pairs, and the private files of its user."""

    def __init__(self, home: Path, good: Path, finished: Path) -> None:
        self.home, self.outside = home, home / "private"
        self.run = Path(shutil.copytree(finished, home / "output" / "run"))
        shutil.copytree(good / "base", self.run / "base")
        shutil.copy(good / "pairs.jsonl", self.run / "pairs.jsonl")
        shutil.copytree(good / "base", self.outside / "base")
        row = {"prompt": PRIVATE, "chosen": PRIVATE, "rejected": "w1"}
        (self.outside / "file.jsonl").write_text(json.dumps(row) + "\n")
        (self.outside / "notes.txt").write_text(PRIVATE)
        (self.run / "link").symlink_to(self.outside / "file.jsonl")
        (self.run / "linked").symlink_to(self.outside / "base")
        mine = {"pretrain": str(good / "base"), "sequence_length": 64, "exp_name": "mine"}
        mine |= {"output_dir": str(home / "output")}
        mine |= {"actor_train": {"data_args": {"file_name": str(good / "pairs.jsonl")}}}
        (home / "mine.yaml").write_text(yaml.safe_dump(mine))
        self.values: dict[str, Any] = {"sequence_length": 64, "max_steps": 1}
        self.change("pretrain", str(self.run / "base"))
        self.change("actor_train.data_args.file_name", str(self.run / "pairs.jsonl"))
        self.change("actor_train.training_args.per_device_train_batch_size", 8)
        self.change("actor_train.training_args.gradient_accumulation_steps", 1)

    def change(self, path: str, value: Any) -> None:
        *parents, name = path.split(".")
        section = self.values
        for parent in parents:
            section[parent] = section.get(parent) or {}
            section = section[parent]
        section[name] = value

    def write(self, changes: dict[str, Any] | None = None) -> Path:
        """Write the config with some keys changed."""
        file = self.run / "config.yaml"
        whole = json.loads(json.dumps(self.values))
        for path, value in (changes or {}).items():
            is_mapping = path.endswith((".columns", "envs", "_config", "_args"))
            self.change(path, {"a": value} if is_mapping else value)
        file.write_text(yaml.safe_dump(self.values))
        self.values = whole
        return file

    def hostile(self, path: str, server: Server) -> list[str]:
        """Return everything that could lead out of the folder as the value of a key."""
        is_model = path.endswith(("pretrain", "_or_path"))
        return [
            server.address if path == "ray.address" else "s3:bucket/x",
            "${oc.env:DATABASE_URL}",
            str(self.outside / ("base" if is_model else "file.jsonl")),
            str(self.run / ("linked" if is_model else "link")),
        ]

    def attempts(self, server: Server) -> Iterator[dict[str, str]]:
        """Yield changes that are worth a whole command.

        A name is refused, so each is tried in turn with each value. Keys that are not read do not
        hide each other and are tried together. Of harmless texts, each has one of the values.
        """
        names = [path for path in TEXTS if path.rpartition(".")[2] not in ONLY_TEXT]
        for kind in range(4):
            ignored = [path for path in names if path in NOT_READ]
            yield {path: self.hostile(path, server)[kind] for path in ignored}
            for path in names:
                if path not in NOT_READ:
                    yield {path: self.hostile(path, server)[kind]}
        for place, path in enumerate(path for path in TEXTS if path not in names):
            yield {path: self.hostile(path, server)[place % 4]}

    def digests(self) -> dict[str, bytes]:
        """Return everything outside of the folders that a command may write to."""
        files = (file for file in self.home.rglob("*") if file.is_file() and not file.is_symlink())
        allowed = (self.home / "output", self.home / "out")
        return {str(f): f.read_bytes() for f in files if not any(map(f.is_relative_to, allowed))}


@pytest.fixture
def folder(tmp_path: Path, good: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path, good, finished)


def test_every_key_is_allowed_or_not_read() -> None:
    """A new key is on one of both lists; one that takes any text must be harmless or a name."""
    from rather.config.found import ALLOWED, NAMES

    removed = "parity"  # read to refuse a run that was trained with it
    assert {*ALLOWED, *NOT_READ} == {*leaves(), "spike", removed}
    assert not {*ALLOWED} & {*NOT_READ}
    texts = {path.rpartition(".")[2] for path in ALLOWED if path in TEXTS}
    assert texts == {*NAMES, *ONLY_TEXT}


CODE: dict[str, Any] = {
    "actor_train.model_args.trust_remote_code": True,
    "reference.model_args.trust_remote_code": True,
    "actor_train.worker_cls": "evil.Worker",
    "system_envs": {"LD_PRELOAD": "evil.so"},
    "actor_train.system_envs": {"LD_PRELOAD": "evil.so"},
    "eval_prompts": {"file": "output/run/pairs.jsonl", "judge": {"with": "evil.py:score"}},
}


@pytest.mark.defect("A9")
@pytest.mark.parametrize("key", CODE)
def test_a_config_in_a_run_folder_runs_no_code(folder: Folder, key: str) -> None:
    """Not even if it is named as a config, unless the command line has the key, or the run is one's own."""
    (folder.run / "evil.py").write_text("def score(prompt, answer): return 1\n")
    folder.change(key, CODE[key])
    text = yaml.safe_dump(folder.values)
    for file in (folder.run / "config.yaml", folder.run / "mine.yaml"):
        file.write_text(text)
        for command in ("plan", "data", "train") if key.startswith("actor_train.m") else ("plan",):
            said = exits(2, command, file)
            assert f"and {file} came with a run folder" in said.replace("\n", "")
        assert "came with a run folder" in rather("rounds", file).stderr
    if "." in key:
        assert load_config(folder.run / "mine.yaml", [f"{key}={json.dumps(CODE[key])}"])
    (folder.run / "config.yaml").write_text(signed(text))
    assert load_config(folder.run / "config.yaml")
    assert load_config(folder.run / "mine.yaml")
    (folder.run / "metrics.jsonl").unlink()
    (folder.run / "config.yaml").unlink()
    assert load_config(folder.run / "mine.yaml"), "a folder of configs"


@pytest.mark.defect("X1")
@pytest.mark.defect("X3")
@pytest.mark.defect("X21")
def test_no_key_leads_out(folder: Folder, server: Server, watch: Watch) -> None:
    """The one function that decides for every command, with each key in turn."""
    attempts = [(path, value) for path in TEXTS for value in folder.hostile(path, server)]
    for path, value in attempts:
        file = folder.write({path: value})
        with watch(folder.outside):
            try:
                values = str(load_found(file).model_dump())
            except RatherError as error:
                values = str(error) if SECRET in str(error) else ""
        assert SECRET not in values, (path, value)
        if path.rpartition(".")[2] not in ONLY_TEXT:
            assert str(value) not in values, (path, value)
        assert watch.saw_nothing(server), (path, value)


@pytest.mark.defect("X1")
@pytest.mark.parametrize("names", [("s3:", "bucket/x"), ("hf:", "datasets/a/b"), ("s3:/", "/b/x")])
def test_an_address_in_two_halves(
    folder: Folder, server: Server, watch: Watch, names: tuple[str, str]
) -> None:
    folder.change("actor_train.data_args.dataset_dir", names[0])
    refused = "is outside" if names[1].startswith("/") else "is an address"
    with pytest.raises(ConfigError, match=refused):
        load_found(folder.write({"actor_train.data_args.file_name": names[1]}))
    value = f"{names[1]}-${{oc.env:DATABASE_URL}}"
    file = folder.write({"actor_train.data_args.file_name": value})
    with watch(folder.outside):
        said = exits(0, "pairs", file.parent)
    assert "the texts of the pairs are not available" in said
    assert SECRET not in said
    assert watch.saw_nothing(server)


@pytest.mark.parametrize("name", ["a\0b", "~nobody-has-this-name/x", "x" * 5000])
def test_what_is_not_a_path_is_refused_in_one_line(folder: Folder, name: str) -> None:
    keys = ("pretrain", "global_template", "actor_train.data_args.file_name")
    for key in keys:
        file = folder.write({key: f"{name}.jinja" if "template" in key else name})
        with pytest.raises(ConfigError, match=rf"{key}: .* (is not a path|is outside of the run)"):
            load_found(file)


@pytest.mark.parametrize(
    "text",
    [
        "x: !!python/object/apply:os.system [id]",
        "actor_train: {data_args: {columns: {2024-01-01: x}}}",
        "actor_train: {data_args: {chat_template_kwargs: {x: .nan}}}",
        "actor_train: [1]",
    ],
)
@pytest.mark.parametrize("command", ["pairs", "export", "push"])
def test_a_config_with_other_values_is_refused_in_one_line(
    folder: Folder, text: str, command: str
) -> None:
    if command != "push":
        shutil.rmtree(folder.run / "model")
    (folder.run / "config.yaml").write_text(text)
    words = {"export": ["export", folder.run, folder.home / "out"],
             "push": ["push", folder.run, "org/name", "--dry-run"]}  # fmt: skip
    exits((0, 2, 3), *words.get(command, [command, folder.run]))


@pytest.mark.parametrize("base", ["outside", "hub", "a list", "not named"])
def test_a_pushed_card_reads_no_private_file(
    folder: Folder, server: Server, watch: Watch, base: str
) -> None:
    """Its licence would be read from the card of a base that the stranger names."""
    (folder.outside / "base" / "README.md").write_text(f"---\nlicense: {PRIVATE}\n---\n")
    named = {"outside": str(folder.outside / "base"), "hub": "org/name", "a list": ["a"]}
    folder.write({"pretrain": named.get(base)})
    push = ("push", folder.run, "org/name", "--dry-run")
    with watch(folder.outside):
        said = exits(0 if base == "not named" else 2, *push)
    assert PRIVATE not in said
    assert watch.saw_nothing(server)
    if base == "outside":
        assert PRIVATE in exits(0, *push, "--trust-paths")
        (folder.run / "base" / "README.md").symlink_to(folder.outside / "base" / "README.md")
        folder.write({"pretrain": str(folder.run / "base")})
        assert "is a link to" in exits(2, *push)
    (folder.run / "data_report.json").write_text('{"train": [], "evals": 5}')
    exits(2, *push, "--trust-paths")


LINKED = {
    "push": "push {run} org/name --dry-run",
    "chat": "chat {run} --prompt w1",
    "export": "export {run} out",
    "generate": "generate {run} {run}/pairs.jsonl --out answers.jsonl",
}


@pytest.mark.parametrize("command", [*LINKED, "board"])
def test_a_result_that_is_a_linked_folder_is_not_opened(
    folder: Folder, watch: Watch, command: str
) -> None:
    """A private model would be answered from, exported, or even uploaded."""
    from rather.tools.board.session import Session

    shutil.rmtree(folder.run / "model")
    (folder.run / "model").symlink_to(folder.outside / "base")
    folder.write()
    with watch(folder.outside):
        if command == "board":
            with pytest.raises(ConfigError, match="is a link to"):
                Session(folder.run).sources()
        else:
            assert "is a link to" in exits(2, *LINKED[command].format(run=folder.run).split())
    assert watch.opened == []


@pytest.mark.parametrize("name", ["README.md", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("command", ["push", "score"])
def test_no_linked_file_of_a_model_is_opened(
    folder: Folder, watch: Watch, command: str, name: str
) -> None:
    model = folder.run / ("model" if command == "push" else "base")
    if command == "score":
        shutil.rmtree(folder.run / "model")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(folder.outside / "notes.txt")
    folder.write()
    line = LINKED["push"] if command == "push" else "score {run} {run}/pairs.jsonl"
    with watch(folder.outside):
        code = 0 if (command, name) == ("score", "README.md") else 2
        said = exits(code, *line.format(run=folder.run).split())
    assert watch.opened == []
    assert PRIVATE not in said


def test_a_folder_of_parts_inside_the_run_does_not_lead_out(folder: Folder) -> None:
    part, data = folder.outside / "part", folder.run / "data"
    data.mkdir()
    save_to_disk(part, [dict.fromkeys(("prompt", "chosen", "rejected"), PRIVATE)] * 2)
    (data / "part-00000").symlink_to(part)
    folder.write({"actor_train.data_args.file_name": str(data)})
    assert "part-00000: is a link to" in rather("pairs", folder.run).stderr
    files = (folder.home / "output").rglob("*")
    files = [file for file in files if file.is_file() and not file.is_symlink()]
    assert not [file for file in files if PRIVATE.encode() in file.read_bytes()]


@pytest.mark.defect("X2")
@pytest.mark.parametrize("name", [".cache", ".cache/data", ".cache/vision"])
def test_a_linked_cache_is_not_written(folder: Folder, name: str) -> None:
    place = folder.home / "output" / name
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(folder.outside)
    before = folder.digests()
    said = rather("pairs", folder.write().parent).stderr
    assert folder.digests() == before
    assert f"{place}: is a link" in said
    place.unlink()
    assert "not available" not in rather("pairs", folder.run).stderr


@pytest.mark.defect("X3")
@pytest.mark.defect("X4")
def test_no_ray_and_no_processes(folder: Folder, server: Server, watch: Watch) -> None:
    folder.change("ray.address", server.address)
    folder.change("actor_train.device_mapping", list(range(8)))
    folder.change("actor_train.data_args.preprocessing_num_workers", 3000)
    config = load_found(folder.write())
    assert (config.ray.address, config.actor_train.devices) == (None, [0])
    assert config.global_batch() == 64, "a step has as many pairs as on the eight devices"
    with watch(folder.outside):
        assert "not available" not in exits(0, "pairs", folder.run)
    assert len(watch.processes) <= 4
    assert server.connections == 0


@pytest.mark.defect("X21")
def test_a_private_file_is_not_exported_as_template(folder: Folder) -> None:
    shutil.rmtree(folder.run / "model")
    notes = str(folder.outside / "notes.txt")
    file = folder.write({"actor_train.data_args.template": notes})
    said = exits(2, "export", file.parent, folder.home / "out")
    assert "template: " in said
    assert "--trust-paths" in said
    assert not (folder.home / "out").exists()


def test_your_own_run_is_read_as_it_was_started(folder: Folder, finished: Path) -> None:
    """Its config.yaml names model and pairs outside of the folder, and is signed."""
    from rather.config.found import is_signed

    text = (finished / "config.yaml").read_text()
    assert is_signed(text)
    names = load_found(finished / "config.yaml")
    assert not Path(names.actor_train.model_path).is_relative_to(finished)
    (folder.run / "config.yaml").write_text(text)  # also after the folder was moved
    assert load_found(folder.run / "config.yaml").actor_train.model_path == (
        names.actor_train.model_path
    )
    (folder.run / "config.yaml").write_text(text + "beta: 0.2\n")
    with pytest.raises(ConfigError, match="--trust-paths"):
        load_found(folder.run / "config.yaml")


def test_nobody_else_has_the_key(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rather.config.found import is_signed, signed

    text = (finished / "config.yaml").read_text()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert not is_signed(text)
    assert is_signed(signed("a: 1\n"))
    (key,) = (tmp_path / "other" / "rather").iterdir()
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    assert not is_signed(signed("a: 1\n")), "others could have read it"
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/none")
    assert signed("a: 1\n") == "a: 1\n"


COMMANDS = {
    "pairs": "pairs {run}",
    "plant": "pairs {run} --plant 0.2",
    "chat": "chat {run} --prompt w1 --max-new-tokens 2",
    "score": "score {run}/checkpoint-1 {run}/pairs.jsonl",
    "export": "export {run}/checkpoint-1 {home}/out",
    "verify": "verify {run}",
    "health": "health {run}",
    "report": "report {run}",
    "stop": "stop {run}",
    "save-now": "save-now {run}",
}


@pytest.mark.wide
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_is_led_out(folder: Folder, server: Server, watch: Watch, command: str) -> None:
    """All commands that are given a run folder, with every key that takes text."""
    shutil.rmtree(folder.run / "model")  # its checkpoint is used
    before = folder.digests()
    for changes in folder.attempts(server):
        folder.write(changes)
        with watch(folder.outside):
            done = rather(*COMMANDS[command].format(run=folder.run, home=folder.home).split())
        where = (changes, done.output)
        assert done.exception is None or isinstance(done.exception, SystemExit), where
        assert SECRET not in done.output, where
        assert PRIVATE not in done.output, where
        assert watch.saw_nothing(server), where
        assert len(watch.processes) <= 8, where
        for made in (folder.home / "out", folder.home / "output" / "run-planted"):
            for file in made.rglob("*"):
                assert not file.is_file() or PRIVATE.encode() not in file.read_bytes(), where
            shutil.rmtree(made, ignore_errors=True)
        assert folder.digests() == before, where


@pytest.mark.wide
def test_the_board_is_not_led_out(folder: Folder, server: Server, watch: Watch) -> None:
    """Its pair inspector opens data and models of the run."""
    from rather.tools.board.session import Session

    before, pairs_shown = folder.digests(), 0
    for changes in folder.attempts(server):
        folder.write(changes)
        with watch(folder.outside):
            try:
                shown = str(Session(folder.run).pair("train", 0))
                pairs_shown += 1
            except RatherError as error:
                shown = str(error)
        assert SECRET not in shown, changes
        assert PRIVATE not in shown, changes
        assert watch.saw_nothing(server), changes
    assert folder.digests() == before
    assert pairs_shown >= 4, "keys that are not read hinder nothing"
