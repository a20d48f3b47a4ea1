"""Read messages and check the order of turns, whatever names a file gives them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rather.data.images import NAMES, PARTS, PLACEHOLDER, reference
from rather.data.json_rows import DropReason
from rather.errors import LIMITS

Json = dict[str, Any]
Turns = tuple[Json, ...]
Content = str | Turns

ROLES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant",
    "model": "assistant", "observation": "tool", "function": "tool", "ipython": "tool",
    "function_call": "assistant",
}  # fmt: skip
NO_MEDIA = f"video and audio are not read; {LIMITS}"
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
REFERENCES = (
    "image_references"  # key of a turn: an image for each part, None for the next of the row
)
MEDIA_PARTS = ("video", "video_url", "audio", "input_audio", "audio_url")
FOLLOWS = {  # which turns may come after a turn
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def wrong_type(where: str, expected: str, value: Any) -> DropReason:
    """Return the reason for a value that is not what was expected."""
    shown = "null"
    if value is not None:
        shown = f"{type(value).__name__} {json.dumps(value, default=str)[:40]}"
    return DropReason("bad_type", f"{where} must be {expected}, found {shown}")


def text_of(value: Any, where: str) -> str:
    """Return a value that must be text."""
    if not isinstance(value, str):
        raise wrong_type(where, "text or messages", value)
    return value


def text_or_turns(value: Any, where: str) -> Content:
    """Return text as it is, and a message or a list of messages with their usual names."""
    return value if isinstance(value, str) else turns_of(value, where)


def turns_of(value: Any, where: str) -> Turns:
    """Return the messages of a list, or a single message."""
    values = [value] if isinstance(value, dict) else value
    if not isinstance(values, list | tuple):
        raise wrong_type(where, "a list of messages", value)
    return tuple(_message(entry, where) for entry in values)


def _message(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise wrong_type(where, "messages (objects)", value)
    role = value.get("role", value.get("from"))
    if not isinstance(role, str):
        keys = ", ".join(map(str, value))
        raise DropReason("bad_type", f"a message of {where} has no role (or from), only {keys}")
    role = ROLES.get(role.lower(), role.lower())
    if role not in KNOWN_ROLES:
        roles = ", ".join((*KNOWN_ROLES, *ROLES))
        raise DropReason("bad_roles", f"{where} has the role {role!r}; known are {roles}")
    extras = {
        key: content
        for key, content in value.items()
        if key not in ("role", "from", "content", "value") and content is not None
    }
    if extras.get("images"):
        raise DropReason("bad_type", f"a message of {where} has images; write them into the row")
    content, images = _content_of(value, where)
    return {"role": role, "content": content, **extras, **({REFERENCES: images} if images else {})}


def _content_of(message: Json, where: str) -> tuple[str, list[str | None]]:
    """Return the text of a message and its images; a list of parts is joined."""
    contents = [message.get(key) for key in ("content", "value", "text")]
    no_content = "" if message.get("tool_calls") else None
    content = next((content for content in contents if content is not None), no_content)
    images: list[str | None] = []
    if isinstance(content, list) and content and all(isinstance(piece, dict) for piece in content):
        pieces = []
        for piece in content:
            if piece.get("type") in PARTS:
                is_named = any(piece.get(name) is not None for name in NAMES)
                images.append(reference(piece) if is_named else None)
                pieces.append(PLACEHOLDER)
            else:
                pieces.append(_text_of_part(piece, where))
        content = "".join(pieces)
    return text_of(content, where), images


def _text_of_part(piece: Json, where: str) -> str:
    kind = piece.get("type", "text")
    if kind in MEDIA_PARTS:
        raise DropReason("bad_type", f"{where} has a part of type {kind}: {NO_MEDIA}")
    text = piece.get("text")
    if kind != "text" or not isinstance(text, str):
        raise DropReason("bad_type", f"{where} has parts that are not text, which is not read")
    return text


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items both sequences begin with."""
    shortest = min(len(left), len(right))
    if left[:shortest] == right[:shortest]:
        return shortest
    return next(i for i in range(shortest) if left[i] != right[i])


def as_turns(value: Content, role: str) -> Turns:
    """Return text as one turn with a role."""
    return ({"role": role, "content": value},) if isinstance(value, str) else value


def check_roles(prompt: Turns, *answers: Turns) -> None:
    """Check the order: a system turn only first, user and assistant alternate, answers end it."""
    for turns in (prompt, *answers):
        ends = ["user", "tool"] if turns is prompt else ["assistant"]
        last = turns[-1]["role"]
        if last not in ends:
            raise DropReason(
                "bad_roles", f"a part must end with a {' or '.join(ends)} turn, it ends with {last}"
            )
    for answer in answers:
        roles = [None, *(turn["role"] for turn in (*prompt, *answer))]
        for before, role in pairwise(roles):
            if role not in FOLLOWS[before]:
                where = f"after {before}" if before else "first"
                expected = " or ".join(FOLLOWS[before])
                raise DropReason("bad_roles", f"a {role} turn comes {where}; expected {expected}")
