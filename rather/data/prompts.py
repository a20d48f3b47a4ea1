"""Read the prompts of a file in any shape that training takes, with or without answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from rather.data.formats import (
    IMAGES,
    MEDIA,
    TEXT_ONLY,
    Row,
    RowLayout,
    extras_of,
    matching_format,
    place_images,
    read_by,
    require,
)
from rather.data.formats.standard import bare_prompt, ends_with_question
from rather.data.json_rows import DropReason
from rather.data.messages import Content, as_turns, text_or_turns
from rather.data.read import find_sources, rows_of
from rather.errors import DataError, counted

SHOWN = 5  # bad rows that an error lists
SYSTEM = ("system", "developer")
FOR_TEMPLATES = ("tools", "chat_template_kwargs")


class PromptRow(NamedTuple):
    """A prompt as text or messages, what its template gets, and the row it came from."""

    prompt: Content
    tools: list[Any] | None
    template_kwargs: dict[str, Any]
    row: dict[str, Any]
    images: tuple[str, ...] = ()  # paths and data URLs

    @property
    def written(self) -> dict[str, Any]:
        """The row with its prompt under `prompt`; a system message keeps the column it has."""
        prompt = self.prompt
        if self.row.get("system") and self.has_system:
            prompt = prompt[1:]
        if not isinstance(prompt, str):
            turns = list(prompt)
            is_question = len(turns) == 1 and turns[0].keys() == {"role", "content"}
            was_text = not isinstance(self.row.get("prompt"), list)
            return {
                **self.row,
                "prompt": turns[0]["content"] if is_question and was_text else turns,
            }
        return {**self.row, "prompt": prompt}

    @property
    def has_system(self) -> bool:
        return not isinstance(self.prompt, str) and self.prompt[0]["role"] in SYSTEM


def read_prompts(path: Path, refuse_images: str = TEXT_ONLY) -> list[PromptRow]:
    """Return the prompts of all rows; an error lists the rows that have none.

    `refuse_images` says why images are not read; it is empty if they are.
    """
    prompts: list[PromptRow] = []
    problems: list[str] = []
    for source in find_sources(path):
        for number, row in rows_of(source):
            try:
                if isinstance(row, DropReason):
                    raise row
                prompts.append(prompt_row(row, refuse_images))
            except DropReason as reason:
                problems.append(f"{source.path}:{number}: {reason.detail}")
    if problems:
        more = len(problems) - SHOWN
        end = [f"... and {counted(more, 'rows')} more"] if more > 0 else []
        raise DataError("\n".join([*problems[:SHOWN], *end]))
    if not prompts:
        raise DataError(f"{path}: has no prompt in it.")
    return prompts


def prompt_row(row: dict[str, Any], refuse_images: str = TEXT_ONLY) -> PromptRow:
    """Return the prompt of one row; raise DropReason if it has none."""
    extras = extras_of(
        {name: value for name, value in row.items() if name in (*MEDIA, *FOR_TEMPLATES)}
    )
    prompt = text_or_turns(_prompt(row), "the prompt")
    prompt, images = place_images(prompt, row, refuse_images)
    if not isinstance(prompt, str) and (not prompt or prompt[-1]["role"] not in ("user", "tool")):
        raise DropReason("bad_roles", "a prompt must end with a user or tool turn")
    if not any(turn["content"].strip() for turn in as_turns(prompt, "user")):
        raise DropReason("empty_prompt", "the prompt is empty")
    if images:  # as text, which any file can hold
        row = {name: row[name] for name in row if name not in IMAGES} | {"images": list(images)}
    kwargs = extras.get("template_kwargs", {})
    return PromptRow(prompt, extras.get("tools"), kwargs, row, images)


def _prompt(row: Row) -> Any:
    form = matching_format(row, RowLayout(rows="answers"))
    if form and not (form.single and ends_with_question(row)):
        return read_by(form, row)[0]
    prompt = bare_prompt(row)
    if prompt is None:
        require(row, "prompt")
    return prompt
