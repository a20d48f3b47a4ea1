"""The engine for all tools: rules set keys, the schema checks them, none is lost silently."""

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
from rather.tools.migrate.removed import TOOL, marks_in
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
    UNKNOWN,
    UNSET,
    WRITTEN,
    Given,
    Outcome,
    Rule,
    Unsupported,
    full,
    rounds_instead,
    short,
)
from rather.tools.migrate.source import SourceSettings
from rather.tracking.json_lines import flatten

PROBLEMS = (*INCOMPLETE, OPEN, LEFT_OUT)
DIFFERENCES = (*PROBLEMS, CHANGED)
ORDER = (*DIFFERENCES, WRITTEN, CONVERTED, NEEDLESS)
MAPPINGS = (".strategy_config.", "system_envs.")  # any name
# Keys whose value is code that a run would execute.
RUNS_CODE = (".trust_remote_code", ".worker_cls", "actor_train.engine")
FOLDERS = {"output_dir", "exp_name", "logging_dir"}
# What an incomplete file has where its source says nothing.
PLACES = {
    "pretrain": "path/to/model",
    "actor_train.data_args.file_name": "path/to/pairs.jsonl",
}
DEVICES = "actor_train.device_mapping"
STRATEGY = "actor_train.strategy_args.strategy_name"
_TRAINING, _MODEL = "actor_train.training_args.", "actor_train.model_args."
# What a training is; without one of these a conversion is a guess.
ESSENTIAL = {
    "model": ("pretrain",),
    "data": ("actor_train.data_args.file_name",),
    "loss": ("pref_loss",),
    "beta": ("beta",),
    "learning rate": (_TRAINING + "learning_rate",),
    "batch": ("train_batch_size", _TRAINING + "per_device_train_batch_size"),
    "adapter": tuple(_MODEL + key for key in ("lora_rank", "lora_config", "adapter_name_or_path")),
    "layers of the adapter": tuple(_MODEL + key for key in ("lora_target", "lora_config")),
    "precision": (_MODEL + "dtype",),
    "scored turns": ("actor_train.data_args.score",),
    "router loss": (_MODEL + "moe_aux_loss_coef",),
}
KEYS = Path(__file__).parent / "keys"  # lists that bench/migrate_keys.py makes
# What is known besides the keys of a file.
TRAINER, COUNT, FOLDER = "(trainer)", "(devices)", "(folder)"
VARIABLE = re.compile(r"\$(\{|[A-Za-z_])")
UNSURE = "its value is only known when a script has filled it in"
SHARDED = (
    "the weights are divided among devices, but the source does not say how many there are, so the "
    "pairs of a step are not known; pass --devices"
)
QUANTISED = "its weights are quantised and cannot be trained; name the model in full precision"
ROUNDED = re.compile(r"(?i)(^|[-_/.])(gptq|awq|aqlm|hqq|eetq|bnb-4bit|int4|int8)($|[-_/.])")
VISION = re.compile(  # names of models and data sets
    r"(?i)(^|[^a-z])((intern)?(vl|vlm)|llava\w*|vision|omni|pixtral|idefics\w*|[a-z]*ocr|tts|asr|audio|"
    r"speech|minicpm-?[vo]|ovis\w*|janus\w*|emu\d?|textcaps|llama-?4|rlaif-v)($|[^a-z])"
)
# Models that see images here.
SEEING = re.compile(r"(?i)qwen(2\.?5-?vl|3-?vl|3\.?5)|llava-?(v1\.6|next)|smolvlm")
FREEZE = _MODEL + "freeze"
FREEZING = ("llama-factory",)
IMAGE_SIZES = (
    "tools scale images before the processor does, so sizes and tokens of images may differ; "
    "compare `rather data --show 3`, set data_args.image_dir and image_max_pixels"
)


