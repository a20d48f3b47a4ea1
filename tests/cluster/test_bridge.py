"""The bridge between the first ranks of two roles: numbered messages over a gloo group."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from rather.cluster.bridge import POLICY, REFERENCE, Answer, Bridge, ReferenceApart
from rather.cluster.health import Failure
from rather.errors import BatchTooLarge
from tests.tiny import make_config


@pytest.fixture
def ends() -> tuple[Bridge, Bridge]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    made: dict[int, Bridge] = {}

    def connect(rank: int) -> None:
        made[rank] = Bridge(store, rank)

    thread = threading.Thread(target=connect, args=(REFERENCE,))
    thread.start()
    connect(POLICY)
    thread.join()
    return made[POLICY], made[REFERENCE]


@pytest.fixture
def apart(ends: tuple[Bridge, Bridge], tmp_path: Any) -> tuple[ReferenceApart, Bridge]:
    policy, reference = ends
    return ReferenceApart(make_config(tmp_path).reference, "cpu", policy, None), reference


def asked(bridge: Bridge) -> tuple[int, str]:
    number, (method, _) = bridge.receive()
    return number, method


def test_an_answer_that_comes_early_waits_for_its_question(
    apart: tuple[ReferenceApart, Bridge],
) -> None:
    role, reference = apart
    first, second = role.ask_log_probs([]), role.ask_log_probs([])
    for _ in range(2):
        number, method = asked(reference)
        assert method == "compute_log_probs"
        reference.send(number, Answer({}, 0.5))
    assert role.await_log_probs(second) == role.await_log_probs(first) == {}
    assert role.take_seconds() == 1.0
    assert role.take_seconds() == 0.0


def test_an_answer_that_nobody_waits_for_is_dropped(
    apart: tuple[ReferenceApart, Bridge],
) -> None:
    role, reference = apart
    role.ask_log_probs([])
    role.drop_questions()  # as a rollback does
    number = role.ask_log_probs([])
    stale, _ = asked(reference)
    reference.send(stale, Answer({"stale": 1}, 0.5))
    reference.send(asked(reference)[0], Answer({}, 0.5))
    assert role.await_log_probs(number) == {}
    assert stale == number - 1


def test_lack_of_memory_can_be_answered_with_smaller_micro_batches(
    apart: tuple[ReferenceApart, Bridge],
) -> None:
    role, reference = apart
    number = role.ask_log_probs([])
    reference.send(asked(reference)[0], Answer(Failure.of(BatchTooLarge("no room")), 0.0))
    with pytest.raises(BatchTooLarge, match="no room"):
        role.await_log_probs(number)
