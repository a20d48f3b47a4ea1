"""Read the settings of another trainer: a YAML or JSON file, or a command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rather.errors import ConfigError
from rather.files import MOST_DIGITS, parse_json, parse_yaml, yaml_text

NUMBER = re.compile(r"[+-]?(\d++\.?\d*+|\.\d++)([eE][+-]?\d++)?")
WORDS = {"true": True, "false": False, "none": None, "null": None}
FILES = (".yaml", ".yml", ".json")
# Of launchers: how many processes a node runs, and how many nodes.
PROCESSES = ("num_processes", "nproc_per_node", "nproc-per-node", "num_gpus", "n_gpus_per_node",
             "NPROC_PER_NODE")  # fmt: skip
LAUNCHER = ("module", "config_file", "config_path", "config_name", "hostfile", "master_port",
            "master_addr", "node_rank", "main_process_port", "rdzv_backend", "rdzv_endpoint",
            "standalone")  # fmt: skip
NODES = ("nnodes", "num_nodes", "num_machines", "NNODES")


@dataclass(frozen=True)
class SourceSettings:
    """Nested values, the words of a command line, and the devices that its launcher asks for."""

    name: str
    values: dict[str, Any]
    words: tuple[str, ...] = ()
    devices: int | None = None
    file: Path | None = None


def read_file(path: Path) -> SourceSettings:
    """Read a YAML or JSON file, or a text file with a command line."""
    text = _text(path)
    if path.suffix in FILES:
        return SourceSettings(path.name, _mapping(text, path), file=path)
    return read_line(text, path.name, path.parent)


def read_line(line: str, name: str = "the line", folder: Path = Path()) -> SourceSettings:
    """Read a command line: environment, launcher, script, flags, and a config file that it names."""
    joined = "\n".join(
        each for each in line.replace("\\\n", " ").splitlines() if not each.lstrip().startswith("#")
    )
    try:
        words = shlex.split(joined)
    except ValueError as error:
        raise ConfigError(f"{name}: is not a command line ({error}).") from None
    if not words:
        raise ConfigError(f"{name}: contains no command line.")
    written = list(_written(words))
    values: dict[str, Any] = {}
    for key, value in written:
        if key == "config" or (not key and str(value).endswith(FILES)):
            values |= _base(str(value), folder, name)
    flags = {key: value for key, value in written if key and key != "config"}
    launched = (*PROCESSES, *NODES, *LAUNCHER)
    values |= {
        key: value for key, value in flags.items() if key not in launched and not key.isupper()
    }
    return SourceSettings(name, values, tuple(words), _devices(flags))


def flat(
    values: Mapping[str, Any], whole: tuple[str, ...] = (), prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield ("policy.precision", "bf16") for nested mappings; keys of `whole` stay mappings."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and path not in whole:
            yield from flat(value, whole, f"{path}.")
        else:
            yield path, value


def with_powers(value: Any) -> Any:
    """Convert 5e-7, which YAML 1.1 reads as text, to a number; other text stays text."""
    if isinstance(value, list):
        return [with_powers(item) for item in value]
    if isinstance(value, dict):
        return {str(key): with_powers(item) for key, item in value.items()}
    is_number = isinstance(value, str) and "e" in value.lower() and NUMBER.fullmatch(value)
    return float(value) if is_number else value


def plain(value: Any) -> Any:
    """Convert the numbers and words of a command line, where everything is text."""
    if isinstance(value, list):
        return [plain(item) for item in value]
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


def _mapping(text: str, path: Path) -> dict[str, Any]:
    try:
        values = with_powers(parse_json(text) if path.suffix == ".json" else parse_yaml(text))
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read as {path.suffix[1:]}: {error}") from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path}: contains no keys and values.")
    return values


def _base(word: str, folder: Path, name: str) -> dict[str, Any]:
    """Return the values of a config file that a command line names."""
    path = Path(word).expanduser()
    found = next((each for each in (folder / path, path) if each.is_file()), None)
    if found is None:
        raise ConfigError(
            f"{name}: the config file {word} does not exist; run this in the folder of that command."
        )
    return _mapping(_text(found), found)


def _written(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield --key value, --key=value, --switch, --key a b c, key=value; other words without key."""
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not word.startswith("--"):
            key, equals, value = word.partition("=")
            is_setting = bool(equals) and re.fullmatch(r"[+~]{0,2}[\w.]+", key) is not None
            yield (key.lstrip("+~"), plain(value)) if is_setting else ("", word)
            continue
        key, equals, value = word[2:].partition("=")
        taken = [value] if equals else []
        while not equals and i < len(words) and not _ends_values(words[i]):
            taken.append(words[i])
            i += 1
        yield (
            _named(key),
            True if not taken else plain(taken[0]) if len(taken) == 1 else plain(taken),
        )


def _ends_values(word: str) -> bool:
    return word.endswith(".py") or (word.startswith("-") and not NUMBER.fullmatch(word))


def _named(key: str) -> str:
    return key if key in PROCESSES else key.replace("-", "_")


def _devices(flags: Mapping[str, Any]) -> int | None:
    processes = next((flags[key] for key in PROCESSES if isinstance(flags.get(key), int)), None)
    nodes = next((flags[key] for key in NODES if isinstance(flags.get(key), int)), 1)
    if processes is None:
        visible = str(flags.get("CUDA_VISIBLE_DEVICES", ""))
        return len(visible.split(",")) if visible else None
    return int(processes) * (1 if "num_processes" in flags else int(nodes))
