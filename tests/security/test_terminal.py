"""Texts of strangers are printed, never obeyed: no control character reaches the terminal."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

from rather.config.redaction import printable
from tests.commands.conftest import exits
from tests.house.source import nodes, python_files
from tests.security.conftest import Config, change
from tests.tiny import write_rows

ROOT = Path(__file__).parents[2]
TITLE = "\x1b]0;another title\x07\x9b2J[/red]"  # also markup of rich, which may not be closed
# These print numbers and texts of Rather, or redact what they print.
DIRECT = {"cli.py", "commands/terminal.py", "run_folder/control.py", "tracking/run.py"}
DIRECT |= {"pipeline/pipeline.py"}  # metrics as JSON, which escapes control characters
DIRECT |= {"tracking/logs.py", "cluster/supervision.py", "cluster/resources.py", "data/show.py"}
DIRECT |= {"cluster/cleanup.py"}
DIRECT |= {"tools/report/write.py"}  # the seconds that a page took, for its parent


def refuse_control(text: str) -> None:
    assert printable(text) == text
    assert "another title" in text, "the text was not shown at all"


def test_control_characters_are_shown_as_such() -> None:
    assert printable("a\tb\n\x1b[2J\r\x7f\x9b é中") == "a\tb\n\\x1b[2J\\x0d\\x7f\\x9b é中"


def test_texts_of_a_dataset(config: Config, tmp_path: Path) -> None:
    rows = tmp_path / f"{TITLE.replace('/', '')}.jsonl"
    good = {"prompt": f"w1 {TITLE}", "chosen": "w2", "rejected": "w3", TITLE: 1}
    bad = {"prompt": 1, "chosen": TITLE, "id": TITLE}
    write_rows(rows, [good] * 4 + [bad] * 2)
    file = config(actor_train__data_args__file_name=str(rows), max_bad_fraction=1)
    refuse_control(exits(0, "data", file, "--show", "2"))
    refuse_control(exits(3, "data", file, "max_bad_fraction=0"))


def test_texts_of_a_run_and_a_model(model: Path, finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    finding = {"step": 1, "severity": "warning", "number": 1.0}
    finding |= dict.fromkeys(("name", "text", "advice"), f"odd {TITLE}")
    write_rows(run / "health.jsonl", [finding])
    shown = exits(0, "health", run)
    assert "odd" in shown
    refuse_control(shown)
    tokens = json.loads((model / "tokenizer.json").read_text())
    words = tokens["model"]["vocab"]
    tokens["model"]["vocab"] = {
        word + TITLE if word.startswith("w") and word != "w1" else word: number
        for word, number in words.items()
    }
    (model / "tokenizer.json").write_text(json.dumps(tokens))
    refuse_control(exits(0, "chat", model, "--prompt", "w1 w1", "--temperature", "9"))
    change(model / "config.json", model_type=TITLE)
    refuse_control(exits(2, "chat", model, "--prompt", "w1"))


@pytest.mark.parametrize("name", ["echo", "print"])
def test_commands_print_by_one_function(name: str) -> None:
    found = {
        str(file.relative_to(ROOT / "rather"))
        for file in python_files("rather")
        for node in nodes(file)
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Attribute) and node.func.attr == name)
            or (name == "print" and isinstance(node.func, ast.Name) and node.func.id == name)
        )
    }
    assert found <= DIRECT
