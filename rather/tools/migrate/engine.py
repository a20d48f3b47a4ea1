"""The engine for all tools: rules set keys, the schema checks them, none is lost silently."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from rather.errors import ConfigError
from rather.files import JsonObject
from rather.tools.migrate.rules import (
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
    rounds_instead,
    short,
)
from rather.tools.migrate.settings import SourceSettings
from rather.tracking.json_lines import flatten

ORDER = (*INCOMPLETE, OPEN, LEFT_OUT, CHANGED, WRITTEN, RENAMED, KEPT, NEEDLESS)
MAPPINGS = (".columns.", ".strategy_config.", ".lr_scheduler_kwargs.", "system_envs.")  # any name
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
# What a source says besides its keys.
PROGRAM, COUNT, FOLDER, ALIASED = "(program)", "(devices)", "(folder)", "(other names)"
NOT_READ = "(not read)"
OTHERS = re.compile(  # programs that train something else
    r"(?i)(^|[_ .-])(sft|kto|bco|r?ppo|grpo|gdpo|gspo|sdpo|xpo|tpo|rloo|rm|prm|reward\w*|online\w*|"
    r"nash\w*|gkd|gold|sdft|ssd|distill\w*|embedding|pt|pretrain|vlm|mpo)($|[_ .-])"
)
UNSURE = "the number of processes is only known when the launcher runs; pass --devices"
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
FREEZING = ("llama-factory", "swift")
IMAGE_SIZES = (
    "tools scale images before the processor does, so sizes and tokens of images may differ; "
    "compare `rather data --show 3`, set data_args.image_dir and image_max_pixels"
)


@dataclass(frozen=True)
class Peer:
    """Another trainer: its keys, its defaults, and how to recognise its files.

    The facts are those of `version`. `programs` are its scripts and subcommands that Rather can
    replace, with the loss or task of each; None: another key says it. A default may be a function
    of the other settings. `aliases` are other names of keys. `marks` and `words` are keys, and
    words of a command line, that only this tool has. `whole` are keys whose value is a mapping.
    `reader` reads a file whose values refer to others, under the flags of a command line; `config`
    is its place next to the program if the line names none. `secrets` are keys whose text is a
    secret although their names do not say so. `always` are differences that no key expresses.
    `script` returns what the file of a program sets by itself, with the reason and its place.
    """

    name: str
    rules: Mapping[str, Rule]
    version: str = ""
    defaults: JsonObject = field(default_factory=dict)
    programs: Mapping[str, str | Mapping[str, str] | None] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    marks: str = ""
    words: tuple[str, ...] = ()
    reader: Callable[[Path, JsonObject], JsonObject] | None = None
    config: str = ""
    whole: str = ""
    secrets: str = ""
    always: tuple[str, ...] = ()
    script: Callable[[Path], dict[str, str]] | None = None

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

    def rule(self, key: str) -> Rule | None:
        """Return the rule of a key, or of a section it is in, such as `policy.generation.*`."""
        key = self.aliases.get(key, key)
        rule = algorithm(self.programs) if key == PROGRAM else self.rules.get(key)
        while rule is None and "." in key:
            key = key.rpartition(".")[0]
            rule = self.rules.get(f"{key}.*")
        return rule


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
        pairs, count = self.config.global_batch(), len(self.config.actor_train.devices)
        sizes = f"A step has {pairs} {'pair' if pairs == 1 else 'pairs'}"
        if self.knows_devices or self.config.train_batch_size:
            return f"{sizes} on {count} {'device' if count == 1 else 'devices'}."
        return (
            f"{sizes} on each device; the source does not say how many devices there are, so the "
            "file uses 1. Pass --devices for more."
        )

    def yaml(self) -> str:
        tool = f"{self.peer.name} {self.peer.version}".strip()
        lines = [f"# Made by `rather migrate` from {self.name} ({tool})."]
        if not self.is_complete:
            lines.append("# INCOMPLETE: it does not train what the source trains.")
        problems = (*INCOMPLETE, OPEN, LEFT_OUT)
        lines += [f"# {row.line}" for row in self.rows if row.status in problems]
        return "\n".join([*lines, yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)])


def guess(source: SourceSettings, peers: Mapping[str, Peer]) -> Peer:
    """Return the tool that these words or keys belong to; an error if none or several match."""
    keys = {*flatten(source.values), *source.values}
    line = f" {' '.join(source.words)} "
    best = [peer.name for peer in peers.values() if any(word in line for word in peer.words)]
    if not best:
        counts = {peer.name: len(keys.intersection(peer.marks.split())) for peer in peers.values()}
        highest = max(counts.values())
        best = [name for name, count in counts.items() if count == highest and highest]
    if len(best) == 1:
        return peers[best[0]]
    raise ConfigError(
        f"{source.name}: cannot tell which tool this file is for; add --from "
        + "|".join(best or peers)
    )


def with_program(source: SourceSettings, peer: Peer, program: str) -> SourceSettings:
    """Return settings that a program of the tool reads, which the user names."""
    if program not in peer.programs:
        offered = ", ".join(peer.programs)
        raise ConfigError(f"--trainer {program}: of {peer.name} Rather converts {offered}.")
    if source.program in peer.programs and source.program.split()[-1] != program.split()[-1]:
        raise ConfigError(f"--trainer {program}: {source.name} itself calls {source.program}.")
    return replace(source, program=program)


def migrate(source: SourceSettings, peer: Peer, devices: int | None = None) -> Migrated:
    """Return settings of the same meaning, as far as Rather has them."""
    if source.program not in peer.programs and OTHERS.search(source.program):
        raise ConfigError(
            f"{source.name}: {source.program} is not a training that Rather offers; of {peer.name} "
            f"it converts {', '.join(peer.programs)}.{rounds_instead(source.program)}"
        )
    source = _with_script(source, peer)
    count = devices or source.devices
    file = _file_of(source, peer)
    written = _written_keys(source, peer, file)
    settings = {
        COUNT: count or 1,
        FOLDER: file.parent if file else source.folder,
        ALIASED: any(key in peer.aliases for key in written),
        NOT_READ: source.unknown,
        **{peer.aliases.get(key, key): setting for key, setting in written.items()},
    }
    filled = _fill_defaults(peer, source, settings)
    rows = _launched(count) + _assumed_script(source, peer)
    rows += [_row(peer, key, setting, settings) for key, setting in written.items()]
    rows = _agreed(rows)
    stated = set(_values(rows))
    rows += [Outcome(LEFT_OUT, note=note, key=key) for key, note in source.left_out.items()]
    rows += [_not_read(peer, key, note, settings) for key, note in source.unknown.items()]
    stated = stated.union(*(_paths(peer, key, settings) for key in source.unknown))
    defaults = [_row(peer, key, settings[key], settings) for key in filled]
    rows += _differing_defaults(defaults, stated)
    rows += _unknown_devices(count, stated, _values(rows))
    determined = stated.union(*(row.values for row in defaults))
    rows += _places(peer, _values(rows), determined)
    rows += _image_rows(peer, source, _values(rows))
    rows, config = _judged(rows)
    rows += _missing(peer, rows, determined, config)
    rows += _refuse_model(source, config)
    rows.sort(key=lambda row: ORDER.index(row.status))
    knows_devices = bool(count) or DEVICES in stated
    return Migrated(peer, source.name, nested(_values(rows)), rows, config, knows_devices)


def _with_script(source: SourceSettings, peer: Peer) -> SourceSettings:
    """Return settings with what the file of the program sets by itself."""
    if peer.script is None or source.script is None:
        return source
    return replace(source, unknown={**source.unknown, **peer.script(source.script)})


def _assumed_script(source: SourceSettings, peer: Peer) -> list[Outcome]:
    """Return a row for a script that is not here: users give theirs the names of the tool's."""
    is_script = source.program in peer.programs and " " not in source.program
    if peer.script is None or source.script or not is_script or not source.words:
        return []
    return [Outcome(CHANGED, note=f"not here; taken to be {peer.name}'s own", key="(script)")]


