"""A YAML names values: nothing in it is imported, constructed or called while it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.security.conftest import rather

Config = Callable[..., Path]
TOUCH = "touch code-ran-here"
ALIASES = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
TAG = "dpo.yaml:3: could not determine a constructor for the tag"
TARGET = "_target_ (dpo.yaml:{line}): a config never names code to run; remove it"
HOSTILE = {  # what is written from line 3 on, and what is said to it
    "a python object": (
        f"seed: !!python/object/apply:os.system ['{TOUCH}']\n",
        f"{TAG} 'tag:yaml.org,2002:python/object/apply:os.system'",
    ),
    "a python name": (
        "seed: !!python/name:os.system\n",
        f"{TAG} 'tag:yaml.org,2002:python/name:os.system'",
    ),
    "a python module": (
        "seed: !!python/module:evil\n",
        f"{TAG} 'tag:yaml.org,2002:python/module:evil'",
    ),
    "an object of one's own": (
        f"seed: !evil ['{TOUCH}']\n",
        f"{TAG} '!evil'",
    ),
    "a target": (
        f"actor_train:\n  _target_: os.system\n  _args_: ['{TOUCH}']\n",
        f"actor_train.{TARGET.format(line=4)}",
    ),
    "a target in a list": (
        f"system_envs:\n- _target_: os.system\n  command: {TOUCH}\n",
        f"system_envs.[].{TARGET.format(line=4)}",
    ),
    "an evaluating resolver": (
        f"exp_name: ${{eval:__import__('os').system('{TOUCH}')}}\n",
        "exp_name (dpo.yaml:3): token recognition error at: '('",
    ),
    "a resolver that nobody registered": (
        f"exp_name: ${{sh:{TOUCH}}}\n",
        "exp_name (dpo.yaml:3): Unsupported interpolation type sh",
    ),
    "a device list that is code": (
        f"actor_train: {{device_mapping: \"__import__('os').system('{TOUCH}')\"}}\n",
        "cannot be used: write different device numbers",
    ),
    "a number that is code": (
        f"beta: __import__('os').system('{TOUCH}')\n",
        "is not a number > 0 or null",
    ),
    "many laughs": (
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + ALIASES,
        "its aliases unfold to more than 20,000 values",
    ),
    "hydra starting something": (
        "hydra: {launcher: {_target_: evil.Evil}}\n",
        f"hydra.launcher.{TARGET.format(line=3)}",
    ),
    "a searched path": (
        "hydra: {searchpath: ['pkg://evil']}\n",
        "hydra.searchpath (dpo.yaml:3): a config cannot add folders or packages to search",
    ),
    "a name that is a path": (
        "exp_name: ../../code-ran-here\n",
        "exp_name (dpo.yaml:3): '../../code-ran-here' cannot be used: it names a folder",
    ),
}


def test_without_anything_hostile_it_is_a_config(good: Path, tmp_path: Path) -> None:
    """Else all that follows would be refused for nothing."""
    done = rather("config", "show", written(tmp_path, good, "seed: 3\n"), pairs_of(good))
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_yaml(good: Path, tmp_path: Path, marker: Path, python: str, case: str) -> None:
    (tmp_path / "evil.py").write_text(python)
    text, said = HOSTILE[case]
    for command in (("config", "show"), ("train",)):
        done = rather(*command, written(tmp_path, good, text), pairs_of(good))
        assert done.exit_code == 2
        [sentence] = done.stderr.splitlines()
        assert said in sentence


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
def test_a_hostile_override(
    config: Config, tmp_path: Path, marker: Path, python: str, override: str
) -> None:
    (tmp_path / "evil.py").write_text(python)
    assert rather("train", config(), override).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_worker_class_is_the_authors_own_and_must_be_one(config: Config, marker: Path) -> None:
    """The author of a YAML may name code on purpose, by a path to import; not by any other text."""
    for text in ("os", "os.system('x')", "os.system; import evil", "../evil.Evil"):
        assert rather("train", config(actor_train__worker_cls=text)).exit_code == 2
    done = rather("train", config(actor_train__worker_cls="os.system"))
    assert done.exit_code == 2
    assert "worker_cls" in done.stderr
