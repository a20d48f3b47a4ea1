"""Every row shape becomes the same kind of pair; everything else becomes a reason with a sentence."""

from __future__ import annotations

import json
import math
from itertools import product
from random import Random
from typing import Any

import pytest
import yaml

from rather.data.formats import (
    EXTRAS,
    FORMATS,
    RowLayout,
    RowPairs,
    TextPair,
    read_row,
    texts,
)
from rather.data.messages import as_turns
from rather.errors import ConfigError, DataError
from tests.cells import read_table
from tests.data.rows import EARLIER, PAIRED, Turns, assistant, draw_row, system, user

SINGLE = [name for name in FORMATS if name not in PAIRED]
AB = {"chosen": "a", "rejected": "b"}


def read(row: dict[str, Any], **layout: Any) -> RowPairs:
    return read_row(row, RowLayout(**layout))


def one(row: dict[str, Any], **layout: Any) -> TextPair:
    found = read(row, **layout)
    assert not found.dropped, found.dropped
    [pair] = found.pairs
    return pair


def dropped(row: dict[str, Any], **layout: Any) -> str:
    """Return why a row gives no pairs: the reason, and the sentence about it."""
    found = read(row, **layout)
    assert not found.pairs
    [bad] = found.dropped
    return f"{bad.reason}: {bad.detail}"


def reason(row: dict[str, Any], **layout: Any) -> str:
    return dropped(row, **layout).partition(":")[0]


def turns_of(pair: TextPair) -> list[Turns]:
    """Return the prompt and both answers, which are all text or all conversations."""
    sides = [pair.prompt, pair.chosen, pair.rejected]
    assert len({type(side) for side in sides}) == 1
    return [as_turns(side, role) for side, role in zip(sides, ROLES, strict=True)]


ROLES = ("user", "assistant", "assistant")


@pytest.mark.parametrize("name", PAIRED)
def test_every_spelling_of_a_format_gives_the_same_pair(name: str) -> None:
    draw = Random(name)
    for _ in range(60):
        row, prompt = draw_row(FORMATS[name], draw)
        found = read(row, format=name)
        assert not found.ignored, row
        assert [turns_of(pair) for pair in found.pairs] == [
            [prompt, (assistant("a"),), (assistant("b"),)]
        ], row
        assert repr(one(row)) == repr(found.pairs[0])  # NaN equals itself up to Python 3.12


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].one_of])
def test_a_named_format_needs_one_of_its_columns(name: str) -> None:
    form = FORMATS[name]
    row = {
        key: text for key, text in draw_row(form, Random(0))[0].items() if key not in form.one_of
    }
    [missing] = read(row, format=name).dropped
    assert missing.reason == "missing_key"


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_column_is_named(name: str) -> None:
    draw, rows = Random(name), "pairs" if name in PAIRED else "answers"
    for column in FORMATS[name].needs:
        row, _ = draw_row(FORMATS[name], draw)
        for damaged, expected in (
            ({key: row[key] for key in row if key != column}, "missing_key"),
            ({**row, column: None}, "bad_type"),
            ({**row, column: 5}, "bad_type"),
        ):
            [bad] = read(damaged, format=name, rows=rows).dropped
            assert bad.reason == expected
            assert column.removesuffix("_response") in bad.detail


@pytest.mark.parametrize("name", FORMATS)
def test_answers_that_say_nothing_or_the_same_are_dropped(name: str) -> None:
    layout = {"format": name, "rows": "pairs" if name in PAIRED else "answers"}
    same, empty, both_empty = (
        draw_row(FORMATS[name], Random(name), answers=answers)[0]
        for answers in (("a", "a"), (" \n", "b"), ("", ""))
    )
    assert reason(empty, **layout) == reason(both_empty, **layout) == "empty_response"
    if name in PAIRED:
        assert reason(same, **layout) == "identical_text"
        assert " and " in dropped(both_empty, **layout)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "q", "input": "more", **AB}, ("q\nmore", "a", "b")),
        ({"chosen": "Q: where? A: there", "rejected": "Q: where? A: these"}, ("Q: where? A: ", "there", "these")),
        ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
         ((user("q"),), (assistant("a"),), (assistant("b"),))),
    ],
    ids=["instruction with input", "whole texts", "whole dialogues as text"],
)  # fmt: skip
def test_a_prompt_inside_of_text(row: dict[str, Any], expected: tuple[Any, ...]) -> None:
    pair = one(row)
    assert (pair.prompt, pair.chosen, pair.rejected) == expected