def _unknown_devices(count: int | None, stated: set[str], values: JsonObject) -> list[Outcome]:
    """Return a row if the number of devices decides what is trained, and is not known."""
    if count == 0:
        return [Outcome(MISSING, note=UNSURE, key=COUNT)]
    is_known = bool(count) or DEVICES in stated
    if not is_known and _needs_devices(values):
        return [Outcome(MISSING, note=SHARDED, key=COUNT)]
    return []


def _file_of(source: SourceSettings, peer: Peer) -> Path | None:
    """Return the config file; a program may read one that the command line does not name."""
    if peer.config and not source.file and source.script:
        return source.script.parent / peer.config
    return source.file


def _written_keys(source: SourceSettings, peer: Peer, file: Path | None) -> JsonObject:
    """Return the keys that a source sets; `--no_remove_unused_columns` sets one to false."""
    values = peer.reader(file, source.flags) if peer.reader and file else source.values
    written: JsonObject = {}
    if source.program in peer.programs:
        written[PROGRAM] = source.program
    for key, setting in flatten(values, whole=peer.whole.split()).items():
        name = key.removeprefix("no_")
        turned = setting is True and peer.rule(key) is None and peer.rule(name) is not None
        written |= {name: False} if turned else {key: setting}
    return written


def _fill_defaults(peer: Peer, source: SourceSettings, given: JsonObject) -> list[str]:
    """Add the defaults of keys that are not set, in their order; return these keys."""
    filled = []
    for key, default in peer.defaults.items():
        with suppress(TypeError, ValueError, ArithmeticError):  # it depends on senseless values
            filled_in = default(given) if callable(default) else default
            is_set = key in source.unknown or key in source.left_out or _says(peer, key, given)
            if filled_in is not UNSET and not is_set:
                given[key] = filled_in
                filled.append(key)
    return filled


