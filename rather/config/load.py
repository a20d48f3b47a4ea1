"""YAML + overrides -> Hydra -> plain values -> DPOConfig, with every problem in one error.

Hydra composes the values and drops their positions, so the file is also read as a tree of nodes.
No other module imports hydra or omegaconf.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from rather.config import paths
from rather.config.compat import Names, roll_keys
from rather.config.found import ALLOWED, NO_TRUST, Trust, found_values, in_run_folder, is_found
from rather.config.inherit import set_at
from rather.config.keys import field_problems, nearest, table
from rather.config.run_config import FOR_A_PART, FOR_A_RUN, DPOConfig
from rather.config.show import public_values
from rather.errors import ConfigError
from rather.files import BoundedLoader, JsonObject, Opener, own, regular, yaml_text

COMMAND_LINE = "command line"
RUNS_CODE = ("trust_remote_code", "worker_cls", "system_envs", "judge")
HINTS = {  # what PyYAML says -> what to do
    "character '\\t'": "indent with spaces, not with tabs",
    "mapping values": "is a colon missing in the line above? A text with ': ' needs quotes",
    "expected <block end>": "check the indentation of this line and of those above",
    "expected ':'": "write `key: value`, here or in the line above",
}
UNREADABLE = (HydraException, OmegaConfBaseException, yaml.YAMLError, RecursionError, ValueError)
HYDRAS_OWN = re.compile(r"@package|\$\{(?!oc\.)\w+:")  # a header, and resolvers such as ${now:%H}
MOST_INSERTED = 10_000_000  # characters that ${...} may insert
log = logging.getLogger(__name__)


class ShippedGroups(SearchPathPlugin):
    """Finds ROLL's `../config/deepspeed_zero3@_here_` in the package, after the user's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("rather", f"file://{Path(__file__).parent / 'groups' / 'config'}")


class BoundedFiles(FileConfigSource):
    """Reads the files of a defaults list, like the config itself, within limits."""

    def load_config(self, config_path: str) -> ConfigResult:
        if self.is_config(config_path):
            _tree(Path(self.path) / self._normalize_file_name(config_path))
        return super().load_config(config_path)


Plugins.instance().register(ShippedGroups)
SourcesRegistry.instance().types["file"] = BoundedFiles


def load_config(
    path: str | Path, overrides: Iterable[str] = (), *, check_paths: bool = True
) -> DPOConfig:
    """Return the config of a YAML file with `key=value` overrides.

    Raise one ConfigError with every problem. `check_paths`: models and data files must exist.
    """
    path = Path(path).expanduser()
    sources = _key_lines(path)
    composed = _compose(path, overrides, sources)
    config = _validated(path, composed, sources)
    problems = [
        f"{key}: may run code, and {path} came with a run folder; if you trust it, add {key}=... "
        "to the command"
        for key, place in sources.items()
        if key.rpartition(".")[2] in RUNS_CODE and place != COMMAND_LINE
        if OmegaConf.select(composed, key) and is_found(path)
    ]
    if problems:
        raise ConfigError(problems)
    if check_paths:
        paths.check_paths(config)
    return config


load = partial(load_config, check_paths=False)


def load_found(path: Path, trust: Trust = NO_TRUST, keys: Collection[str] = ALLOWED) -> DPOConfig:
    """Return the config.yaml of a run folder, which is data and not the user's own config.

    `found_values` decides what it may say. With fewer keys than all, it need not name a model or
    pairs.
    """
    sources = _key_lines(path, own)
    context = FOR_A_RUN if keys is ALLOWED else FOR_A_PART
    config = config_from_dict(found_values(path, trust, keys), sources, context=context)
    config._sources.update(dict.fromkeys(table(), "default") | sources)
    return config


@contextmanager
def _limited_insertions() -> Iterator[None]:
    """Refuse ${...} that insert one another until they fill the memory."""
    resolve = Container._resolve_node_interpolation
    inserted = 0

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal inserted
        inserted += 5_000
        if inserted > MOST_INSERTED:
            raise ValueError("its ${...} insert too much text; write the values themselves")
        node = resolve(*args, **kwargs)
        text = node._value()
        if isinstance(text, str):
            inserted += len(text)
        return node

    Container._resolve_node_interpolation = count  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container._resolve_node_interpolation = resolve  # type: ignore[method-assign]