@pytest.mark.parametrize("first", ["", "system column", "system", "developer"])
def test_nothing_of_a_prompt_is_lost_that_whole_conversations_repeat_in_part(first: str) -> None:
    """Of a system turn, earlier turns and a question, each place may omit some."""
    begin = ({"role": first.removesuffix(" column"), "content": "s"},) if first else ()
    for question, both_begin in product(["q", ""], [False, True]):
        talks = [(user(question),), (*EARLIER, user(question))]
        for asked, repeated in product([(), *talks], talks):
            prompt = asked if first == "system column" else (*begin, *asked)
            whole = (*begin, *repeated) if both_begin else repeated
            row = {
                "prompt": [*prompt] or ([] if question else ""),
                "chosen": [*whole, assistant("a")],
                "rejected": [*whole, assistant("b")],
            }
            pair = one({**row, "system": "s"} if first == "system column" else row)
            assert turns_of(pair) == [
                (*begin, *max(asked, repeated, key=len)),
                (assistant("a"),),
                (assistant("b"),),
            ], row


def test_ranked_rows_keep_their_good_pairs() -> None:
    found = read({"prompt": "q", "responses": ["a", "", "c"], "ranks": [1, 2, 3]})
    assert [pair.chosen for pair in found.pairs] == ["a"]
    assert [bad.reason for bad in found.dropped] == ["empty_response", "empty_response"]
    assert reason({"prompt": "q", "responses": ["a"], "ranks": [1]}) == "too_few_answers"
    assert reason({"prompt": "q", "responses": ["a", "b"], "ranks": [1]}) == "bad_type"
    assert read({"prompt": "q", "responses": ["a", "b"], "ranks": [1, 1]}) == (
        [], [], {"ties_skipped": 1}, [],
    )  # fmt: skip


def test_columns_are_renamed() -> None:
    row = {"question": "q", "good": "a", "bad": "b", "w": 2, "note": "x"}
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad", "weight": "w"}
    found = read(row, columns=columns)
    assert (found.pairs[0].prompt, found.pairs[0].chosen, found.pairs[0].weight) == ("q", "a", 2.0)
    assert found.ignored == ["note"]
    assert reason({**row, "good": None}, columns=columns) == "bad_type"
    [bad] = read({"question": "q", "god": "a", "bad": "b"}, columns=columns).dropped
    assert bad.reason == "missing_key"
    assert "did you mean 'god'" in bad.detail
    with pytest.raises(DataError, match=r"data_args\.columns: 'chosn'.* 'chosen'"):
        RowLayout(columns={"chosn": "x"})
    with pytest.raises(ConfigError, match=r"data_args\.format: .*'swit'.* 'swift'"):
        RowLayout("swit")


@pytest.mark.parametrize("empty", [{}, {"x": None}], ids=["missing", "null"])
@pytest.mark.parametrize("name", ["input", "system", "history", "weight", "id", "tools"])
def test_an_optional_column_stays_optional_under_another_name(
    name: str, empty: dict[str, Any]
) -> None:
    row = {"instruction": "q", **AB}
    assert repr(one({**row, **empty}, columns={name: "x"})) == repr(one(row))


def test_ranks_or_scores_are_enough_when_both_have_other_names() -> None:
    columns = {"ranks": "places", "scores": "points"}
    row = {"prompt": "q", "responses": ["a", "b"]}
    assert one({**row, "places": [2, 1], "points": None}, columns=columns).chosen == "b"
    assert one({**row, "points": [2, 1]}, columns=columns).chosen == "a"
    assert reason(row, columns=columns) == "missing_key"


