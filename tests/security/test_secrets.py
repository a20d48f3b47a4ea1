"""No secret is written: canaries from every door are looked for in every byte that a run leaves or prints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rather.cli import main
from rather.cluster.health import Failure
from rather.cluster.worker import ActorWorker
from rather.config.keys import table
from rather.config.redaction import looks_secret, redact
from rather.run_folder.layout import Incidents
from tests.commands.conftest import exits, rather
from tests.security.conftest import Config
from tests.tiny import in_child

CANARIES = {
    "HF_TOKEN": "hf_CanaryCanaryCanary0001",
    "WANDB_API_KEY": "c0ffee00" * 5,
    "AWS_SECRET_ACCESS_KEY": "canary/aws+Secret0003",
    "MY_TOKEN": "canary-my-own-0004",
    "OPENAI_API_KEY": "sk-canary-0005-abcdefgh",
}
WRITTEN = {"db_password": "canary-password-0006", "SERVICE_SECRET": "canary-service-0007"}
OVERRIDDEN = {"OTHER_API_KEY": "canary-override-0008"}
ADDRESS = "canary-user:canary-word-0009"
ALL = [*CANARIES.values(), *WRITTEN.values(), *OVERRIDDEN.values(), "canary-word-0009"]


class Leaky(ActorWorker):
    """Says and raises what it should not."""

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.log.warning("using %s", os.environ["MY_TOKEN"])
        raise RuntimeError(
            f"401 for {os.environ['AWS_SECRET_ACCESS_KEY']} at https://{ADDRESS}@host: {ALL[:-1]}"
        )


@pytest.fixture
def secret_config(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Config]:
    before = dict(os.environ)
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)

    def write(**changes: Any) -> Path:
        environment = {
            "COPY_OF_TOKEN": "${oc.env:MY_TOKEN}",
            "PLAIN": "${oc.env:HF_TOKEN}",
            **WRITTEN,
        }
        return config(
            system_envs=environment,
            actor_train__system_envs={"ROLE_TOKEN": "${oc.env:WANDB_API_KEY}"},
            actor_train__data_args__cache_dir=str(tmp_path / "cache"),
            **changes,
        )

    yield write
    for name in os.environ.keys() - before.keys():  # a run sets system_envs in its own process
        del os.environ[name]


def leaks(folder: Path, printed: str) -> list[str]:
    """Where a canary stands. The YAML itself, which the user wrote, may hold its own."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "dpo.yaml"]
    assert len(files) > 5 or printed
    texts = {str(file): file.read_bytes() for file in files} | {"console": printed.encode()}
    names = {str(path): str(path).encode() for path in folder.rglob("*")}
    return [
        f"{where}: {canary}"
        for where, content in [*texts.items(), *names.items()]
        for canary in ALL
        if canary.encode() in content
    ]


OVERRIDE = [f"+system_envs.{name}={value}" for name, value in OVERRIDDEN.items()]


def test_a_run_writes_none(secret_config: Config, tmp_path: Path) -> None:
    said = exits(0, "train", secret_config(track_with="tensorboard", save_best=False), *OVERRIDE)
    assert list(tmp_path.rglob("events.out.*"))
    assert not leaks(tmp_path, said)


def test_a_failing_run_writes_none(secret_config: Config, tmp_path: Path) -> None:
    done = rather(
        "train",
        secret_config(actor_train__worker_cls="tests.security.test_secrets.Leaky"),
        *OVERRIDE,
    )
    assert isinstance(
        done.exception, RuntimeError
    )  # what the console shows of it is the next test's
    log = (tmp_path / "logs" / "run" / "driver.log").read_text()
    assert "Traceback" in log
    assert "401 for [hidden] at https://[hidden]@host" in log
    assert "using [hidden]" in log
    assert not leaks(tmp_path, done.output)


def command(arguments: list[str], console: Path) -> None:
    """As the shell starts it; the last word has whoever called it."""
    os.environ.update(CANARIES)
    with console.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["rather", *arguments]
    main()


