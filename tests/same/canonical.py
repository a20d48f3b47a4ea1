"""The canonical run: a small model, a few ragged steps of several micro-batches, on one process or
on a mesh.

However it is laid out, it must give the same losses, gradient norms and weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rather.checkpoint.sharded_tensors import Shard, ShardSpec
from rather.config.schema import ActorModelArgs, TrainingArgs
from rather.config.strategies import Layout
from rather.data.batch import Columns, PairBatch, PairFacts, TokenPair
from rather.data.pack import pack
from rather.losses.metrics import Window
from rather.losses.objective import PairLoss, configure
from rather.model.adapters import inject
from rather.model.attention import IMPLEMENTATION
from rather.model.policy import PolicyModel
from rather.optim.optimizer import Optimizer
from rather.parallel.apply import divide
from rather.parallel.mesh import Mesh, build_mesh
from rather.parallel.shard import STAGES
from rather.parallel.stages import Stages
from rather.train.rank_trainer import RankTrainer, WholeModelRunner
from tests.model.test_experts import DEEPSEEK
from tests.padded import random_pairs

VOCAB = 64
BUDGET = 72  # tokens of a micro-batch
PAIRS = 14  # of a step; the last one is smaller
# Mixtures of experts: a router loss that matters, and one layer of DeepSeek-V3 without experts.
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 8, "sliding_window": None},
    "olmoe": {"num_experts": 8, "num_key_value_heads": 8},
    "deepseek_v3": DEEPSEEK | {"num_key_value_heads": 8, "moe_intermediate_size": 32},
}


@dataclass(frozen=True)
class Setup:
    """What is trained, and how."""

    family: str = "llama"
    tied: bool = True
    losses: tuple[str, ...] = ("sigmoid",)
    steps: int = 20
    lr: float = 1e-5
    longest: int = 24  # tokens of a prompt or answer
    layers: int = 8
    router_loss: float | None = None
    adapted: tuple[str, ...] = ()  # modules with a LoRA adapter; the others are frozen


@dataclass(frozen=True)
class Step:
    """One optimizer step: the micro-batches of every dp rank, and what is known of all pairs."""

    dealt: list[list[PairBatch]]
    facts: PairFacts
    reference: Columns


@dataclass
class Outcome:
    losses: list[float]
    grad_norms: list[float]
    logps: list[Tensor]  # [pairs, 2] of each step
    weights: dict[str, Any]  # whole tensors, or the pieces of one rank


def make_policy(setup: Setup) -> PolicyModel:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": setup.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": setup.tied,
    }
    if setup.family in EXPERTS:
        sizes |= {"num_experts_per_tok": 2, "pad_token_id": None, **EXPERTS[setup.family]}
    config = AutoConfig.for_model(setup.family, **sizes)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=IMPLEMENTATION, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            elif setup.family == "qwen2":  # biases start at zero, and would hide a mistake
                parameter.add_(torch.randn_like(parameter) * 0.02)
    policy = PolicyModel(model.eval())
    if setup.adapted:
        torch.manual_seed(1)
        inject(model, ActorModelArgs(lora_rank=2, lora_target=list(setup.adapted)))
        for name, parameter in policy.named_parameters():
            if ".lora_" in name:  # PEFT's adapters have no effect when they start
                parameter.data.normal_(0, 0.1)
    return policy


def make_loss(setup: Setup) -> PairLoss:
    return configure(setup.losses, {}, [1.0, 0.2][: len(setup.losses)])


def make_optimizer(policy: PolicyModel | Stages, setup: Setup) -> Optimizer:
    # Gradients of 1e-9 are noise from the order of sums; with an epsilon below them Adam makes
    # whole steps of it.
    args = TrainingArgs(learning_rate=setup.lr, weight_decay=0.1, adam_epsilon=1e-6)
    options: dict[str, Any] = {"schedule": lambda _: setup.lr, "max_grad_norm": 1.0}
    options |= {"rounding": policy.rounding, "exact": policy.exact}
    return Optimizer(policy.named_parameters(), args, **options)


def pairs_of(setup: Setup) -> list[list[TokenPair]]:
    """The pairs of every step; weights differ, and the last step is ragged."""
    count = PAIRS * setup.steps - PAIRS // 2
    pairs = random_pairs(count, VOCAB, seed=7, longest=setup.longest)
    return [pairs[first : first + PAIRS] for first in range(0, count, PAIRS)]


def make_step(pairs: list[TokenPair], dp: int) -> Step:
    batches = pack(pairs, BUDGET, ranks=dp)
    facts = PairFacts.of_step(batches)
    noise = torch.randn(
        facts.length.shape, generator=torch.Generator().manual_seed(len(pairs)), dtype=torch.float64
    )
    reference = {"sum": (noise * 0.3 - 4.2) * facts.length}
    return Step([batches[rank::dp] for rank in range(dp)], facts, reference)


def train(trainer: RankTrainer, setup: Setup, first: int = 0, last: int | None = None) -> Outcome:
    """Steps `first` to `last` of the run, on every rank of the trainer's mesh."""
    outcome = Outcome([], [], [], {})
    for pairs in pairs_of(setup)[first:last]:
        step = make_step(pairs, trainer.mesh.size("dp"))
        own = step.dealt[trainer.mesh.rank("dp")]
        result = trainer.train_step(
            own, step.reference if trainer.loss.needs_reference else None, step.facts
        )
        window = Window()
        window.add(result.sums, pairs=len(pairs), tokens=1)
        means = window.means()
        outcome.losses += [means[name] for name in ("loss", "router_loss") if name in means]
        outcome.grad_norms.append(result.grad_norm)
        outcome.logps.append(result.policy)
    outcome.weights = {name: _detached(piece) for name, piece in trainer.weight_pieces().items()}
    return outcome


