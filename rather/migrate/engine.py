"""The engine for all tools: rules set keys, the schema checks them, none is lost silently."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rather.config.keys import table
from rather.config.load import config_from_dict
from rather.config.redaction import looks_secret
from rather.config.schema import DPOConfig
from rather.config.values import MASK
from rather.errors import ConfigError
from rather.migrate.rules import (
    CHANGED,
    IMPOSSIBLE,
    KEPT,
    NEEDLESS,
    OPEN,
    RENAMED,
    UNKNOWN,
    WRITTEN,
    Given,
    Outcome,
    Rule,
    Unsupported,
)
from rather.migrate.source import SourceSettings, flat

ORDER = (KEPT, RENAMED, CHANGED, WRITTEN, OPEN, IMPOSSIBLE, UNKNOWN, NEEDLESS)
MODEL, PAIRS = "pretrain", "actor_train.data_args.file_name"
MAPPINGS = (".strategy_config.", ".lr_scheduler_kwargs.", "system_envs.")  # take any name
DEVICES = "actor_train.device_mapping"
PLACES = {MODEL: "path/to/model", PAIRS: "path/to/pairs.jsonl"}


@dataclass(frozen=True)
class Peer:
    """Another trainer: its keys, its differing defaults, and how to recognise its files.

    `marks` and `words` are keys, and words of a command line, that only this tool has. `whole` are
    keys whose value is a mapping. `reader` reads a file whose values refer to others. `always` are
    differences that no key expresses. Files that `is_early` recognises have the `early` defaults.
    """

    name: str
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    reader: Callable[[Path], dict[str, Any]] | None = None
    whole: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    is_early: Callable[[Given], bool] = lambda given: False
    early: Mapping[str, Any] = field(default_factory=dict)

    def rule(self, key: str) -> Rule | None:
        """Accept the last part of a dotted key: some tools moved their flags into groups."""
        return self.rules.get(key) or self.rules.get(key.rpartition(".")[2])


@dataclass(frozen=True)
class Row:
    """What became of one key."""

    key: str
    value: Any
    outcome: Outcome

    @property
    def status(self) -> str:
        return self.outcome.status

    @property
    def ours(self) -> str:
        return ", ".join(f"{path}: {_short(value)}" for path, value in self.outcome.values.items())


@dataclass(frozen=True)
class Migrated:
    """Values for Rather as nested mappings, and the table."""

    peer: Peer
    source: SourceSettings
    values: dict[str, Any]
    rows: list[Row]
    config: DPOConfig

    def yaml(self) -> str:
        lines = [f"# Made by `rather migrate` from {self.source.name} ({self.peer.name})."]
        lines += [
            f"# {row.status}: {row.key} = {_short(row.value)}; {row.outcome.note}".rstrip("; ")
            for row in self.rows
            if row.status in (OPEN, IMPOSSIBLE, UNKNOWN)
        ]
        values = yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)
        return "\n".join([*lines, values])


def guess(source: SourceSettings, peers: Mapping[str, Peer]) -> Peer:
    """Return the tool that these words or keys belong to; an error if none or several match."""
    keys = {key for key, _ in flat(source.values)} | set(source.values)
    line = " ".join(source.words)
    best = [peer.name for peer in peers.values() if any(word in line for word in peer.words)]
    if not best:
        found = {peer.name: len(keys & set(peer.marks)) for peer in peers.values()}
        most = max(found.values())
        best = [name for name, count in found.items() if count == most and most]
    if len(best) == 1:
        return peers[best[0]]
    raise ConfigError(
        f"{source.name}: cannot tell which tool this file is for; add --from "
        + "|".join(best or peers)
    )


def migrate(source: SourceSettings, peer: Peer, devices: int | None = None) -> Migrated:
    """Return settings of the same meaning, as far as Rather has them."""
    values = peer.reader(source.file) if peer.reader and source.file else source.values
    written = dict(_without_no(peer, *item) for item in flat(values, peer.whole))
    defaults = {**peer.defaults, **(peer.early if peer.is_early(written) else {})}
    given = {**defaults, **written}
    rows = [_row(peer, key, value, given) for key, value in written.items()]
    said = {path for row in rows for path in row.outcome.values}
    rows += [
        row for key in defaults if key not in written and (row := _default(peer, key, given, said))
    ]
    rows += _device_rows(devices or source.devices)
    rows += [row for path in PLACES if (row := _place(path, rows))]
    rows, config = _judged(rows)
    ordered = sorted(rows, key=lambda row: ORDER.index(row.status))
    return Migrated(peer, source, nested(_values(rows)), ordered, config)


def _without_no(peer: Peer, key: str, value: Any) -> tuple[str, Any]:
    """`--no_remove_unused_columns` means remove_unused_columns: false."""
    short = key.removeprefix("no_")
    turned = (
        short != key and peer.rule(key) is None and peer.rule(short) is not None and value is True
    )
    return (short, False) if turned else (key, value)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted paths as nested mappings, in the order of the schema."""
    order = list(table())
    result: dict[str, Any] = {}
    for path in sorted(values, key=lambda path: order.index(_known(path))):
        *parents, name = path.split(".")
        owner = result
        for parent in parents:
            owner = owner.setdefault(parent, {})
        owner[name] = values[path]
    return result


