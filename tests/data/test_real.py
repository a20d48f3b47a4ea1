"""Real pairs with real tokenizers, where the team's data is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rather.data.formats import RowLayout, read_row
from rather.data.prepare import prepare
from rather.data.template import choose_template, load_tokenizer
from tests.data.conftest import data_config
from tests.data.files import rows_of


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in rows_of(path)]


def test_a_chat_tokenizer_agrees_with_transformers(
    team_data: Path, tmp_path: Path, console: Console
) -> None:
    """Prompt and answers are what `apply_chat_template` gives, but for the line end after the last turn."""
    folder = team_data / "tokenizers/smollm2"
    path = team_data / "pairs/llamafactory_dpo_en_demo.jsonl.gz"
    made = prepare(data_config(tmp_path, folder, path), console=console)
    tokenizer: Any = load_tokenizer(str(folder))
    rows_in_file = rows(path)
    kept = made.train.column("number").tolist()
    assert made.report["train"]["rows"] == len(rows_in_file) == 295
    some = range(0, len(kept), 4)
    for number, pair in zip(kept[::4], made.train.take(some), strict=True):
        row = rows_in_file[number - 1]
        start = tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_dict=False
        )
        assert pair.prompt.tolist() == start
        for side in ("chosen", "rejected"):
            whole = [*row["messages"], {"role": "assistant", "content": row[side]}]
            ids = tokenizer.apply_chat_template(whole, return_dict=False)
            assert [*start, *getattr(pair, side).tolist()] == ids[:-1]
            assert ids[-2] == tokenizer.eos_token_id


def test_a_plain_tokenizer_agrees_with_transformers(
    team_data: Path, tmp_path: Path, console: Console
) -> None:
    folder = team_data / "models/stories15M"
    path = team_data / "pairs/stories15M_vader_onpolicy.jsonl.gz"
    made = prepare(data_config(tmp_path, folder, path, data={"separator": " "}), console=console)
    tokenizer: Any = load_tokenizer(str(folder))
    assert choose_template(None, tokenizer) is None
    assert len(made.train) == len(rows(path)) == 688
    assert not made.report["train"]["changed"]
    for row, pair in zip(rows(path)[::8], made.train.take(range(0, 688, 8)), strict=True):
        assert [*pair.prompt, *pair.chosen] == [
            *tokenizer(f"{row['prompt']} {row['chosen']}").input_ids,
            tokenizer.eos_token_id,
        ]
        assert pair.prompt.tolist() == tokenizer(row["prompt"]).input_ids
    glued = prepare(data_config(tmp_path, folder, path), console=console)
    assert glued.report["train"]["warned"]["glued_boundary"]["count"] > 500


@pytest.mark.parametrize(
    "name",
    ["orca_dpo_validation", "rasbt_politeness", "truthfulqa_pairs", "ultrafeedback_train_clean"],
)
def test_real_rows_are_read(team_data: Path, name: str) -> None:
    found = [read_row(row, RowLayout()) for row in rows(team_data / f"pairs/{name}.jsonl.gz")]
    assert all(len(one.pairs) == 1 or one.dropped for one in found)
    assert sum(len(one.pairs) for one in found) > 0.97 * len(found)
