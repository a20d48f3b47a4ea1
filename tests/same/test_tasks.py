"""KTO on two ranks: loss and gradient of a step are those of one process, in any order."""

from __future__ import annotations

import pytest
import torch

from tests.losses.test_feedback import PRECISIONS, ROWS, SHUFFLED, assert_same_step, kto_step
from tests.same.pool import pool


@pytest.mark.parametrize(("dtype", "limit"), PRECISIONS)
@pytest.mark.parametrize("micro", [1, 4])
def test_kto_does_not_depend_on_the_number_of_ranks(
    dtype: torch.dtype, limit: float, micro: int
) -> None:
    for order in (ROWS, SHUFFLED):
        for got in pool(2).run(kto_step, dtype, order, micro, 2):
            assert_same_step(got, dtype, limit)