@_limited_insertions()
def _validated(path: Path, composed: DictConfig, sources: dict[str, str]) -> DPOConfig:
    """Fill in ${...} and return the config; or raise an error with all problems."""
    raw = _plain(composed)
    if "rounds" in raw:
        place = _near("rounds", sources)
        raise ConfigError(
            f"rounds{place}: is for `rather rounds {path}`; other commands train once."
        )
    if "exp_name" not in raw:
        raw["exp_name"] = composed.exp_name = path.stem
        sources["exp_name"] = "name of the file"
    if raw.get("report_html") == "auto" and in_run_folder(path):
        raw["report_html"] = True  # an earlier version wrote its default down
    problems: dict[Names, str] = {}
    for names, leaf in _leaves(raw):
        if "defaults" in sources:
            sources.setdefault(".".join(names), f"{sources['defaults']}, defaults list")
        if "${" in str(leaf):
            try:
                node = OmegaConf.select(composed, ".".join(names))
                if OmegaConf.is_config(node):
                    OmegaConf.to_container(node, resolve=True)
            except UNREADABLE as error:
                problems[names] = _in_short(error)
    code_keys = [key for key in sources if key.rpartition(".")[2] == "_target_"]
    if code_keys:
        text = "a config never names code to run; remove it"
        raise ConfigError([f"{key} ({sources[key]}): {text}" for key in code_keys])
    try:
        values = _plain(OmegaConf.create(_without(raw, problems)), resolve=True)
    except UNREADABLE as error:
        raise ConfigError(_unreadable(path, error)) from None
    config = config_from_dict(values, sources, problems)
    config._unresolved.update(raw)
    config._sources.update(dict.fromkeys(table(), "default") | sources)
    for key, followed in config.followed.items():
        config._sources[key] = f"follows {followed}"
    return config


@_limited_insertions()
def composed_values(path: Path, overrides: Iterable[str] = ()) -> JsonObject:
    """Return the values of a file, its defaults list and ${...} filled in, before validation."""
    try:
        return _plain(_compose(path, overrides, _key_lines(path)), resolve=True)
    except UNREADABLE as error:
        raise ConfigError(f"{path.name}: {_in_short(error)}") from None


def dump_yaml(config: DPOConfig) -> str:
    """Return the config as YAML to load again; secrets are masked, ${oc.env:...} stays."""
    options: dict[str, Any] = {"allow_unicode": True, "sort_keys": False}
    return str(yaml.dump(public_values(config), Dumper=_Dumper, **options))


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Repeats equal values instead of linking them; quotes texts that Hydra reads as numbers."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: Any, text: str) -> Any:
    try:
        float(text)
        style = "'"
    except ValueError:
        style = None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def config_from_dict(
    values: JsonObject,
    sources: Mapping[str, str] = MappingProxyType({}),
    found: Mapping[Names, str] = MappingProxyType({}),
    context: Mapping[str, Any] = FOR_A_RUN,
) -> DPOConfig:
    """Return a config of plain values, or raise one ConfigError with all problems.

    `sources` has the place of each key in a file, `found` the problems that are already known.
    Keys with a problem are removed and the rest is validated again, so that a bad value does not
    hide an impossible combination elsewhere. A combination that names a removed key is skipped.
    """
    ignored, refused = roll_keys(values)
    problems = {".".join(names): text for names, text in {**refused, **found}.items()}
    values = _without(values, (*ignored, *refused, *found))
    config = _valid_config(values, problems, context)
    if config is None or problems:
        order = {path: position for position, path in enumerate(sources)}
        ordered = sorted(problems, key=lambda path: order.get(path, len(order)))
        raise ConfigError([f"{path}{_near(path, sources)}: {problems[path]}" for path in ordered])
    for names, text in ignored.items():
        if text:
            path = ".".join(names)
            log.warning("%s%s: %s", path, _near(path, sources), text)
    return config


def changed(config: DPOConfig, settings: Mapping[str, Any]) -> DPOConfig:
    """Return the config with some key paths set to other values, checked like a file."""
    values = config.model_dump(exclude_unset=True)
    for path, setting in settings.items():
        set_at(values, path, setting)
    return config_from_dict(values)


