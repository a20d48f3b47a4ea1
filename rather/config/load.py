"""YAML + overrides -> Hydra -> plain values -> DPOConfig, with every problem of the file in one
error.

The only door to hydra and omegaconf. Hydra composes the values, the YAML tree knows the lines, the
schema judges.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as HydraOverride
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from yaml import YAMLError

from rather.config import paths
from rather.config.keys import table
from rather.config.masking import public_values
from rather.config.positions import key_lines, node_problems, read_nodes
from rather.config.schema import DPOConfig
from rather.config.validate import COMMAND_LINE, Names, Origins, validated, without
from rather.errors import ConfigError


class ShippedGroups(SearchPathPlugin):
    """ROLL's `../config/deepspeed_zero3@_here_` in a defaults list is found in the package,
    after the user's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("rather", f"file://{Path(__file__).parent / 'groups' / 'config'}")


Plugins.instance().register(ShippedGroups)


@dataclass(frozen=True)
class Loaded:
    """A config, where each of its values came from, and the composed values before
    interpolation."""

    config: DPOConfig
    sources: dict[str, str]
    raw: dict[str, Any]


def load_config(
    path: str | Path, overrides: Iterable[str] = (), *, check_paths: bool = True
) -> DPOConfig:
    """The config of a YAML file with `key=value` overrides, or one ConfigError with every
    problem."""
    loaded = load(path, overrides)
    if check_paths:
        paths.check_paths(loaded.config, loaded.sources)
    return loaded.config


def load(path: str | Path, overrides: Iterable[str] = ()) -> Loaded:
    """As `load_config`, with the sources of all values, and without looking for files."""
    path = Path(path).expanduser()
    nodes = read_nodes(path)
    given = [read_override(text, path.parent) for text in overrides]
    broken = [
        *node_problems(nodes, path.name),
        *(override.problem for override in given if override.problem),
    ]
    if broken:
        raise ConfigError(broken)
    composed = _compose(path, given)
    written = _plain(composed, resolve=False)
    if "exp_name" not in written:
        composed.exp_name = path.stem
    raw = {"exp_name": path.stem} | written
    origins = Origins(
        path.name, key_lines(nodes), {key for override in given for key in override.keys}, written
    )
    problems = dict(_unresolvable(composed, raw))
    readable: Mapping[str, Any] = raw
    for names in problems:
        readable = without(readable, names)
    config = validated(_plain(OmegaConf.create(dict(readable)), resolve=True), origins, problems)
    config._unresolved.update(raw)
    config._sources.update(_sources(config, origins))
    return Loaded(config, dict(config.sources), raw)


def composed_values(path: Path) -> dict[str, Any]:
    """What a file says, its defaults list and ${...} filled in, before anybody judges it."""
    composed = _compose(path, [])
    try:
        return _plain(composed, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path.name}: {_in_short(error)}") from None


def config_from_dict(values: Mapping[str, Any]) -> DPOConfig:
    """A config from plain values, judged like a file."""
    return validated(values, Origins())


def dump_yaml(config: DPOConfig) -> str:
    """The resolved config as YAML to load again; secrets are masked, ${oc.env:...} stays as
    written."""
    return OmegaConf.to_yaml(OmegaConf.create(public_values(config)))


class Override(NamedTuple):
    """One `key=value` of the command line: as Hydra takes it, or as plain text, or what is wrong
    with it."""

    keys: tuple[str, ...] = ()
    hydra: str | None = None
    text: str | None = None
    problem: str | None = None


def read_override(argument: str, folder: Path) -> Override:
    """Keys of the schema need no `+`; deletions (`~key`), config groups and `hydra.` keys are
    Hydra's own.

    What its grammar cannot read as one value (`0,2,4-6`, `list(range(0,8))`, a path with spaces) is
    taken as text, and so is a number for a key that only takes text (`exp_name=2024`).
    """
    name, equals, value = argument.partition("=")
    name = name.lstrip("+")
    key = table().get(name)
    if name.startswith("~") or name.partition(".")[0] == "hydra":
        return Override(hydra=argument)
    if not equals or not name.strip():
        return Override(
            problem=f"{argument} ({COMMAND_LINE}): an override is written key=value, such as beta=0.05"
        )
    if key is None and (folder / name.partition("@")[0]).is_dir():
        return Override(hydra=argument)
    parsed = _single_value(f"++{name}={value}")
    if parsed is None or (key and key.only_text and isinstance(parsed.value(), bool | int | float)):
        return Override((name,), text=value)
    keys = tuple(".".join((name, *names)) for names, _ in _leaves(parsed.value()))
    return Override(keys, hydra=f"++{name}={value}")


