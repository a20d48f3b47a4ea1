"""One rank: weighted sums over micro-batches, steps that are skipped or refused, and its whole state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rather.config.schema import TrainingArgs
from rather.data.batch import PairFacts, PairLogps, TokenPair
from rather.data.pack import pack
from rather.losses.metrics import Window
from rather.losses.objective import PairLoss, configure, own_loss
from rather.optim.optimizer import Optimizer
from rather.train.rank_trainer import RankTrainer
from tests.padded import padded_logps, random_pairs
from tests.tiny import tiny_policy
from tests.train.test_pack import ODD_PAIRS

BETA = 0.3


def trainer_of(
    dtype: torch.dtype = torch.float32, loss: PairLoss | None = None, **changes: Any
) -> RankTrainer:
    policy = tiny_policy(dtype=dtype)
    args = TrainingArgs(learning_rate=1e-3)
    optimizer = Optimizer(
        policy.named_parameters(), args, schedule=lambda n: 1e-3 / (n + 1), max_grad_norm=1.0
    )
    return RankTrainer(policy, loss or configure(["sigmoid"], {"beta": BETA}), optimizer, **changes)


def pairs_of(count: int = 5, **changes: Any) -> list[TokenPair]:
    return random_pairs(count, 60, seed=2, **changes)


def everything(trainer: RankTrainer) -> dict[str, Tensor]:
    groups, _ = trainer.state()
    tensors = {f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()}
    return {
        name: t.clone() for name, t in (tensors | dict(trainer.policy.named_parameters())).items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_is_the_plain_padded_computation() -> None:
    """Loss, gradient and metrics of a step, by the model's own padded forward and autograd."""
    pairs = [TokenPair(p.prompt, p.chosen, p.rejected, p.chosen_scored, p.rejected_scored, w)
             for p, w in zip(pairs_of(), (1.0, 2.0, 0.5, 1.0, 0.25), strict=True)]  # fmt: skip
    trainer, plain = trainer_of(), tiny_policy()
    plain.causal_lm.set_attn_implementation("eager")
    torch.manual_seed(1)
    reference = padded_logps(plain.causal_lm, pairs).detach() + torch.randn(len(pairs), 2)
    result = trainer.train_step(pack(pairs, 60), {"sum": reference})
    policy = padded_logps(plain.causal_lm, pairs)
    margins = BETA * ((policy - reference)[:, 0] - (policy - reference)[:, 1])
    weight = torch.tensor([p.weight for p in pairs], dtype=torch.float64)
    loss = (-torch.nn.functional.logsigmoid(margins) * weight).sum() / weight.sum()
    loss.backward()
    norm = torch.linalg.vector_norm(
        torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None])
    )
    window = Window()
    window.add(result.sums, pairs=len(pairs), tokens=1)
    assert window.means()["loss"] == pytest.approx(loss.item(), rel=1e-6)
    mean_margin = (margins * weight).sum() / weight.sum()
    assert window.means()["rewards/margins"] == pytest.approx(mean_margin.item(), rel=1e-5)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert torch.allclose(result.policy, policy.detach(), rtol=1e-6)
    assert (result.lr, result.skipped, result.zeros_in_grad) == (1e-3, 0, None)


@pytest.mark.parametrize("budget", [1, 50, 10**6])
def test_log_probs_are_in_the_order_of_the_step(budget: int) -> None:
    """Odd pairs too: no prompt, scored turns inside the prompt, nothing left of an answer."""
    pairs = [*pairs_of(6), *ODD_PAIRS]
    trainer = trainer_of()
    got = trainer.log_probs(pack(pairs, budget))["sum"]
    trainer.policy.causal_lm.set_attn_implementation("eager")
    assert not got.requires_grad
    assert torch.allclose(got, padded_logps(trainer.policy.causal_lm, pairs).detach(), rtol=1e-5)


def test_evaluation_trains_nothing_and_equals_the_metrics_of_a_step() -> None:
    pairs = pairs_of()
    trainer = trainer_of()
    known = trainer.log_probs(pack(pairs, 10**6))
    reference = {"sum": known["sum"] - 0.5}
    before = everything(trainer)
    batches = pack(pairs, 40)
    sums = trainer.score(PairFacts.of_step(batches), trainer.log_probs(batches), reference)
    assert same(everything(trainer), before)
    assert all(p.grad is None for p in trainer.policy.parameters())
    assert trainer.train_step(pack(pairs, 90), reference).sums == pytest.approx(
        sums, rel=1e-6, abs=1e-6
    )
    assert not same(everything(trainer), before)


