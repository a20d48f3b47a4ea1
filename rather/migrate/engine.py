"""The engine for all tools: rules set keys, the schema checks them, none is lost silently."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rather.config.inherit import set_at
from rather.config.keys import table
from rather.config.load import config_from_dict
from rather.config.redaction import looks_secret
from rather.config.schema import DPOConfig
from rather.config.values import MASK
from rather.errors import ConfigError
from rather.files import write_new
from rather.migrate.rules import (
    CHANGED,
    IMPOSSIBLE,
    INCOMPLETE,
    KEPT,
    LEFT_OUT,
    MISSING,
    MIXTURE,
    NEEDLESS,
    OPEN,
    RENAMED,
    UNKNOWN,
    UNSET,
    WRITTEN,
    Given,
    Outcome,
    Rule,
    Unsupported,
    algorithm,
    full,
)
from rather.migrate.source import SourceSettings
from rather.tracking.json_lines import flatten

ORDER = (*INCOMPLETE, OPEN, LEFT_OUT, CHANGED, WRITTEN, RENAMED, KEPT, NEEDLESS)
MODEL, PAIRS = "pretrain", "actor_train.data_args.file_name"
MAPPINGS = (
    ".columns.",
    ".strategy_config.",
    ".lr_scheduler_kwargs.",
    "system_envs.",
)  # take any name
DEVICES = "actor_train.device_mapping"
FOLDERS = {"output_dir", "exp_name", "logging_dir"}
PLACES = {MODEL: "path/to/model", PAIRS: "path/to/pairs.jsonl"}
_TRAINING, _MODEL = "actor_train.training_args.", "actor_train.model_args."
# What a training is; without one of these a conversion is a guess.
ESSENTIAL = {
    "model": ("pretrain",),
    "loss": ("pref_loss",),
    "beta": ("beta",),
    "learning rate": (_TRAINING + "learning_rate",),
    "batch": ("train_batch_size", _TRAINING + "per_device_train_batch_size"),
    "adapter": tuple(_MODEL + key for key in ("lora_rank", "lora_config", "adapter_name_or_path")),
    "precision": (_MODEL + "dtype",),
    "scored turns": ("actor_train.data_args.score",),
    "router loss": (_MODEL + "moe_aux_loss_coef",),
}
# What a source says besides its keys.
PROGRAM, COUNT, FOLDER, ALIASED = "(program)", "(devices)", "(folder)", "(other names)"
OTHERS = re.compile(  # programs that train something else
    r"(?i)(^|[_ .-])(sft|kto|bco|r?ppo|grpo|gdpo|gspo|sdpo|xpo|tpo|rloo|rm|prm|reward\w*|online\w*|"
    r"nash\w*|gkd|gold|sdft|ssd|distill\w*|embedding|pt|pretrain|vlm|mpo)($|[_ .-])"
)
UNSURE = "the number of processes is only known when the launcher runs; pass --devices"
VISION = re.compile(
    r"(?i)(^|[^a-z])(intern)?(vl|vlm|llava\w*|vision|omni|pixtral|idefics\w*)($|[^a-z])"
)


@dataclass(frozen=True)
class Peer:
    """Another trainer: its keys, its defaults, and how to recognise its files.

    The facts are those of `version`. `programs` are its scripts and subcommands that Rather can
    replace, with the loss or task of each; None: another key says it. A key without a rule is a
    typing error. A default may be a function of the other settings. `aliases` are other names of keys. `marks`
    and `words` are keys, and words of a command line, that only this tool has. `whole` are keys
    whose value is a mapping. `reader` reads a file whose values refer to others, under the flags of
    a command line; `config` is its place next to the program if the line names none. `always` are
    differences that no key expresses.
    """

    name: str
    rules: Mapping[str, Rule]
    version: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    programs: Mapping[str, str | Mapping[str, str] | None] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    marks: str = ""
    words: tuple[str, ...] = ()
    reader: Callable[[Path, dict[str, Any]], dict[str, Any]] | None = None
    config: str = ""
    whole: str = ""
    always: tuple[str, ...] = ()

    def rule(self, key: str) -> Rule | None:
        """Return the rule of a key, or of a section that it is in, such as `policy.generation.*`."""
        key = self.aliases.get(key, key)
        found = algorithm(self.programs) if key == PROGRAM else self.rules.get(key)
        while found is None and "." in key:
            key = key.rpartition(".")[0]
            found = self.rules.get(f"{key}.*")
        return found


@dataclass(frozen=True)
class Row:
    """What became of one key."""

    key: str
    value: Any
    outcome: Outcome
    rejected: tuple[str, ...] = ()  # keys that the schema or the loss did not accept

    @property
    def status(self) -> str:
        return self.outcome.status

    @property
    def line(self) -> str:
        """Return all of it in one line."""
        ours = ", ".join(f"{path}: {_short(v)}" for path, v in self.outcome.values.items())
        text = f"{self.status}: {self.key}"
        text += "" if self.value is None else f" = {_short(self.value)}"
        text += f" -> {ours}" if ours else ""
        return f"{text}; {self.outcome.note}" if self.outcome.note else text


@dataclass(frozen=True)
class Migrated:
    """Values for Rather as nested mappings, and what became of each key, problems first."""

    peer: Peer
    source: SourceSettings
    values: dict[str, Any]
    rows: list[Row]
    config: DPOConfig

    @property
    def is_complete(self) -> bool:
        return not any(row.status in INCOMPLETE for row in self.rows)

    def yaml(self) -> str:
        tool = f"{self.peer.name} {self.peer.version}".strip()
        lines = [f"# Made by `rather migrate` from {self.source.name} ({tool})."]
        if not self.is_complete:
            lines.append("# INCOMPLETE: it does not train what the source trains.")
        problems = (*INCOMPLETE, OPEN, LEFT_OUT)
        lines += [f"# {row.line}" for row in self.rows if row.status in problems]
        values = yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)
        return "\n".join([*lines, values])


def guess(source: SourceSettings, peers: Mapping[str, Peer]) -> Peer:
    """Return the tool that these words or keys belong to; an error if none or several match."""
    keys = {*flatten(source.values), *source.values}
    line = f" {' '.join(source.words)} "
    best = [peer.name for peer in peers.values() if any(word in line for word in peer.words)]
    if not best:
        found = {peer.name: len(keys.intersection(peer.marks.split())) for peer in peers.values()}
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
    if source.program not in peer.programs and OTHERS.search(source.program):
        raise ConfigError(
            f"{source.name}: {source.program} is not a training that Rather offers; of {peer.name} "
            f"it converts {', '.join(peer.programs)}."
        )
    file = source.file
    if peer.config and not file and source.script:
        file = source.script.parent / peer.config
    values = peer.reader(file, source.flags) if peer.reader and file else source.values
    written = {PROGRAM: source.program} if source.program in peer.programs else {}
    known = flatten(values, whole=peer.whole.split())
    written |= dict(_without_no(peer, *item) for item in known.items())
    count = devices or source.devices
    here = {COUNT: count or 1, FOLDER: file.parent if file else source.folder,
            ALIASED: any(key in peer.aliases for key in written)}  # fmt: skip
    given = here | {peer.aliases.get(key, key): v for key, v in written.items()}
    filled = []
    for key, default in peer.defaults.items():
        value = _filled(default, given)
        if value is not UNSET and not _says(peer, key, given):
            given[key] = value
            filled.append(key)
    rows = _agreed([_row(peer, key, value, given) for key, value in written.items()])
    stated = {path for row in rows for path in row.outcome.values}
    fallbacks = [_row(peer, key, given[key], given) for key in filled]
    rows += [row for each in fallbacks if (row := _default(each, stated))]
    rows += _device_rows(count)
    determined = stated.union(*(row.outcome.values for row in fallbacks))
    rows += [Row(f"({path})", None, Outcome(OPEN, {path: text}, "not set in the source file"))
             for path, text in PLACES.items() if path not in _values(rows)]  # fmt: skip
    rows, config = _judged(rows)
    rows += _missing(determined - {path for row in rows for path in row.rejected}, config, peer)
    if VISION.search(f"{source.program} {config.pretrain}"):
        raise ConfigError(f"{source.name}: {config.pretrain}: Rather trains language models only.")
    ordered = sorted(rows, key=lambda row: ORDER.index(row.status))
    return Migrated(peer, source, nested(_values(rows)), ordered, config)


def _filled(default: Any, given: Given) -> Any:
    """Return a default, which may depend on other keys; not on values that make no sense."""
    try:
        return default(given) if callable(default) else default
    except (TypeError, ValueError, ArithmeticError):
        return UNSET


def _says(peer: Peer, key: str, given: Given) -> bool:
    """Return whether a key is set; an empty one is, only if that has a meaning of its own."""
    if given.get(key) is not None or key not in given:
        return key in given
    return bool(_outcome(peer, key, None, given).values)


def _agreed(rows: list[Row]) -> list[Row]:
    """Report keys that set the same key of Rather to different values."""
    first: dict[str, Row] = {}
    result = []
    for row in rows:
        values = row.outcome.values
        against = {first[path].key for path, value in values.items()
                   if first.setdefault(path, row).outcome.values[path] != value}  # fmt: skip
        note = f"contradicts {', '.join(sorted(against))}; remove one of them"
        result.append(Row(row.key, row.value, Outcome(IMPOSSIBLE, note=note)) if against else row)
    return result


def _missing(determined: set[str], config: DPOConfig, peer: Peer) -> list[Row]:
    """Return what makes a training and is neither in the source nor a default of the tool."""
    needless = {"beta"} if config.loss_names == ["sft"] or config.task == "reward" else set()
    needless |= set() if config.task == "sft" else {"scored turns"}
    needless |= set() if MIXTURE.search(str(config.pretrain)) else {"router loss"}
    note = f"neither set in the source file nor a fixed default of {peer.name}; set "
    return [
        Row(f"({name})", None, Outcome(MISSING, note=note + paths[0]))
        for name, paths in ESSENTIAL.items()
        if name not in needless and determined.isdisjoint(paths)
    ]


def _without_no(peer: Peer, key: str, value: Any) -> tuple[str, Any]:
    """`--no_remove_unused_columns` means remove_unused_columns: false."""
    short = key.removeprefix("no_")
    turned = (
        short != key and peer.rule(key) is None and peer.rule(short) is not None and value is True
    )
    return (short, False) if turned else (key, value)


def nested_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted paths as nested mappings."""
    result: dict[str, Any] = {}
    for path, value in values.items():
        set_at(result, path, value)
    return result


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted paths as nested mappings, in the order of the schema."""
    order = list(table())
    return nested_keys(dict(sorted(values.items(), key=lambda item: order.index(_known(item[0])))))


def _known(path: str) -> str:
    """Return the key of the schema that a path belongs to: strategy_config takes any key."""
    while path not in table():
        path = path.rpartition(".")[0]
    return path


def _row(peer: Peer, key: str, value: Any, given: Given) -> Row:
    """Apply the rule of a key. A text under a name like hub_token is neither shown nor written."""
    outcome = _outcome(peer, key, value, given)
    paths = outcome.values
    if any(path.endswith((".trust_remote_code", ".worker_cls")) for path in paths) and value:
        note = "it runs Python code of others and is not copied; add it yourself if you trust them"
        return Row(key, value, Outcome(LEFT_OUT, note=note))
    public = bool(paths) and not any(map(looks_secret, paths))
    if not (looks_secret(key) and isinstance(value, str)) or public:
        return Row(key, value, outcome)
    note = "secrets are not written; set it in the environment"
    hidden = outcome if outcome.status in INCOMPLETE else Outcome(LEFT_OUT, note=note)
    return Row(key, MASK, hidden)


def _outcome(peer: Peer, key: str, value: Any, given: Given) -> Outcome:
    rule = peer.rule(key)
    if rule is None:
        near = difflib.get_close_matches(key, [*peer.rules, *peer.aliases], n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else "a typing error?"
        return Outcome(UNKNOWN, note=f"{peer.name} has no such setting; {hint}")
    if value == "":
        return Outcome(NEEDLESS, note="empty")
    try:
        status, values, note = rule(value, given)
    except ConfigError as why:
        raise ConfigError(f"{key}: {why}") from None
    except Unsupported as why:
        return Outcome(IMPOSSIBLE, note=str(why))
    except (TypeError, ValueError, AttributeError, LookupError):
        return Outcome(IMPOSSIBLE, note=f"{_short(value)} is not a value that {peer.name} accepts")
    values = {full(path): v for path, v in values.items()}
    if "${" in str(values):
        status = LEFT_OUT if set(values) <= FOLDERS else IMPOSSIBLE
        return Outcome(status, note="its value is only known when it runs")
    if absent := [path for path in values if not _exists(path)]:
        return Outcome(IMPOSSIBLE, note=f"this version has no {', '.join(absent)}")
    same = all(key in (path, path.rpartition(".")[2]) for path in values)
    return Outcome(KEPT if same and status == RENAMED else status, values, note)


def _exists(path: str) -> bool:
    return path in table() or any(part in path for part in MAPPINGS)


def _default(row: Row, said: set[str]) -> Row | None:
    """Write a default of the tool if Rather's is another."""
    differ = {
        path: value
        for path, value in row.outcome.values.items()
        if path not in said and (path not in table() or value != table()[path].default)
    }
    if row.status in INCOMPLETE:
        return row
    if not differ:
        return None
    ours = ", ".join(_short(table()[path].default) for path in differ if path in table())
    notes = (f"Rather's default is {ours}" if ours else "", row.outcome.note)
    return Row(row.key, row.value, Outcome(WRITTEN, differ, "; ".join(filter(None, notes))))