def _single_value(text: str) -> HydraOverride | None:
    try:
        parsed: HydraOverride = OverridesParser.create().parse_override(text)
    except HydraException:
        return None
    return None if parsed.is_sweep_override() else parsed


def _leaves(value: Any) -> Iterator[tuple[Names, Any]]:
    """Everything that is not a mapping, with its key path."""
    if not isinstance(value, dict) or not value:
        yield (), value
    else:
        for name, item in value.items():
            yield from (((name, *names), leaf) for names, leaf in _leaves(item))


def _compose(path: Path, overrides: list[Override]) -> DictConfig:
    """Hydra's part: defaults lists, config groups, overrides. A `hydra:` key is Hydra's own and
    ends here."""
    try:
        with (
            warnings.catch_warnings(),
            initialize_config_dir(
                str(path.parent.resolve()), job_name="rather", version_base="1.3"
            ),
        ):
            warnings.filterwarnings(
                "ignore", "In '.*': Defaults list is missing"
            )  # as in every file of ROLL
            warnings.filterwarnings(
                "ignore", "provider=hydra.searchpath"
            )  # what is not found there is told below
            composed = compose(
                path.stem, [override.hydra for override in overrides if override.hydra]
            )
    except (HydraException, OmegaConfBaseException, YAMLError, RecursionError) as error:
        unread = error.__cause__  # Hydra's own error is empty then
        problem = (
            _unread(path, unread)
            if isinstance(unread, GrammarParseError)
            else f"{path.name}: {_in_short(error)}"
        )
        raise ConfigError(problem) from None
    OmegaConf.set_struct(composed, False)
    for key, text in (
        (override.keys[0], override.text) for override in overrides if override.text is not None
    ):
        try:
            OmegaConf.update(composed, key, text)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key} ({COMMAND_LINE}): {_in_short(error)}") from None
    return composed


def _unread(path: Path, error: GrammarParseError) -> str:
    key = str(error.full_key)
    line = key_lines(read_nodes(path)).get(key)
    where = f"{path.name}:{line}" if line else path.name
    return (
        f"{key} ({where}): its ${{...}} cannot be read ({_in_short(error)}); ${{key}} takes the value of another key, "
        "${oc.env:NAME} that of the environment, and nothing is computed"
    )


def _in_short(error: BaseException) -> str:
    """A library's message without its search paths and its advice to write `+key=value`."""
    noise = ("full_key", "object_type", "To append", "Config search", "provider=")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        "; ".join([line for line in lines if not line.startswith(noise)][:3])
        or type(error).__name__
    )


def _unresolvable(composed: DictConfig, raw: dict[str, Any]) -> Iterator[tuple[Names, str]]:
    """Every ${...} that cannot be filled in, and every key that asks for code to be run."""
    for names, leaf in _leaves(raw):
        if names and names[-1] == "_target_":
            yield names, "a config never names code to run; remove it"
        elif "${" in str(leaf):
            try:
                node = OmegaConf.select(composed, ".".join(names))
                if OmegaConf.is_config(node):
                    OmegaConf.to_container(node, resolve=True)
            except (OmegaConfBaseException, RecursionError) as error:
                yield names, _in_short(error)


def _plain(composed: DictConfig, *, resolve: bool) -> dict[str, Any]:
    values = _text_keys(OmegaConf.to_container(composed, resolve=resolve))
    assert isinstance(values, dict)
    return values


def _text_keys(value: Any) -> Any:
    """YAML reads `1: x` as a number; every key of ours is a word."""
    return (
        {str(name): _text_keys(item) for name, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def _sources(config: DPOConfig, origins: Origins) -> dict[str, str]:
    """Key path -> where its value came from, for every key that holds a value."""
    sources = {
        path: origins.of(path) or "default" for path, key in table().items() if not key.section
    }
    sources |= {path: f"follows {followed}" for path, followed in config.followed.items()}
    if sources["exp_name"] == "default":
        sources["exp_name"] = "name of the file"
    return sources
