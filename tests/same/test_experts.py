"""Expert parallel: losses, router loss, the gradient of every parameter and the weights are those
of one process, with every other axis. Checkpoints and files fit any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rather.checkpoint import checkpoint
from rather.checkpoint.sharded_tensors import ShardedFiles
from rather.config.schema import ActorModelArgs, ModelArgs
from rather.config.strategies import Layout
from rather.errors import ConfigError
from rather.losses.objective import configure
from rather.model.adapters import inject
from rather.model.export import FileCast, export_model, export_stored
from rather.model.files import ModelFiles, weight_files
from rather.optim.adamw import local
from rather.optim.rounding import Rounding
from rather.parallel.apply import divide
from rather.parallel.experts import check_experts, refuse_adapted_experts
from rather.parallel.load import load_divided, load_policy
from rather.parallel.mesh import build_mesh
from rather.parallel.shard import STAGES
from rather.parallel.stages import Stages
from rather.train.rank_trainer import RankTrainer, WholeModelRunner
from tests.cells import cells
from tests.model.test_experts import FAMILIES, SMALL
from tests.same.canonical import (
    EXPERTS,
    Outcome,
    Setup,
    assert_same,
    joined,
    make_policy,
    make_trainer,
    train,
    whole,
)
from tests.same.pool import pool
from tests.same.test_elastic import MORE, SAVED_AFTER, assert_goes_on, on, save
from tests.tiny import make_model

SETUP = Setup("qwen3_moe", tied=False, steps=2, layers=2, router_loss=0.3)


def trainer_on(
    layout: Layout, setup: Setup = SETUP, compute: torch.dtype = torch.float32
) -> RankTrainer:
    mesh = build_mesh(layout, "cpu")
    policy: Any = divide(make_policy(setup), mesh, layout, compute=compute)
    runner = None if layout.pp > 1 else WholeModelRunner(policy, STAGES[layout.stage])
    return make_trainer(setup, mesh, policy, runner)


def run(layout: Layout | None, setup: Setup) -> tuple[Outcome, dict[str, Any]]:
    """One rank of a run, with its part of the gradients of the first step."""
    trainer = trainer_on(layout, setup) if layout else make_trainer(setup)
    optimizer, gradients = trainer._trained, dict[str, Any]()
    step = optimizer.step

    def recorded(grad_norm: float) -> None:
        if not gradients:
            named = {name: g.clone() for name, g in optimizer.named_gradients().items()}
            gradients.update(trainer._pieces(named))
        step(grad_norm)

    optimizer.step = recorded  # type: ignore[method-assign]
    return train(trainer, setup), gradients


def assert_like_one_process(layout: Layout, setup: Setup = SETUP) -> None:
    expected, gradients = run(None, setup)
    outcomes, pieces = zip(*pool(layout.devices).run(run, layout, setup), strict=True)
    assert_same(joined(list(outcomes)), expected)
    found: dict[str, Tensor] = whole(list(pieces))
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = float((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6))
        assert error < 1e-5, f"{name}: {error:.2g}"


LAYOUTS = {
    "ep2 ddp": Layout(2, ep=2),
    "ep2 zero3": Layout(2, ep=2, stage=3, shard=2),
    "ep2 zero1 efsdp2": Layout(4, ep=2, stage=1, shard=4),
    "ep2 zero2 efsdp2": Layout(4, ep=2, stage=2, shard=4),
    "ep2 zero3 efsdp2": Layout(4, ep=2, stage=3, shard=4),
    "ep2 ddp efsdp2": Layout(4, ep=2),
    "ep2 hsdp": Layout(4, ep=2, stage=3, shard=2),
    "ep4 zero3": Layout(4, ep=4, stage=3, shard=4),
    "ep4 hsdp": Layout(4, ep=4, stage=3, shard=2),
    "ep4 zero3 efsdp2": Layout(8, ep=4, stage=3, shard=8),
    "ep2 tp2": Layout(2, tp=2, ep=2, stage=3, shard=2),
    "ep2 tp2 by sequence": Layout(2, tp=2, ep=2, stage=3, shard=2, sequence_parallel=True),
    "ep2 pp2": Layout(2, pp=2, ep=2, stage=1, shard=2),
    "ep2 cp2": Layout(2, cp=2, ep=2, stage=3, shard=2),
    "ep2 tp2 efsdp2": Layout(4, tp=2, ep=2, stage=3, shard=4),
    "ep2 pp2 efsdp2": Layout(4, pp=2, ep=2, stage=1, shard=4),
    "ep2 cp2 efsdp2": Layout(4, cp=2, ep=2, stage=3, shard=4),
    "ep4 tp2": Layout(4, tp=2, ep=4, stage=2, shard=4),
    "ep4 pp2": Layout(4, pp=2, ep=4, stage=1, shard=4),
    "ep4 cp2": Layout(4, cp=2, ep=4, stage=2, shard=4),
    "ep2 tp2 pp2": Layout(2, tp=2, pp=2, ep=2, stage=1, shard=2),
    "ep2 tp2 cp2": Layout(2, tp=2, cp=2, ep=2, stage=3, shard=2, sequence_parallel=True),
    "ep2 pp2 cp2": Layout(2, pp=2, cp=2, ep=2, stage=1, shard=2),
    "ep2 recomputed": Layout(2, ep=2, stage=3, shard=2, recompute="full"),
}


# Each other axis with and without shards of experts (efsdp), and three axes at once.
FAST = ["ep2 zero3 efsdp2", "ep2 tp2", "ep2 pp2"]
WIDE = ["ep2 ddp", "ep2 zero1 efsdp2", "ep4 hsdp", "ep2 tp2 by sequence", "ep4 cp2",
        "ep2 pp2 efsdp2", "ep2 tp2 pp2", "ep2 tp2 cp2", "ep2 recomputed"]  # fmt: skip


@pytest.mark.parametrize("name", cells(FAST, WIDE))
def test_every_axis(name: str) -> None:
    assert_like_one_process(LAYOUTS[name])


@pytest.mark.wide
@pytest.mark.parametrize("family", sorted(EXPERTS.keys() - {"qwen3_moe"}))
def test_every_family(family: str) -> None:
    setup = Setup(family, tied=False, steps=2, layers=2, router_loss=0.3)
    assert_like_one_process(LAYOUTS["ep2 zero3 efsdp2"], setup)


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_schedules_of_a_pipeline(schedule: str) -> None:
    layout = Layout(2, pp=2, ep=2, stage=1, shard=2, schedule=schedule, virtual=2)
    assert_like_one_process(layout, replace(SETUP, layers=4))


def in_half_precision(layout: Layout, setup: Setup) -> Outcome:
    return train(trainer_on(layout, setup, torch.bfloat16), setup)


def test_half_precision() -> None:
    """The same products, whose weights are rounded alike; only sums of gradients differ."""
    setup = replace(SETUP, family="deepseek_v3", steps=1)
    divided, plain = (
        joined(pool(2).run(in_half_precision, Layout(2, ep=ep, stage=3, shard=2), setup))
        for ep in (2, 1)
    )
    assert divided.losses == pytest.approx(plain.losses, rel=1e-6)
    assert divided.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)


STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(layout: Layout | None, stacks: Sequence[str] = ()) -> Outcome:
    """One rank of a run that trains adapters of attention, and of stacks of frozen experts."""
    policy = make_policy(SETUP)
    torch.manual_seed(1)
    inject(policy.causal_lm, ActorModelArgs(lora_rank=2, lora_target=["all-linear", *stacks]))
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.1)
    if layout is None:
        return train(make_trainer(SETUP, None, policy), SETUP)
    mesh = build_mesh(layout, "cpu")
    divided: Any = divide(policy, mesh, layout, compute=torch.float32)
    runner = WholeModelRunner(divided, STAGES[layout.stage])
    return train(make_trainer(SETUP, mesh, divided, runner), SETUP)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["ep2 zero3 efsdp2", "ep2 tp2"])
def test_adapters_next_to_divided_experts(name: str) -> None:
    found = joined(pool(4).run(adapted, LAYOUTS[name]))
    assert_same(found, adapted(None))
    assert any(".lora_" in name for name in found.weights)


def test_adapters_of_experts_on_two_ranks() -> None:
    layout = Layout(2, stage=3, shard=2)
    found = joined(pool(2).run(adapted, layout, STACKS))
    assert_same(found, adapted(None, STACKS))
    assert sum(".experts." in name for name in found.weights) == 8


@pytest.mark.parametrize("key", ["tp", "pp", "ep"])
def test_adapters_of_experts_are_not_divided(key: str) -> None:
    policy = make_policy(SETUP)
    inject(policy.causal_lm, ActorModelArgs(lora_target=STACKS))
    with pytest.raises(ConfigError, match=f"adapters cannot be divided; set {key}_size to 1"):
        refuse_adapted_experts(policy, Layout(2, **{key: 2}))


# --- checkpoints ---


def elastic(layout: Layout) -> RankTrainer:
    return trainer_on(
        layout, Setup("qwen3_moe", tied=False, lr=1e-4, layers=2, steps=16, router_loss=0.3)
    )


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """Losses and router losses of more steps of a run that was never interrupted."""
    setup = Setup(steps=SAVED_AFTER + MORE)
    return train(elastic(Layout(1)), setup, 0, SAVED_AFTER + MORE).losses[2 * SAVED_AFTER :]


@pytest.mark.parametrize(
    ("before", "after"),
    [("ep4 hsdp", "ep2 pp2"), ("ep2 tp2", "ep2 zero1 efsdp2"), ("ep2 ddp", "1")],
)
def test_a_checkpoint_resumes_on_another_ep(
    tmp_path: Path, expected: list[float], before: str, after: str
) -> None:
    layouts = LAYOUTS | {"1": Layout(1)}
    on(layouts[before], save, tmp_path, elastic)
    assert_goes_on(tmp_path / f"checkpoint-{SAVED_AFTER}", layouts[after], expected, elastic)


# --- files ---


def make_experts(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A folder whose files name each expert."""
    make_model(folder)
    own = {"vocab_size": 63, "tie_word_embeddings": False}
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **own})
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = torch.randn(buffer.shape) / 3  # not on the grid of bfloat16
    model.save_pretrained(folder)
    return folder


