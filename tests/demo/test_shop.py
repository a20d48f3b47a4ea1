"""The task of the demo: its grammar, its split, and a judge that can say no."""

from __future__ import annotations

import random

import pytest

from rather.tools.demo import (
    FACTS,
    MARKS,
    Query,
    answer,
    manner_of,
    on_topic,
    pair,
    queries,
)

HONEY = Query("Hello. ", "Where is the {}?", "honey", "place")
TRUE_PLACE = FACTS["honey"]["place"]


def test_held_out_combinations_of_wording_and_item_are_nowhere_in_training() -> None:
    parts = {
        held: [query for query in queries() if query.held_out is held] for held in (True, False)
    }
    combinations = {
        held: {(query.wording, query.item) for query in part} for held, part in parts.items()
    }
    assert len(parts[False]) == 3 * len(parts[True]) == 864
    assert not combinations[True] & combinations[False]
    assert not {query.prompt for query in parts[True]} & {query.prompt for query in parts[False]}
    for values in (
        "wording",
        "item",
        "greeting",
        "asks",
    ):  # each part is known from training; the combination is new
        assert {getattr(query, values) for query in parts[True]} == {
            getattr(query, values) for query in parts[False]
        }


@pytest.mark.parametrize("manner", ["kind", "grumpy"])
def test_every_answer_of_the_grammar_is_judged_as_meant(manner: str) -> None:
    rng = random.Random(1)
    for query in queries():
        text = answer(query, manner, rng)
        assert manner_of(text) == manner
        assert on_topic(query, text)


def test_a_pair_answers_one_question_in_two_manners() -> None:
    row = pair(HONEY, random.Random(1))
    assert list(row) == ["instruction", "input", "chosen", "rejected"]
    assert row["instruction"] == "Hello. Where is the honey?"
    assert (manner_of(row["chosen"]), manner_of(row["rejected"])) == ("kind", "grumpy")


@pytest.mark.parametrize(
    ("text", "manner"),
    [
        ("", "neither"),
        (f"The honey is {TRUE_PLACE}.", "neither"),
        ("With pleasure! The honey is by the door. Now go away.", "neither"),
        ("Not again. May your day be sunny!", "neither"),
        ("Ugh, customers. The honey is by the door.", "grumpy"),
        ("The honey is by the door. May your day be sunny!", "kind"),
    ],
)
def test_the_judge_wants_words_of_one_manner_only(text: str, manner: str) -> None:
    assert manner_of(text) == manner


def test_no_word_speaks_for_both_manners() -> None:
    assert MARKS["kind"]
    assert MARKS["grumpy"]
    assert not MARKS["kind"] & MARKS["grumpy"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "With pleasure!",
        "The honey is lovely.",
        f"The jam is {TRUE_PLACE}.",
        f"The honey costs {FACTS['honey']['price']}.",
        f"The honey and the jam are {TRUE_PLACE}.",
        f"The honeycomb is {TRUE_PLACE}.",
        *(
            f"The honey is {fact['place']}."
            for fact in FACTS.values()
            if fact["place"] != TRUE_PLACE
        ),
    ],
)
def test_off_topic(text: str) -> None:
    assert not on_topic(HONEY, text)