def test_extra_columns_weights_and_ids() -> None:
    row = {"prompt": "q", **AB, "weight": 0.5, "margin": 2, "id": 7, "tools": '[{"name": "f"}]',
           "chat_template_kwargs": {"enable_thinking": False}, "score_chosen": 1.0}  # fmt: skip
    found = read(row)
    [pair] = found.pairs
    assert (pair.weight, pair.margin, pair.id, pair.tools) == (0.5, 2.0, "7", [{"name": "f"}])
    assert pair.template_kwargs == {"enable_thinking": False}
    assert found.ignored == ["score_chosen"]
    bad = {"weight": [-1, "2", True, 10**400], "margin": [-(10**400), math.nan]}
    for name, values in (bad | {"id": [[1]], "tools": ["x"]}).items():
        for value in values:
            assert reason({"prompt": "q", **AB, name: value}) == "bad_type"


TALK = [*EARLIER, user("q")]
Q_A, Q_B = [user("q"), assistant("a")], [user("q"), assistant("b")]
BAD_ROWS: dict[str, dict[str, Any]] = {
    "missing_key: no key 'rejected' (did you mean 'reject'?); the row has prompt, chosen, reject":
        {"prompt": "q", "chosen": "a", "reject": "b"},
    "missing_key: no two answers to compare: no key 'chosen'; the row has prompt": {"prompt": "q"},
    "missing_key: no two answers to compare: no key 'chosen'; the row has no keys": {},
    "missing_key: responses need a column of ranks": {"prompt": "q", "responses": ["a", "b"]},
    "bad_type: chosen must be messages (objects), found int 1": {"prompt": "q", "chosen": [1, 2], "rejected": "b"},
    "bad_type: chosen must be a list of messages, found bool": {"prompt": "q", "chosen": True, "rejected": "b"},
    "bad_type: a message of messages has no role": {"messages": [{"content": "q"}], **AB},
    "bad_type: messages must be text or messages, found null": {"messages": [user(None)], **AB},
    "bad_type: without a prompt, chosen and rejected must both be text": {"chosen": Q_A, "rejected": "b"},
    "bad_type: history must be a list of [question, answer] lists, found int": {"instruction": "q", "history": 5, **AB},
    "bad_type: history must be a list of [question, answer] lists, found list": {"instruction": "q", "history": ["x"], **AB},
    "bad_type: ranks must be a number": {"prompt": "q", "responses": ["a", "b"], "ranks": [1, 10**400]},
    "images_refused: the row has images, but only text": {"messages": [user([{"type": "image"}])], **AB},
    "empty_response: chosen: nothing but white": {"prompt": [user("q")], "chosen": [], "rejected": "a"},
    "prompt_mismatch: chosen and rejected answer different questions (they differ at turn 1)":
        {"chosen": Q_A, "rejected": [user("p"), assistant("b")]},
    "prompt_mismatch: the prompt is not what": {"prompt": "p", "chosen": Q_A, "rejected": Q_B},
    "prompt_mismatch: the prompt is not what the conversations of chosen and rejected begin with":
        {"prompt": [user("z"), *TALK[1:]], "chosen": [*TALK, assistant("a")], "rejected": [*TALK, assistant("b")]},
    "prompt_mismatch: the system prompt is not":
        {"prompt": "q", "system": "other", "chosen": [system("s"), *Q_A], "rejected": [system("s"), *Q_B]},
    "bad_roles: a user turn comes after user": {"messages": [user("q"), user("r")], **AB},
    "bad_roles: a part must end with a user or tool turn, it ends with assistant": {"messages": Q_A, **AB},
    "bad_roles: a assistant turn comes first": {"messages": Q_A[::-1], **AB},
    "bad_roles: a system turn comes after": {"messages": [*Q_A, system("s"), user("x")], **AB},
    "bad_roles: messages has the role 'wizard'": {"messages": [{"role": "wizard", "content": "q"}], **AB},
    "bad_roles: a part must end with a user or tool turn, it ends with system": {"messages": [system("q")], **AB},
    "bad_roles: the messages must end with an assistant": {"messages": [user("q")], "rejected_response": "b"},
    "bad_roles: a part must end with a assistant turn, it ends with user":
        {"prompt": [user("q")], "chosen": [user("a")], "rejected": "b"},
    "bad_roles: a part must end with a assistant turn":
        {"prompt": [user("q")], "chosen": [assistant("a"), user("x")], "rejected": "b"},
}  # fmt: skip


