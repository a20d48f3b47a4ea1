"""Rows of every registered format, drawn from a seed: the same question and the same two answers."""

from __future__ import annotations

from random import Random
from typing import Any

from rather.data.formats import FORMATS, DataFormat

Turn = dict[str, Any]
Turns = tuple[Turn, ...]
QUESTIONS = ("prompt", "messages", "conversations", "context", "question", "input", "instruction")
CHOSEN = ("chosen", "chosen_response", "output", "completion", "responses", "completions")
PAIRED = [name for name in FORMATS if not FORMATS[name].single]


def user(text: Any) -> Turn:
    return {"role": "user", "content": text}


def assistant(text: Any) -> Turn:
    return {"role": "assistant", "content": text}


def system(text: str) -> Turn:
    return {"role": "system", "content": text}


EARLIER = (user("x"), assistant("y"))


NAMES = {"user": "human", "assistant": "gpt"}
SPELLINGS = [  # of a message: OpenAI's, the same in parts, ColossalChat's and ShareGPT's
    lambda role, text: {"role": role, "content": text},
    lambda role, text: {"role": role, "content": [{"type": "text", "text": text}]},
    lambda role, text: {"from": role, "content": text},
    lambda role, text: {"from": NAMES.get(role, role), "value": text},
]


def spelled(turns: Turns, draw: Random) -> list[Turn]:
    """Return messages with the keys, roles and parts that one of the peers uses."""
    spelling = draw.choice(SPELLINGS)
    return [spelling(turn["role"], turn["content"]) for turn in turns]


def text_or_messages(turns: Turns, draw: Random) -> Any:
    """Return a list of messages, or a single turn as one message or as its text."""
    messages = spelled(turns, draw)
    if len(turns) > 1:
        return messages
    return draw.choice([messages, messages[0], turns[0]["content"]])


def draw_row(
    form: DataFormat, draw: Random, question: str = "q", answers: tuple[str, str] = ("a", "b")
) -> tuple[dict[str, Any], Turns]:
    """Return a row of a format and the turns of its prompt.

    A format with columns that no other one has needs them in `_value`.
    """
    columns = {*form.needs}
    optional = [name for name in QUESTIONS if name in form.may and name != "input"]
    if form.one_of:
        columns.add(draw.choice(form.one_of))
    if columns.isdisjoint(QUESTIONS) and optional:
        columns.add(draw.choice(optional))
    takes_earlier = "instruction" not in columns or "history" in form.may
    first = draw.choice([(), (system("s"),)])
    earlier = draw.choice([(), EARLIER]) if takes_earlier else ()
    prompt = (*first, *earlier, user(question))
    row: dict[str, Any] = {}
    asked = prompt  # what the column of the question holds
    if first and "system" in form.may and ("instruction" in columns or draw.random() < 0.5):
        row["system"] = "s"
        asked = asked[1:]
    if "instruction" in columns:
        asked = asked[-1:]
        row["input"] = draw.choice([None, "", " "])
        if "history" in form.may:
            row["history"] = [["x", "y"]] if earlier else draw.choice([None, []])
    for name in sorted(columns):
        row[name] = _value(name, columns, asked, answers, draw)
    if "responses" in row and draw.random() < 0.5:
        for name in {"responses", "ranks", "scores"} & columns:
            row[name].reverse()
    return row, prompt


def _value(
    name: str, columns: set[str], asked: Turns, answers: tuple[str, str], draw: Random
) -> Any:
    repeated = asked if columns.isdisjoint(QUESTIONS) else ()  # by answers without a question
    better, worse = ((*repeated, assistant(answer)) for answer in answers)
    if name in ("messages", "conversations"):
        return spelled(asked if columns.intersection(CHOSEN) else (*asked, *better), draw)
    if name == "rejected_messages":
        return spelled((*asked, *worse), draw)
    if name == "completions":
        ranked = [*enumerate(text_or_messages(answer, draw) for answer in (better, worse))]
        draw.shuffle(ranked)
        return [{"rank": rank, "completion": answer} for rank, answer in ranked]
    return {
        "instruction": asked[-1]["content"],
        "responses": [text_or_messages(answer, draw) for answer in (better, worse)],
        "ranks": [1, 2],
        "scores": [0.9, 0.1],
        **dict.fromkeys(("rejected", "rejected_response"), text_or_messages(worse, draw)),
        **dict.fromkeys(CHOSEN[:4], text_or_messages(better, draw)),
        **dict.fromkeys(("prompt", "context", "question", "input"), text_or_messages(asked, draw)),
    }[name]
