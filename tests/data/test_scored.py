"""Pairs from scored answers: which are made, which are skipped and counted, and whose tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rather.data.formats import RowLayout, read_row
from rather.data.pool import ChunkEncoder
from rather.data.read import Chunk
from rather.data.tokens import Encoder
from rather.errors import ConfigError
from rather.files import JsonObject
from rather.tracking.json_lines import strict_json
from tests.data.conftest import Make
from tests.tiny import make_config

ROW: JsonObject = {
    "prompt": "And the salt?",
    "responses": ["a", "bb", "a", "cut", "ccc", "dddd"],
    "scores": [0.9, 0.5, 0.1, 1.0, 0.5, 0.2],
    "ended": [True, True, True, False, True, True],
}


def pairs(row: JsonObject, **layout: Any) -> tuple[list[str], dict[str, int]]:
    found = read_row(row, RowLayout(**layout))
    assert not found.dropped
    assert not found.ignored
    return [f"{pair.chosen}>{pair.rejected}" for pair in found.pairs], dict(found.skipped)


@pytest.mark.parametrize(
    ("layout", "made", "skipped"),
    [
        ({}, ["a>bb", "a>ccc", "a>dddd", "bb>dddd", "ccc>dddd"], {"ties_skipped": 1}),
        ({"ranked_pairs": "adjacent"}, ["a>bb", "ccc>dddd"], {"ties_skipped": 1}),
        ({"ranked_pairs": "best_vs_worst"}, ["a>dddd"], {}),
        ({"ranked_pairs": "best_vs_rest", "min_gap": 0.5}, ["a>dddd"], {"small_gap": 2}),
    ],
)
def test_cut_and_repeated_answers_make_no_pair(
    layout: JsonObject, made: list[str], skipped: dict[str, int]
) -> None:
    once = {"cut_answer": 1, "duplicate_answer": 1}
    assert pairs(ROW, **layout) == (made, once | skipped)
    ranks = {"scores": None, "ranks": [-score for score in ROW["scores"]]}
    assert pairs(ROW | ranks, **layout) == (made, once | skipped)


def test_rows_without_ends_are_read_as_before() -> None:
    row = {name: ROW[name] for name in ("prompt", "responses", "scores")}
    made, skipped = pairs(row, ranked_pairs="best_vs_rest")
    assert made == ["cut>a", "cut>bb", "cut>ccc", "cut>dddd", "cut>a"]
    assert skipped == {}


def test_answers_without_a_score_make_no_pair() -> None:
    row: JsonObject = {"prompt": "p", "responses": ["a", "b", "c"], "scores": [1, None, 0]}
    for ends in ({}, {"ended": [True] * 3}):
        assert pairs(row | ends) == (["a>c"], {"unscored_answer": 1})


def test_a_row_whose_answers_are_cut_is_skipped_and_not_bad() -> None:
    row = ROW | {"ended": [True, *[False] * 5]}
    assert pairs(row) == ([], {"cut_answer": 5})
    [single] = read_row(row, RowLayout(rows="scored")).pairs
    assert (single.chosen, single.score) == ("a", 0.9)


def encode_row(encoder: Encoder, row: JsonObject, **layout: Any) -> tuple[Any, Counter[str]]:
    chunks = ChunkEncoder(encoder, RowLayout(**layout), lambda number: None)
    head, _ = chunks.encode(Chunk(0, ((1, strict_json(row).encode()),)))
    assert not head["dropped"]
    return chunks.pairs, Counter(kind for kind, _, _ in head["noted"])


def test_answers_of_other_lengths_are_skipped_by_their_tokens(encoder: Make) -> None:
    row = {"prompt": "q", "responses": ["one two three four", "one", "two"], "scores": [2, 1, 0]}
    chat = encoder()
    made, noted = encode_row(chat, row, max_length_gap=2)
    assert len(made) == 1
    assert noted["length_gap"] == 2
    made, noted = encode_row(chat, row, max_length_gap=100)
    assert len(made) == 3
    assert not noted["length_gap"]


def generated_row(encoder: Encoder) -> JsonObject:
    """A row as `rather generate` writes it; the model wrote its first answer letter by letter."""
    letters = [encoder.tokenizer.encode(c, add_special_tokens=False).ids for c in "salt"]
    other = encoder.tokenizer.encode("pepper", add_special_tokens=False).ids
    [made] = read_row({"prompt": "q", "chosen": "x", "rejected": "y"}, RowLayout()).pairs
    return {
        "prompt": "q",
        "responses": ["salt", "pepper"],
        "scores": [1, 0],
        "ended": [True, True],
        "response_ids": [[token for ids in letters for token in ids], other],
        "prompt_ids": encoder.prompt_ids(made),
        "tokens_digest": encoder.recipe.digest,
    }


def test_the_models_own_tokens_are_trained(encoder: Make) -> None:
    chat = encoder()
    row = generated_row(chat)
    [pair], noted = encode_row(chat, row)
    assert noted["own_tokens"] == 1
    assert pair["prompt"] == row["prompt_ids"]
    assert pair["chosen"] == [*row["response_ids"][0], chat.end_of_turn]
    assert pair["rejected"] == [*row["response_ids"][1], chat.end_of_turn]
    start = len(pair["prompt"])
    assert pair["chosen_scored"] == [start, start + len(pair["chosen"])]
    [single, _], _ = encode_row(chat, row, rows="scored")
    assert single["chosen"] == pair["chosen"]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_digest": "0" * 16},  # of another tokenizer
        {"prompt_ids": [1, 2, 3]},  # of another system message
        {"responses": ["malt", "pepper"]},  # the text says something else
    ],
)
def test_other_tokens_are_counted_and_the_text_is_trained(encoder: Make, change: Any) -> None:
    chat = encoder()
    row = generated_row(chat) | change
    text_only = {name: row[name] for name in ("prompt", "responses", "scores", "ended")}
    [expected], _ = encode_row(chat, text_only)
    [pair], noted = encode_row(chat, row)
    assert pair == expected
    assert noted["tokens_changed"] == 1
    assert "own_tokens" not in noted


def test_equal_tokens_are_not_counted(encoder: Make) -> None:
    chat = encoder()
    row = generated_row(chat)
    row["response_ids"][0] = chat.tokenizer.encode("salt", add_special_tokens=False).ids
    _, noted = encode_row(chat, row)
    assert not {"own_tokens", "tokens_changed"} & noted.keys()


def test_gaps_belong_to_pairs(tmp_path: Path) -> None:
    for name in ("min_gap", "max_length_gap"):
        with pytest.raises(ConfigError, match=f"{name}: belongs to pairs, and task is scored"):
            make_config(tmp_path, task="scored", **{name: 1})