def _valid_config(
    values: JsonObject, problems: dict[str, str], context: Mapping[str, Any]
) -> DPOConfig | None:
    """Return the config, or None; add what is wrong with it to the problems."""
    broken_paths = set(problems)
    while True:
        try:
            return DPOConfig.model_validate(values, context=context)
        except ValidationError as error:
            first_error = error.errors()[0]
            if first_error["type"] == "cross_field":
                broken_names = {path.rpartition(".")[2] for path in broken_paths}
                for key, text in first_error["ctx"]["problems"]:
                    if not broken_names & set(re.findall(r"\w+", f"{key} {text}")):
                        problems[key] = text
                return None
            wrong = field_problems(error, values)
            values = _without(values, wrong)
            for names, text in wrong.items():
                path = ".".join(names)
                problems[path] = text
                broken_paths.add(path)
                if path not in table():
                    broken_paths.add(nearest(path) or path)


def _near(path: str, sources: Mapping[str, str]) -> str:
    """Return ' (dpo.yaml:31)': the line of the key or of a group around it, or the file."""
    while path and path not in sources:
        path = path.rpartition(".")[0]
    file = next(iter(sources.values()), "").rpartition(":")[0]
    source = sources.get(path, file)
    return f" ({source})" if source else ""


def _without(values: JsonObject, dropped: Iterable[Names]) -> JsonObject:
    """Return a copy of nested values without some keys."""
    dropped_inside: dict[str, list[Names]] = {}
    for name, *names_inside in dropped:
        dropped_inside.setdefault(name, []).append(tuple(names_inside))
    remaining: JsonObject = {}
    for name, content in values.items():
        paths_inside = dropped_inside.get(name)
        if paths_inside is None:
            remaining[name] = content
        elif () not in paths_inside:
            remaining[name] = _without(content, paths_inside)
    return remaining


def _leaves(value: Any, names: Names = ()) -> Iterator[tuple[Names, Any]]:
    """Yield everything that is not a mapping, with its key path."""
    if isinstance(value, dict) and value:
        for name, content in value.items():
            yield from _leaves(content, (*names, name))
    else:
        yield names, value


def _key_lines(path: Path, opener: Opener = regular) -> dict[str, str]:
    """Return key path -> `dpo.yaml:31`, or raise a ConfigError if it cannot be a config."""
    if path.is_dir():
        files = ", ".join(sorted(file.name for file in path.glob("*.yaml"))[:5])
        raise ConfigError(f"{path}: is a folder; name a file in it ({files or 'it has no *.yaml'})")
    if not path.is_file():
        raise ConfigError(f"{path}: is not a file ({path.absolute()}){paths.nearest_names(path)}")
    if path.suffix in (".jsonl", ".parquet", ".arrow", ".csv", ".gz"):
        raise ConfigError(
            f"{path}: is data; name it in a YAML file as actor_train.data_args.file_name"
        )
    if path.suffix != ".yaml":
        raise ConfigError(f"{path}: a config file is named *.yaml; rename it to {path.stem}.yaml")
    node = _tree(path, opener)
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: the file must hold keys and values, such as `pretrain: ...`")
    sources = {key: f"{path.name}:{line}" for key, line in _nodes(node, "")}
    if "hydra.searchpath" in sources:
        source = sources["hydra.searchpath"]
        raise ConfigError(
            f"hydra.searchpath ({source}): a config cannot add folders or packages to search; "
            "remove it"
        )
    return sources


def _tree(path: Path, opener: Opener = regular) -> yaml.Node | None:
    try:
        return BoundedLoader(yaml_text(path, opener)).get_single_node()
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(_unreadable(path, error)) from None


