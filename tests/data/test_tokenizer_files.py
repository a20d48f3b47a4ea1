"""tokenizer.json is a stranger's: what would fill the memory or end the process is refused first."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rather.config.schema import DataArgs
from rather.data import tokenizer_files
from rather.data.prepare import recipe_of
from rather.data.template import load_tokenizer
from rather.errors import DataError

Content = dict[str, Any]


def far_id(content: Content) -> None:
    content["model"]["vocab"]["far"] = 10**9


def far_added_token(content: Content) -> None:
    content["added_tokens"].append({**content["added_tokens"][0], "content": "far", "id": 10**9})


def long_added_tokens(content: Content) -> None:
    first = content["added_tokens"][0]
    content["added_tokens"] += [
        {**first, "content": f"{i}{'x' * 2000}", "id": 600 + i} for i in range(2500)
    ]


def post_processor(content: Content, pieces: int, name: str, ids: list[int]) -> None:
    token = {"SpecialToken": {"id": name, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}}
    content["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {
                "type": "TemplateProcessing",
                "single": [token] * pieces + [text],
                "pair": [text],
                "special_tokens": special,
            }
        ],
    }


CASES = {
    "far id": (far_id, r"a token has the id 1,000,000,000, but there are only \d+ tokens"),
    "far added token": (far_added_token, "a token has the id 1,000,000,000"),
    "long added tokens": (long_added_tokens, r"added_tokens have 5,\d+,\d+ characters"),
    "missing token": (
        lambda content: post_processor(content, 1, "missing", [1]),
        "its post_processor uses 'missing', which is not among its special_tokens",
    ),
    "many pieces": (
        lambda content: post_processor(content, 10_000, "<s>", [1]),
        "its post_processor adds 20,001 tokens to a text",
    ),
    "many ids": (
        lambda content: post_processor(content, 1, "<s>", [1] * 10_000),
        "its post_processor adds 10,002 tokens to a text",
    ),
    "another type": (lambda content: content.update(model=3), "AttributeError"),
}


@pytest.fixture
def content(folders: dict[str, Path]) -> Content:
    found: Content = json.loads((folders["chat"] / "tokenizer.json").read_text())
    return copy.deepcopy(found)


@pytest.mark.defect("X14")
@pytest.mark.defect("X23")
@pytest.mark.parametrize("case", CASES)
def test_what_a_library_would_not_survive_is_refused(
    content: Content, tmp_path: Path, case: str
) -> None:
    change, message = CASES[case]
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def large(content: Content) -> None:
    """As many tokens as the largest vocabularies, with a gap, and many added ones."""
    vocabulary = content["model"]["vocab"]
    for number in range(262_144):
        vocabulary[f"token {number}"] = len(vocabulary) + 1000
    first = content["added_tokens"][0]
    content["added_tokens"] += [
        {**first, "content": f"<|audio {i:05}|>", "id": 300_000 + i} for i in range(65_536)
    ]


def longest(content: Content) -> None:
    first = content["added_tokens"][0]
    size = sum(len(token["content"]) for token in content["added_tokens"])
    content["added_tokens"].append({**first, "content": "x" * (tokenizer_files.MOST_ADDED - size)})


@pytest.mark.parametrize(
    "change",
    [lambda content: None, large, longest, lambda content: post_processor(content, 2, "<s>", [1])],
)
def test_usual_and_large_tokenizers_pass(
    content: Content, change: Callable[[Content], None]
) -> None:
    change(content)
    tokenizer_files._check_tokenizer(content)


def test_a_tokenizer_without_the_token_for_unknown_words_is_one_line() -> None:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "b": 1}, unk_token="[UNK]"))
    fast_class: Any = PreTrainedTokenizerFast
    tokenizer = fast_class(tokenizer_object=backend, bos_token="<s>")
    with pytest.raises(DataError, match=r"the tokenizer cannot encode: .*Missing \[UNK\] token"):
        recipe_of(tokenizer, DataArgs(template="chatml"), 64)
