"""Convert a file: rules set keys, the schema checks them, and none is lost silently."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rather.config.inherit import set_at
from rather.config.keys import table
from rather.config.load import config_from_dict
from rather.config.redaction import looks_secret
from rather.config.run_config import DPOConfig
from rather.config.schema import as_list
from rather.config.values import MASK
from rather.errors import ConfigError, counted
from rather.files import JsonObject
from rather.tools.migrate.removed import MARKS, TOOL
from rather.tools.migrate.rules import (
    CHANGED,
    CONVERTED,
    IMPOSSIBLE,
    INCOMPLETE,
    LEFT_OUT,
    MISSING,
    MIXTURE,
    NEEDLESS,
    OPEN,
    SEEING,
    UNKNOWN,
    UNSET,
    VISION,
    WRITTEN,
    Given,
    Outcome,
    Rule,
    Unsupported,
    all_hold,
    one_line,
    pairs,
    rounds_instead,
    short,
)
from rather.tracking.json_lines import flatten

PROBLEMS = (*INCOMPLETE, OPEN, LEFT_OUT)
DIFFERENCES = (*PROBLEMS, CHANGED)
ORDER = (*DIFFERENCES, WRITTEN, CONVERTED, NEEDLESS)
# Keys whose value is code that a run would execute.
RUNS_CODE = (".trust_remote_code", ".worker_cls", "actor_train.engine")
FOLDERS = {"output_dir", "exp_name", "logging_dir"}
DEVICES = "actor_train.device_mapping"
SECTIONS = {  # short names that the tables use
    "training": "actor_train.training_args",
    "model": "actor_train.model_args",
    "data": "actor_train.data_args",
    "strategy": "actor_train.strategy_args.strategy_config",
    "held_out": "validation.data_args",
}
# What a training is; without one of these keys a conversion is a guess.
ESSENTIAL = """
    model = pretrain
    data = data.file_name
    devices = actor_train.device_mapping train_batch_size
    loss = pref_loss
    beta = beta
    learning rate = training.learning_rate
    batch = train_batch_size training.per_device_train_batch_size
    adapter = model.lora_rank model.lora_config model.adapter_name_or_path
    precision = model.dtype
    scored turns = data.score
    router loss = model.moe_aux_loss_coef
"""
# Placeholders for keys that the source file does not set.
PLACES = {"pretrain": "path/to/model", "actor_train.data_args.file_name": "path/to/pairs.jsonl"}
KEYS = Path(__file__).parent / "keys"  # lists that bench/migrate_keys.py makes
# What is known besides the keys of a file.
TRAINER, FOLDER = "(trainer)", "(folder)"
VARIABLE = re.compile(r"\$(\{|[A-Za-z_])")
UNSURE = "its value is only known when a script has filled it in"
QUANTISED = "its weights are quantised and cannot be trained; name the model in full precision"
ROUNDED = re.compile(r"(?i)(^|[-_/.])(gptq|awq|aqlm|hqq|eetq|bnb-4bit|int4|int8)($|[-_/.])")
IMAGES = (
    "tools scale images before the processor does, so sizes and tokens of images may differ; "
    "compare `rather data --show 3`, set data_args.image_dir and image_max_pixels"
)
SHARDED = (
    "the weights are divided among devices, and the pairs of a step depend on how many there are; "
    "pass --devices"
)


@dataclass(frozen=True)
class Peer:
    """Another trainer: its keys, its defaults, and how to recognise its files.

    The facts are those of `version`. A line of `defaults` may have conditions; the first of a key
    whose conditions hold counts. `derived` are defaults that a function finds, before the others.
    `marks` are keys that only this tool has. `trainers` are what `--trainer` may name, if files do
    not. `whole` are keys whose value is a mapping. `reader` reads a file whose values refer to
    others. `always` are differences that no key expresses.
    """

    name: str
    rules: Mapping[str, Rule]
    version: str
    marks: str
    defaults: str
    derived: Mapping[str, Callable[[Given], Any]] = field(default_factory=dict)
    trainers: tuple[str, ...] = ()
    reader: Callable[[Path], JsonObject] | None = None
    whole: str = ""
    always: tuple[str, ...] = ()

    @cached_property
    def settings(self) -> JsonObject:
        """Return all settings of the tool with their defaults, if its sources were listed."""
        file = KEYS / f"{self.name}.txt"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        settings: JsonObject = {}
        for line in lines:
            if not line.startswith("#"):
                name, _, default = line.partition(" = ")
                settings[name] = json.loads(default) if default else UNSET
        return settings

    def defaults_for(self, given: Given) -> Iterator[tuple[str, Any]]:
        """Yield the defaults. `given` gets each before the next one's conditions are checked."""
        for key, derive in self.derived.items():
            with suppress(TypeError, ValueError):  # it depends on senseless values
                yield key, derive(given)
        for line in self.defaults.strip().splitlines():
            settings, *conditions = one_line(line).split(" if ")
            if all_hold(conditions, given):
                yield from pairs(settings).items()