@dataclass(frozen=True)
class Peer:
    """Another trainer: its keys, its defaults, and how to recognise its files.

    The facts are those of `version`. A default may be a function of the other settings. `marks` are
    keys that only this tool has. `trainers` are what `--trainer` may name, if files do not.
    `whole` are keys whose value is a mapping. `reader` reads a file whose values refer to others.
    `always` are differences that no key expresses.
    """

    name: str
    rules: Mapping[str, Rule]
    version: str = ""
    defaults: JsonObject = field(default_factory=dict)
    trainers: tuple[str, ...] = ()
    marks: str = ""
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


@dataclass(frozen=True)
class Migrated:
    """Values for Rather as nested mappings, and what became of each key, problems first."""

    peer: Peer
    name: str
    values: JsonObject
    rows: list[Outcome]
    config: DPOConfig
    knows_devices: bool = False  # whether the source or the caller says how many there are

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
        tool = f"{self.peer.name} {self.peer.version}".strip()
        lines = [f"# Made by `rather migrate` from {self.name} ({tool})."]
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


def guess(source: SourceSettings, peers: Mapping[str, Peer]) -> Peer:
    """Return the tool that these keys belong to; an error if none or several match."""
    keys = {*flatten(source.values), *source.values}
    counts = {peer.name: len(keys.intersection(peer.marks.split())) for peer in peers.values()}
    counts |= marks_in(keys)
    highest = max(counts.values())
    best = [name for name, count in counts.items() if count == highest and highest]
    if len(best) == 1 and best[0] not in peers:
        raise ConfigError(f"{source.name}: a file of {best[0]} {TOOL}")
    if len(best) == 1:
        return peers[best[0]]
    raise ConfigError(
        f"{source.name}: cannot tell which tool this file is for; add --from "
        + "|".join([name for name in best if name in peers] or peers)
    )


def migrate(
    source: SourceSettings, peer: Peer, devices: int | None = None, trainer: str | None = None
) -> Migrated:
    """Return settings of the same meaning, as far as Rather has them."""
    values = peer.reader(source.file) if peer.reader and source.file else source.values
    written = flatten(values, whole=peer.whole.split())
    if trainer:
        _check_trainer(peer, trainer)
        written[TRAINER] = trainer
    settings = {FOLDER: source.folder, **written}
    filled = _fill_defaults(peer, settings)
    rows = [_row(peer, key, setting, settings) for key, setting in written.items()]
    rows = _agreed(_given_devices(devices) + rows)
    stated = set(_values(rows))
    defaults = [_row(peer, key, settings[key], settings) for key in filled]
    rows += _differing_defaults(defaults, stated)
    knows_devices = bool(devices) or DEVICES in stated
    if not knows_devices and _needs_devices(_values(rows)):
        rows.append(Outcome(MISSING, note=SHARDED, key=COUNT))
    determined = stated.union(*(row.values for row in defaults))
    rows += _places(peer, _values(rows), determined)
    rows += _image_rows(peer, _values(rows))
    rows, config = _judged(rows)
    rows += _missing(peer, rows, determined, config)
    rows += _refuse_model(source, config)
    rows.sort(key=lambda row: ORDER.index(row.status))
    return Migrated(peer, source.name, nested(_values(rows)), rows, config, knows_devices)


def _check_trainer(peer: Peer, trainer: str) -> None:
    if trainer not in peer.trainers:
        offered = ", ".join(peer.trainers) or "what a file itself says"
        raise ConfigError(
            f"--trainer {trainer}: of {peer.name} Rather converts {offered}."
            f"{rounds_instead(trainer)}"
        )


def _fill_defaults(peer: Peer, given: JsonObject) -> list[str]:
    """Add the defaults of keys that are not set, in their order; return these keys."""
    filled = []
    for key, default in peer.defaults.items():
        with suppress(TypeError, ValueError, ArithmeticError):  # it depends on senseless values
            filled_in = default(given) if callable(default) else default
            if filled_in is not UNSET and not _says(peer, key, given):
                given[key] = filled_in
                filled.append(key)
    return filled


