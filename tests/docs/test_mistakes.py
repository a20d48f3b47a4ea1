"""The commands of "Ten typical mistakes" get the answers that the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.commands.conftest import rather
from tests.house.source import ROOT
from tests.tiny import make_model, make_pairs

PAGE = (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CONFIG = """\
pretrain: ./model
exp_name: first
max_steps: 1
actor_train:
  data_args: {file_name: pairs.jsonl}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    make_model(made / "model")
    make_pairs(made / "pairs.jsonl", 40)
    row = json.dumps({"question": "Tea?", "good": "Here you are.", "bad": "No."})
    (made / "good_bad.jsonl").write_text(f"{row}\n" * 3)
    (made / "dpo.yaml").write_text(CONFIG)
    return made


def plain(text: str) -> str:
    """Return a text without the frame that Typer draws, and with single spaces."""
    return " ".join(re.sub(r"[│╭╮╰╯─]|Error ", " ", text).split())


def pattern(shown: str) -> str:
    return re.escape(plain(shown)).replace(re.escape("..."), ".*")


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0][9:50] for block in BLOCKS])
def test_the_answer_is_the_one_on_the_page(
    block: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for command, shown, code in re.findall(r"\$ rather (.*)\n((?s:.*?))\[exit code (\d)\]", block):
        done = rather(*command.split())
        said = plain(done.output).partition("for help. ")
        # A slow machine also prints its progress.
        assert re.search(rf"{pattern(shown)}$", said[2] or said[0]), done.output
        assert done.exit_code == int(code)


def test_there_are_ten() -> None:
    assert len(re.findall(r"^## \d+\. ", PAGE, re.MULTILINE)) == 10
    assert len(BLOCKS) >= 12
