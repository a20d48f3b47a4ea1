"""data_args.chat_template_kwargs: variables of the chat template, and which tokens are scored then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rather.config.load import config_from_dict
from rather.data.batch import TokenPair
from rather.data.prepare import prepare
from rather.errors import ConfigError, DataError
from tests.tiny import WORDS, make_model

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
NAMES = ["user", "assistant", "system", "tool"]
# Templates as models have them: with a switch for thinking, with a think block that only the last
# answer keeps, and one that renders a prompt otherwise once an answer follows.
SWITCH = """{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}\
{% if add_generation_prompt %}<|im_start|> assistant {% if enable_thinking is defined and not \
enable_thinking %}<think> </think> {% endif %}{% endif %}"""
FORGETS = """{% for m in messages %}<|im_start|> {{ m.role }} {% if m.role == 'assistant' and not \
loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %} <|im_end|> \
{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"""
UNSAFE = """{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}\
{% if add_generation_prompt %}<|im_start|> assistant <think> {% endif %}"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = make_model(tmp_path / "base")
    words = ["<unk>", "<s>", "</s>", *WORDS, *MARKS, *NAMES]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def prepared(base: Path, text: str, rows: list[dict[str, Any]], **data: Any) -> list[TokenPair]:
    file, template = base.parent / "pairs.jsonl", base.parent / "template.jinja"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    template.write_text(text)
    named = {"file_name": str(file), "template": str(template), "special_tokens": "keep", **data}
    values = {
        "exp_name": "kwargs",
        "pretrain": str(base),
        "output_dir": str(base.parent / "output"),
        "actor_train": {"data_args": named},
    }
    pairs = prepare(config_from_dict(values)).train
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


def test_a_think_block_of_an_answer_is_scored_and_earlier_ones_are_as_the_template_leaves_them(
    base: Path,
) -> None:
    turns = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "<think> w9 </think> w4"},
        {"role": "user", "content": "w5"},
    ]
    row = {"messages": turns, "chosen": "<think> w6 </think> w2", "rejected": "<think> </think> w3"}
    [pair] = prepared(base, FORGETS, [row])
    assert "w9" not in words(base, pair.prompt)
    assert scored(base, pair, "chosen") == "<think> w6 </think> w2 <|im_end|>"
    # Both answers begin with <think>, which the prompt is not: each is scored whole.
    assert scored(base, pair, "rejected") == "<think> </think> w3 <|im_end|>"


def test_a_prompt_that_is_rendered_otherwise_before_an_answer_is_cut_where_they_part(
    base: Path,
) -> None:
    """The template starts an answer with <think>, which these answers do not have."""
    [pair] = prepared(base, UNSAFE, [ROW])
    assert scored(base, pair, "chosen") == "w2 <|im_end|>"
    assert words(base, pair.sequence("chosen")[0]).count("<think>") == 0


def test_what_no_template_could_use_is_an_error(base: Path) -> None:
    with pytest.raises(DataError, match="chat_template_kwargs: there is no chat template"):
        prepared(base, SWITCH, [ROW], template="none", chat_template_kwargs={"a": 1})
    with pytest.raises(ConfigError, match=r"chat_template_kwargs.*must not set messages"):
        prepared(base, SWITCH, [ROW], chat_template_kwargs={"messages": "x"})


def test_other_values_are_other_data(base: Path) -> None:
    """Tokens of another value do not come from the cache."""
    text, lengths = SWITCH.replace("{{ m.content }}", THOUGHTLESS), []
    for thinks in (True, False, True):
        [pair] = prepared(base, text, [ROW], chat_template_kwargs={"enable_thinking": thinks})
        lengths.append(len(pair.prompt))
    assert lengths == [lengths[0], lengths[0] + 2, lengths[0]]
