"""Scans on a CUDA device: rows of paths and vectors of length one, by kernels, as torch has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from rather.data.batch import Segments
from rather.data.pack import pack
from rather.model import mixers
from tests.padded import ranked_pairs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def segments() -> Segments:
    (batch,) = pack(ranked_pairs(128)[:9], 10**6)
    return batch.to("cuda").segments


def results(function: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of a function, for the same slope each time."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    slope = torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output).to(output.dtype)
    return [output, *torch.autograd.grad((output * slope).sum(), leaves)]


@pytest.mark.parametrize("width", [16, 1100])
def test_rows_of_paths_are_those_of_torch(segments: Segments, width: int) -> None:
    tokens = torch.randn(1, len(segments.start_N) - 1, width, device="cuda")
    computed = results(lambda x: mixers._on_paths(x, segments), tokens)
    expected = results(lambda x: x.index_select(1, segments.key_index_K), tokens)
    torch.testing.assert_close(computed, expected)
    paths = torch.randn(1, len(segments.key_index_K), width, device="cuda")
    computed = results(lambda x: mixers._own_rows(x, segments), paths)
    expected = results(lambda x: x.index_select(1, segments.own_place_N), paths)
    torch.testing.assert_close(computed, expected)


def test_vectors_of_length_one_are_those_of_the_family() -> None:
    vectors = torch.randn(5, 7, 100, device="cuda")
    computed = results(mixers._Unit.apply, vectors)
    torch.testing.assert_close(computed, results(modeling_qwen3_5.l2norm, vectors))


@pytest.mark.parametrize("activation", ["silu", None])
def test_the_convolution_is_that_of_the_family(segments: Segments, activation: str | None) -> None:
    if problem := mixers.fused_problem(torch.device("cuda")):
        pytest.skip(problem)
    hidden = torch.randn(1, 96, len(segments.start_N) - 1, device="cuda")
    weight = torch.randn(96, 4, device="cuda")
    scan = mixers.SCANS["causal_conv1d_fn"]
    plain = mixers._Scan(scan.time, scan.places)
    function = mixers.unwrap(modeling_qwen3_5.causal_conv1d_fn)
    computed, expected = (
        results(
            lambda x, w, kind=kind: mixers._run(
                function, kind, (x, w), {"activation": activation}, segments
            ),
            hidden,
            weight,
        )
        for kind in (scan, plain)
    )
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)
