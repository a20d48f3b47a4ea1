"""Habits of chat templates, and what each does to an answer; docs/data.md has the table.

`python -m tests.data.test_template_habits` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rather.data.formats import RowLayout, read_row
from rather.data.json_rows import DropReason
from rather.data.prepare import prepare
from rather.data.show import token_view
from rather.data.template import ChatTemplate, tokenizer_of
from rather.data.tokens import Encoder, TokenRecipe
from tests.data.conftest import Config, Write, _tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CONTENT = "m.content"
OFF = "enable_thinking is defined and not enable_thinking"
EMPTY = "<think></think>"


def template(content: str = CONTENT, start: str = "", turns: str = TURNS) -> str:
    """Turns like those of ChatML; `content` is the text of one, `start` begins an answer."""
    begin = START.replace("{% endif %}", f"{start}{{% endif %}}")
    return turns.replace(CONTENT, content).replace("CONTENT", content) + begin


IN_ANSWERS = f"('{EMPTY}' if m.role == 'assistant' and {OFF}) ~ m.content"
IN_PROMPTS = f"{{% if {OFF} %}}{EMPTY}{{% endif %}}"
AFTER_THOUGHTS = "m.content.split('</think>')[-1]"
LAST_THOUGHTS = f"(m.content if loop.last else {AFTER_THOUGHTS})"
CALLS = """m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>\
{% endfor %}{{ ''"""
ONE_CALL = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
REASONS = "('<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content) ~ m.content"
ONLY_THINKING = REASONS.replace("if m.", f"if not ({OFF}) and m.")
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
THOUGHTS = {"chosen": "<think>far</think>Here.", "rejected": "<think>near</think>There."}
REASONED = {
    side: [{"role": "assistant", "content": text, "reasoning_content": thought}]
    for side, text, thought in (("chosen", "Here.", "far"), ("rejected", "There.", "near"))
}
EARLIER = [
    {"role": "user", "content": "Bread?"},
    {"role": "assistant", "content": "<think>old</think>Yes."},
    {"role": "user", "content": "Where?"},
]
LOOK = {"function": {"name": "look", "arguments": {"at": "shelf"}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
)
SYSTEM = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Where?"}]


@dataclass(frozen=True)
class Habit:
    """What a template does, and a row that shows it."""

    what: str
    text: str
    row: dict[str, Any] = field(default_factory=dict)


HABITS = [
    Habit("writes turns as they are", template()),
    Habit("keeps a think block of the answer", template(), THOUGHTS),
    Habit(
        "`enable_thinking: false` writes an empty block into prompts and answers",
        template(IN_ANSWERS, IN_PROMPTS),
        QUIET,
    ),
    Habit(
        "`enable_thinking: false` writes an empty block into prompts only",
        template(start=IN_PROMPTS),
        QUIET,
    ),
    Habit("begins answers with `<think>`, and so do the rows", template(start="<think>"), THOUGHTS),
    Habit("begins answers with `<think>`, the rows do not", template(start="<think>")),
    Habit(
        "begins answers with `<think>` and writes `reasoning_content` behind it",
        template(REASONS, "<think>"),
        REASONED,
    ),
    Habit(
        "`enable_thinking: false` leaves `reasoning_content` out",
        template(ONLY_THINKING),
        {**QUIET, **REASONED},
    ),
    Habit(
        "removes thoughts of earlier answers",
        template(LAST_THOUGHTS),
        {"prompt": EARLIER, **THOUGHTS},
    ),
    Habit("removes thoughts of every answer", template(AFTER_THOUGHTS), THOUGHTS),
    Habit(
        "writes tool calls",
        template(CALLS) + "{{ tools and '' }}",
        {"chosen": [CALL], "tools": TOOLS},
    ),
    Habit(
        "writes the first of two tool calls",
        template(ONE_CALL) + "{{ tools and '' }}",
        {"chosen": [{**CALL, "tool_calls": CALL["tool_calls"] * 2}], "tools": TOOLS},
    ),
    Habit(
        "writes tool calls without arguments",
        template(CALLS) + "{{ tools and '' }}",
        {"chosen": [{**CALL, "tool_calls": [LOOK]}], "tools": TOOLS},
    ),
    Habit("has no place for tools", template(), {"tools": TOOLS}),
    Habit("refuses system turns", NO_SYSTEM + template(), {"prompt": SYSTEM}),
    Habit("trims answers", template("m.content | trim"), {"chosen": " Here. "}),
    Habit(
        "writes answers only",
        template(turns=TURNS.replace("in messages", "in messages if m.role == 'assistant'")),
    ),
    Habit(
        "ends turns with a mark of another tokenizer", template().replace("<|im_end|>", "<|stop|>")
    ),
]
ROW = {"prompt": "Where?", "chosen": "Here.", "rejected": "There."}


def outcome(habit: Habit, tokenizer: Any) -> tuple[str, str]:
    """Return the scored text of the chosen answer, and what is reported about the row."""
    end = tokenizer.token_to_id("<|im_end|>")
    chat = ChatTemplate(habit.what, habit.text)
    recipe = TokenRecipe(tokenizer.to_str(), chat, None, end, False, 512, special_tokens="keep")
    [pair] = read_row({**ROW, **habit.row}, RowLayout()).pairs
    try:
        encoder = Encoder(recipe)
        made = encoder.encode(pair)
    except DropReason as dropped:
        return "", f"dropped: `{dropped.reason}`"
    [(first, last)] = made.chosen_scored
    ids = (made.prompt + made.chosen)[first:last]
    notes = ", ".join(f"`{kind}`" for kind in made.notes)
    return str(encoder.tokenizer.decode(ids, skip_special_tokens=False)), notes


def table() -> list[str]:
    tokenizer = _tokenizer(adds_bos=False)
    rows = [(habit.what, *outcome(habit, tokenizer)) for habit in HABITS]
    lines = []
    for what, scored, notes in rows:
        cell = f"`{scored}`".replace("|", "\\|") if scored else ""
        lines.append(f"| {what} | {cell} | {notes} |")
    return ["| the template | scored tokens | reported |", "|---|---|---|", *lines]


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in PAGE.read_text(encoding="utf-8")


def test_rows_that_lose_text_are_reported_and_others_are_not() -> None:
    tokenizer = _tokenizer(adds_bos=False)
    lost = {habit.what for habit in HABITS if "_lost" in outcome(habit, tokenizer)[1]}
    assert lost == {
        "`enable_thinking: false` leaves `reasoning_content` out",
        "removes thoughts of every answer",
        "writes the first of two tool calls",
        "writes tool calls without arguments",
        "writes answers only",
    }


@pytest.mark.parametrize("number", [2, 6, 10])
def test_what_is_shown_as_scored_is_scored(number: int, config: Config, write: Write) -> None:
    """`rather data --show` prints what token_view returns."""
    habit = HABITS[number]
    settings = {"template": str(write(habit.text, "habit.jinja")), "special_tokens": "keep"}
    prepared = config(write([{**ROW, **habit.row}]), data=settings, sequence_length=512)
    tokenizer = tokenizer_of(prepared.actor_train)
    [shown] = token_view(prepare(prepared).train, tokenizer, 1)
    tokens = shown["sides"]["chosen"]["shown"]
    scored = "".join(text for text, is_scored in tokens if is_scored)
    assert scored == outcome(habit, _tokenizer(adds_bos=False))[0]


if __name__ == "__main__":
    print("\n".join(table()))
