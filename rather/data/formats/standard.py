"""The formats that Rather reads. The last one that fits a row is taken: special ones come last."""

from __future__ import annotations

import math
import re
from typing import Any

from rather.data.formats import (
    ANSWERS,
    GENERATED,
    GRADES,
    REJECTED_IMAGES,
    OwnTokens,
    Ranked,
    Row,
    Single,
    data_format,
    number_of,
    require,
)
from rather.data.json_rows import DropReason
from rather.data.messages import (
    Turns,
    as_turns,
    common_length,
    text_of,
    text_or_turns,
    turns_of,
    wrong_type,
)

Prompt = str | Turns
Answers = tuple[Prompt, Prompt]
PROMPTS = ("prompt", "messages", "conversations", "context")


def _answers(row: Row) -> Answers:
    return text_or_turns(row["chosen"], "chosen"), text_or_turns(row["rejected"], "rejected")


def _prompt(row: Row, name: str) -> Prompt:
    """Return the prompt of a column, after the system turn if the row has one."""
    prompt = text_or_turns(row[name], name)
    return (*_system(row), *as_turns(prompt, "user")) if row.get("system") else prompt


def _turns(row: Row, name: str) -> Turns:
    return (*_system(row), *turns_of(row[name], name))


def _system(row: Row) -> Turns:
    return as_turns(text_of(row["system"], "system"), "system") if row.get("system") else ()


# ---- no answer: what `rather generate` reads


def bare_prompt(row: Row) -> Prompt | None:
    """Return the prompt of a row that needs no answer; None if no column has one."""
    for name in (*PROMPTS, "question"):
        if row.get(name) is not None:
            is_messages = name in ("messages", "conversations")
            return _turns(row, name) if is_messages else _prompt(row, name)
    if row.get("instruction") is not None:
        return _instruction_prompt(row)
    return _prompt(row, "input") if row.get("input") is not None else None


def ends_with_question(row: Row) -> bool:
    """Return whether the messages of a row have no answer at their end."""
    name = "messages" if row.get("messages") is not None else "conversations"
    turns = turns_of(row[name], name) if row.get(name) is not None else ()
    return bool(turns) and turns[-1]["role"] != "assistant"


# ---- one answer; rows with these columns are pairs only if they have more


@data_format("messages", may=("system", *GRADES), single=True)
def dialogue(row: Row) -> tuple[Prompt, Single]:
    """Messages that end with the answer, as OpenAI, TRL and ms-swift have them."""
    return _last_answer(_turns(row, "messages"))


@data_format("conversations", may=("system", *GRADES), single=True)
def sharegpt(row: Row) -> tuple[Prompt, Single]:
    """ShareGPT messages that end with the answer, as LLaMA-Factory has them."""
    return _last_answer(_turns(row, "conversations"))


@data_format("instruction", "output", may=("input", "history", "system", *GRADES), single=True)
def alpaca(row: Row) -> tuple[Prompt, Single]:
    """Alpaca's columns, with earlier turns as history."""
    return _instruction_prompt(row), Single(text_or_turns(row["output"], "output"))


@data_format("prompt", "completion", may=("system", *GRADES), single=True)
def completion(row: Row) -> tuple[Prompt, Single]:
    """A prompt and one answer, as TRL and ColossalChat have them."""
    return _prompt(row, "prompt"), Single(text_or_turns(row["completion"], "completion"))


def _last_answer(turns: Turns) -> tuple[Turns, Single]:
    if not turns or turns[-1]["role"] != "assistant":
        raise DropReason("bad_roles", "the messages must end with an assistant turn, the answer")
    return turns[:-1], Single(turns[-1:])


@data_format(
    "chosen_response",
    "rejected_response",
    may=("prompt", "instruction", "question", "input", "system"),
    one_of=("prompt", "instruction", "question", "input"),
)
def argilla(row: Row) -> tuple[Any, Any]:
    """Axolotl's chatml.argilla: other names of the answers."""
    read = question
    if row.get("prompt") is not None or row.get("instruction") is not None:
        read = prompt if row.get("prompt") is not None else instruction
    return read({**row} | {name: row[f"{name}_response"] for name in ANSWERS})


# ---- the prompt is the common beginning of both answers