def _device_rows(devices: int | None) -> list[Row]:
    if devices is None or devices == 1:
        return []
    if not devices:
        return [Row("(devices)", None, Outcome(MISSING, note=UNSURE))]
    values = {DEVICES: f"0-{devices - 1}"}
    return [Row("(devices)", devices, Outcome(RENAMED, values, "from the launcher"))]


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
            lost = (*row.rejected, *(path for path in values if path not in kept))
            status = LEFT_OUT if lost == ("eval_steps",) else IMPOSSIBLE  # it trains the same
            return Row(row.key, row.value, Outcome(status, kept, text), lost)
    return row


def _short(value: Any) -> str:
    text = str(value) if not isinstance(value, bool) else str(value).lower()
    text = "null" if value is None else " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def summary(migrated: Migrated) -> dict[str, Any]:
    """Return what became of each key, for programs."""
    return {
        "tool": migrated.peer.name,
        "version": migrated.peer.version,
        "complete": migrated.is_complete,
        "keys": [
            {"key": row.key, "value": row.value, "status": row.status, "note": row.outcome.note,
             "rather": row.outcome.values}
            for row in migrated.rows
        ],
        "always": list(migrated.peer.always),
    }  # fmt: skip


def write(migrated: Migrated, file: Path, *, force: bool = False) -> Path:
    """Write the YAML, an incomplete one as `*.incomplete.yaml`; replace a file only if forced."""
    if not migrated.is_complete:
        file = file.with_suffix(f".incomplete{file.suffix}")
    write_new(file, migrated.yaml(), force=force)
    return file