@dataclass(frozen=True)
class Migrated:
    """Values for Rather as nested mappings, and what became of each key, problems first."""

    peer: Peer
    name: str
    rows: list[Outcome]
    config: DPOConfig
    knows_devices: bool  # whether the source or the caller says how many there are

    @property
    def values(self) -> JsonObject:
        return nested(_values(self.rows))

    @property
    def is_complete(self) -> bool:
        return not any(row.status in INCOMPLETE for row in self.rows)

    @property
    def step(self) -> str:
        """Return how many pairs a step has, and on how many devices."""
        pairs = f"A step has {counted(self.config.global_batch(), 'pairs')}"
        if self.knows_devices or self.config.train_batch_size:
            return f"{pairs} on {counted(len(self.config.actor_train.devices), 'devices')}."
        return (
            f"{pairs} on each device; the file does not say how many devices there are, so the "
            "YAML uses 1. Pass --devices for more."
        )

    def yaml(self) -> str:
        tool = f"{self.peer.name} {self.peer.version}"
        lines = [one_line(f"# Made by `rather migrate` from {self.name} ({tool}).")]
        if not self.is_complete:
            lines.append("# INCOMPLETE: it does not train what the source trains.")
        lines += [f"# {row.line}" for row in self.rows if row.status in PROBLEMS]
        return "\n".join([*lines, yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)])

    def report(self, *, verbose: bool) -> str:
        """Return what the conversion changes or leaves open; if verbose, each key."""
        shown = [row.line for row in self.rows if verbose or row.status in DIFFERENCES]
        if hidden := len(self.rows) - len(shown):
            shown.append(f"{counted(hidden, 'more keys')} without a difference: see --verbose.")
        return "\n".join([*shown, *(f"- {text}" for text in (self.step, *self.peer.always))])

    def summary(self) -> JsonObject:
        """Return what became of each key, for programs."""
        return {
            "tool": self.peer.name,
            "version": self.peer.version,
            "complete": self.is_complete,
            "keys": [
                {"key": row.key, "value": row.value, "status": row.status, "note": row.note,
                 "rather": row.values}
                for row in self.rows
            ],
            "always": list(self.peer.always),
            "pairs_per_step": self.config.global_batch(),
        }  # fmt: skip


def guess(path: Path, values: JsonObject, peers: Mapping[str, Peer]) -> Peer:
    """Return the tool that these keys belong to; an error if none or several match."""
    keys = {*flatten(values), *values}
    key_parts = keys.union(*(key.split(".") for key in keys))
    counts = {name: len(keys.intersection(peer.marks.split())) for name, peer in peers.items()}
    for name, marks in MARKS.items():
        counts[name] = len(key_parts.intersection(marks.split()))
    highest = max(counts.values())
    best = [name for name, count in counts.items() if count == highest > 0]
    offered = [name for name in best if name in peers]
    if len(best) != 1:
        raise ConfigError(
            f"{path.name}: cannot tell which tool this file is for; add --from "
            + "|".join(offered or peers)
        )
    if not offered:
        raise ConfigError(f"{path.name}: a file of {best[0]} {TOOL}")
    return peers[offered[0]]


