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
    "data": ("*.arrow", "state.json", "dataset_dict.json", "part-*/state.json"),
}
TABLES = (".xlsx", ".xls")
TEMPLATE_SUFFIXES = (".jinja", ".jinja2", ".j2")


def check_paths(config: DPOConfig) -> None:
    """Raise one error with every missing path: a DataError if only data files are missing."""
    found: dict[str, str] = {}  # name -> the first problem with it

    def check(key: str, kind: str, name: str | None, path: Path | None = None) -> None:
        problem = name and name not in found and _problem(kind, name, path)
        if name and problem:
            key = config.followed.get(key, key)
            where = f" ({config.sources[key]})" if key in config.sources else ""
            found[name] = f"{key}{where}: {problem}"

    for role, section in config.roles.items():
        args = section.model_args
        check(f"{role}.model_args.model_name_or_path", "model", section.model_path)
        check(f"{role}.model_args.adapter_name_or_path", "PEFT adapter", args.adapter_name_or_path)
    actor, validation = config.actor_train, config.validation.data_args
    check("actor_train.model_args.tokenizer_name_or_path", "tokenizer", actor.tokenizer_path)
    for role, data in (("actor_train", actor.data_args), ("validation", validation)):
        if data.template and ("/" in data.template or data.template.endswith(TEMPLATE_SUFFIXES)):
            check(f"{role}.data_args.template", "template", data.template, Path(data.template))
    has_data_only = not found
    for name in as_list(actor.data_args.file_name):
        path = actor.data_args.locate(name)
        check("actor_train.data_args.file_name", "data", name, path)
    for name in (name for names in validation.names().values() for name in names):
        check("validation.data_args.file_name", "data", name, validation.locate(name))
    if config.eval_prompts and (file := config.eval_prompts.file):
        check("eval_prompts.file", "prompts", file, actor.data_args.locate(file))
    if found and has_data_only:
        raise DataError("\n".join(found.values()))
    if found:
        raise ConfigError(list(found.values()))


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
        known = ", s3://bucket/name and hf://datasets/ORG/NAME[@revision][:split]"
        return f"{name} is an address; only local files{known if kind == 'data' else ''} are read"
    if kind == "data" and path.suffix in TABLES:
        return (
            f"{path.suffix} files are not read; save {name} as CSV, or convert it with pandas: "
            "read_excel(...).to_json(..., orient='records', lines=True)"
        )
    try:
        is_folder = any(next(path.glob(each), None) for each in FOLDERS.get(kind, ()))
        if is_folder or (path.is_file() if file else not is_local(name)):
            return None
        if kind == "model" and (path / "adapter_config.json").is_file():
            return (
                f"{name} is a PEFT adapter: name it as actor_train.model_args.adapter_name_or_path, "
                "and its base model here"
            )
        if path.exists():
            names = FOLDERS.get(kind, ("text",))
            inside = next((each.parent for name in names for each in path.glob(f"*/{name}")), None)
            hint = f"; {inside} has" if inside else ""
            text = f"{path.absolute()} is not a {kind} folder: it has no {' or '.join(names)}"
            return f"{text}{hint}"
        what = f"{kind} {'file' if file else 'folder'}"
        text = f"the {what} {path.absolute()} does not exist{nearest_names(path)}"
        is_dataset = kind == "data" and "/" in name and "." not in Path(name).name
        hub = f"; a dataset of the hub is hf://datasets/{name}" if is_dataset else ""
        return text + (hub if HUB_NAME.fullmatch(name) else "")
    except OSError as error:  # a folder that may not be searched, a name too long
        return f"{name[:80]} cannot be read ({error.strerror or error})"


def nearest_names(path: Path) -> str:
    """Return '; near it: ...', from the folder where the path stops existing."""
    path = path.absolute()
    while not path.parent.is_dir() and path != path.parent:
        path = path.parent
    try:
        names = sorted(each.name for each in path.parent.iterdir())
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; near it: {', '.join(near)}" if near else f"; {path.parent} has no similar name"
