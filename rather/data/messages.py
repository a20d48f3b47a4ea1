"""Messages and the order of turns, whatever names a file gives them; anything else is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rather.data.json_rows import Bad

Message = dict[str, Any]
Turns = tuple[Message, ...]


class Refused(Exception):
    """A row that gives no pair."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.bad = Bad(reason, detail)


ROLES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant",
    "observation": "tool", "function": "tool", "ipython": "tool", "function_call": "assistant",
}  # fmt: skip
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
FOLLOWS = {  # which turns may stand after a turn
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise Refused("bad_type", f"{where} must hold messages (objects), found {kind_of(value)}")
    role = value.get("role", value.get("from"))
    if not isinstance(role, str):
        raise Refused(
            "bad_type",
            f"a message of {where} has no role (or from), only {', '.join(map(str, value))}",
        )
    role = ROLES.get(role.lower(), role.lower())
    if role not in KNOWN_ROLES:
        raise Refused(
            "bad_roles",
            f"{where} has the role {role!r}; known are {', '.join((*KNOWN_ROLES, *ROLES))}",
        )
    content = next(
        (value[key] for key in ("content", "value", "text") if value.get(key) is not None), None
    )
    if content is None and value.get("tool_calls"):
        content = ""
    extras = {
        k: v
        for k, v in value.items()
        if k not in ("role", "from", "content", "value") and v is not None
    }
    return {"role": role, "content": _content(content, where), **extras}


def _content(value: Any, where: str) -> str:
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        texts = [part.get("text") for part in value if part.get("type", "text") == "text"]
        if len(texts) < len(value) or not all(isinstance(text, str) for text in texts):
            raise Refused(
                "bad_type", f"{where} holds parts that are not text; only text is trained"
            )
        return "".join(map(str, texts))
    return text_of(value, where)


def text_of(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Refused("bad_type", f"{where} must be text or messages, found {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    return (
        "null" if value is None else f"{type(value).__name__} {json.dumps(value, default=str)[:40]}"
    )


def turns_of(value: Any, where: str) -> Turns:
    """Messages from a list of them or a single one."""
    values = [value] if isinstance(value, dict) else value
    if not isinstance(values, list):
        raise Refused("bad_type", f"{where} must be a list of messages, found {kind_of(value)}")
    return tuple(_message(entry, where) for entry in values)


def text_or_turns(value: Any, where: str) -> str | Turns:
    return value if isinstance(value, str) else turns_of(value, where)


def as_turns(value: str | Turns, role: str) -> Turns:
    return ({"role": role, "content": value},) if isinstance(value, str) else value


def check_roles(prompt: Turns, answers: Sequence[Turns]) -> None:
    """System only first, then user and assistant in turn, tool results after an assistant; answers end with it."""
    last = _check_order(prompt, None, "the prompt")
    if last not in ("user", "tool"):
        raise Refused(
            "bad_roles", f"the prompt must end with a user or tool turn, it ends with {last}"
        )
    for answer in answers:
        ending = _check_order(answer, last, "the answer")
        if ending != "assistant":
            raise Refused(
                "bad_roles", f"an answer must end with an assistant turn, it ends with {ending}"
            )


def _check_order(turns: Turns, before: str | None, where: str) -> str | None:
    for turn in turns:
        if turn["role"] not in FOLLOWS[before]:
            after = f"after {before}" if before else "first"
            raise Refused(
                "bad_roles",
                f"in {where} a {turn['role']} turn stands {after}; expected {_or(FOLLOWS[before])}",
            )
        before = turn["role"]
    return before


def _or(words: Sequence[str]) -> str:
    return " or ".join(words)