def migrate(
    path: Path,
    values: JsonObject,
    peer: Peer,
    devices: int | None = None,
    trainer: str | None = None,
) -> Migrated:
    """Return settings of the same meaning, as far as Rather has them."""
    written = flatten(values, whole=peer.whole.split())
    if trainer:
        if trainer not in peer.trainers:
            offered = ", ".join(peer.trainers) or "what a file itself says"
            raise ConfigError(
                f"--trainer {trainer}: of {peer.name} Rather converts {offered}."
                f"{rounds_instead(trainer)}"
            )
        written[TRAINER] = trainer
    given = {FOLDER: path.parent, **written}
    filled = _fill_defaults(peer, given)
    rows = [_row(peer, key, setting, given) for key, setting in written.items()]
    if devices and devices > 1:
        mapping = {DEVICES: f"0-{devices - 1}"}
        rows.insert(0, Outcome(CONVERTED, mapping, "from --devices", "(devices)", devices))
    rows = _agreed(rows)
    stated = _values(rows)
    defaults = [_row(peer, key, given[key], given) for key in filled]
    rows += _differing_defaults(defaults, stated)
    proposed = _values(rows)
    rows, config = _judged(rows)
    rejected = proposed.keys() - _values(rows).keys()
    determined = (_values(defaults).keys() | proposed.keys()) - rejected
    knows_devices = bool(devices) or DEVICES in determined
    rows += _missing(peer, rows, determined, config, knows_devices=knows_devices)
    rows += _of_model(path, config)
    rows.sort(key=lambda row: ORDER.index(row.status))
    return Migrated(peer, path.name, rows, config, knows_devices)


def _fill_defaults(peer: Peer, given: JsonObject) -> list[str]:
    """Add the defaults of keys that are not set, in their order; return these keys.

    An empty key is set only if that has a meaning of its own.
    """
    filled = []
    for key, default in peer.defaults_for(given):
        if default is UNSET or key in filled or given.get(key) is not None:
            continue
        if key in given and _outcome(peer, key, None, given).values:
            continue
        given[key] = default
        filled.append(key)
    return filled


def _of_model(path: Path, config: DPOConfig) -> Iterator[Outcome]:
    """Yield what a model that sees images or is quantised means; refuse other kinds of models."""
    model = str(config.pretrain)
    names = " ".join([model, *map(str, as_list(config.actor_train.data_args.file_name))])
    if VISION.search(names):
        if not SEEING.search(model):
            raise ConfigError(
                f"{path.name}: {names}: Rather trains language models, and on images only the "
                "families of docs/vision.md."
            )
        yield Outcome(MISSING, note=IMAGES, key="(images)")
    if ROUNDED.search(model):
        yield Outcome(IMPOSSIBLE, note=QUANTISED, key="(model)", value=config.pretrain)


def _agreed(rows: list[Outcome]) -> list[Outcome]:
    """Report keys that set the same key of Rather to different values."""
    first: dict[str, Outcome] = {}
    checked = []
    for row in rows:
        contradicted = set()
        for path, setting in row.values.items():
            earlier = first.setdefault(path, row)
            if earlier.values[path] != setting:
                contradicted.add(earlier.key)
        note = f"contradicts {', '.join(sorted(contradicted))}; remove one of them"
        checked.append(row.refused(IMPOSSIBLE, note) if contradicted else row)
    return checked


def _missing(
    peer: Peer, rows: list[Outcome], determined: set[str], config: DPOConfig, *, knows_devices: bool
) -> Iterator[Outcome]:
    """Yield what makes a training and is neither in the source nor a default of the tool."""
    needless = {
        # The batch depends on how many devices divide the weights.
        "devices": knows_devices or config.actor_train.strategy_args.strategy_name in (None, "ddp"),
        "beta": config.loss_names == ["sft"] or config.task == "reward",
        "scored turns": config.task != "sft",
        "router loss": not MIXTURE.search(str(config.pretrain)),
    }
    reported = {row.key for row in rows}
    for line in ESSENTIAL.strip().splitlines():
        name, _, alternatives = line.strip().partition(" = ")
        paths = list(map(full, alternatives.split()))
        if needless.get(name) or f"({name})" in reported or not determined.isdisjoint(paths):
            continue
        note = f"neither set in the source file nor a fixed default of {peer.name}; set {paths[0]}"
        if name == "devices":
            note = SHARDED
        values = {path: PLACES[path] for path in paths if path in PLACES}
        yield Outcome(MISSING, values, note, f"({name})")


def full(path: str) -> str:
    """Return a key of Rather whose section may have a short name."""
    section, dot, name = path.partition(".")
    return SECTIONS.get(section, section) + dot + name if dot else path


def nested(values: JsonObject) -> JsonObject:
    """Return dotted paths as nested mappings, in the order of the schema."""
    order = {path: place for place, path in enumerate(table())}
    tree: JsonObject = {}
    for path in sorted(values, key=lambda path: order.get(path, len(order))):
        set_at(tree, path, values[path])
    return tree


