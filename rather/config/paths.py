"""Models, tokenizers, templates and data files that a config names but that do not exist."""

from __future__ import annotations

import difflib
from pathlib import Path

from rather.config.run_config import DPOConfig
from rather.config.schema import as_list
from rather.config.values import HUB_DATASET, STORE
from rather.errors import ConfigError, DataError
from rather.files import HUB_NAME

# A folder of each kind has one of these files.
FOLDERS = {
    "model": ("config.json",),
    "PEFT adapter": ("adapter_config.json",),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"),
    "Megatron checkpoint": (".metadata", "*/.metadata", "*/*/.metadata"),
    "data": ("*.arrow", "state.json", "dataset_dict.json", "part-*/state.json"),
}
TABLES = (".xlsx", ".xls")
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")


def check_paths(config: DPOConfig) -> None:
    """Raise one error with every missing path: a DataError if only data files are missing."""
    paths = _NamedPaths(config)
    _check_models(config, paths)
    has_data_only = not paths.problems
    _check_data(config, paths)
    texts = list(paths.problems.values())
    if texts and has_data_only:
        raise DataError("\n".join(texts))
    if texts:
        raise ConfigError(texts)


class _NamedPaths:
    """The paths that a config names, and what is wrong with them."""

    def __init__(self, config: DPOConfig) -> None:
        self._followed = config.followed
        self._sources = config.sources
        self.problems: dict[str, str] = {}  # name -> the first problem with it

    def check(self, key: str, kind: str, name: str | None, path: Path | None = None) -> None:
        if not name or name in self.problems:
            return
        problem = _problem(kind, name, path)
        if problem:
            source = self._followed.get(key, key)
            where = f" ({self._sources[source]})" if source in self._sources else ""
            self.problems[name] = f"{source}{where}: {problem}"


def _check_models(config: DPOConfig, paths: _NamedPaths) -> None:
    """Check models, adapters, the tokenizer and templates."""
    for role, section in config.roles.items():
        adapter, described_by = (
            section.model_args.adapter_name_or_path,
            section.model_args.config_from,
        )
        kind = "Megatron checkpoint" if described_by else "model"
        paths.check(f"{role}.model_args.model_name_or_path", kind, section.model_path)
        paths.check(f"{role}.model_args.config_from", "model", described_by)
        paths.check(f"{role}.model_args.adapter_name_or_path", "PEFT adapter", adapter)
    tokenizer = config.actor_train.tokenizer_path
    paths.check("actor_train.model_args.tokenizer_name_or_path", "tokenizer", tokenizer)
    templates = {
        "actor_train": config.actor_train.data_args.template,
        "validation": config.validation.data_args.template,
    }
    for role, template in templates.items():
        if template and ("/" in template or template.endswith(TEMPLATE_SUFFIXES)):
            paths.check(f"{role}.data_args.template", "template", template, Path(template))


def _check_data(config: DPOConfig, paths: _NamedPaths) -> None:
    """Check files of pairs and prompts."""
    training = config.actor_train.data_args
    validation = config.validation.data_args
    for name in as_list(training.file_name):
        paths.check("actor_train.data_args.file_name", "data", name, training.locate(name))
    for names in validation.names().values():
        for name in names:
            paths.check("validation.data_args.file_name", "data", name, validation.locate(name))
    if config.forgetting not in ("auto", "off"):
        paths.check("forgetting", "texts", config.forgetting, training.locate(config.forgetting))
    if config.eval_prompts and config.eval_prompts.file:
        file = config.eval_prompts.file
        paths.check("eval_prompts.file", "prompts", file, training.locate(file))


def is_local(name: str) -> bool:
    """Whether a model name is a folder (it looks like a path, or exists), not a hub name."""
    return (
        name.startswith(("/", ".", "~"))
        or name.count("/") > 1
        or Path(name).exists()
        or not HUB_NAME.fullmatch(name)
    )


def _problem(kind: str, name: str, file: Path | None) -> str | None:
    """Return why a folder, or a file where one is given, cannot be used."""
    path = (file or Path(name)).expanduser()
    if kind == "data" and (name.startswith(STORE) or HUB_DATASET.fullmatch(name)):
        return None
    if "://" in name:
        addresses = ""
        if kind == "data":
            addresses = ", s3://bucket/name and hf://datasets/ORG/NAME[@revision][:split]"
        return f"{name} is an address; only local files{addresses} are read"
    if kind == "data" and path.suffix in TABLES:
        return (
            f"{path.suffix} files are not read; save {name} as CSV, or convert it with pandas: "
            "read_excel(...).to_json(..., orient='records', lines=True)"
        )
    try:
        if _is_usable(kind, name, path, is_file=file is not None):
            return None
        if path.exists():
            return _wrong_folder(kind, name, path)
        return _not_found(kind, name, path, is_file=file is not None)
    except OSError as error:  # a folder that may not be searched, a name too long
        return f"{name[:80]} cannot be read ({error.strerror or error})"


def _is_usable(kind: str, name: str, path: Path, *, is_file: bool) -> bool:
    if any(next(path.glob(pattern), None) for pattern in FOLDERS.get(kind, ())):
        return True
    return path.is_file() if is_file else not is_local(name)


def _wrong_folder(kind: str, name: str, path: Path) -> str:
    """Return why a path that exists is not a folder of this kind."""
    if kind == "model" and (path / "adapter_config.json").is_file():
        return (
            f"{name} is a PEFT adapter: name it as actor_train.model_args.adapter_name_or_path, "
            "and its base model here"
        )
    patterns = FOLDERS.get(kind, ("text",))
    text = f"{path.absolute()} is not a {kind} folder: it has no {' or '.join(patterns)}"
    for pattern in patterns:
        for file in path.glob(f"*/{pattern}"):
            return f"{text}; {file.parent} has"
    return text


def _not_found(kind: str, name: str, path: Path, *, is_file: bool) -> str:
    word = "file" if is_file else "folder"
    text = f"the {kind} {word} {path.absolute()} does not exist{nearest_names(path)}"
    is_dataset = kind == "data" and "/" in name and "." not in Path(name).name
    if is_dataset and HUB_NAME.fullmatch(name):
        text += f"; a dataset of the hub is hf://datasets/{name}"
    return text


def nearest_names(path: Path) -> str:
    """Return '; near it: ...', from the folder where the path stops existing."""
    path = path.absolute()
    while not path.parent.is_dir() and path != path.parent:
        path = path.parent
    try:
        names = sorted(neighbour.name for neighbour in path.parent.iterdir())
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; near it: {', '.join(near)}" if near else f"; {path.parent} has no similar name"
