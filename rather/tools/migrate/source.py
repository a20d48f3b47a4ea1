"""Read the settings of another trainer: a YAML or JSON file, a command line, or a shell script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rather.errors import ConfigError
from rather.files import MOST_DIGITS, JsonObject, parse_json, parse_yaml, yaml_text
from rather.tools.migrate.python_script import read_script, trainer_in
from rather.tools.migrate.settings import SourceSettings as SourceSettings
from rather.tools.migrate.shell import commands

NUMBER = re.compile(r"[+-]?(\d++\.?\d*+|\.\d++)([eE][+-]?\d++)?")
SETTING = re.compile(r"[+~]{0,2}[\w.]+=")
WORDS = {"true": True, "false": False, "none": None, "null": None}
FILES = (".yaml", ".yml", ".json")
PROGRAMS = (".md", ".ipynb", ".rst", ".toml")  # files that hold no settings
CLIS = ("trl", "swift", "megatron", "llamafactory-cli", "lmf", "axolotl")
# Of the programs that a script calls, those that train.
TRAINS = re.compile(
    r"(?i)(^|[_. /-])(train\w*|rlhf|\w*[dockip]po|dpo\w*|kto\w*|sft\w*|rm|reward\w*|bco|rloo|nash)"
)
# Of launchers: how many processes a node runs, and how many nodes.
PROCESSES = ("num_processes", "nproc_per_node", "nproc-per-node", "num_gpus", "n_gpus_per_node",
             "NPROC_PER_NODE")  # fmt: skip
NODES = ("nnodes", "num_nodes", "num_machines", "NNODES")
LAUNCHED = (*PROCESSES, *NODES)
CONFIG_FLAGS = ("config", "config_path", "config_name")  # name a file
ENVIRONMENT = ("NPROC_PER_NODE", "NNODES", "CUDA_VISIBLE_DEVICES")
ALL_VISIBLE = ("accelerate", "deepspeed", "llamafactory-cli", "axolotl")  # start one each
STARTS_ONE = ("torchrun", "swift", "megatron")  # process by default
MAPPING_OF = ("compute_environment", "distributed_type")  # keys of accelerate's own file


def read_file(path: Path) -> SourceSettings:
    """Read a YAML or JSON file, a training script, or a text file with a command line."""
    if path.suffix in PROGRAMS:
        raise ConfigError(
            f"{path}: holds no settings; pass the command line that trains, with --line."
        )
    if path.suffix == ".py":
        return read_script(path)
    if path.suffix in FILES:
        return SourceSettings(path.name, read_mapping(path), file=path, folder=path.parent)
    return read_line(_text(path), path.name, path.parent, str(path))


def read_line(
    line: str, name: str = "the line", folder: Path = Path(), file: str = ""
) -> SourceSettings:
    """Read a command line or script: environment, launcher, program, flags, and its config file."""
    try:
        environment, words, start = _training(commands(line, file), name)
    except ValueError as error:
        raise ConfigError(f"{name}: is not a command line ({error}).") from None
    program, after = start or ("", 0)
    launcher = dict(_written(words[: after or None]))
    flags, config = _flags_and_config(words[after:], folder, name, has_program=start is not None)
    values = (read_mapping(config) if config else {}) | flags
    launch_variables = {key: environment[key] for key in ENVIRONMENT if key in environment}
    launched = {**launch_variables, **_accelerate(launcher, folder), **launcher}
    devices = _devices(words[:1], launched, folder)
    script = _script(words[after - 1], folder) if start else None
    if script is None:
        return SourceSettings(name, values, tuple(words), devices, config, program, flags, folder)
    trainer = trainer_in(script) if script.suffix == ".py" else ""
    if trainer and not flags and not config:
        return replace(read_script(script), devices=devices)
    return SourceSettings(
        name, values, tuple(words), devices, config, trainer or program, flags, folder, script
    )


def _flags_and_config(
    words: list[str], folder: Path, name: str, *, has_program: bool
) -> tuple[JsonObject, Path | None]:
    """Return the settings of a command line, and the config file that it names.

    Without a program, the flags of launchers are not settings.
    """
    flags: JsonObject = {}
    other_words = []
    for key, setting in _written(words):
        if not key:
            other_words.append(str(setting))
        elif has_program or key not in LAUNCHED:
            flags[key] = setting
    config = _config_file(flags, other_words, folder, name)
    if has_program:  # a typing error such as -lr for --lr
        flags |= {word: True for word in other_words if not word.endswith(FILES)}
    if config:
        flags = {key: setting for key, setting in flags.items() if key not in CONFIG_FLAGS}
    return flags, config


def _training(
    found: list[tuple[dict[str, str], list[str]]], name: str
) -> tuple[dict[str, str], list[str], tuple[str, int] | None]:
    """Pick the one command that trains; without any known program, all words are settings."""
    if not found:
        raise ConfigError(f"{name}: contains no command line.")
    started = [(env, words, start) for env, words in found if (start := _program(words))]
    if not started:
        return found[-1][0], [word for _, words in found for word in words], None
    training = [command for command in started if TRAINS.search(command[2][0])] or started
    if len(training) > 1:
        names = ", ".join(start[0] for _, _, start in training)
        raise ConfigError(f"{name}: has several commands ({names}); pass one of them with --line.")
    return training[0]


def _program(words: list[str]) -> tuple[str, int] | None:
    """Return the name of the program and where its arguments begin."""
    is_module = False
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        follows = words[index + 1] if index + 1 < len(words) else "-"
        if name in CLIS and not follows.startswith("-"):
            return f"{name} {follows}", index + 2
        if is_module or name.endswith(".py"):
            return name.removesuffix(".py").rpartition(".")[2], index + 1
        is_module = word in ("-m", "--module")
    return None


def _script(word: str, folder: Path) -> Path | None:
    """Return the file of a program: as a shell in the folder, here or one level up finds it."""
    is_module = "/" not in word and not word.endswith(".py")
    file = f"{word.replace('.', '/')}.py" if is_module else word
    places = (folder / file, Path(file), folder.parent / file)
    return next((place for place in places if place.is_file()), None)


def with_powers(value: Any) -> Any:
    """Convert 5e-7, which YAML 1.1 reads as text, to a number; other text stays text."""
    if isinstance(value, list):
        return [with_powers(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): with_powers(entry) for key, entry in value.items()}
    is_number = isinstance(value, str) and "e" in value.lower() and NUMBER.fullmatch(value)
    return float(value) if is_number else value


def plain(value: Any) -> Any:
    """Convert the numbers and words of a command line, where everything is text."""
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    if not isinstance(value, str):
        return value
    if value.lower() in WORDS:
        return WORDS[value.lower()]
    if len(value) <= MOST_DIGITS and NUMBER.fullmatch(value):
        return int(value) if value.lstrip("+-").isdigit() else float(value)
    if value[:1] in "[{" and value[-1:] in "]}":
        try:
            return with_powers(parse_yaml(value))
        except ValueError:
            return value
    return value


def _text(path: Path) -> str:
    try:
        return yaml_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); pass a YAML, JSON or text file."
        ) from None


def read_mapping(path: Path) -> JsonObject:
    """Read the keys and values of a YAML or JSON file."""
    text = _text(path)
    try:
        values = with_powers(parse_json(text) if path.suffix == ".json" else parse_yaml(text))
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as {path.suffix[1:]}: {error}") from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path}: contains no keys and values.")
    if all(key in values for key in MAPPING_OF):
        raise ConfigError(f"{path}: configures accelerate, not a training; pass the command line.")
    return values


def _config_file(flags: JsonObject, others: list[str], folder: Path, name: str) -> Path | None:
    """Return the config file that a command line names; a missing one is an error."""
    files = [word for word in others if word.endswith(FILES) and word[0] != "-"]
    if flags.get("config"):
        files.append(str(flags["config"]))
    elif flags.get("config_name"):
        files.append(f"{flags.get('config_path', '.')}/{flags['config_name']}.yaml")
    if not files:
        return None
    if len(files) > 1:
        raise ConfigError(f"{name}: names several config files ({', '.join(files)}).")
    path = Path(files[0]).expanduser()
    for candidate in (folder / path, path, folder / "examples" / path, folder.parent / path):
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"{name}: the config file {path} does not exist; run this in the folder of that command."
    )


def _written(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield --key value, --key=value, --switch, --key a b c, key=value; other words without key."""
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not word.startswith("--"):
            key, _, text = word.partition("=")
            yield (key.lstrip("+~"), plain(text)) if SETTING.match(word) else ("", word)
            continue
        key, equals, text = word[2:].partition("=")
        texts = [text] if equals else []
        while not equals and i < len(words) and not _ends_values(words[i], texts):
            texts.append(words[i])
            i += 1
        key = key if key in PROCESSES else key.replace("-", "_")
        yield key, plain(texts[0] if len(texts) == 1 else texts or True)