@pytest.mark.parametrize("said", BAD_ROWS)
def test_bad_rows_have_a_reason_and_a_sentence(said: str) -> None:
    assert dropped(BAD_ROWS[said]).startswith(said)


def test_tool_turns_and_empty_prompts_are_allowed() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    talk = [
        user("q"),
        call,
        {"role": "tool", "content": "1"},
        {"role": "observation", "content": "2"},
    ]
    prompt, *_ = turns_of(one({"messages": talk, **AB}))
    assert [turn["role"] for turn in prompt] == ["user", "assistant", "tool", "tool"]
    assert one({"prompt": "", **AB}).prompt == ""
    assert one({"prompt": [], **AB}).prompt == (user(""),)
    assert one({"chosen": "yes", "rejected": "no"}).prompt == ""


def test_whole_conversations_may_part_before_the_last_turn() -> None:
    chosen = [*Q_A, user("x"), assistant("y")]
    rejected = [*Q_B, user("z"), assistant("w")]
    pair = one({"chosen": chosen, "rejected": rejected})
    assert (pair.prompt, pair.chosen) == ((user("q"),), tuple(chosen[1:]))
    assert texts(pair) == ["q", "a", "x", "y", "b", "z", "w"]


COLUMNS = {*EXTRAS}.union(
    *((*form.needs, *form.may) for form in FORMATS.values() if not form.single)
)
ODD: list[Any] = [
    None, "", " ", "text", "7", "[1]", '{"a": 1}', "{", "\n\nHuman: q\n\nAssistant: a", "\n\nHuman: q\n\nAssistant: b",
    0, 5, -1, 2.5, 1e308, 10**400, -(10**400), True, False, {}, {"a": 1}, {"role": "user"}, {"role": 5, "content": []},
    [], [[]], [None], [5], [1, 2], [2, 10**400], ["a", "b"], ["a", None], [["q", "a"]], [["q", 5]], [["q"]], [{}],
    user("q"), assistant("a"), system("s"), [system("s")], [user("q")], [user("")], [assistant("a")], TALK,
    Q_A, Q_B, [*TALK, assistant("a")], [*TALK, assistant("b")], [system("s"), *Q_B], [{"role": "assistant", "content": None, "tool_calls": [5]}],
    [{"role": "user", "content": [{"type": "text", "text": "q"}]}, assistant("a")], [{"from": [], "value": {}}],
    [{"role": "user", "content": [{"text": 5}]}], [{"completion": "a", "rank": 1}, {"completion": [], "rank": 10**400}],
    [{"completion": "a", "rank": 1}, {"completion": "b", "rank": 2}], [{"completion": None, "rank": "1"}],
]  # fmt: skip


def odd_rows(count: int, names: list[str]) -> list[dict[str, Any]]:
    """As JSON can hold them; most have both answers, so that the shapes are read and not only told apart."""
    draw = Random(0)
    rows = []
    for _ in range(count):
        row = {name: draw.choice(ODD) for name in draw.sample(names, draw.randrange(1, 6))}
        if draw.random() < 0.8:
            row |= {name: draw.choice(ODD) for name in ("chosen", "rejected")}
        rows.append(json.loads(json.dumps(row)))
    return rows


