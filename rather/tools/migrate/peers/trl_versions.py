"""Which trainer of TRL a file is for, and of which version.

A YAML of TRL does not name its trainer. trl_keys.json, made by bench/trl_keys.py from TRL's
history, has the settings of every trainer in every minor version since 0.8.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rather.files import JsonObject, parse_json

SHARED = "shared"  # settings of scripts and models, which every trainer may be given
# 0.29 changed what DPOConfig means. BETWEEN: the file may be for versions before or after it.
NEW, OLD, BETWEEN = "new", "old", "between"
LAST_OLD = "0.28"


@cache
def table() -> JsonObject:
    text = (Path(__file__).parent / "trl_keys.json").read_text(encoding="utf-8")
    table: JsonObject = parse_json(text)
    return table


@cache
def last_versions(trainer: str) -> dict[str, int]:
    """Return TRL's settings of a trainer, each with the number of the last version that has it."""
    order, keys = list(table()["versions"]), table()["keys"]
    last: dict[str, int] = {}
    for span, names in [*keys[SHARED].items(), *keys.get(trainer, {}).items()]:
        number = order.index(span.split()[1])
        last |= {name: max(number, last.get(name, 0)) for name in names.split()}
    return {name: last[name] for name in last.keys() - table()["inherited"].split()}


def era(trainer: str, keys: Iterable[str]) -> str:
    """Return NEW if the newest version has all settings of a file; otherwise what it can be for."""
    order, last = list(table()["versions"]), last_versions(trainer)
    newest = order[min((last[key] for key in keys if key in last), default=-1)]
    if newest == order[-1]:
        return NEW
    return OLD if order.index(newest) <= order.index(LAST_OLD) else BETWEEN


@cache
def owners() -> dict[str, set[str]]:
    """Return the trainers that have each setting in any version, and each `loss_type=value`."""
    owners: dict[str, set[str]] = {}
    for trainer in table()["keys"]:
        losses = table()["losses"].get(trainer, "").split()
        for name in (*last_versions(trainer), *(f"loss_type={loss}" for loss in losses)):
            owners.setdefault(name, set()).add(trainer)
    return owners


def trainer_of(keys: Iterable[str], losses: Iterable[str]) -> str | None:
    """Return the trainer that a file with these settings is for; None if that is not certain."""
    names = owners().keys() & {*keys, *(f"loss_type={loss}" for loss in losses)}
    trainers = set().union(*(owners()[name] for name in names if len(owners()[name]) == 1))
    if len(trainers) != 1:
        return None
    [trainer] = trainers
    return trainer if names.intersection(keys) <= last_versions(trainer).keys() else None
