"""KTO and groups of answers on two ranks: loss and gradient of a step are those of one process."""

from __future__ import annotations

import pytest
import torch

from tests.losses.test_batching import assert_same
from tests.losses.test_feedback import PRECISIONS, ROWS, SHUFFLED, assert_same_step, kto_step
from tests.losses.test_groups import FORMULAS, group_step
from tests.losses.test_groups import SHUFFLED as SHUFFLED_ANSWERS
from tests.same.pool import pool


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
@pytest.mark.parametrize("micro", [1, 4])
def test_kto_does_not_depend_on_the_number_of_ranks(
    dtype: torch.dtype, limit: float, micro: int
) -> None:
    for order in (ROWS, SHUFFLED):
        for got in pool(2).run(kto_step, dtype, order, micro, 2):
            assert_same_step(got, dtype, limit)


@pytest.mark.parametrize("name", FORMULAS)
def test_groups_do_not_depend_on_the_number_of_ranks(name: str) -> None:
    whole = group_step(name, list(range(9)), 10**6)
    for got in pool(2).run(group_step, name, SHUFFLED_ANSWERS, 20, 2):
        assert_same(got, whole, 1e-9)
