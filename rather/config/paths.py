"""Models, tokenizers, templates and data files that are named but missing: all at once, before
any load."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from rather.config.schema import DataArgs, DPOConfig, as_list
from rather.errors import ConfigError, DataError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
MODEL_FILES, ADAPTER_FILES = ("config.json",), ("adapter_config.json",)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")
TABLES = (
    "*.arrow",
    "state.json",
    "dataset_dict.json",
    "part-*/state.json",
)  # one of them in a folder of tables


def check_paths(config: DPOConfig, sources: Mapping[str, str] | None = None) -> None:
    """Raise one error with every missing path: DataError when only data files miss, otherwise
    ConfigError."""
    models = list(_model_problems(config)) + list(_template_problems(config))
    data = list(_data_problems(config))
    lines = [f"{key}{_where(key, sources or {})}: {text}" for key, text in models + data]
    if models:
        raise ConfigError(lines)
    if data:
        raise DataError("\n".join(lines))


def _where(key: str, sources: Mapping[str, str]) -> str:
    return f" ({sources[key]})" if key in sources else ""


def _model_problems(config: DPOConfig) -> Iterator[tuple[str, str]]:
    actor, reference = config.actor_train, config.reference
    key, adapters = "model_args.model_name_or_path", {}
    policy = _folder_problem("model", actor.model_path, MODEL_FILES)
    if policy:
        yield config.followed.get(f"actor_train.{key}", f"actor_train.{key}"), policy
    if reference.model_path != actor.model_path and (
        text := _folder_problem("model", reference.model_path, MODEL_FILES)
    ):
        yield f"reference.{key}", text
    for role, section in reversed(config.roles.items()):  # an adapter of both is the policy's
        adapters[section.model_args.adapter_name_or_path] = role
    for adapter, role in adapters.items():
        if adapter and (text := _folder_problem("PEFT adapter", adapter, ADAPTER_FILES)):
            yield f"{role}.model_args.adapter_name_or_path", text
    own = actor.model_args.tokenizer_name_or_path
    if (own or not policy) and (
        text := _folder_problem("tokenizer", actor.tokenizer_path, TOKENIZER_FILES)
    ):
        yield "actor_train.model_args.tokenizer_name_or_path", text


def is_local(name: str) -> bool:
    """Whether a model name means a folder here (it looks like a path, or is one) and not a name
    on a hub."""
    return (
        name.startswith(("/", ".", "~"))
        or name.count("/") > 1
        or Path(name).exists()
        or not HUB_NAME.fullmatch(name)
    )


def _folder_problem(kind: str, name: str, files: tuple[str, ...]) -> str | None:
    """Return why a folder that has one of these files is not there; None for a name on a hub."""
    path = Path(name).expanduser()
    if "://" in name:
        return f"{name} is an address; name a folder, or a model by its hub name"
    if not is_local(name) or any((path / file).is_file() for file in files):
        return None
    if path.exists():
        return f"{path.absolute()} is not a {kind} folder: it has no {' or '.join(files)}"
    return f"the {kind} folder {path.absolute()} does not exist{nearest_names(path)}"


def _template_problems(config: DPOConfig) -> Iterator[tuple[str, str]]:
    seen = set()
    for key, data in _data_sections(config):
        name, key = data.template, f"{key}.template"
        if name and name not in seen and ("/" in name or name.endswith(TEMPLATE_SUFFIXES)):
            seen.add(name)
            path = Path(name).expanduser()
            if not path.is_file():
                yield (
                    config.followed.get(key, key),
                    f"the template file {path.absolute()} does not exist{nearest_names(path)}",
                )


def _data_sections(config: DPOConfig) -> list[tuple[str, DataArgs]]:
    return [
        ("actor_train.data_args", config.actor_train.data_args),
        ("validation.data_args", config.validation.data_args),
    ]


def _data_problems(config: DPOConfig) -> Iterator[tuple[str, str]]:
    train, evaluation = config.actor_train.data_args, config.validation.data_args
    named = (
        evaluation.file_name
        if isinstance(evaluation.file_name, dict)
        else {"": evaluation.file_name}
    )
    for name in as_list(train.file_name):
        if text := _file_problem(name, train):
            yield "actor_train.data_args.file_name", text
    for name in (name for files in named.values() for name in as_list(files)):
        if text := _file_problem(name, evaluation):
            yield "validation.data_args.file_name", text
    prompts = config.eval_prompts and config.eval_prompts.file
    if prompts and (text := _file_problem(prompts, train, tables=False)):
        yield "eval_prompts.file", text


def _file_problem(name: str, data: DataArgs, *, tables: bool = True) -> str | None:
    """`tables`: a folder that `datasets` wrote serves too."""
    if "://" in name:
        return f"{name} is an address; only local files are read: download it first"
    try:
        path = data.locate(name)
        if path.is_file() or (tables and any(next(path.glob(kind), None) for kind in TABLES)):
            return None
        if path.is_dir():
            return f"{path.absolute()} is a folder{' without tables' if tables else ''}; name the files in it"
        if path.exists():
            return f"{path.absolute()} is not a regular file"
        return f"the data file {path.absolute()} does not exist{nearest_names(path)}"
    except OSError as error:  # a folder that may not be searched, a name too long
        return f"{name[:80]} cannot be read ({error.strerror or error})"


def nearest_names(path: Path) -> str:
    """'; near it: ...', from the folder where the path stops existing."""
    path = path.absolute()
    while not path.parent.is_dir() and path != path.parent:
        path = path.parent
    try:
        names = sorted(p.name for p in path.parent.iterdir())
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return (
        f"; near it: {', '.join(near)}"
        if near
        else f"; {path.parent} has nothing named like '{path.name}'"
    )