def broken(x: PairLogps) -> Tensor:
    return x.policy[:, 0] * math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nonfinite_loss_never_reaches_the_weights(dtype: torch.dtype) -> None:
    pairs = pairs_of(2)
    trainer = trainer_of(dtype, own_loss(broken))
    before = everything(trainer)
    result = trainer.train_step(pack(pairs, 10**6), {"sum": torch.zeros(2, 2)})
    assert (result.skip_reason, result.skipped) == ("nonfinite", 1)
    assert same(everything(trainer), before)
    assert trainer.optimizer
    assert trainer.optimizer.gradients() == []


def overflowing(x: PairLogps) -> Tensor:
    """A slope that float16 holds at a scale of 1, and not at 2**14."""
    return x.policy[:, 0] * 8


def test_a_float16_overflow_skips_the_step_and_touches_nothing() -> None:
    pairs = pairs_of(2)
    trainer = trainer_of(torch.float16, own_loss(overflowing))
    assert trainer.optimizer
    assert trainer.optimizer.loss_scale
    batches, reference = pack(pairs, 10**6), {"sum": torch.zeros(2, 2)}
    scales, results = [], []
    before = everything(trainer)
    while not results or results[-1].skipped:
        assert same(everything(trainer), before)
        assert trainer.optimizer.updates == 0
        scales.append(trainer.optimizer.loss_scale.value)
        results.append(trainer.train_step(batches, reference))
        assert math.isfinite(results[-1].grad_norm) is (not results[-1].skipped)
    assert len(results) > 1
    assert scales == [2.0 ** (16 - i) for i in range(len(scales))]
    assert trainer.optimizer.updates == 1
    assert not same(everything(trainer), before)
    assert {result.lr for result in results} == {1e-3}  # the rate follows updates, not steps
    assert trainer.train_step(batches, reference).lr == 5e-4


class Steep(torch.autograd.Function):
    """A loss of 0 whose gradient is no number."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * math.nan


def steep(x: PairLogps) -> Tensor:
    flat: Tensor = Steep.apply(x.policy[:, 0])
    return flat


def test_float16_that_no_scale_can_help() -> None:
    """A gradient may need a smaller scale, down to 1; a loss that is none needs something else, and at once."""
    batches, reference = pack(pairs_of(2), 10**6), {"sum": torch.zeros(2, 2)}
    trainer = trainer_of(torch.float16, own_loss(steep))
    held = [trainer.train_step(batches, reference).skip_reason for _ in range(18)]
    assert held == ["overflow"] * 16 + ["nonfinite"] * 2
    trainer = trainer_of(torch.float16, own_loss(broken))
    assert trainer.train_step(batches, reference).skip_reason == "nonfinite"
    assert trainer.optimizer
    assert trainer.optimizer.loss_scale
    assert trainer.optimizer.loss_scale.value == 2.0**16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_state_is_all_that_later_steps_depend_on(dtype: torch.dtype) -> None:
    pairs = pairs_of(4)
    batches, reference = pack(pairs, 60), {"sum": torch.randn(4, 2) - 20}
    trainer = trainer_of(dtype)
    for _ in range(2):
        trainer.train_step(batches, reference)
    if trainer.optimizer and trainer.optimizer.loss_scale:
        trainer.optimizer.loss_scale.value, trainer.optimizer.loss_scale.clean = 512.0, 1998
    groups, numbers = trainer.state()
    saved = {
        group: {name: t.clone() for name, t in tensors.items()} for group, tensors in groups.items()
    }
    other = trainer_of(dtype)
    torch.rand(3)
    other.load_state(saved, numbers)
    drawn = [torch.rand(2)]
    torch.set_rng_state(saved["rng"]["cpu"])
    drawn.append(torch.rand(2))
    assert torch.equal(*drawn)
    for each in (trainer, other):
        for _ in range(2):
            each.train_step(batches, reference)
    ours, theirs = everything(trainer), everything(other)
    assert same(
        {k: v for k, v in ours.items() if "rng" not in k},
        {k: v for k, v in theirs.items() if "rng" not in k},
    )
    assert other.state()[1] == trainer.state()[1]
    if dtype == torch.float16:
        assert trainer.state()[1]["loss_scale"] == [1024.0, 0]


def test_zeros_in_the_gradient_are_counted_on_request() -> None:
    """A quarter of a matrix is cut off from the loss."""
    trainer = trainer_of(count_zeros=True)
    weight = trainer.policy.causal_lm.model.layers[0].mlp.down_proj.weight
    cut_off = torch.ones_like(weight)
    cut_off[: len(weight) // 4] = 0
    weight.register_hook(lambda gradient: gradient * cut_off)
    result = trainer.train_step(pack(pairs_of(3), 10**6), {"sum": torch.zeros(3, 2)})
    assert result.zeros_in_grad == weight.numel() // 4
