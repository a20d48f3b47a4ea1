"""A YAML names values: nothing in it is imported, constructed or called while it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.security.conftest import rather

Config = Callable[..., Path]
TOUCH = "touch code-ran-here"
ALIASES = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
HOSTILE = {
    "a python object": f"seed: !!python/object/apply:os.system ['{TOUCH}']\n",
    "a python name": "seed: !!python/name:os.system\n",
    "a python module": "seed: !!python/module:evil\n",
    "an object of one's own": f"seed: !evil ['{TOUCH}']\n",
    "a target": f"actor_train:\n  _target_: os.system\n  _args_: ['{TOUCH}']\n",
    "a target in a list": f"system_envs:\n- _target_: os.system\n  command: {TOUCH}\n",
    "an evaluating resolver": f"exp_name: ${{eval:__import__('os').system('{TOUCH}')}}\n",
    "a resolver that nobody registered": f"exp_name: ${{sh:{TOUCH}}}\n",
    "a device list that is code": f"actor_train: {{device_mapping: \"__import__('os').system('{TOUCH}')\"}}\n",
    "a number that is code": f"beta: __import__('os').system('{TOUCH}')\n",
    "many laughs": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + ALIASES,
    "hydra starting something": "hydra: {launcher: {_target_: evil.Evil}}\n",
    "a searched path": "hydra: {searchpath: ['pkg://evil']}\ndefaults: [evil]\n",
    "a name that is a path": "exp_name: ../../code-ran-here\n",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_yaml(tmp_path: Path, marker: Path, python: str, case: str) -> None:
    (tmp_path / "evil.py").write_text(python)
    file = tmp_path / "dpo.yaml"
    file.write_text(f"pretrain: org/model\n{HOSTILE[case]}")
    for command in (("config", "show"), ("train",)):
        assert rather(*command, file).exit_code == 2


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
def test_a_hostile_override(config: Config, tmp_path: Path, marker: Path, python: str, override: str) -> None:
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