def make_trainer(
    setup: Setup,
    mesh: Mesh | None = None,
    policy: PolicyModel | Stages | None = None,
    stage: int = 0,
) -> RankTrainer:
    """A trainer of `policy`, which is already laid out on the mesh (by default a whole one, in this
    process); `stage` says what is sharded."""
    policy = policy or make_policy(setup)
    runner = WholeModelRunner(policy, STAGES[stage]) if isinstance(policy, PolicyModel) else None
    return RankTrainer(
        policy, make_loss(setup), make_optimizer(policy, setup), mesh=mesh, runner=runner,
        router_loss=setup.router_loss,
    )  # fmt: skip


def trainer_on(layout: Layout, setup: Setup, compute: torch.dtype = torch.float32) -> RankTrainer:
    """This rank's trainer of the setup, divided as the layout says."""
    mesh = build_mesh(layout, "cpu")
    policy = divide(make_policy(setup), mesh, layout, compute=compute)
    return make_trainer(setup, mesh, policy, layout.stage)


@cache
def alone(setup: Setup = Setup()) -> Outcome:
    """The run in one process, computed once."""
    first = pairs_of(setup)[0]
    assert len(make_step(first, 1).dealt[0]) >= 8
    return train(make_trainer(setup), setup)


def joined(outcomes: list[Outcome]) -> Outcome:
    """What all ranks told, with the weights put together; all must have told the same numbers."""
    first = outcomes[0]
    for other in outcomes[1:]:
        assert (other.losses, other.grad_norms) == (first.losses, first.grad_norms)
        assert all(map(torch.equal, other.logps, first.logps))
    return Outcome(
        first.losses,
        first.grad_norms,
        first.logps,
        whole([outcome.weights for outcome in outcomes]),
    )


def whole(parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pieces of several ranks -> whole tensors; every number must come from exactly one rank."""
    tensors: dict[str, Tensor] = {}
    found: dict[str, int] = {}
    for pieces in parts:
        for name, piece in pieces.items():
            own = piece if isinstance(piece, Shard) else Shard(piece, ShardSpec.full(piece.shape))
            into = tensors.setdefault(name, own.tensor.new_empty(own.spec.whole))
            into[own.spec.slices] = own.tensor
            found[name] = found.get(name, 0) + own.tensor.numel()
    assert found == {name: tensor.numel() for name, tensor in tensors.items()}
    return tensors


def assert_same(got: Outcome, expected: Outcome) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    for mine, theirs in zip(got.logps, expected.logps, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5)
    assert got.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        difference = (got.weights[name] - weight).abs().max().item()
        assert difference < 1e-6, f"{name}: {difference}"


def differences(got: Outcome, expected: Outcome) -> tuple[float, float, float]:
    """The largest relative ones of losses and gradient norms, the largest absolute one of
    weights."""
    losses = max(abs(a / b - 1) for a, b in zip(got.losses, expected.losses, strict=True))
    norms = max(abs(a / b - 1) for a, b in zip(got.grad_norms, expected.grad_norms, strict=True))
    weights = max(
        (got.weights[name] - w).abs().max().item() for name, w in expected.weights.items()
    )
    return losses, norms, weights


def _detached(piece: Tensor | Shard) -> Tensor | Shard:
    if isinstance(piece, Shard):
        return Shard(piece.tensor.detach().clone(), piece.spec)
    return piece.detach().clone()
