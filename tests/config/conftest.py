"""A YAML file in a fresh folder, and the problems that it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from rather.config.load import config_from_dict, load
from rather.errors import ConfigError
from tests.tiny import nest

SMALLEST = """
pretrain: org/model
actor_train:
  data_args:
    file_name: pairs.json
"""

Write = Callable[..., Path]
Problems = Callable[..., list[str]]


def smallest(*settings: str) -> dict[str, Any]:
    """The values of the smallest good file, changed by `key.path=YAML`."""
    pairs = (setting.split("=", 1) for setting in settings)
    changes = {key: yaml.safe_load(text) for key, text in pairs}
    return nest(yaml.safe_load(SMALLEST), changes, ".")


def strategy(text: str, devices: int = 4) -> list[str]:
    """Settings for `NAME: DETAIL=VALUE + ...`, the keys of strategy_config; `default` names none."""
    name, _, details = text.partition(": ")
    role = "actor_train.strategy_args"
    settings = [f"actor_train.device_mapping=0-{devices - 1}"]
    if name != "default":
        settings.append(f"{role}.strategy_name={name}")
    return settings + [f"{role}.strategy_config.{each}" for each in details.split(" + ") if each]


def assert_the_last_is_refused(problems: list[str], settings: list[str], said: str) -> None:
    """The one problem names the key of the last setting and says what is wrong with its value."""
    (line,) = problems
    assert line.startswith(f"{settings[-1].partition('=')[0]}: ")
    assert said in line
    assert ("unknown key" in line) == ("unknown key" in said)


@pytest.fixture
def judged() -> Problems:
    """What is wrong with the smallest good values and these changes; a tenth of the time that
    Hydra takes."""

    def of(*settings: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            config_from_dict(smallest(*settings))
        return caught.value.problems

    return of


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_yaml(text: str = SMALLEST, name: str = "dpo.yaml") -> Path:
        path = tmp_path / name
        path.write_text(dedent(text).lstrip("\n"), encoding="utf-8")
        return path

    return write_yaml


@pytest.fixture
def problems(write: Write) -> Problems:
    """What is wrong with the smallest good file when these overrides are added."""

    def of(*overrides: str, text: str = SMALLEST) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(write(text), overrides)
        return caught.value.problems

    return of