def _given_devices(count: int | None) -> list[Outcome]:
    if not count or count == 1:
        return []
    return [Outcome(CONVERTED, {DEVICES: f"0-{count - 1}"}, "from --devices", COUNT, count)]


def _places(peer: Peer, values: JsonObject, determined: set[str]) -> Iterator[Outcome]:
    """Yield something to fill in for a model or pairs that the source does not name."""
    for name in ("model", "data"):
        [path] = ESSENTIAL[name]
        if path not in values:
            status = OPEN if path in determined else MISSING  # OPEN: another row says why
            yield Outcome(status, {path: PLACES[path]}, _unset(peer, path), f"({name})")


def _image_rows(peer: Peer, values: JsonObject) -> list[Outcome]:
    """Return what has to be checked by hand for a model that sees images.

    LLaMA-Factory freezes tower and projector, as Rather does; other tools train them.
    """
    model = str(values.get("pretrain"))
    if not VISION.search(model) or not SEEING.search(model):
        return []
    has_adapter = any(values.get(path) for path in ESSENTIAL["adapter"])
    trains_all = peer.name not in FREEZING and not has_adapter
    return [Outcome(MISSING, {FREEZE: []} if trains_all else {}, IMAGE_SIZES, "(images)")]


def _refuse_model(source: SourceSettings, config: DPOConfig) -> list[Outcome]:
    """Raise for models and data of other kinds; return a row for quantised weights."""
    files = map(str, as_list(config.actor_train.data_args.file_name))
    names = f"{config.pretrain} {' '.join(files)}"
    if VISION.search(names) and not SEEING.search(str(config.pretrain)):
        raise ConfigError(
            f"{source.name}: {names}: Rather trains language models, and on images only the "
            "families of docs/vision.md."
        )
    if not ROUNDED.search(str(config.pretrain)):
        return []
    return [Outcome(IMPOSSIBLE, note=QUANTISED, key="(model)", value=config.pretrain)]


def _needs_devices(values: JsonObject) -> bool:
    """Return whether weights are divided, and the batch depends on how many devices do that."""
    divides = values.get(STRATEGY) not in (None, "ddp")
    return divides and "train_batch_size" not in values


def _says(peer: Peer, key: str, given: Given) -> bool:
    """Return whether a key is set; an empty one is, only if that has a meaning of its own."""
    if given.get(key) is not None or key not in given:
        return key in given
    return bool(_outcome(peer, key, None, given).values)


def _agreed(rows: list[Outcome]) -> list[Outcome]:
    """Report keys that set the same key of Rather to different values."""
    first: dict[str, Outcome] = {}
    checked = []
    for row in rows:
        against = {first[path].key for path, setting in row.values.items()
                   if first.setdefault(path, row).values[path] != setting}  # fmt: skip
        note = f"contradicts {', '.join(sorted(against))}; remove one of them"
        checked.append(row.refused(IMPOSSIBLE, note) if against else row)
    return checked


def _missing(
    peer: Peer, rows: list[Outcome], determined: set[str], config: DPOConfig
) -> list[Outcome]:
    """Return what makes a training and is neither in the source nor a default of the tool."""
    needless = {
        "beta": config.loss_names == ["sft"] or config.task == "reward",
        # PEFT's own choice depends on the model; other tools choose all layers, as Rather does.
        "layers of the adapter": not config.actor_train.model_args.lora_rank
        or "lora_target_modules" not in peer.defaults,
        "scored turns": config.task != "sft",
        "router loss": not MIXTURE.search(str(config.pretrain)),
    }
    determined = determined.difference(*(row.rejected for row in rows))
    reported = {row.key for row in rows}
    return [
        Outcome(MISSING, note=_unset(peer, paths[0]), key=f"({name})")
        for name, paths in ESSENTIAL.items()
        if not needless.get(name) and determined.isdisjoint(paths) and f"({name})" not in reported
    ]


def _unset(peer: Peer, path: str) -> str:
    return f"neither set in the source file nor a fixed default of {peer.name}; set {path}"


