"""A YAML names values: nothing in it is imported, constructed or called while it is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.commands.conftest import exits
from tests.migrate.convert import of
from tests.security.conftest import Config

TOUCH = "touch code-ran-here"
ALIASES = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
HOSTILE = {  # what is written from line 3 on -> the key and the place that are named
    f"seed: !!python/object/apply:os.system ['{TOUCH}']\n": "dpo.yaml:3: .*python/object/apply",
    "seed: !!python/name:os.system\n": "dpo.yaml:3: .*python/name",
    "seed: !!python/module:evil\n": "dpo.yaml:3: .*python/module",
    f"seed: !evil ['{TOUCH}']\n": "dpo.yaml:3: .*!evil",
    f"actor_train:\n  _target_: os.system\n  _args_: ['{TOUCH}']\n": r"actor_train\._target_ \(dpo.yaml:4\): ",
    f"system_envs:\n- _target_: os.system\n  command: {TOUCH}\n": r"system_envs\.\[\]\._target_ \(dpo.yaml:4\): ",
    f"exp_name: ${{eval:__import__('os').system('{TOUCH}')}}\n": r"exp_name \(dpo.yaml:3\): token recognition error",
    f"exp_name: ${{sh:{TOUCH}}}\n": r"exp_name \(dpo.yaml:3\): Unsupported interpolation type sh",
    f"actor_train: {{device_mapping: \"__import__('os').system('{TOUCH}')\"}}\n":
        r"actor_train.device_mapping \(dpo.yaml:3\): .* cannot be used",
    f"beta: __import__('os').system('{TOUCH}')\n": r"beta \(dpo.yaml:3\): .* is not a number",
    "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + ALIASES: "dpo.yaml:7: .*aliases",
    "hydra: {launcher: {_target_: evil.Evil}}\n": r"hydra\.launcher\._target_ \(dpo.yaml:3\): ",
    "hydra: {searchpath: ['pkg://evil']}\n": r"hydra\.searchpath \(dpo.yaml:3\): ",
    "exp_name: ../../code-ran-here\n": r"exp_name \(dpo.yaml:3\): ",
}  # fmt: skip


def test_without_anything_hostile_it_is_a_config(good: Path, tmp_path: Path) -> None:
    """Else all that follows would be refused for nothing."""
    exits(0, "config", "show", written(tmp_path, good, "seed: 3\n"), pairs_of(good))


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_yaml(good: Path, tmp_path: Path, python: str, text: str) -> None:
    (tmp_path / "evil.py").write_text(python)
    for command in (["config", "show"], ["train"]):
        said = exits(2, *command, written(tmp_path, good, text), pairs_of(good))
        [sentence] = said.splitlines()
        assert re.search(HOSTILE[text], sentence)


def written(folder: Path, good: Path, more: str) -> Path:
    file = folder / "dpo.yaml"
    file.write_text(f"pretrain: {good}/base\nmax_steps: 1\n{more}")
    return file


def pairs_of(good: Path) -> str:
    """On the command line, for some cases write an `actor_train` of their own."""
    return f"actor_train.data_args.file_name={good}/pairs.jsonl"


@pytest.mark.parametrize(
    "override",
    [
        "+hydra.launcher._target_=evil.Evil",
        "actor_train._target_=os.system",
        "exp_name=../x",
        "exp_name=a/b",
        "exp_name=",
        "exp_name=" + "x" * 129,
        "exp_name='a b'",
        "exp_name=${oc.env:HOME}",
        "beta=${eval:1}",
        "+evil=1",
        "actor_train.device_mapping=eval('1')",
    ],
)
def test_a_hostile_override(config: Config, tmp_path: Path, python: str, override: str) -> None:
    (tmp_path / "evil.py").write_text(python)
    exits(2, "train", config(), override)
    assert not (tmp_path / "out").exists()


def test_a_worker_class_is_the_authors_own_and_must_be_one(config: Config) -> None:
    """The author of a YAML may name code on purpose, by a path to import; not by any other text."""
    for text in ("os", "os.system('x')", "os.system; import evil", "../evil.Evil"):
        exits(2, "train", config(actor_train__worker_cls=text))
    assert "worker_cls" in exits(2, "train", config(actor_train__worker_cls="os.system"))


def test_the_name_of_a_migrated_key_adds_no_line() -> None:
    result = of({"a\nsystem_envs: {A: b}\n#": 1})
    assert yaml.safe_load(result.yaml()) == result.values