def write(folder: Path, layout: Layout, target: Path) -> dict[str, Any]:
    """Load, change every weight a little, export. Return what this rank had loaded."""
    mesh = build_mesh(layout, "cpu")
    policy = load_divided(str(folder), ModelArgs(), "cpu", mesh, layout, trains=True)
    trainer = RankTrainer(policy, configure(["sigmoid"], {}), mesh=mesh)
    loaded = trainer._pieces({n: local(p.detach()).clone() for n, p in policy.named_parameters()})
    with torch.no_grad():
        for parameter in policy.parameters():
            local(parameter).mul_(1.0007)
    pieces = target.with_name("pieces")
    checkpoint.write_groups(pieces, {"weights": trainer.weight_pieces()}, rank=dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 0:
        part: Any = policy.stages[0] if isinstance(policy, Stages) else policy
        cast = FileCast(torch.bfloat16, Rounding("dithered"), ModelFiles(weight_files(folder)))
        stored = ShardedFiles(sorted(pieces.iterdir()))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        export_stored(part.causal_lm, stored, tokenizer, target, "card", cast)
        assert cast.kept.weights == sum(stored[name].numel() for name in stored)
    return loaded


@pytest.mark.parametrize(
    ("family", "name"),
    cells(
        [("deepseek_v3", "ep2 zero3")],
        [("mixtral", "ep2 zero3"), ("olmoe", "ep2 ddp"), ("qwen3_moe", "ep2 pp2")],
    ),
)
def test_ranks_read_and_write_the_files_of_one_process(
    tmp_path: Path, family: str, name: str
) -> None:
    folder, layout = make_experts(tmp_path / "base", family), LAYOUTS[name]
    (tmp_path / "pieces").mkdir()
    loaded = whole(pool(layout.devices).run(write, folder, layout, tmp_path / "model"))
    policy = load_policy(str(folder), ModelArgs(dtype="fp32"), "cpu")
    weights = dict(policy.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    policy.rounding = Rounding("dithered")
    changed = {name: weight.detach() * 1.0007 for name, weight in weights.items()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    export_model(policy, changed, tokenizer, tmp_path / "expected", "card")
    found, expected, source = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model", "expected", "base")
    )
    assert found.keys() == expected.keys() == source.keys()
    assert any(".experts.1." in name for name in found)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
        assert found[name].dtype == source[name].dtype, name
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(found[name], source[name])


# --- what is refused ---


@pytest.mark.parametrize(
    ("family", "ep", "text"),
    [
        ("llama", 2, "does not divide the 0 experts of a layer of model family 'llama'"),
        ("qwen3_moe", 3, "does not divide the 8 experts"),
        ("gpt_oss", 2, "the experts of model family 'gpt_oss' cannot be divided"),
    ],
)
def test_experts_that_cannot_be_divided(family: str, ep: int, text: str) -> None:
    sizes = FAMILIES.get(family, {"num_local_experts": 8} if family == "gpt_oss" else {})
    with pytest.raises(ConfigError, match=text):
        check_experts(AutoConfig.for_model(family, **sizes), ep)
