"""`rather data --overlap` counts training rows that share 13 words with held-out or named rows."""

from __future__ import annotations

import json
from pathlib import Path

from rather.config.load import dump_yaml
from rather.data.overlap import WORDS, find_overlap
from tests.commands.conftest import refusal
from tests.tiny import make_config, write_rows


def text(name: str, words: int = WORDS) -> str:
    return " ".join(f"{name}{i}" for i in range(words))


def write(file: Path, *prompts: str) -> Path:
    return write_rows(
        file, [{"prompt": each, "chosen": "yes yes", "rejected": "no"} for each in prompts]
    )


def test_thirteen_words_in_a_row_count_and_twelve_do_not(tmp_path: Path) -> None:
    train = write(
        tmp_path / "train.jsonl", f"So: {text('A')}!", text("b", 12), text("c"), text("d")
    )
    named = write(tmp_path / "named.jsonl", f"{text('a')}?", f"{text('b', 12)} else", text("e"))
    # The third row is held out, and its words come again in the fourth.
    again = json.dumps({"prompt": [{"role": "user", "content": f"x {text('c')}"}]})
    train.write_text(train.read_text() + again)
    found = find_overlap([train], {"named": [named]}, {(0, 3)}, "utf-8")
    assert found["train_rows"] == 4
    assert found["texts"] == {
        "named": {"rows": 1, "first": ["train.jsonl:1"]},
        "eval": {"rows": 1, "first": ["train.jsonl:5"]},
    }


def test_the_command_compares_with_held_out_and_named_rows(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    named = write(tmp_path / "named.jsonl", text("a"))
    train = write(tmp_path / "own.jsonl", text("a"), text("b"))
    held_out = write(tmp_path / "held.jsonl", text("b"))
    (tmp_path / "dpo.yaml").write_text(dump_yaml(config))
    settings = [f"actor_train.data_args.file_name={train}", "sequence_length=512"]
    settings += [f"validation.data_args.file_name={held_out}"]
    said = refusal(0, "data", tmp_path / "dpo.yaml", "--overlap", named, *settings)
    assert f"1 of 2 training rows share 13 words in a row with {named} (first: own.jsonl:1)" in said
    assert "share 13 words in a row with eval (first: own.jsonl:2)" in said