def _known(path: str) -> str:
    """Return the key of the schema that a path belongs to: strategy_config takes any key."""
    while path not in table():
        path = path.rpartition(".")[0]
    return path


def _row(peer: Peer, key: str, value: Any, given: Given) -> Row:
    """Apply the rule of a key. A text under a name like hub_token is neither shown nor written."""
    row = _ruled(peer, key, value, given)
    paths = row.outcome.values
    if any(path.endswith((".trust_remote_code", ".worker_cls")) for path in paths) and value:
        note = "it runs Python code of others and is not copied; add it yourself if you trust them"
        return Row(key, value, Outcome(IMPOSSIBLE, note=note))
    public = bool(paths) and not any(map(looks_secret, paths))
    if not (looks_secret(key) and isinstance(value, str)) or public:
        return row
    note = "secrets are not written; set it in the environment"
    return Row(key, MASK, Outcome(IMPOSSIBLE, note=note))


def _ruled(peer: Peer, key: str, value: Any, given: Given) -> Row:
    rule = peer.rule(key)
    if rule is None:
        near = difflib.get_close_matches(key, peer.rules, n=1, cutoff=0.9)
        return Row(key, value, Outcome(UNKNOWN, note=f"did you mean {near[0]}?" if near else ""))
    try:
        outcome = rule(value, given)
    except Unsupported as why:
        return Row(key, value, Outcome(IMPOSSIBLE, note=str(why)))
    except (TypeError, ValueError, AttributeError, LookupError):
        note = f"{_short(value)} is not a value that {peer.name} accepts"
        return Row(key, value, Outcome(IMPOSSIBLE, note=note))
    absent = [path for path in outcome.values if not _exists(path)]
    if absent:
        return Row(key, value, Outcome(IMPOSSIBLE, note=f"this version has no {', '.join(absent)}"))
    same = outcome.status == RENAMED and all(
        key in (path, path.rpartition(".")[2]) for path in outcome.values
    )
    return Row(key, value, Outcome(KEPT, outcome.values, outcome.note) if same else outcome)


def _exists(path: str) -> bool:
    return path in table() or any(part in path for part in MAPPINGS)


def _default(peer: Peer, key: str, given: Given, said: set[str]) -> Row | None:
    """Write a default of the tool if Rather's is another."""
    outcome = _row(peer, key, given[key], given).outcome
    differ = {
        path: value
        for path, value in outcome.values.items()
        if path not in said and (path not in table() or value != table()[path].default)
    }
    if not differ:
        return None
    ours = ", ".join(_short(table()[path].default) for path in differ if path in table())
    notes = (f"Rather's default is {ours}" if ours else "", outcome.note)
    return Row(key, given[key], Outcome(WRITTEN, differ, "; ".join(filter(None, notes))))


def _device_rows(devices: int | None) -> list[Row]:
    if devices is None or devices == 1:
        return []
    values = {DEVICES: f"0-{devices - 1}"}
    return [Row("(devices)", devices, Outcome(RENAMED, values, "from the launcher"))]


def _place(path: str, rows: list[Row]) -> Row | None:
    if path in _values(rows):
        return None
    return Row(f"({path})", None, Outcome(OPEN, {path: PLACES[path]}, "not set in the source file"))


def _values(rows: list[Row]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for row in rows:
        values.update(row.outcome.values)
    return values


def _judged(rows: list[Row]) -> tuple[list[Row], DPOConfig]:
    """Remove what the schema or the loss rejects, with the reason, until the rest is accepted."""
    while True:
        try:
            config = config_from_dict(nested(_values(rows)))
            from rather.losses.objective import from_config

            from_config(config)
            return rows, config
        except ConfigError as error:
            left = [_without(row, error.problems) for row in rows]
            if left == rows:
                raise
            rows = left


def _without(row: Row, problems: list[str]) -> Row:
    for problem in problems:
        keys, _, text = problem.partition(": ")
        rejected = tuple(f"{key}." for key in keys.split(", "))
        values = row.outcome.values
        kept = {path: v for path, v in values.items() if not f"{path}.".startswith(rejected)}
        if len(kept) < len(values):
            return Row(row.key, row.value, Outcome(IMPOSSIBLE, kept, text))
    return row


def _short(value: Any) -> str:
    text = str(value) if not isinstance(value, bool) else str(value).lower()
    text = "null" if value is None else text
    return text if len(text) <= 60 else text[:57] + "..."


def write(migrated: Migrated, file: Path, *, force: bool = False) -> None:
    """Write the YAML; replace a file only if forced."""
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as out:
            out.write(migrated.yaml())
    except FileExistsError:
        raise ConfigError(
            f"{file}: already exists; choose another with --out, or replace it with --force."
        ) from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written ({error.strerror}).") from error