def _row(peer: Peer, key: str, value: Any, given: Given) -> Outcome:
    """Apply the rule of a key. A text under a name like hub_token is neither shown nor written."""
    row = _outcome(peer, key, value, given)._replace(key=key, value=value)
    if any(path.endswith(RUNS_CODE) for path in row.values) and value:
        note = "it runs Python code of others and is not copied; add it yourself if you trust them"
        return row.refused(LEFT_OUT, note)
    public = bool(row.values) and not any(map(looks_secret, row.values))
    if not (looks_secret(key) and isinstance(value, str)) or public:
        return row
    note = "secrets are not written; set it in the environment"
    hidden = row if row.status in INCOMPLETE else row.refused(LEFT_OUT, note)
    return hidden._replace(value=MASK)


def _outcome(peer: Peer, key: str, value: Any, given: Given) -> Outcome:
    rule = peer.rules.get(key)
    if rule is None:
        return _without_rule(peer, key, value)
    if value == "":
        return Outcome(NEEDLESS, note="empty")
    try:
        outcome = rule(value, given)
    except ConfigError as why:
        raise ConfigError(f"{key}: {why}") from None
    except Unsupported as why:
        return Outcome(IMPOSSIBLE, note=str(why))
    except (TypeError, ValueError, AttributeError, LookupError):
        is_variable = VARIABLE.search(str(value))
        note = UNSURE if is_variable else f"{short(value)} is not a value that {peer.name} accepts"
        return Outcome(IMPOSSIBLE, note=note)
    values = {full(path): v for path, v in outcome.values.items()}
    if VARIABLE.search(str(values)):
        return Outcome(LEFT_OUT if values.keys() <= FOLDERS else IMPOSSIBLE, note=UNSURE)
    return outcome._replace(values=values)


def _without_rule(peer: Peer, key: str, value: Any) -> Outcome:
    """Say whether the tool has a setting at all; decided by the list of its settings."""
    if value is None:
        return Outcome(NEEDLESS, note="empty")
    if key in peer.settings:
        if value == peer.settings[key]:
            return Outcome(NEEDLESS, note=f"the default of {peer.name}")
        return Outcome(IMPOSSIBLE, note="Rather has no rule for it")
    near = difflib.get_close_matches(key, [*peer.rules, *peer.settings], n=1, cutoff=0.8)
    tool = f"{peer.name} {peer.version} has no such setting"
    note = tool if peer.settings else "Rather has no rule for it"
    return Outcome(UNKNOWN, note=f"{note}; did you mean {near[0]}?" if near else note)


def _differing_defaults(rows: list[Outcome], stated: JsonObject) -> Iterator[Outcome]:
    """Yield the defaults of the tool that are not Rather's, and those that have no counterpart."""
    rather_defaults = {path: key.default for path, key in table().items()}
    for row in rows:
        differing = {path: setting for path, setting in row.values.items()
                     if path not in stated and setting != rather_defaults[path]}  # fmt: skip
        if row.status in INCOMPLETE:
            yield row
        elif differing:
            defaults = ", ".join(short(rather_defaults[path]) for path in differing)
            note = f"Rather's default is {defaults}"
            note += f"; {row.note}" if row.note else ""
            yield row._replace(status=WRITTEN, values=differing, note=note)


def _values(rows: list[Outcome]) -> JsonObject:
    return {path: setting for row in rows for path, setting in row.values.items()}


def _judged(rows: list[Outcome]) -> tuple[list[Outcome], DPOConfig]:
    """Remove what the schema or the loss rejects, with the reason, until the rest is accepted."""
    from rather.losses.objective import from_config

    while True:
        try:
            config = config_from_dict(nested({**PLACES, **_values(rows)}))
            from_config(config)
            return rows, config
        except ConfigError as error:
            remaining = [_without(row, error.problems) for row in rows]
            if remaining == rows:
                raise
            rows = remaining


def _without(row: Outcome, problems: list[str]) -> Outcome:
    for problem in problems:
        keys, _, text = problem.partition(": ")
        rejected = tuple(f"{key}." for key in keys.split(", "))
        accepted = {path: v for path, v in row.values.items()
                    if not f"{path}.".startswith(rejected)}  # fmt: skip
        if len(accepted) < len(row.values):
            is_eval = list(row.values) == ["eval_steps"]  # without it, it trains the same
            return Outcome(LEFT_OUT if is_eval else IMPOSSIBLE, accepted, text, row.key, row.value)
    return row
