"""Templates that write turns as released models do, and the tokens that are scored then: in [[ ]]."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from rather.data.formats import RowLayout, read_row
from rather.data.template import ChatTemplate
from rather.data.tokens import Encoder, TokenRecipe
from tests.data.conftest import _tokenizer

MARKS = ["<|start|>", "<|message|>", "<|call|>", "<|return|>", "[INST]", "[/INST]", "[CALLS]"]
# As gpt-oss: calls begin where other answers do, and the last answer has an end of its own.
HARMONY = """\
{% for m in messages %}{% if m.tool_calls %}\
{% if m.content %}<|start|>assistant analysis<|message|>{{ m.content }}<|end|>{% endif %}\
<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|>\
{{ m.tool_calls[0].function.arguments | tojson }}<|call|>\
{% elif m.role == 'assistant' and loop.last and not add_generation_prompt %}\
{% if m.thinking %}<|start|>assistant analysis<|message|>{{ m.thinking }}<|end|>{% endif %}\
<|start|>assistant final<|message|>{{ m.content }}<|return|>\
{% else %}<|start|>{{ m.role }}{{ ' final' if m.role == 'assistant' }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
# As Mistral: the system message is written before a last turn of the user only.
MISTRAL = """\
{% set system = messages[0].content if messages[0].role == 'system' %}\
{% for m in messages if m.role != 'system' %}\
{% if m.role == 'user' %}[INST] {{ system ~ ' ' if loop.last and system }}{{ m.content }}[/INST]\
{% elif m.tool_calls %}[CALLS] {{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}</s>\
{% elif m.role == 'tool' %}[INST] {{ m.content }}[/INST]\
{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"""
# As Qwen 3: the last answer has a think block, earlier ones have none.
QWEN = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}\
{{ m.content }}{% for call in m.tool_calls or [] %}<tool>{{ call.function.name }}</tool>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(content: str = "", where: str = "shelf") -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": where}}
    return says("assistant", content, tool_calls=[{"type": "function", "function": function}])


BREAD = says("user", "Bread?")
FOUND = says("tool", "two")
SYSTEM = [says("system", "Be kind."), BREAD, says("assistant", "Yes."), says("user", "Where?")]
TOOL = {"prompt": [BREAD, calls(), FOUND], "chosen": [says("assistant", "Two.")]}
THOUGHT = {
    "prompt": [BREAD],
    "chosen": [says("assistant", "Two.", thinking="far", reasoning_content="far")],
}


def scored(template: str, score: str, row: dict[str, Any]) -> tuple[str, set[str]]:
    """Return the chosen sequence with its scored tokens in [[ ]], and the kinds of notes."""
    tokenizer = _tokenizer(adds_bos=False)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    end = tokenizer.token_to_id("</s>")
    recipe = TokenRecipe(
        tokenizer.to_str(), ChatTemplate("like", template), None, end, False, 512, score=score
    )
    [pair] = read_row({"rejected": [says("assistant", "None.")], **row}, RowLayout()).pairs
    made = Encoder(recipe).encode(pair)
    text, place = "", 0
    ids = made.prompt + made.chosen
    for first, last in made.chosen_scored:
        parts = (ids[place:first], ids[first:last])
        before, inside = (tokenizer.decode(part, skip_special_tokens=False) for part in parts)
        text += f"{before}[[{inside}]]"
        place = last
    return text + tokenizer.decode(ids[place:], skip_special_tokens=False), set(made.notes)


CALL = ' to=look<|message|>{"at": "shelf"}<|call|>'
CASES: list[tuple[str, str, dict[str, Any], str, set[str]]] = [
    (
        HARMONY, "assistant", TOOL,
        f"<|start|>user<|message|>Bread?<|end|><|start|>assistant[[{CALL}]]"
        "<|start|>tool<|message|>two<|end|><|start|>assistant[[ final<|message|>Two.<|return|>]]",
        set(),
    ),
    (
        HARMONY, "assistant", {**TOOL, "prompt": [BREAD, calls("I look."), FOUND]},
        "<|start|>user<|message|>Bread?<|end|>"
        f"<|start|>assistant[[ analysis<|message|>I look.<|end|><|start|>assistant{CALL}]]"
        "<|start|>tool<|message|>two<|end|><|start|>assistant[[ final<|message|>Two.<|return|>]]",
        set(),
    ),
    (
        HARMONY, "last", {"prompt": [BREAD], "chosen": [calls()]},
        f"<|start|>user<|message|>Bread?<|end|><|start|>assistant[[{CALL}]]",
        set(),
    ),
    (
        HARMONY, "last", THOUGHT,
        "<|start|>user<|message|>Bread?<|end|><|start|>assistant[[ analysis<|message|>far<|end|>"
        "<|start|>assistant final<|message|>Two.<|return|>]]",
        set(),
    ),
    (
        MISTRAL, "last", {"prompt": SYSTEM, "chosen": "There."},
        "[INST] Bread?[/INST] Yes.</s>[INST] Be kind. Where?[/INST][[ There.</s>]]",
        {"prompt_changed"},
    ),
    (
        MISTRAL, "assistant", {"prompt": SYSTEM, "chosen": "There."},
        "[INST] Bread?[/INST][[ Yes.</s>]][INST] Be kind. Where?[/INST][[ There.</s>]]",
        {"prompt_changed"},
    ),
    (
        MISTRAL, "assistant", TOOL,
        '[INST] Bread?[/INST][[[CALLS] look {"at": "shelf"}</s>]][INST] two[/INST][[ Two.</s>]]',
        set(),
    ),
    (MISTRAL, "last", THOUGHT, "[INST] Bread?[/INST][[ Two.</s>]]", {"answer_lost"}),
    (
        QWEN, "assistant", TOOL,
        "<|im_start|>user\nBread?<|im_end|>\n<|im_start|>assistant\n"
        "[[<tool>look</tool><|im_end|>]]\n<|im_start|>tool\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n[[<think></think>Two.<|im_end|>]]",
        set(),
    ),
    (
        QWEN.replace("call.function.name", "''"), "last", {"prompt": [BREAD], "chosen": [calls()]},
        "<|im_start|>user\nBread?<|im_end|>\n<|im_start|>assistant\n"
        "[[<think></think><tool></tool><|im_end|>]]",
        {"answer_lost"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("template", "score", "row", "text", "notes"), CASES)
def test_scored_tokens(
    template: str, score: str, row: dict[str, Any], text: str, notes: set[str]
) -> None:
    assert scored(template, score, row) == (text, notes)