@data_format(*ANSWERS)
def conversation(row: Row) -> tuple[Prompt, Answers]:
    """Two whole conversations, or two texts such as those of HH-RLHF."""
    chosen, rejected = _answers(row)
    if isinstance(chosen, str) and isinstance(rejected, str):
        dialogues = _dialogue(chosen), _dialogue(rejected)
        if all(dialogues):
            return _split_turns(*dialogues)
        same = common_length(chosen, rejected)
        # At the last line end or space of the common beginning, so that no word is cut.
        cut = max(chosen.rfind(space, 0, same) for space in "\n ") + 1
        return chosen[:cut], (chosen[cut:], rejected[cut:])
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DropReason(
            "bad_type",
            "without a prompt, chosen and rejected must both be text or both be conversations",
        )
    if not _have_questions(chosen, rejected):
        raise DropReason(
            "prompt_mismatch",
            "without a prompt column both conversations must begin with the question",
        )
    return _split_turns(chosen, rejected)


def _have_questions(*answers: Turns) -> bool:
    return all(turns and turns[0]["role"] in ("system", "developer", "user") for turns in answers)


def _split_turns(chosen: Turns, rejected: Turns) -> tuple[Turns, Answers]:
    same = common_length(chosen, rejected)
    if chosen == rejected:
        same = max((i for i, turn in enumerate(chosen) if turn["role"] == "assistant"), default=0)
    answers = chosen[same:], rejected[same:]
    if not same or any(turns and turns[0]["role"] != "assistant" for turns in answers):
        raise DropReason(
            "prompt_mismatch",
            f"chosen and rejected answer different questions (they differ at turn {same + 1})",
        )
    return chosen[:same], answers


def _dialogue(text: str) -> Turns:
    """Return '\\n\\nHuman: ...\\n\\nAssistant: ...' (HH-RLHF) as messages; () for other text."""
    begin, *turns = re.split(r"\n\n(Human|Assistant): ?", text)
    if begin.strip() or len(turns) < 4:
        return ()
    names = {"Human": "user", "Assistant": "assistant"}
    return tuple(
        {"role": names[speaker], "content": content.strip()}
        for speaker, content in zip(turns[::2], turns[1::2], strict=True)
    )


# ---- the prompt has a column


@data_format(*ANSWERS, may=("question", "input", "system"), one_of=("question", "input"))
def question(row: Row) -> tuple[Prompt, Answers]:
    """Axolotl's chatml.intel and chatml.icr, such as Orca's pairs."""
    return _prompt(row, "input" if row.get("question") is None else "question"), _answers(row)


@data_format("context", *ANSWERS)
def colossal(row: Row) -> tuple[Prompt, Answers]:
    """ColossalChat."""
    return text_or_turns(row["context"], "context"), _answers(row)


@data_format("conversations", *ANSWERS, may=("system",))
def llama_factory(row: Row) -> tuple[Prompt, Answers]:
    """ShareGPT messages, as LLaMA-Factory has them."""
    return _turns(row, "conversations"), _answers(row)


@data_format("messages", *ANSWERS, may=("system",))
def messages(row: Row) -> tuple[Prompt, Answers]:
    """Messages, then two answers."""
    return _turns(row, "messages"), _answers(row)


@data_format("prompt", *ANSWERS, may=("system",))
def prompt(row: Row) -> tuple[Prompt, Answers]:
    """A prompt and two answers, which may repeat the prompt as in UltraFeedback."""
    prompt_column = _prompt(row, "prompt")
    chosen, rejected = _answers(row)
    if (
        isinstance(chosen, str)
        or isinstance(rejected, str)
        or not _have_questions(chosen, rejected)
    ):
        return prompt_column, (chosen, rejected)
    common, answers = _split_turns(chosen, rejected)
    # The prompt and the conversations may each have a system turn or earlier turns that the other
    # omits.
    system, question = _split_system(as_turns(prompt_column, "user"))
    own_system, begun = _split_system(common)
    if not any(text for _, text in _contents(question)):
        question = ()
    shorter, longer = sorted((question, begun), key=len)
    if _contents(longer)[len(longer) - len(shorter) :] != _contents(shorter):
        raise DropReason(
            "prompt_mismatch",
            "the prompt is not what the conversations of chosen and rejected begin with",
        )
    if system and own_system and _contents(system) != _contents(own_system):
        raise DropReason(
            "prompt_mismatch",
            "the system prompt is not that of the conversations of chosen and rejected",
        )
    return (*(own_system or system), *longer), answers


def _split_system(turns: Turns) -> tuple[Turns, Turns]:
    first = 1 if turns and turns[0]["role"] in ("system", "developer") else 0
    return turns[:first], turns[first:]


def _contents(turns: Turns) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"].strip()) for turn in turns]


