"""Which trainer of TRL a file is for, and what its version leaves to defaults.

A YAML of TRL does not name its trainer. trl_keys.json, made by bench/trl_keys.py from TRL's
history, has the settings of every trainer in every minor version since 0.8.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rather.files import JsonObject, parse_json

HEAD, SHARED = "head", "shared"
INHERITED = {"learning_rate": 5e-5, "bf16": False, "logging_steps": 500}  # of transformers


@cache
def table() -> JsonObject:
    text = (Path(__file__).parent / "trl_keys.json").read_text(encoding="utf-8")
    table: JsonObject = parse_json(text)
    return table


@cache
def versions() -> list[str]:
    """Return the versions of the table, oldest first."""
    return list(table()["versions"])


def _between(first: str, last: str) -> list[str]:
    order = versions()
    return order[order.index(first) : order.index(last) + 1]


@cache
def _keys_by_version(trainer: str) -> dict[str, set[str]]:
    keys_of_version: dict[str, set[str]] = {version: set() for version in versions()}
    for span, names in table()["keys"].get(trainer, {}).items():
        for version in _between(*span.split()):
            keys_of_version[version].update(names.split())
    return keys_of_version


def keys_of(trainer: str, version: str) -> set[str]:
    """Return the settings of a trainer's own config in a version; empty if it did not exist."""
    return _keys_by_version(trainer)[version]


def _owners(names_by_trainer: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the names that one trainer alone has, and the trainer."""
    owners: dict[str, set[str]] = {}
    for trainer, names in names_by_trainer:
        for name in names.split():
            owners.setdefault(name, set()).add(trainer)
    return {name: min(trainers) for name, trainers in owners.items() if len(trainers) == 1}


@cache
def unique_keys() -> dict[str, str]:
    """Return the settings that one config alone has, in all versions, and its trainer."""
    keys_of_trl = _own_keys()
    owners = _owners(_spans())
    return {key: owners[key] for key in owners if owners[key] != SHARED and key in keys_of_trl}


@cache
def unique_losses() -> dict[str, str]:
    """Return the values of loss_type that one trainer alone accepts, and that trainer."""
    return _owners(table()["losses"].items())


def versions_with(trainer: str, keys: Collection[str]) -> list[str]:
    """Return the versions in which a trainer takes all of these settings that TRL knows."""
    trl_keys = _own_keys().intersection(keys)
    fitting = []
    for version in versions():
        keys_of_trainer = keys_of(trainer, version)
        if keys_of_trainer and trl_keys <= keys_of_trainer | keys_of(SHARED, version):
            fitting.append(version)
    return fitting


def keys_ever(trainer: str) -> set[str]:
    """Return all settings that a trainer had in any version."""
    return set().union(*_keys_by_version(trainer).values())


def _spans() -> Iterator[tuple[str, str]]:
    """Yield each trainer with names of its settings."""
    for trainer, spans in table()["keys"].items():
        for names in spans.values():
            yield trainer, names


@cache
def _own_keys() -> set[str]:
    """Return all settings of TRL that are not those of transformers."""
    keys_of_trl = {name for _, names in _spans() for name in names.split()}
    return keys_of_trl.difference(table()["inherited"].split())


def trainer_of(keys: Collection[str], losses: Iterable[str]) -> str | None:
    """Return the trainer that a file with these settings is for; None if that is not certain."""
    trainers = {unique_keys()[key] for key in keys if key in unique_keys()}
    trainers |= {unique_losses()[loss] for loss in losses if loss in unique_losses()}
    if len(trainers) != 1:
        return None
    trainer = trainers.pop()
    return trainer if versions_with(trainer, keys) else None


def default_in(trainer: str, key: str, version: str) -> Any:
    """Return the default of a setting in a version; None if there is none."""
    spans = table()["defaults"].get(trainer, {}).get(key, ())
    default = next((setting for first, last, setting in spans if version in _between(first, last)),
                   INHERITED.get(key))  # fmt: skip
    if key == "bf16" and default is None:
        return True  # unless fp16 is set
    if key == "max_prompt_length" and default == -1:
        return 512  # the value before the setting was about to be removed
    if key == "truncation_mode" and default is None and trainer != "reward":  # not a setting
        return "keep_end" if (trainer, version) == ("dpo", "0.8") else "keep_start"
    return default


def defaults_in(names: Iterable[str], key: str, among: Collection[str]) -> list[Any]:
    """Return the different defaults of a setting for these trainers in these versions."""
    different: list[Any] = []
    for name in names:
        for version in among:
            default = default_in(name, key, version)
            if default not in different:
                different.append(default)
    return different