def _nodes(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield (key path, line) of every value; merged mappings first, for later ones win."""
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            yield f"{prefix}[]", entry.start_mark.line + 1
            yield from _nodes(entry, f"{prefix}[].")
    elif isinstance(node, yaml.MappingNode):
        for key, content in sorted(node.value, key=lambda pair: not _is_merge(pair[0])):
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _nodes(content, prefix if _is_merge(key) else f"{prefix}{key.value}.")


def _is_merge(key: yaml.Node) -> bool:
    return key.tag.endswith(":merge")


def _compose(path: Path, overrides: Iterable[str], sources: dict[str, str]) -> DictConfig:
    """Apply defaults lists, config groups and overrides, and add the latter to the sources.

    Deletions (`~key`), config groups and `hydra.` keys are Hydra's own. What its grammar cannot
    read as one value (`0,2,4-6`, `list(range(0,8))`, a path with spaces) is taken as text, and so
    is a number for a key that only takes text (`exp_name=2024`).
    """
    overrides = list(overrides)
    hydra_overrides, new_values = _sort_overrides(path, overrides)
    key = ""
    try:
        text = yaml_text(path)
        is_plain = not hydra_overrides and {"defaults", "hydra"}.isdisjoint(sources)
        if is_plain and not HYDRAS_OWN.search("\n".join([text, *overrides])):
            # Hydra takes a tenth of a second for what it does not change.
            composed = DictConfig(OmegaConf.create(text))
        else:
            composed = _by_hydra(path, hydra_overrides)
        for key, new_value in new_values.items():
            sources[key] = COMMAND_LINE
            OmegaConf.update(composed, key, new_value)
            for names, _ in _leaves(new_value, tuple(key.split("."))):
                for end in range(1, len(names)):
                    sources.setdefault(".".join(names[:end]), COMMAND_LINE)
                sources[".".join(names)] = COMMAND_LINE
    except UNREADABLE as error:
        key = key or str(getattr(error.__cause__, "full_key", None) or "")
        text = f"{key}{_near(key, sources)}: {_in_short(error.__cause__ or error)}"
        raise ConfigError(text if key else _unreadable(path, error)) from None
    return composed


def _sort_overrides(path: Path, overrides: list[str]) -> tuple[list[str], JsonObject]:
    """Return the overrides that only Hydra understands, and key path -> value of all others."""
    hydra_overrides = []
    new_values: JsonObject = {}
    problems = []
    for argument in overrides:
        name, equals, text = argument.partition("=")
        name = name.lstrip("+")
        is_group = name not in table() and (path.parent / name.partition("@")[0]).is_dir()
        if name.startswith("~") or name.partition(".")[0] == "hydra" or (name and is_group):
            hydra_overrides.append(argument)
        elif not equals or not name.strip():
            text = "an override is written key=value, such as beta=0.05"
            problems.append(f"{argument} ({COMMAND_LINE}): {text}")
        else:
            new_values[name] = _override_value(name, text)
    if problems:
        raise ConfigError(problems)
    return hydra_overrides, new_values


def _by_hydra(path: Path, overrides: list[str]) -> DictConfig:
    folder = str(path.parent.resolve())
    with (
        warnings.catch_warnings(),
        initialize_config_dir(folder, job_name="rather", version_base="1.3"),
    ):
        # Every file of ROLL lacks `_self_`.
        warnings.filterwarnings("ignore", "In '.*': Defaults list is missing")
        composed = compose(path.stem, overrides)
    OmegaConf.set_struct(composed, False)
    return composed


def _override_value(name: str, text: str) -> Any:
    try:
        parsed = OverridesParser.create().parse_override(f"++{name}={text}")
    except HydraException:
        return text
    except ValueError as error:  # a number of 5,000 digits
        raise ConfigError(f"{name} ({COMMAND_LINE}): {_in_short(error)}") from error
    parsed_value = parsed.value()
    key = table().get(name)
    is_text = key and key.only_text and isinstance(parsed_value, bool | int | float)
    return text if is_text or parsed.is_sweep_override() else parsed_value


def _unreadable(path: Path, error: Exception) -> str:
    """Return why a file cannot be read, with the line if the error knows it."""
    mark = getattr(error, "problem_mark", None)
    where = f"{path.name}:{mark.line + 1}" if mark else path.name
    reason = getattr(error, "problem", None) or getattr(error, "strerror", None)
    reason = str(reason or _in_short(error))
    for beginning, hint in HINTS.items():
        if beginning in reason:
            return f"{where}: {reason}; {hint}"
    return f"{where}: {reason}"


def _in_short(error: BaseException) -> str:
    """Return a library's message without its search paths and advice to write `+key=value`."""
    noise = ("full_key", "object_type", "To append", "Config search", "provider=")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = [line for line in lines if not line.startswith(noise)]
    return "; ".join(message[:3]) or type(error).__name__


def _plain(composed: DictConfig, *, resolve: bool = False) -> JsonObject:
    """Return plain values. YAML reads the key of `1: x` as a number, JSON as text."""
    text = json.dumps(OmegaConf.to_container(composed, resolve=resolve), default=str)
    values: JsonObject = json.loads(text)
    return values