def _launched(count: int | None) -> list[Outcome]:
    if not count or count == 1:
        return []
    return [Outcome(RENAMED, {DEVICES: f"0-{count - 1}"}, "from the launcher", COUNT, count)]


def _not_read(peer: Peer, key: str, note: str, given: Given) -> Outcome:
    """Return the row of a key whose value only a run has."""
    paths = _paths(peer, key, given)
    placeholders = {path: placeholder for path, placeholder in PLACES.items() if path in paths}
    return Outcome(MISSING, placeholders, note, key)


def _places(peer: Peer, values: JsonObject, determined: set[str]) -> Iterator[Outcome]:
    """Yield something to fill in for a model or pairs that the source does not name."""
    for name in ("model", "data"):
        [path] = ESSENTIAL[name]
        if path not in values:
            status = OPEN if path in determined else MISSING  # OPEN: another row says why
            yield Outcome(status, {path: PLACES[path]}, _unset(peer, path), f"({name})")


def _image_rows(peer: Peer, source: SourceSettings, values: JsonObject) -> list[Outcome]:
    """Return what has to be checked by hand for a model that sees images.

    LLaMA-Factory and ms-swift freeze tower and projector, as Rather does; other tools train them.
    """
    model = str(values.get("pretrain"))
    if not VISION.search(f"{source.program} {model}") or not SEEING.search(model):
        return []
    has_adapter = any(values.get(path) for path in ESSENTIAL["adapter"])
    trains_all = peer.name not in FREEZING and not has_adapter
    return [Outcome(MISSING, {FREEZE: []} if trains_all else {}, IMAGE_SIZES, "(images)")]


def _refuse_model(source: SourceSettings, config: DPOConfig) -> list[Outcome]:
    """Raise for models and data of other kinds; return a row for quantised weights."""
    files = map(str, as_list(config.actor_train.data_args.file_name))
    names = f"{config.pretrain} {' '.join(files)}"
    if VISION.search(f"{source.program} {names}") and not SEEING.search(str(config.pretrain)):
        raise ConfigError(
            f"{source.name}: {names}: Rather trains language models, and on images only the "
            "families of docs/vision.md."
        )
    if not ROUNDED.search(str(config.pretrain)):
        return []
    return [Outcome(IMPOSSIBLE, note=QUANTISED, key="(model)", value=config.pretrain)]


def _paths(peer: Peer, key: str, given: Given) -> set[str]:
    """Return the keys of Rather that a setting of the tool may set."""
    paths: set[str] = set()
    for example in (True, 1, "x"):
        with suppress(ConfigError):
            paths.update(_outcome(peer, key, example, given).values)
    return paths


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
    if peer.aliases.get(key, key) in peer.secrets.split() and isinstance(value, str):
        return row._replace(value=MASK)
    if not (looks_secret(key) and isinstance(value, str)) or public:
        return row
    note = "secrets are not written; set it in the environment"
    hidden = row if row.status in INCOMPLETE else row.refused(LEFT_OUT, note)
    return hidden._replace(value=MASK)


def _outcome(peer: Peer, key: str, value: Any, given: Given) -> Outcome:
    rule = peer.rule(key)
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
        return Outcome(IMPOSSIBLE, note=f"{short(value)} is not a value that {peer.name} accepts")
    return _in_schema(key, outcome)


def _in_schema(key: str, outcome: Outcome) -> Outcome:
    """Return the outcome of a key with the full names of Rather's keys, all of which must exist."""
    values = {full(path): v for path, v in outcome.values.items()}
    if "${" in str(values):
        status = LEFT_OUT if set(values) <= FOLDERS else IMPOSSIBLE
        return Outcome(status, note="its value is only known when it runs")
    absent = [path for path in values if path not in table() and not _is_in_mapping(path)]
    if absent:
        return Outcome(IMPOSSIBLE, note=f"this version has no {', '.join(absent)}")
    same = all(key in (path, path.rpartition(".")[2]) for path in values)
    status = KEPT if same and outcome.status == RENAMED else outcome.status
    return Outcome(status, values, outcome.note)


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
    names = [*peer.rules, *peer.aliases, *peer.settings]
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