def test_the_console_shows_none_when_a_run_crashes(secret_config: Config, tmp_path: Path) -> None:
    file = secret_config(actor_train__worker_cls="tests.security.test_secrets.Leaky")
    console = tmp_path / "console"
    assert in_child(command, ["train", str(file), *OVERRIDE], console) == 1
    shown = console.read_text()
    assert "Traceback" in shown
    assert "RuntimeError: 401 for [hidden]" in shown
    assert not leaks(tmp_path, shown)


@pytest.mark.parametrize(
    "command", [["show"], ["explain", "system_envs"], ["explain", "actor_train.system_envs"]]
)
def test_showing_a_config_shows_none(
    secret_config: Config, tmp_path: Path, command: list[str]
) -> None:
    said = exits(0, "config", *command, secret_config(), *OVERRIDE)
    assert "***" in said or "oc.env" in said
    assert not leaks(tmp_path, said)


def test_a_password_in_an_address_is_in_no_message(secret_config: Config, tmp_path: Path) -> None:
    for changes in (
        {"pretrain": f"https://{ADDRESS}@host/model"},
        {"actor_train__data_args__file_name": f"https://{ADDRESS}@host/pairs.jsonl"},
        {
            "ray__address": f"http://{ADDRESS}@host:1",
            "actor_train__device_mapping": [0, 1],
            "timeouts__connect": 1.0,
        },
    ):
        said = exits((2, 3), "train", secret_config(**changes))
        assert "[hidden]@host" in said
        assert not leaks(tmp_path, said)
        assert not leaks(tmp_path, rather("config", "show", tmp_path / "dpo.yaml").output)


def test_processes_of_a_run_have_none_in_their_arguments(
    secret_config: Config, started: list[Any]
) -> None:
    exits(0, "data", secret_config(), *OVERRIDE)
    assert started
    commands = str([command for command, _ in started])
    assert not [canary for canary in ALL if canary in commands]


def test_messages_of_a_worker_hold_none(secret_config: Config) -> None:
    try:
        raise RuntimeError(f"401 for {CANARIES['MY_TOKEN']}")
    except RuntimeError as error:
        failure = Failure.of(error)
    assert failure.text == "401 for [hidden]"
    assert CANARIES["MY_TOKEN"] not in failure.trace


def test_an_incident_holds_none(secret_config: Config, tmp_path: Path) -> None:
    Incidents(tmp_path).add("worker_lost", 3, cause=f"401 for {CANARIES['MY_TOKEN']}", losses=[1.5])
    [line] = (tmp_path / "incidents.jsonl").read_text().splitlines()
    assert json.loads(line)["cause"] == "401 for [hidden]"
    assert json.loads(line)["losses"] == [1.5]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://user:pa@ssw0rd-long@host/api", "https://[hidden]@host/api"),
        ("postgresql://user:p@@db, me@home", "postgresql://[hidden]@db, me@home"),
        ('["https://u:word@host","me@home"]', '["https://[hidden]@host","me@home"]'),
        ("http://host/api?token=canary0010&x=1#top", "http://host/api?token=[hidden]&x=1#top"),
        ("http://host?x=1&api_key=canary0011", "http://host?x=1&api_key=[hidden]"),
        (
            '"http://host/?X-Secret=canary0012&Password=canary0013"',
            '"http://host/?X-Secret=[hidden]&Password=[hidden]"',
        ),
        ("http://host/monkeys?tokens=3&page=2", "http://host/monkeys?tokens=3&page=2"),
    ],
)
def test_secrets_in_an_address_are_hidden(address: str, shown: str) -> None:
    assert redact(f"no answer from {address}") == f"no answer from {shown}"


def test_only_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAD_TOKEN", "an-ordinary-word")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    monkeypatch.setenv("SSH_KEY_FILE", "/somewhere/keys")
    text = "abc an-ordinary-word in /somewhere/keys on /disk-with-a-long-name, num_tokens 3, pad_token <pad>"
    assert redact(text) == text
    assert not [
        name
        for name in ("num_tokens", "pad_token", "use_tokenizer", "TOKEN_PATH")
        if looks_secret(name)
    ]


def test_no_key_of_a_config_is_taken_for_a_secret() -> None:
    """Its value would be missing in the run's own config, and the run could not be resumed."""
    paths = list(table())
    assert "timeouts.prepare" in paths
    assert [path for path in paths if looks_secret(path.rpartition(".")[2])] == []
