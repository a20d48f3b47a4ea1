"""Make rather/tools/migrate/peers/trl_keys.json: which settings each config of TRL had, by version.

    python bench/trl_keys.py TRL_GIT_DIRECTORY TRAINING_ARGS.py...

TRL_GIT_DIRECTORY has the history and the tags of huggingface/trl. Of each minor version since 0.8
the last patch is read, and HEAD. The other arguments are `training_args.py` of several versions of
transformers: every config of TRL inherits these fields, so none of them identifies a trainer.
The sources are parsed, never imported.

The table has, for each trainer, its keys by the versions that had them ("0.9 0.28": from the first
to the last), and for the trainers that Rather converts, the defaults that were literals:
[first version, last version, default]. Keys of scripts and models, which every trainer may be
given, are under "shared". "losses" are the names that `loss_type` may have, over all versions.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "rather" / "tools" / "migrate" / "peers" / "trl_keys.json"
OLDEST = (0, 8)
HEAD = "head"
TRAINING_ARGUMENTS = "TrainingArguments"
SHARED = "shared"
CONVERTED = ("dpo", "kto", "orpo", "cpo", "bco", "sft", "reward")
SHARED_CLASSES = ("ModelConfig", "ScriptArguments", "ScriptArgs", "DatasetMixtureConfig")
NOT_LITERAL = object()


@dataclass
class Config:
    """The fields of a dataclass with their defaults, and the names of its bases."""

    bases: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    losses: set[str] = field(default_factory=set)


def git(directory: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(directory), *words], check=True, capture_output=True, text=True
    )
    return done.stdout


def versions(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield each minor version and the name of its last patch, oldest first; HEAD is the last."""
    patches: dict[tuple[int, int], tuple[int, str]] = {}
    for tag in git(directory, "tag").split():
        numbers = re.fullmatch(r"v(\d+)\.(\d+)(?:\.(\d+))?", tag)
        if numbers is None:
            continue
        minor = (int(numbers[1]), int(numbers[2]))
        patch = (int(numbers[3] or 0), tag)
        if minor >= OLDEST:
            patches[minor] = max(patch, patches.get(minor, patch))
    for minor in sorted(patches):
        yield f"{minor[0]}.{minor[1]}", patches[minor][1]
    yield HEAD, "HEAD"


def default_of(value: ast.expr | None) -> Any:
    """Return the literal default of a field; NOT_LITERAL if it has none."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("field", "dataclasses.field"):
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        if factory := named.get("default_factory"):
            body = factory.body if isinstance(factory, ast.Lambda) else None
            return default_of(body)
        return default_of(named.get("default"))
    if value is None:
        return NOT_LITERAL
    try:
        return ast.literal_eval(value)
    except ValueError:
        return NOT_LITERAL


def losses_in(line: ast.AnnAssign) -> set[str]:
    """Return the names that a field's annotation, choices or help give as its values."""
    names = set()
    for node in ast.walk(line):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = re.fullmatch(r"[a-z][a-z0-9_-]*", node.value)
            names |= (
                {node.value} if is_name else set(re.findall(r"'([a-z][a-z0-9_-]*)'", node.value))
            )
    return names - {"help", "choices"}


def configs_in(source: str) -> Iterator[tuple[str, Config]]:
    """Yield the classes of a module that have annotated fields or bases."""
    tree = ast.parse(source)
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            aliases.update({name.asname: name.name for name in node.names if name.asname})
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        config = Config()
        for base in node.bases:
            name = ast.unparse(base).rpartition(".")[2]
            config.bases.append(aliases.get(name, name))
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                config.fields[line.target.id] = default_of(line.value)
                if line.target.id == "loss_type":
                    config.losses = losses_in(line)
        yield node.name, config


def classes_of(directory: Path, revision: str) -> dict[str, Config]:
    """Return the classes of TRL and of its example scripts; those of one name are merged."""
    names = git(directory, "ls-tree", "-r", "--name-only", revision, "trl", "examples/scripts")
    found: dict[str, Config] = {}
    for name in names.splitlines():
        is_example = name.startswith("examples/")
        if not name.endswith(".py"):
            continue
        for title, config in configs_in(git(directory, "show", f"{revision}:{name}")):
            if is_example and title not in SHARED_CLASSES:
                continue
            merged = found.setdefault(title, Config())
            merged.bases += [base for base in config.bases if base != title]
            merged.fields |= config.fields
            merged.losses |= config.losses
    return found


