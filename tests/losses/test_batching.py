"""However the pairs of a step are cut into micro-batches: the same gradient, the same metrics,
for every loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rather.config.schema import TrainingArgs
from rather.data.batch import PairBatch, PairFacts, PairLogps, TokenPair
from rather.data.pack import pack
from rather.losses.objective import PairLoss, configure
from rather.model.policy import PolicyModel, pair_columns
from rather.optim.optimizer import Optimizer
from rather.parallel.mesh import Mesh
from rather.parallel.shard import shard
from rather.train.rank_trainer import RankTrainer, WholeModelRunner
from tests.losses.formulas import PAIRWISE
from tests.padded import fill, plain_columns, random_pairs, ranked_pairs
from tests.tiny import tiny_policy

VOCAB = 61
MODIFIERS = {
    "rpo_alpha": 0.7,
    "pref_ftx": 0.7,
    "ld_alpha": 0.4,
    "use_weighting": True,
    "soft_labels": True,
}
OBJECTIVES: dict[str, PairLoss] = {
    **{name: configure([name], {}) for name in PAIRWISE},
    **{k: configure(["sigmoid"], {}, modifiers={k: value}) for k, value in MODIFIERS.items()},
    "aot ld_alpha": configure(["aot"], {}, modifiers={"ld_alpha": 0.4}),
    "use_weighting sft": configure(["simpo", "sft"], {}, modifiers={"use_weighting": True}),
    "sigmoid + sft": configure(["sigmoid", "sft"], {}, [1.0, 0.5]),
    "aot + sft": configure(["aot", "sft"], {}, [1.0, 0.5]),
}
WAYS = [(1, 1), (2, 1), (2, 4), (8, 2)]  # other ways give the same sizes


class Recording(Optimizer):
    """Keeps the gradient instead of using it."""

    def step(self, grad_norm: float) -> None:
        self.seen = torch.cat([gradient.flatten().double() for gradient in self.gradients()])


@dataclass(frozen=True)
class Outcome:
    gradient: Tensor
    sums: dict[str, float]
    policy: Tensor


def ragged_pairs(objective: PairLoss) -> list[TokenPair]:
    """Eight pairs with margins and labels, and with weights where a pair can have one."""
    draw = np.random.default_rng(3)
    weights = np.ones(8) if objective.whole_batch else draw.uniform(0.2, 2, 8)
    return [
        replace(
            pair,
            weight=float(weight),
            margin=float(draw.uniform(0, 2)),
            soft_label=float(draw.uniform(0.5, 1)),
        )
        for pair, weight in zip(random_pairs(8, VOCAB, seed=4, longest=9), weights, strict=True)
    ]


def cut(pairs: Sequence[TokenPair], micro: int, parts: int) -> list[PairBatch]:
    """Micro-batches of at most `micro` pairs, of each of `parts` equal shares of the step."""
    share = len(pairs) // parts
    return [
        replace(batch, pair_P=batch.pair_P + first)
        for first in range(0, len(pairs), share)
        for batch in pack(pairs[first : first + share], 10**6, micro)
    ]


def small(dtype: torch.dtype) -> PolicyModel:
    """One layer; in float64 all of it, though Hugging Face's norms are float32 whatever the
    weights are."""
    policy = tiny_policy(dtype=dtype, num_hidden_layers=1)
    for module in policy.modules() if dtype == torch.float64 else ():
        if type(module).__name__ == "LlamaRMSNorm":
            norm: Any = module
            norm.forward = lambda h, norm=norm: (
                norm.weight
                * h
                * torch.rsqrt(h.square().mean(-1, keepdim=True) + norm.variance_epsilon)
            )
    return policy


@pytest.fixture(scope="module")
def policies() -> dict[torch.dtype, PolicyModel]:
    return {dtype: small(dtype) for dtype in (torch.float64, torch.float32)}


def reference_of(policy: PolicyModel, objective: PairLoss, batches: Sequence[PairBatch]) -> Any:
    """The policy's own log-probs, moved by known amounts."""
    if not objective.needs_reference:
        return None
    draw = torch.Generator().manual_seed(5)
    columns = RankTrainer(policy, objective).log_probs(batches)
    return {
        name: column + torch.randn(column.shape, generator=draw).double()
        for name, column in columns.items()
    }


@dataclass
class Stepper:
    """A policy on `dp` ranks, whose step is returned instead of taken."""

    policy: PolicyModel
    objective: PairLoss
    dp: int = 1

    def __post_init__(self) -> None:
        self.mesh = Mesh.build(replicate=self.dp) if self.dp > 1 else Mesh()
        if self.dp > 1:
            shard(self.policy, self.mesh, "ddp", compute=next(self.policy.parameters()).dtype)
        self.optimizer = Recording(
            self.policy.named_parameters(),
            TrainingArgs(),
            schedule=lambda _: 0.0,
            max_grad_norm=0.0,
        )
        runner = WholeModelRunner(self.policy, "ddp")
        self.trainer = RankTrainer(
            self.policy, self.objective, self.optimizer, mesh=self.mesh, runner=runner
        )

    def share(self, pairs: Sequence[TokenPair], budget: int, most: int | None = None) -> Any:
        """This rank's micro-batches."""
        return pack(pairs, budget, most, ranks=self.dp)[self.mesh.rank("dp") :: self.dp]

    def step(self, batches: Any, reference: Any, facts: PairFacts | None = None) -> Outcome:
        result = self.trainer.train_step(batches, reference, facts)
        return Outcome(self.optimizer.seen, result.sums, result.policy)