def nested_keys(values: JsonObject) -> JsonObject:
    """Return dotted paths as nested mappings."""
    tree: JsonObject = {}
    for path, setting in values.items():
        set_at(tree, path, setting)
    return tree


def nested(values: JsonObject) -> JsonObject:
    """Return dotted paths as nested mappings, in the order of the schema."""
    order = list(table())

    def place(path: str) -> int:  # strategy_config takes any key
        return order.index(path) if path in order else place(path.rpartition(".")[0])

    return nested_keys({path: values[path] for path in sorted(values, key=place)})


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
    return _in_schema(outcome)


def _in_schema(outcome: Outcome) -> Outcome:
    """Return the outcome of a key with the full names of Rather's keys, all of which must exist."""
    values = {full(path): v for path, v in outcome.values.items()}
    if VARIABLE.search(str(values)):
        status = LEFT_OUT if set(values) <= FOLDERS else IMPOSSIBLE
        return Outcome(status, note=UNSURE)
    absent = [path for path in values if path not in table() and not _is_in_mapping(path)]
    if absent:
        return Outcome(IMPOSSIBLE, note=f"this version has no {', '.join(absent)}")
    return Outcome(outcome.status, values, outcome.note)


def _is_in_mapping(path: str) -> bool:
    return any(mapping in path for mapping in MAPPINGS)


def _without_rule(peer: Peer, key: str, value: Any) -> Outcome:
    """Say whether the tool has a setting at all; decided by the list of its settings."""
    if value is None:
        return Outcome(NEEDLESS, note="empty")
    if key in peer.settings:
        if value == peer.settings[key]:
            return Outcome(NEEDLESS, note=f"the default of {peer.name}")
        return Outcome(IMPOSSIBLE, note="Rather has no rule for it")
    names = [*peer.rules, *peer.settings]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    tool = f"{peer.name} {peer.version}".strip()
    note = f"{tool} has no such setting" if peer.settings else "Rather has no rule for it"
    return Outcome(UNKNOWN, note=f"{note}; did you mean {near[0]}?" if near else note)


def _differing_defaults(rows: list[Outcome], stated: set[str]) -> Iterator[Outcome]:
    """Yield the defaults of the tool that are not Rather's, and those that have no counterpart."""
    schema = table()
    for row in rows:
        if row.status in INCOMPLETE:
            yield row
            continue
        differing = {
            path: setting
            for path, setting in row.values.items()
            if path not in stated and (path not in schema or setting != schema[path].default)
        }
        ours = ", ".join(short(schema[path].default) for path in differing if path in schema)
        notes = [f"Rather's default is {ours}"] if ours else []
        notes += [row.note] if row.note else []
        if differing:
            yield row._replace(status=WRITTEN, values=differing, note="; ".join(notes))


def _values(rows: list[Outcome]) -> JsonObject:
    return {path: setting for row in rows for path, setting in row.values.items()}


def _judged(rows: list[Outcome]) -> tuple[list[Outcome], DPOConfig]:
    """Remove what the schema or the loss rejects, with the reason, until the rest is accepted."""
    from rather.losses.objective import from_config

    while True:
        try:
            config = config_from_dict(nested(_values(rows)))
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
        lost = [path for path in row.values if f"{path}.".startswith(rejected)]
        if lost:
            accepted = {path: v for path, v in row.values.items() if path not in lost}
            all_lost = (*row.rejected, *lost)
            status = LEFT_OUT if all_lost == ("eval_steps",) else IMPOSSIBLE  # it trains the same
            return Outcome(status, accepted, text, row.key, row.value, all_lost)
    return row


def summary(migrated: Migrated) -> JsonObject:
    """Return what became of each key, for programs."""
    return {
        "tool": migrated.peer.name,
        "version": migrated.peer.version,
        "complete": migrated.is_complete,
        "keys": [
            {"key": row.key, "value": row.value, "status": row.status, "note": row.note,
             "rather": row.values}
            for row in migrated.rows
        ],
        "always": list(migrated.peer.always),
    }  # fmt: skip