@data_format("instruction", *ANSWERS, may=("input", "history", "system"))
def instruction(row: Row) -> tuple[Prompt, Answers]:
    """Alpaca's columns, with earlier turns as history."""
    return _instruction_prompt(row), _answers(row)


def _instruction_prompt(row: Row) -> Prompt:
    question = text_of(row["instruction"], "instruction")
    extra = row.get("input")
    if extra is not None and text_of(extra, "input").strip():
        question = f"{question}\n{extra}"
    history = row.get("history") or []
    turns = _system(row)
    for exchange in history if isinstance(history, list) else [history]:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise wrong_type("history", "a list of [question, answer] lists", history)
        for role, text in zip(("user", "assistant"), exchange, strict=True):
            turns += as_turns(text_of(text, "history"), role)
    return (*turns, *as_turns(question, "user")) if turns else question


@data_format("messages", "rejected_response", may=("system", REJECTED_IMAGES))
def swift(row: Row) -> tuple[Prompt, Answers]:
    """Messages that end with the chosen answer, as ms-swift has them."""
    prompt, chosen = _last_answer(_turns(row, "messages"))
    return prompt, (chosen.answer, text_or_turns(row["rejected_response"], "rejected_response"))


@data_format("messages", "rejected_messages", may=("system", REJECTED_IMAGES))
def swift_messages(row: Row) -> tuple[Prompt, Answers]:
    """Two whole conversations, as ms-swift has them."""
    return _split_turns(_turns(row, "messages"), _turns(row, "rejected_messages"))


# ---- several answers, of which each better one is chosen against each worse one


@data_format("context", "completions")
def nemo(row: Row) -> tuple[Prompt, Ranked]:
    """NeMo-RL's completions with ranks."""
    entries: Any = row["completions"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise wrong_type("completions", "a list of objects with rank and completion", entries)
    for entry in entries:
        require(entry, "completion", "rank")
    ranks = [number_of(entry["rank"], "rank") for entry in entries]
    prompt = text_or_turns(row["context"], "context")
    return prompt, Ranked([entry["completion"] for entry in entries], ranks)


@data_format(
    "responses",
    may=("ranks", "scores", *PROMPTS, "instruction", "input", "history", "system", *GENERATED),
    one_of=("ranks", "scores"),
)
def ranked(row: Row) -> tuple[Prompt, Ranked]:
    """Several responses with ranks (1 is best) or scores (more is better); null: unknown."""
    name, sign = ("scores", -1) if row.get("ranks") is None else ("ranks", 1)
    answers = row["responses"]
    values = row.get(name)
    if values is None:
        raise DropReason(
            "missing_key", "responses need a column of ranks (1 is best) or scores (more is better)"
        )
    are_lists = isinstance(answers, list) and isinstance(values, list)
    if not are_lists or len(values) != len(answers):
        raise DropReason("bad_type", f"responses and {name} must be lists of the same length")
    ranks = [math.nan if rank is None else sign * number_of(rank, name) for rank in values]
    responses = Ranked(answers, ranks, _ended(row, len(answers)), _own_tokens(row, len(answers)))
    for column in PROMPTS:
        if row.get(column) is not None:
            return _prompt(row, column), responses
    if row.get("instruction") is None:
        require(row, "prompt")
    return _instruction_prompt(row), responses


def _ended(row: Row, answers: int) -> list[bool] | None:
    """Return which of the sampled answers a limit has not cut off."""
    ended = row.get("ended")
    if ended is None:
        return None
    is_list = isinstance(ended, list) and len(ended) == answers
    if not is_list or not all(isinstance(end, bool) for end in ended):
        raise DropReason("bad_type", "ended must be a list of true or false, one for each response")
    return list(ended)


def _own_tokens(row: Row, answers: int) -> OwnTokens | None:
    """Return the tokens that the model wrote, if the row has them all."""
    digest, prompt, ids = (row.get(n) for n in ("tokens_digest", "prompt_ids", "response_ids"))
    if not isinstance(digest, str) or not isinstance(ids, list) or len(ids) != answers:
        return None
    if not all(_is_ids(each) for each in (prompt, *ids)):
        raise DropReason("bad_type", "prompt_ids and response_ids must be lists of whole numbers")
    return OwnTokens(digest, list(prompt or []), [list(each) for each in ids])


def _is_ids(ids: Any) -> bool:
    is_list = isinstance(ids, list)
    return is_list and all(type(token) is int and 0 <= token < 1 << 31 for token in ids)
