"""The head: log-probs and gradients of a plain log-softmax, in chunks, with logits kept or computed again."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck

from rather.model import head
from rather.model.collectives import enter
from rather.parallel.tensor import part
from tests.same.pool import pool

ROWS, WIDTH, VOCAB = 7, 5, 11
TREATMENTS: dict[str, dict[str, float]] = {
    "plain": {},
    "scaled": {"scale": 0.7},
    "capped": {"softcap": 2.0},
    "scaled and capped": {"scale": 1.7, "softcap": 3.0},
}
KEPT_OR_NOT = pytest.mark.parametrize("keep_bytes", [0, 1 << 30], ids=["recomputed", "kept"])


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = True, rows: int = ROWS) -> Any:
    torch.manual_seed(1)
    hidden = torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    bias_V = torch.randn(VOCAB, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, bias_V, torch.randint(0, VOCAB, (rows,))


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]


def both(*tensors: Any, keep_bytes: int = 1 << 30, **options: Any) -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(head.KEEP_BYTES, "cpu", keep_bytes)
        return head.token_logps(*tensors, **options)


def token_logps(*tensors: Any, **options: Any) -> Tensor:
    logps, squares = both(*tensors, **options)
    assert len(squares) == 0  # nobody asked
    return logps


def gradients(logps: Tensor, tensors: Any) -> list[Tensor]:
    """Of a weighted sum, so that each row counts differently."""
    given = [t for t in tensors if t is not None and t.requires_grad]
    return list(torch.autograd.grad((logps * torch.linspace(-1, 2, len(logps))).sum(), given))


def assert_same_bits(one: Tensor, other: Tensor, tensors: Any) -> None:
    """Of log-probs and of their gradients."""
    assert torch.equal(one, other)
    assert all(map(torch.equal, gradients(one, tensors), gradients(other, tensors)))


@pytest.fixture(params=[1, 3, ROWS], ids=lambda rows: f"chunks of {rows}")
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", request.param * VOCAB * 8)
    return int(request.param)


@KEPT_OR_NOT
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_equals_log_softmax(treatment: str, bias: bool, keep_bytes: int, chunk_rows: int) -> None:
    *tensors, targets = inputs(bias=bias)
    options = TREATMENTS[treatment]
    want = plain(*tensors, targets, **options)
    got = token_logps(*tensors, targets, **options, keep_bytes=keep_bytes)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients(got, tensors), gradients(want, tensors), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@KEPT_OR_NOT
@pytest.mark.parametrize("treatment", ["plain", "scaled and capped"])
def test_gradcheck(treatment: str, keep_bytes: int, chunk_rows: int) -> None:
    """By finite differences; gradcheck also runs backward several times on one graph."""
    *tensors, targets = inputs()

    def work(*tensors: Any) -> Tensor:
        return token_logps(*tensors, targets, **TREATMENTS[treatment], keep_bytes=keep_bytes)

    assert gradcheck(work, tensors)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_statistics_leave_log_probs_and_gradients_as_they_are(
    treatment: str, chunk_rows: int
) -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    options = TREATMENTS[treatment]
    logits = torch.nn.functional.linear(hidden, weight, bias).detach() * options.get("scale", 1.0)
    if cap := options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    targets[1:4] = logits[1:4].argmax(-1)
    filled = torch.empty(3, ROWS)
    tensors = (hidden, weight, bias, targets)
    with_statistics = token_logps(*tensors, statistics=filled, **options)
    without = token_logps(*tensors, **options)

    entropy, mean_logit, is_largest = filled
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(entropy, expected, atol=1e-6)
    assert torch.allclose(mean_logit, logits.mean(-1), atol=1e-6)
    assert is_largest.tolist() == (logits.argmax(-1) == targets).float().tolist()
    assert_same_bits(with_statistics, without, tensors)


@KEPT_OR_NOT
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_squares_on_request(treatment: str, keep_bytes: int, chunk_rows: int) -> None:
    """log sum p^2 over the vocabulary, without a gradient and without a change to the log-probs'."""
    *tensors, targets = inputs()
    options: dict[str, Any] = {**TREATMENTS[treatment], "keep_bytes": keep_bytes}
    logps, squares = both(*tensors, targets, **options, squares=True)
    each = [
        plain(*tensors, torch.full((ROWS,), word), **TREATMENTS[treatment]) for word in range(VOCAB)
    ]
    want = torch.stack(each).exp().square().sum(0).log()
    assert torch.allclose(squares, want, rtol=1e-12)
    assert not squares.requires_grad
    assert_same_bits(logps, token_logps(*tensors, targets, **options), tensors)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_kept_and_recomputed_logits_give_the_same_bits(treatment: str, chunk_rows: int) -> None:
    *tensors, targets = inputs(torch.float32)
    options: dict[str, Any] = TREATMENTS[treatment]
    kept, recomputed = (
        token_logps(*tensors, targets, **options, keep_bytes=n) for n in (1 << 30, 0)
    )
    assert_same_bits(kept, recomputed, tensors)


