"""An encoder in a child process gives the same results, and continues after Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest

from rather.data.formats import TextPair
from rather.data.json_rows import DropReason
from rather.data.pool import LimitedEncoder, encoder_of
from rather.data.tokens import Encoded, Encoder
from tests.data.conftest import Make
from tests.data.test_tokens import TALK, pair

PAIRS = [
    pair("Where is the bread?", "On the shelf.", "Gone."),
    pair(TALK, "By the door.<|im_end|>", "\u200bNo idea at all."),
    pair("x", "same", "same "),
    TextPair("Which day?", "Monday", "Friday", template_kwargs={"today": date(2026, 1, 5)}),
    TextPair("x", "a", "b", template_kwargs={"messages": []}),
]


def limited(encoder: Encoder) -> LimitedEncoder:
    found = encoder_of(encoder.recipe, "here")
    assert isinstance(found, LimitedEncoder)
    return found


def outcome(method: Callable[[TextPair], Any], given: TextPair) -> Any:
    """What a method returns, or the arguments of the reason that it raises."""
    try:
        return method(given)
    except DropReason as reason:
        return reason.args


def asked(encoder: Any, question: str) -> list[int]:
    ids: list[int] = encoder.prompt_ids(TextPair(question, "", ""), as_trained=True)
    return ids


def test_both_give_the_same(encoder: Make) -> None:
    beside = encoder(score="all")
    behind = limited(beside)
    results = [outcome(beside.encode, one) for one in PAIRS]
    assert [outcome(behind.encode, one) for one in PAIRS] == results
    assert {type(result) for result in results} == {tuple, Encoded}
    assert any(result.notes for result in results if isinstance(result, Encoded))
    assert [outcome(behind.prompt_ids, one) for one in PAIRS] == [
        outcome(beside.prompt_ids, one) for one in PAIRS
    ]
    assert asked(behind, "Where?") == asked(beside, "Where?")
    assert behind.end_of_turn == beside.end_of_turn == beside.tokenizer.token_to_id("<|im_end|>")


def test_without_a_template_nothing_is_started(encoder: Make) -> None:
    assert isinstance(encoder_of(encoder(template=None).recipe, "here"), Encoder)


def test_after_ctrl_c_the_next_answer_is_its_own(
    encoder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sends it to the child as well; and an answer that nobody waited for is never taken for another."""
    beside = encoder()
    behind = limited(beside)
    asked(behind, "one")
    assert behind._child
    os.kill(behind._child.process.pid, signal.SIGINT)
    assert asked(behind, "two") == asked(beside, "two")

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    child = behind._child.process
    with monkeypatch.context() as patch:
        patch.setattr(behind._child.connection, "recv_bytes", stopped)
        with pytest.raises(KeyboardInterrupt):
            asked(behind, "three")
    assert asked(behind, "four") == asked(beside, "four")
    assert child.poll() is not None
    child = behind._child.process
    del behind
    assert child.poll() is not None, "it ends with the encoder"