def _ends_values(word: str, taken: list[str]) -> bool:
    """Return whether a word ends the values of a flag: after one value, `a.b=c` is a setting."""
    is_flag = word.startswith("-") and not NUMBER.fullmatch(word)
    return is_flag or word.endswith(".py") or bool(taken and SETTING.match(word))


def _accelerate(launcher: JsonObject, folder: Path) -> JsonObject:
    """Return the processes that accelerate's own file asks for; a text if the file is not here."""
    if not launcher.get("config_file"):
        return {}
    file = folder / str(launcher["config_file"])
    if not file.is_file():
        return {"num_processes": f"those of {file}"}
    if file.suffix not in FILES:
        return {}
    settings, key = parse_yaml(_text(file)), "num_processes"
    return {key: settings[key]} if isinstance(settings, dict) and key in settings else {}


def _devices(first: list[str], flags: JsonObject, folder: Path) -> int | None:
    """Return how many processes a launcher starts; 0 if that is only known when it runs."""
    numbers = {key: plain(flags[key]) for key in LAUNCHED if key in flags}
    nodes = _nodes(numbers, flags.get("hostfile"), folder)
    processes = next((numbers[key] for key in PROCESSES if key in numbers), None)
    if processes is None:
        launcher = first[0].rpartition("/")[2] if first else ""
        processes = _processes_of(launcher, str(flags.get("CUDA_VISIBLE_DEVICES", "")))
    if processes is None and nodes == 1 and not {"include", "exclude"} & set(flags):
        return None
    if not isinstance(processes, int) or not isinstance(nodes, int):
        return 0
    return processes * (1 if "num_processes" in flags else nodes)


def _nodes(numbers: JsonObject, hostfile: Any, folder: Path) -> Any:
    """Return the number of nodes: that of a host file, else of a flag; None if it is unknown."""
    if hostfile:
        file = folder / str(hostfile)
        return len(_text(file).split()) if file.is_file() else None
    return next((numbers[key] for key in NODES if key in numbers), 1)


def _processes_of(launcher: str, visible: str) -> int | None:
    """Return how many processes a launcher starts if no flag says it; None if that is not known."""
    if launcher in STARTS_ONE:
        return 1
    is_known = visible and "$" not in visible
    return len(visible.split(",")) if launcher in ALL_VISIBLE and is_known else None