def step(
    policy: PolicyModel, objective: PairLoss, batches: Sequence[PairBatch], reference: Any
) -> Outcome:
    return Stepper(policy, objective).step(batches, reference)


def assert_same(one: Outcome, other: Outcome, tolerance: float) -> None:
    assert (one.gradient - other.gradient).norm() <= tolerance * other.gradient.norm()
    assert one.sums == pytest.approx(other.sums, rel=tolerance, abs=tolerance)
    assert torch.allclose(one.policy, other.policy, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_split_into_micro_batches_does_not_matter(
    policies: Any, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    objective, policy = OBJECTIVES[name], policies[dtype]
    pairs = ragged_pairs(objective)
    reference = reference_of(policy, objective, cut(pairs, 8, 1))
    whole = step(policy, objective, cut(pairs, 8, 1), reference)
    assert whole.gradient.norm() > 0
    ways = WAYS[1:] if dtype == torch.float64 else [(1, 1), (2, 4)]
    for micro, parts in ways:
        batches = cut(pairs, micro, parts)
        assert max(len(batch.pair_P) for batch in batches) == min(micro, 8 // parts)
        assert_same(step(policy, objective, batches, reference), whole, tolerance)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_mean_loss(policies: Any, name: str) -> None:
    """By one autograd graph over the whole step, without micro-batches, slopes or weighted sums."""
    objective, policy = OBJECTIVES[name], policies[torch.float64]
    pairs = ragged_pairs(objective)
    (batch,) = cut(pairs, 8, 1)
    reference = reference_of(policy, objective, [batch])
    columns, facts = pair_columns(policy, batch, {"shared", "squares"}), PairFacts.of(batch)
    extra = {
        "margin": facts.margin,
        "mean_chosen_length": (facts.length[:, 0] * facts.weight).sum() / facts.weight.sum(),
        "policy/shared": columns["shared"],
        "policy/squares": columns["squares"],
    }
    extra |= {"soft_label": facts.soft_label} if objective.modifiers.soft_labels else {}
    extra |= {f"reference/{key}": column for key, column in (reference or {}).items()}
    losses = objective(
        PairLogps(columns["sum"], reference and reference["sum"], facts.length, extra)
    )
    mean = (losses * facts.weight).sum() / facts.weight.sum()
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(mean, list(policy.parameters()))])
    got = step(policy, objective, cut(pairs, 2, 2), reference)
    assert (got.gradient - wanted).norm() <= 1e-9 * wanted.norm()
    assert got.sums["loss"] / got.sums["weight"] == pytest.approx(float(mean.detach()), rel=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_bfloat16_policy_trains(name: str) -> None:
    objective, policy = OBJECTIVES[name], small(torch.bfloat16)
    batches = cut(ragged_pairs(objective), 2, 1)
    outcome = step(policy, objective, batches, reference_of(policy, objective, batches))
    assert outcome.policy.dtype == torch.float64
    assert torch.isfinite(outcome.gradient).all()
    assert outcome.gradient.norm() > 0
    assert all(np.isfinite(value) for value in outcome.sums.values())


EVERYTHING = configure(["sigmoid"], {}, modifiers={"ld_alpha": 0.5, "use_weighting": True})


def test_columns_are_those_of_a_plain_forward() -> None:
    policy, pairs = small(torch.float64), ragged_pairs(OBJECTIVES["sigmoid"])
    columns = RankTrainer(policy, EVERYTHING).log_probs(cut(pairs, 2, 2))
    policy.causal_lm.set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = plain_columns(policy.causal_lm, pairs)
    for name, column in wanted.items():
        assert torch.allclose(columns[name], column, rtol=1e-9, atol=0), name


@pytest.mark.parametrize(
    "limits", [{"budget": 10**6}, {"budget": 45}, {"budget": 1}, {"budget": 96, "ladder": 32}]
)
def test_what_is_shared_counts_as_if_it_were_not(limits: dict[str, int]) -> None:
    """Log-probs, both columns beside them and gradients, in float64; nothing is differentiated
    by "squares"."""
    policy, plain = small(torch.float64), small(torch.float64)
    plain.causal_lm.set_attn_implementation("sdpa")
    pairs = ranked_pairs(VOCAB)
    wanted = plain_columns(plain.causal_lm, pairs)
    slopes = {name: torch.randn(len(pairs), 2, dtype=torch.float64) for name in ("sum", "shared")}
    sum((wanted[name] * slopes[name]).sum() for name in slopes).backward()  # type: ignore[union-attr]
    batches = pack(pairs, **limits)
    for batch in batches:
        columns = pair_columns(policy, batch, {"shared", "squares"})
        for name, column in columns.items():
            assert torch.allclose(column, wanted[name][batch.pair_P], rtol=1e-12, atol=1e-12), name
        sum((columns[name] * slopes[name][batch.pair_P]).sum() for name in slopes).backward()  # type: ignore[union-attr]
    for (name, one), other in zip(policy.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() <= 1e-12 * other.grad.norm(), name


@pytest.mark.parametrize("name", ["sigmoid", "aot", "use_weighting", "ld_alpha"])
def test_fillers_and_empty_batches_change_nothing(policies: Any, name: str) -> None:
    objective, policy = OBJECTIVES[name], policies[torch.float64]
    pairs = ragged_pairs(objective)
    whole = cut(pairs, 8, 1)
    reference = reference_of(policy, objective, whole)
    filled = pack(pairs, 10**6, ladder=512, ranks=len(pairs) + 1)
    assert fill(filled) < 0.1
    assert any(len(batch.pair_P) == 0 for batch in filled)
    assert_same(
        step(policy, objective, filled, reference), step(policy, objective, whole, reference), 1e-9
    )
