"""data_args.chat_template_kwargs: variables of the chat template, and which tokens are scored then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from rather.data.batch import TokenPair
from rather.data.prepare import prepare
from rather.errors import ConfigError, DataError
from tests.data.conftest import _save, data_config
from tests.tiny import WORDS, write_rows

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
NAMES = ["user", "assistant", "system", "tool"]
# A template with a switch for thinking; test_template_habits.py has more of what models have.
SWITCH = """{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}\
{% if add_generation_prompt %}<|im_start|> assistant {% if enable_thinking is defined and not \
enable_thinking %}<think> </think> {% endif %}{% endif %}"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    words = ["<unk>", "<s>", "</s>", *WORDS, *MARKS, *NAMES]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _save(tmp_path / "base", tokenizer, bos_token="<s>", eos_token="</s>")


def prepared(base: Path, text: str, rows: list[dict[str, Any]], **data: Any) -> list[TokenPair]:
    file, template = write_rows(base.parent / "pairs.jsonl", rows), base.parent / "template.jinja"
    template.write_text(text)
    settings = {"template": template, "special_tokens": "keep", **data}
    pairs = prepare(data_config(base.parent, base, file, data=settings)).train
    return list(pairs.take(range(len(pairs))))


def words(base: Path, ids: Any) -> str:
    known = json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]
    by_id = {number: word for word, number in known.items()}
    return " ".join(by_id[int(number)] for number in ids)


def scored(base: Path, pair: TokenPair, side: str) -> str:
    ids, marks = pair.sequence(side)
    return words(base, [number for number, mark in zip(ids, marks, strict=True) if mark])


ROW = {"prompt": "w1", "chosen": "w2", "rejected": "w3"}


def test_a_switch_changes_the_prompt(base: Path) -> None:
    [on] = prepared(base, SWITCH, [ROW])
    assert words(base, on.prompt) == "<|im_start|> user w1 <|im_end|> <|im_start|> assistant"
    settings = {"chat_template_kwargs": {"enable_thinking": False}}
    [off] = prepared(base, SWITCH.replace("{{ m.content }}", THOUGHTLESS), [ROW], **settings)
    assert words(base, off.prompt).endswith("assistant <think> </think>")
    assert scored(base, off, "chosen") == "w2 <|im_end|>"
    assert scored(base, off, "rejected") == "w3 <|im_end|>"
    # A row's own value goes first.
    own = {**ROW, "chat_template_kwargs": {"enable_thinking": True}}
    [again] = prepared(base, SWITCH, [own], **settings)
    assert words(base, again.prompt) == words(base, on.prompt)


# The same switch inside answers: a model that does not think begins each with an empty block.
THOUGHTLESS = (
    "{% if m.role == 'assistant' and enable_thinking is defined and not enable_thinking %}"
    "<think> </think> {% endif %}{{ m.content }}"
)


def test_what_no_template_could_use_is_an_error(base: Path) -> None:
    with pytest.raises(DataError, match=r"data_args\.chat_template_kwargs: "):
        prepared(base, SWITCH, [ROW], template="none", chat_template_kwargs={"a": 1})
    with pytest.raises(ConfigError, match=r"chat_template_kwargs.*messages"):
        prepared(base, SWITCH, [ROW], chat_template_kwargs={"messages": "x"})


def test_other_values_are_other_data(base: Path) -> None:
    """Tokens of another value do not come from the cache."""
    text, lengths = SWITCH.replace("{{ m.content }}", THOUGHTLESS), []
    for thinks in (True, False, True):
        [pair] = prepared(base, text, [ROW], chat_template_kwargs={"enable_thinking": thinks})
        lengths.append(len(pair.prompt))
    assert lengths == [lengths[0], lengths[0] + 2, lengths[0]]