@pytest.mark.parametrize(
    "columns", [{}, {"prompt": "system", "system": "prompt", "weight": "margin"}]
)
def test_any_row_gives_pairs_or_a_counted_reason(columns: dict[str, str]) -> None:
    reasons = set()
    for row in odd_rows(8_000, sorted(COLUMNS)):
        found = read(row, columns=columns)
        assert found.pairs or found.dropped or found.skipped, row
        reasons |= {bad.reason for bad in found.dropped}
    assert reasons | {"images_refused"} >= {
        said.partition(":")[0] for said in [*BAD_ROWS, "identical_text"]
    }


@pytest.mark.parametrize("name", ["images", "image", "videos", "video", "audios", "audio"])
def test_rows_with_pictures_or_sound_are_refused(name: str) -> None:
    row = {"prompt": "q", **AB}
    why = "images_refused" if name.startswith("image") else "bad_type"
    assert reason({**row, name: ["1.png"]}) == why
    assert reason({**row, name: "1.png"}) == why
    for empty in (None, [], ""):
        assert repr(one({**row, name: empty})) == repr(one(row))


# --- one answer ---


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(
    ("graded", "label"),
    [({"label": True}, 1.0), ({"label": "false"}, 0.0), ({"kto_tag": 0}, 0.0), ({"kto_tag": True}, 1.0)],
)  # fmt: skip
def test_single_answers_with_labels(name: str, graded: dict[str, Any], label: float) -> None:
    draw = Random(name)
    for _ in range(20):
        row, prompt = draw_row(FORMATS[name], draw)
        row |= graded
        pair = one(row, rows="labelled")
        assert (pair.label, pair.rejected) == (label, "")
        assert texts(pair) == [turn["content"] for turn in (*prompt, assistant("a"))]
        found = read(row, rows="answers")
        assert math.isnan(found.pairs[0].label)
        assert found.ignored == [*graded]  # also bad answers count
        [refused] = read(row).dropped
        assert "to train on it, set task: unpaired" in refused.detail


def test_labels_from_scores_and_from_pairs() -> None:
    row = {"prompt": "q", "completion": "a", "score": 3.5}
    for threshold, label in ((3.5, 1.0), (4.0, 0.0)):
        assert one(row, rows="labelled", label_threshold=threshold).label == label
    pair = {"prompt": "q", **AB, "weight": 2}
    found = read(pair, rows="labelled").pairs
    assert [(one.chosen, one.label, one.weight) for one in found] == [("a", 1, 2), ("b", 0, 2)]
    assert one(pair, rows="answers").chosen == "a"
    ranked = {"prompt": "q", "responses": ["a", "b", "c"], "scores": [2, 9, 4]}
    found = read(ranked, rows="labelled").pairs
    assert [(one.chosen, one.label) for one in found] == [("b", 1), ("a", 0)]


LABELS = """
    {label: good} | bad_type: label must be true or false, 1 or 0 (for scores, set data_args.label_threshold)
    {label: 0.7} | bad_type: label must be true or false, 1 or 0 (for scores, set data_args.label_threshold)
    {label: null} | bad_type: label is null; it needs a value
    {score: 4} | missing_key: no key 'label', but a score; set data_args.label_threshold
    {labels: true} | missing_key: no key 'label' (did you mean 'labels'?)
    {label: true, completion: ' '} | empty_response: the answer: nothing but white space
"""


@pytest.mark.parametrize(("row", "said"), read_table(LABELS))
def test_what_is_wrong_with_a_label(row: str, said: str) -> None:
    answer = {"prompt": "q", "completion": "a", **yaml.safe_load(row)}
    assert dropped(answer, rows="labelled").startswith(said)


def test_a_label_or_an_answer_that_the_row_does_not_have() -> None:
    row = {"prompt": "q", "completion": "a", "label": True}
    assert reason(row, rows="labelled", columns={"label": "up"}) == "missing_key"
    assert "has one answer, not a pair; to train" in dropped(row, format="completion")