def inherits(name: str, classes: dict[str, Config]) -> bool:
    """Return whether a class has transformers' TrainingArguments among its ancestors."""
    bases = classes[name].bases if name in classes else []
    return TRAINING_ARGUMENTS in bases or any(inherits(base, classes) for base in bases)


def all_fields(name: str, classes: dict[str, Config]) -> dict[str, Any]:
    if name not in classes:
        return {}
    result: dict[str, Any] = {}
    for base in classes[name].bases:
        result |= all_fields(base, classes)
    return result | classes[name].fields


def all_losses(name: str, classes: dict[str, Config]) -> set[str]:
    if name not in classes:
        return set()
    return classes[name].losses.union(*(all_losses(base, classes) for base in classes[name].bases))


def trainer_of(name: str) -> str:
    """Return `dpo` for DPOConfig and for DpoScriptArguments."""
    return re.sub(r"(Config|ScriptArguments)$", "", name).lower()


def keys_of(classes: dict[str, Config]) -> dict[str, dict[str, Any]]:
    """Return the keys of each trainer with their defaults."""
    result: dict[str, dict[str, Any]] = {SHARED: {}}
    for name in classes:
        is_config = not name.startswith("_") and inherits(name, classes)
        if name in SHARED_CLASSES:
            result[SHARED] |= all_fields(name, classes)
        elif is_config or name.endswith("ScriptArguments"):  # of DPO and SFT before 0.9
            result.setdefault(trainer_of(name), {}).update(all_fields(name, classes))
    return result


Spans = dict[str, dict[str, list[list[Any]]]]  # [first version, last version, value] by key


def extend(spans: list[list[Any]], before: str, version: str, value: Any) -> None:
    """Add a version to the last span if that ended with the version before and had this value."""
    if spans and spans[-1][1] == before and spans[-1][2] == value:
        spans[-1][1] = version
    else:
        spans.append([version, version, value])


def grouped(keys: dict[str, list[list[Any]]]) -> dict[str, str]:
    """Return the names of keys by the versions that had them."""
    groups: dict[str, list[str]] = {}
    for key, spans in sorted(keys.items()):
        for first, last, _ in spans:
            groups.setdefault(f"{first} {last}", []).append(key)
    return {span: " ".join(names) for span, names in groups.items()}


def table(directory: Path, inherited: set[str]) -> dict[str, Any]:
    commits: dict[str, str] = {}
    present: Spans = {}
    defaults: Spans = {}
    losses: dict[str, set[str]] = {}
    before = ""
    for version, revision in versions(directory):
        commit = git(directory, "rev-parse", f"{revision}^{{commit}}").strip()
        commits[version] = f"{revision} {commit}"
        classes = classes_of(directory, revision)
        for name in classes:
            if names := all_losses(name, classes):
                losses[trainer_of(name)] = losses.get(trainer_of(name), set()) | names
        for trainer, keys in keys_of(classes).items():
            for key, default in keys.items():
                extend(present.setdefault(trainer, {}).setdefault(key, []), before, version, True)
                if trainer in (*CONVERTED, SHARED) and default is not NOT_LITERAL:
                    spans = defaults.setdefault(trainer, {}).setdefault(key, [])
                    extend(spans, before, version, default)
        before = version
    return {
        "versions": commits,
        "inherited": " ".join(sorted(inherited)),
        "losses": {trainer: " ".join(sorted(names)) for trainer, names in sorted(losses.items())},
        "keys": {trainer: grouped(keys) for trainer, keys in sorted(present.items())},
        "defaults": {trainer: dict(sorted(keys.items())) for trainer, keys in defaults.items()},
    }


def text_of(value: Any, depth: int = 0) -> str:
    """Return JSON with one line for each innermost key."""
    if not isinstance(value, dict):
        return json.dumps(value)
    indent = " " * (depth + 1)
    lines = [f"{indent}{json.dumps(key)}: {text_of(v, depth + 1)}" for key, v in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trl", type=Path, help="a git directory of huggingface/trl")
    parser.add_argument(
        "training_args", type=Path, nargs="+", help="transformers' training_args.py"
    )
    args = parser.parse_args()
    inherited: set[str] = set()
    for file in args.training_args:
        inherited |= dict(configs_in(file.read_text()))[TRAINING_ARGUMENTS].fields.keys()
    found = table(args.trl, inherited)
    TABLE.write_text(text_of(found) + "\n", encoding="utf-8")
    print(f"{TABLE}: {len(found['versions'])} versions, {len(found['keys'])} trainers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
