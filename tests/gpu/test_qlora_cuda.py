"""4-bit weights on a GPU: the tests of the CPU, which take the device that is there."""

from __future__ import annotations

import pytest
import torch

from tests.adapters.test_quantised import (  # noqa: F401
    folder,
    test_it_is_merged_into_the_weights_as_they_were,
    test_it_resumes_to_the_same_bits,
    test_the_reference_is_the_4_bit_base,
    trained,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