@KEPT_OR_NOT
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_second_backward_gives_the_same(treatment: str, keep_bytes: int) -> None:
    """Zero-bubble schedules ask for the inputs' gradient, then for the weights': in-place work must not spoil it."""
    *tensors, targets = inputs()
    logps = token_logps(*tensors, targets, **TREATMENTS[treatment], keep_bytes=keep_bytes)
    first, second = (
        torch.autograd.grad(logps.sin().sum(), tensors, retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_and_its_log_probs_are_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(40, 32).to(dtype).requires_grad_()
    weight = (torch.randn(97, 32) * 0.3).to(dtype).requires_grad_()
    targets = torch.randint(0, 97, (40,))
    got = token_logps(hidden, weight, None, targets)
    want = plain(hidden.float(), weight.float(), None, targets)
    assert got.dtype == torch.float32
    assert torch.allclose(got, want, atol=0.03)
    for ours, theirs in zip(
        gradients(got, (hidden, weight)), gradients(want, (hidden, weight)), strict=True
    ):
        assert (
            torch.cosine_similarity(ours.float().flatten(), theirs.float().flatten(), dim=0)
            > 0.9999
        )


@KEPT_OR_NOT
def test_no_rows_at_all(keep_bytes: int) -> None:
    *tensors, targets = inputs(rows=0)
    got = token_logps(*tensors, targets, keep_bytes=keep_bytes)
    assert got.shape == (0,)
    assert all(not g.any() for g in gradients(got, tensors))


def test_a_frozen_weight_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is computed: it is a third of the work."""
    hidden, weight, _, targets = inputs(bias=False)
    whole = gradients(token_logps(hidden, weight, None, targets), (hidden, weight))[0]
    weight.requires_grad_(False)
    monkeypatch.setattr(head, "_add_weight_gradient", None)
    token_logps(hidden, weight, None, targets).backward(
        torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    )
    assert weight.grad is None
    assert torch.allclose(hidden.grad, whole, rtol=1e-5)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks of logits are in memory: after each one was made, and now when asked with `count`."""
    made: list[weakref.ref[Tensor]] = []
    seen: list[int] = []
    compute = head._Treatment.logits

    def watched(*args: Any) -> Tensor:
        logits = compute(*args)
        made.append(weakref.ref(logits))
        seen.append(sum(chunk() is not None for chunk in made))
        return logits

    monkeypatch.setattr(head._Treatment, "logits", watched)
    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", VOCAB * 8)  # a chunk for each row
    return seen


@pytest.mark.parametrize(
    ("gradient", "keep_bytes", "most"), [(True, 1 << 30, ROWS), (True, 0, 2), (False, 1 << 30, 2)]
)
def test_what_is_in_memory(alive: list[int], gradient: bool, keep_bytes: int, most: int) -> None:
    """Logits stay between forward and backward when they fit the budget, and never where there is no backward."""
    *tensors, targets = inputs()
    with torch.set_grad_enabled(gradient):
        logps = token_logps(*tensors, targets, keep_bytes=keep_bytes)
    assert max(alive) == most
    if gradient:
        logps.sum().backward()
        alive.clear()
        token_logps(*tensors, targets, keep_bytes=0)
        assert alive[0] == 1  # the first of its own: nothing is left of those before


# --- a vocabulary divided among ranks: 11 words over 2 and 4 of them ---


def divided_differences(dtype: torch.dtype) -> dict[str, float]:
    """The largest difference from the plain head: log-probs, squares, and gradients of all inputs."""
    cases = [
        (name, bias, kept) for name in TREATMENTS for bias in (True, False) for kept in (0, 1 << 30)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(head.CHUNK_BYTES, "cpu", 3 * VOCAB * 8)  # a few rows at a time
        return {
            f"{name}, {bias}, {kept}": _divided_difference(dtype, name, bias, kept)
            for name, bias, kept in cases
        }


def _divided_difference(dtype: torch.dtype, treatment: str, bias: bool, keep_bytes: int) -> float:
    options: dict[str, Any] = {**TREATMENTS[treatment], "keep_bytes": keep_bytes, "squares": True}
    first, count = part(VOCAB, dist.get_rank(), dist.get_world_size())
    own = slice(first, first + count)
    *tensors, targets = inputs(dtype, bias=bias)
    want = both(*tensors, targets, **options)
    whole = gradients(want[0], tensors)
    *tensors, targets = inputs(dtype, bias=bias)
    cut = [None if t is None else t.detach()[own].clone().requires_grad_() for t in tensors[1:]]
    group = dist.group.WORLD.group_name
    got = both(enter(tensors[0], group), *cut, targets, **options, words=head.Words(first, group))
    assert got[0].requires_grad
    assert not got[1].requires_grad
    parts = gradients(got[0], [tensors[0], *cut])
    pairs = [*zip(want, got, strict=True), (whole[0], parts[0])]
    pairs += [(one[own], other) for one, other in zip(whole[1:], parts[1:], strict=True)]
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str
)
def test_a_divided_vocabulary_equals_the_whole(
    ranks: int, dtype: torch.dtype, tolerance: float
) -> None:
    for each in pool(ranks).run(divided_differences, dtype):
        assert max(each.values()) < tolerance, each


def numeric_slope() -> float:
    """By finite differences on all ranks at once: a change of a hidden row is seen by every rank's words."""
    group = dist.group.WORLD.group_name
    first, count = part(VOCAB, dist.get_rank(), dist.get_world_size())
    own = slice(first, first + count)
    hidden, weight, bias, targets = inputs()
    words, cut = head.Words(own.start, group), (weight.detach()[own], bias.detach()[own])

    def work(hidden: Tensor) -> Tensor:
        return both(
            enter(hidden, group), *cut, targets, **TREATMENTS["scaled and capped"], words=words
        )[0]

    return float(gradcheck(work, (hidden,)))


def test_gradcheck_of_a_divided_vocabulary() -> None:
    assert pool(2).run(numeric_slope) == [1.0, 1.0]
