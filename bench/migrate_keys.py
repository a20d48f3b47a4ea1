"""Lists the settings of other tools from their sources, for the messages of `rather migrate`.

    python bench/migrate_keys.py FOLDER

FOLDER has a git checkout of LLaMA-Factory and axolotl. Nothing of them is run: fields of classes are
read from the syntax trees. LLaMA-Factory takes the arguments of transformers' Trainer and gets the
fields of the installed version as well. Writes
rather/tools/migrate/keys/TOOL.txt: names, and defaults where they are literals. Only of a tool with such a
list may a message say that it has no such setting.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import transformers

UNKNOWN = object()  # no default, or one that is not written as a literal
TARGET = Path(__file__).parents[1] / "rather" / "tools" / "migrate" / "keys"
# The folder of each tool, where its settings are, and whether it takes the Trainer's arguments.
TOOLS = {
    "llama-factory": ("LLaMA-Factory", ["src/llamafactory/hparams/*.py"], True),
    "axolotl": ("axolotl", ["src/axolotl/utils/schemas/**/*.py",
                            "src/axolotl/integrations/*/args.py"], False),
}  # fmt: skip


def settings_in(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield annotated fields of classes with their defaults."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, default_of(line.value)
                    for alias in aliases_of(line.value):
                        yield alias, default_of(line.value)


def default_of(value: ast.expr | None) -> Any:
    """Return the default of a field if it is written as a literal."""
    if isinstance(value, ast.Call):
        words = {word.arg: word.value for word in value.keywords}
        return default_of(words.get("default"))
    if isinstance(value, ast.Constant):
        return value.value
    return UNKNOWN


def aliases_of(value: ast.expr | None) -> Iterator[str]:
    """Yield the other names that pydantic accepts for a field."""
    for word in value.keywords if isinstance(value, ast.Call) else ():
        if word.arg in ("alias", "validation_alias"):
            for node in ast.walk(word.value):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def defaults_of(found: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return each name with its default, or UNKNOWN if classes differ."""
    result: dict[str, Any] = {}
    for name, default in found:
        if not name.startswith("_"):
            is_same = repr(result.get(name, default)) == repr(default)
            result[name] = default if is_same else UNKNOWN
    return result


def main() -> None:
    folder = Path(sys.argv[1])
    for tool, (checkout, patterns, takes_trainer) in TOOLS.items():
        root = folder / checkout
        files = sorted(file for pattern in patterns for file in root.glob(pattern))
        found = [item for file in files for item in settings_in(ast.parse(file.read_text()))]
        read = ", ".join(patterns)
        if takes_trainer:
            fields = dataclasses.fields(transformers.Seq2SeqTrainingArguments)
            found += [(field.name, field.default) for field in fields]
            read += f", Seq2SeqTrainingArguments of transformers {transformers.__version__}"
        log = ["git", "-C", str(root), "log", "-1", "--format=%h %cs"]
        commit = subprocess.run(log, check=True, capture_output=True, text=True).stdout.strip()
        head = f"# Settings of {checkout} at {commit}, by bench/migrate_keys.py from {read}."
        lines = textwrap.wrap(head, 98, subsequent_indent="# ", break_on_hyphens=False)
        settings = defaults_of(found)
        for name in sorted(settings):
            default = settings[name]
            is_plain = default is None or isinstance(default, bool | int | float | str)
            lines.append(f"{name} = {json.dumps(default)}" if is_plain else name)
        (TARGET / f"{tool}.txt").write_text("\n".join(lines) + "\n")
        print(tool, len(settings))


if __name__ == "__main__":
    main()
