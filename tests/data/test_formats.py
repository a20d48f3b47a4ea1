"""Every row shape becomes the same kind of pair; everything else becomes a reason with a sentence."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from rather.data.formats import (
    EXTRAS,
    FORMATS,
    GRADES,
    RowLayout,
    RowPairs,
    TextPair,
    read_row,
    texts,
)
from rather.errors import ConfigError, DataError


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def read(row: dict[str, Any], **layout: Any) -> RowPairs:
    return read_row(row, RowLayout(**layout))


def one(row: dict[str, Any], **layout: Any) -> TextPair:
    found = read(row, **layout)
    assert not found.dropped, found.dropped
    [pair] = found.pairs
    return pair


def reason(row: dict[str, Any], **layout: Any) -> str:
    found = read(row, **layout)
    assert not found.pairs
    [bad] = found.dropped
    return bad.reason


AB = {"chosen": "a", "rejected": "b"}
TALK = ((user("q"),), (assistant("a"),), (assistant("b"),))
FROM_Q = [{"from": "human", "value": "q"}]

SHAPES = {
    "instruction": ({"instruction": "q", **AB}, ("q", "a", "b")),
    "instruction with input": ({"instruction": "q", "input": "more", **AB}, ("q\nmore", "a", "b")),
    "instruction with empty input": ({"instruction": "q", "input": " ", **AB}, ("q", "a", "b")),
    "instruction with null input": ({"instruction": "q", "input": None, **AB}, ("q", "a", "b")),
    "instruction with system and history": (
        {"instruction": "q", "system": "s", "history": [["x", "y"]], **AB},
        ((system("s"), user("x"), assistant("y"), user("q")), (assistant("a"),), (assistant("b"),)),
    ),
    "prompt": ({"prompt": "q", **AB}, ("q", "a", "b")),
    "prompt with a system column": (
        {"prompt": "q", "system": "s", **AB},
        ((system("s"), user("q")), (assistant("a"),), (assistant("b"),)),
    ),
    "prompt as messages": ({"prompt": [user("q")], **AB}, TALK),
    "chosen as messages": ({"prompt": "q", "chosen": [assistant("a")], "rejected": "b"}, TALK),
    "rejected as one message": (
        {"prompt": [user("q")], "chosen": "a", "rejected": assistant("b")},
        TALK,
    ),
    "prompt repeated in whole conversations": (
        {
            "prompt": "q",
            "chosen": [user("q"), assistant("a")],
            "rejected": [user("q"), assistant("b")],
        },
        TALK,
    ),
    "whole conversations": (
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        TALK,
    ),
    "whole conversations of several turns": (
        {
            "chosen": [system("s"), user("x"), assistant("y"), user("q"), assistant("a")],
            "rejected": [system("s"), user("x"), assistant("y"), user("q"), assistant("b")],
        },
        ((system("s"), user("x"), assistant("y"), user("q")), (assistant("a"),), (assistant("b"),)),
    ),
    "whole dialogues as text": (
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        TALK,
    ),
    "whole texts": (
        {"chosen": "Q: where? A: there", "rejected": "Q: where? A: these"},
        ("Q: where? A: ", "there", "these"),
    ),
    "messages": ({"messages": [user("q")], **AB}, TALK),
    "content parts": ({"messages": [user([{"type": "text", "text": "q"}])], **AB}, TALK),  # type: ignore[arg-type]
    "colossal": (
        {
            "context": [{"from": "system", "content": "s"}, {"from": "user", "content": "q"}],
            "chosen": [{"from": "assistant", "content": "a"}],
            "rejected": [{"from": "assistant", "content": "b"}],
        },
        ((system("s"), user("q")), (assistant("a"),), (assistant("b"),)),
    ),
    "llama_factory": (
        {
            "conversations": FROM_Q,
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        TALK,
    ),
    "llama_factory with text": ({"conversations": FROM_Q, **AB}, TALK),
    "nemo": (
        {
            "context": [user("q")],
            "completions": [
                {"rank": 1, "completion": [assistant("b")]},
                {"rank": 0, "completion": [assistant("a")]},
            ],
        },
        TALK,
    ),
    "question": ({"question": "q", **AB}, ("q", "a", "b")),
    "question as input with a system column": (
        {"input": "q", "system": "s", **AB},
        ((system("s"), user("q")), (assistant("a"),), (assistant("b"),)),
    ),
    "argilla": (
        {"instruction": "q", "chosen_response": "a", "rejected_response": "b"},
        ("q", "a", "b"),
    ),
    "argilla with a question": (
        {"question": "q", "chosen_response": "a", "rejected_response": "b"},
        ("q", "a", "b"),
    ),
    "messages and answers as one message each": (
        {"messages": [user("q")], "chosen": assistant("a"), "rejected": assistant("b")},
        TALK,
    ),
    "swift": ({"messages": [user("q"), assistant("a")], "rejected_response": "b"}, TALK),
    "ranked": ({"prompt": "q", "responses": ["b", "a"], "ranks": [2, 1]}, ("q", "a", "b")),
    "scored": ({"messages": [user("q")], "responses": ["b", "a"], "scores": [0.1, 0.9]}, TALK),
    "ranked answers to an instruction": (
        {"instruction": "q", "input": "i", "responses": ["a", "b"], "ranks": [1, 2]},
        ("q\ni", "a", "b"),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_the_same_pair(name: str) -> None:
    row, expected = SHAPES[name]
    pair = one(row)
    assert (pair.prompt, pair.chosen, pair.rejected) == expected


@pytest.mark.parametrize(
    "name",
    [
        "instruction",
        "prompt",
        "messages",
        "colossal",
        "llama_factory",
        "nemo",
        "swift",
        "ranked",
        "question",
        "argilla",
    ],
)
def test_a_named_format_reads_its_rows_and_refuses_others(name: str) -> None:
    row, _ = SHAPES[name]
    assert repr(one(row, format=name)) == repr(one(row))  # NaN equals itself up to Python 3.12
    assert reason({"text": "x"}, format=name) == "missing_key"


EARLIER = [user("x"), assistant("y"), user("q")]
BEGINNINGS = {  # system column, prompt, what both conversations begin with -> the prompt of the pair
    "system column, one turn": ("s", "q", [user("q")], [system("s"), user("q")]),
    "system column, several turns": ("s", "q", EARLIER, [system("s"), *EARLIER]),
    "system column, nothing asked": ("s", [], EARLIER, [system("s"), *EARLIER]),
    "system column and the same in the conversations": (
        "s",
        "q",
        [system("s"), *EARLIER],
        [system("s"), *EARLIER],
    ),
    "system turn in the prompt": (None, [system("s"), user("q")], EARLIER, [system("s"), *EARLIER]),
    "system turn alone in the prompt": (None, [system("s")], EARLIER, [system("s"), *EARLIER]),
    "developer turn in the prompt": (
        None,
        [{"role": "developer", "content": "s"}, *EARLIER],
        EARLIER,
        [{"role": "developer", "content": "s"}, *EARLIER],
    ),
    "system turn in the conversations": (
        None,
        EARLIER,
        [system("s"), *EARLIER],
        [system("s"), *EARLIER],
    ),
    "earlier turns in the prompt": (
        None,
        [system("s"), *EARLIER],
        [user("q")],
        [system("s"), *EARLIER],
    ),
    "earlier turns in the conversations": (None, [user("q")], EARLIER, EARLIER),
    "empty prompt": (None, "", EARLIER, EARLIER),
    "empty list": (None, [], [user("q")], [user("q")]),
    "empty question": ("s", "", [user("")], [system("s"), user("")]),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_nothing_of_a_prompt_is_lost_that_whole_conversations_repeat_in_part(name: str) -> None:
    given, prompt, begin, expected = BEGINNINGS[name]
    row = {
        "prompt": prompt,
        "chosen": [*begin, assistant("a")],
        "rejected": [*begin, assistant("b")],
    }
    pair = one({**row, "system": given} if given else row)
    assert (pair.prompt, pair.chosen, pair.rejected) == (
        tuple(expected),
        (assistant("a"),),
        (assistant("b"),),
    )


RANKED = {"prompt": "q", "responses": ["c", "a", "b", "b2"], "ranks": [3, 1, 2, 2]}


@pytest.mark.parametrize(
    ("which", "pairs", "ties"),
    [
        ("all", ["ab", "ab2", "ac", "bc", "b2c"], 1),
        ("best_vs_rest", ["ab", "ab2", "ac"], 0),
        ("best_vs_worst", ["ac"], 0),
        ("adjacent", ["ab", "b2c"], 1),
    ],
)
def test_ranked_answers_are_paired_and_ties_counted(
    which: str, pairs: list[str], ties: int
) -> None:
    found = read(RANKED, ranked_pairs=which)
    assert [f"{pair.chosen}{pair.rejected}" for pair in found.pairs] == pairs  # type: ignore[str-bytes-safe]
    assert found.skipped.get("ties_skipped", 0) == ties


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
    [bad] = read({"question": "q", "god": "a", "bad": "b"}, columns=columns).dropped
    assert bad.reason == "missing_key"
    assert "did you mean 'god'" in bad.detail
    [bad] = read({"question": None, "good": "a", "bad": "b"}, columns=columns).dropped
    assert bad.args == ("bad_type", "question is null; it needs a value")
    with pytest.raises(DataError, match="did you mean 'chosen'"):
        RowLayout(columns={"chosn": "x"})
    with pytest.raises(ConfigError, match=r"data_args\.format: .*did you mean 'swift'"):
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
    [bad] = read(row, columns=columns).dropped
    assert (bad.reason, "a column of ranks" in bad.detail) == ("missing_key", True)


def test_extra_columns_weights_and_ids() -> None:
    row = {"prompt": "q", **AB, "weight": 0.5, "margin": 2, "id": 7, "tools": '[{"name": "f"}]',
           "chat_template_kwargs": {"enable_thinking": False}, "score_chosen": 1.0}  # fmt: skip
    found = read(row)
    [pair] = found.pairs
    assert (pair.weight, pair.margin, pair.id, pair.tools) == (0.5, 2.0, "7", [{"name": "f"}])
    assert pair.template_kwargs == {"enable_thinking": False}
    assert found.ignored == ["score_chosen"]
    for name, value in (
        ("weight", -1),
        ("weight", "2"),
        ("weight", True),
        ("weight", 10**400),
        ("margin", -(10**400)),
        ("margin", float("nan")),
        ("id", [1]),
        ("tools", "x"),
    ):
        assert reason({"prompt": "q", **AB, name: value}) == "bad_type"


@pytest.mark.parametrize(
    ("row", "expected", "says"),
    [
        ({"prompt": "q", "chosen": "a", "reject": "b"}, "missing_key", "did you mean 'reject'"),
        ({"prompt": "q"}, "missing_key", "the row has prompt"),
        ({}, "missing_key", "no keys"),
        ({"prompt": "q", "chosen": 5, "rejected": "b"}, "bad_type", "int 5"),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "bad_type", "null"),
        ({"prompt": "q", "chosen": [1, 2], "rejected": "b"}, "bad_type", "messages"),
        ({"prompt": "q", "chosen": True, "rejected": "b"}, "bad_type", "bool"),
        ({"prompt": 5, **AB}, "bad_type", "prompt"),
        ({"messages": [{"content": "q"}], **AB}, "bad_type", "no role"),
        ({"messages": [user([{"type": "image"}])], **AB}, "images_refused", "only text"),  # type: ignore[arg-type]
        ({"messages": [user(None)], **AB}, "bad_type", "null"),  # type: ignore[arg-type]
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "identical_text", ""),
        ({"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("a")]}, "identical_text", ""),
        ({"prompt": "q", "chosen": " \n", "rejected": "a"}, "empty_response", "chosen"),
        ({"prompt": "q", "chosen": "", "rejected": ""}, "empty_response", "chosen and rejected"),
        ({"prompt": [user("q")], "chosen": [], "rejected": "a"}, "empty_response", "chosen"),
        ({"chosen": [user("q"), assistant("a")], "rejected": [user("p"), assistant("b")]}, "prompt_mismatch", "turn 1"),
        ({"chosen": [user("q"), assistant("a")], "rejected": "b"}, "bad_type", "both"),
        ({"prompt": "p", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
         "prompt_mismatch", "the prompt is not"),
        ({"prompt": [user("z"), assistant("y"), user("q")], "chosen": [*EARLIER, assistant("a")],
          "rejected": [*EARLIER, assistant("b")]}, "prompt_mismatch", "the prompt is not"),
        ({"prompt": "q", "system": "other", "chosen": [system("s"), user("q"), assistant("a")],
          "rejected": [system("s"), user("q"), assistant("b")]}, "prompt_mismatch", "the system prompt is not"),
        ({"instruction": "q", "history": 5, **AB}, "bad_type", "history must be a list of [question, answer] lists"),
        ({"instruction": "q", "history": ["x"], **AB}, "bad_type", "history must be a list of [question, answer] lists"),
        ({"prompt": "q", "responses": ["a", "b"], "ranks": [1, 10**400]}, "bad_type", "ranks must be a number"),
        ({"prompt": "q", "responses": ["a", "b"]}, "missing_key", "a column of ranks"),
        ({"messages": [user("q"), user("r")], **AB}, "bad_roles", "user turn comes after user"),
        ({"messages": [user("q"), assistant("r")], **AB}, "bad_roles", "it ends with assistant"),
        ({"messages": [assistant("r"), user("q")], **AB}, "bad_roles", "comes first"),
        ({"messages": [user("q"), assistant("r"), system("s"), user("x")], **AB}, "bad_roles", "a system turn"),
        ({"messages": [{"role": "wizard", "content": "q"}], **AB}, "bad_roles", "wizard"),
        ({"messages": [system("q")], **AB}, "bad_roles", "it ends with system"),
        ({"prompt": [user("q")], "chosen": [user("a")], "rejected": "b"}, "bad_roles", "it ends with user"),
        ({"prompt": [user("q")], "chosen": [assistant("a"), user("x")], "rejected": "b"}, "bad_roles", "must end"),
        ({"messages": [user("q")], "rejected_response": "b"}, "bad_roles", "end with an assistant turn"),
    ],
)  # fmt: skip
def test_bad_rows_have_a_reason_and_a_sentence(
    row: dict[str, Any], expected: str, says: str
) -> None:
    [bad] = read(row).dropped
    assert bad.reason == expected
    assert says in bad.detail


def test_tool_turns_and_empty_prompts_are_allowed() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    talk = [
        user("q"),
        call,
        {"role": "tool", "content": "1"},
        {"role": "observation", "content": "2"},
    ]
    assert [turn["role"] for turn in one({"messages": talk, **AB}).prompt] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]  # type: ignore[index]
    assert one({"prompt": "", **AB}).prompt == ""
    assert one({"prompt": [], **AB}).prompt == (user(""),)
    assert one({"chosen": "yes", "rejected": "no"}).prompt == ""


def test_whole_conversations_may_part_before_the_last_turn() -> None:
    chosen = [user("q"), assistant("a"), user("x"), assistant("y")]
    rejected = [user("q"), assistant("b"), user("z"), assistant("w")]
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
    user("q"), assistant("a"), system("s"), [system("s")], [user("q")], [user("")], [assistant("a")], EARLIER,
    [user("q"), assistant("a")], [user("q"), assistant("b")], [*EARLIER, assistant("a")], [*EARLIER, assistant("b")],
    [system("s"), user("q"), assistant("b")], [{"role": "assistant", "content": None, "tool_calls": [5]}],
    [{"role": "user", "content": [{"type": "text", "text": "q"}]}, assistant("a")], [{"from": [], "value": {}}],
    [{"role": "user", "content": [{"text": 5}]}], [{"completion": "a", "rank": 1}, {"completion": [], "rank": 10**400}],
    [{"completion": "a", "rank": 1}, {"completion": "b", "rank": 2}], [{"completion": None, "rank": "1"}],
]  # fmt: skip


def odd_rows(count: int, names: list[str]) -> list[dict[str, Any]]:
    """As JSON can hold them; most have both answers, so that the shapes are read and not only told apart."""
    draw = random.Random(0)
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
    assert reasons >= {
        "bad_type",
        "bad_roles",
        "missing_key",
        "prompt_mismatch",
        "empty_response",
        "identical_text",
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

THUMBS: list[tuple[dict[str, Any], float]] = [
    ({"prompt": "q", "completion": "a", "label": True}, 1.0),
    ({"prompt": "q", "completion": "a", "label": "false"}, 0.0),
    ({"prompt": [{"from": "user", "content": "q"}],
      "completion": {"from": "assistant", "content": "a"}, "label": 0}, 0.0),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
      "label": True}, 1.0),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
      "kto_tag": False}, 0.0),
    ({"instruction": "q", "input": "", "output": "a", "kto_tag": True}, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("row", "label"), THUMBS)
def test_single_answers_with_labels(row: dict[str, Any], label: float) -> None:
    [pair] = read_row(row, RowLayout(rows="labelled")).pairs
    assert pair.label == label
    assert not pair.rejected
    assert texts(pair) == ["q", "a"]
    found = read_row(row, RowLayout(rows="answers"))
    assert math.isnan(found.pairs[0].label)
    assert found.ignored == [name for name in row if name in GRADES]  # also bad answers count
    [reason] = read_row(row, RowLayout()).dropped
    assert "to train on it, set task: unpaired" in reason.detail


def test_labels_from_scores_and_from_pairs() -> None:
    row = {"prompt": "q", "completion": "a", "score": 3.5}
    for threshold, label in ((3.5, 1.0), (4.0, 0.0)):
        layout = RowLayout(rows="labelled", label_threshold=threshold)
        assert read_row(row, layout).pairs[0].label == label
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "weight": 2}
    found = read_row(pair, RowLayout(rows="labelled")).pairs
    assert [(one.chosen, one.label, one.weight) for one in found] == [
        ("a", 1.0, 2.0),
        ("b", 0.0, 2.0),
    ]
    assert [one.chosen for one in read_row(pair, RowLayout(rows="answers")).pairs] == ["a"]
    ranked = {"prompt": "q", "responses": ["a", "b", "c"], "scores": [2, 9, 4]}
    found = read_row(ranked, RowLayout(rows="labelled")).pairs
    assert [(one.chosen, one.label) for one in found] == [("b", 1.0), ("a", 0.0)]


@pytest.mark.parametrize(
    ("row", "columns", "detail"),
    [
        ({"label": "good"}, {}, "must be true or false, 1 or 0 (for scores, set"),
        ({"label": 0.7}, {}, "for scores, set data_args.label_threshold"),
        ({"label": None}, {}, "label is null"),
        ({"score": 4}, {}, "no key 'label', but a score; set data_args.label_threshold"),
        ({"labels": True}, {}, "did you mean 'labels'?"),
        ({"label": True}, {"label": "up"}, "data_args.columns is {'label': 'up'}"),
        ({"label": True, "completion": " "}, {}, "the answer: nothing but white space"),
    ],
)
def test_what_is_wrong_with_a_label(
    row: dict[str, Any], columns: dict[str, str], detail: str
) -> None:
    layout = RowLayout(rows="labelled", columns=columns)
    [reason] = read_row({"prompt": "q", "completion": "a", **row}, layout).dropped
    assert detail in reason.detail


def test_a_named_format_of_single_answers_gives_no_pairs() -> None:
    found = read({"prompt": "q", "completion": "a"}, format="completion")
    assert not found.pairs
    assert "not a pair; to train on it" in found.dropped[0].detail
