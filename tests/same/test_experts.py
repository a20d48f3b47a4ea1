"""Divided experts in half precision; files that fit any number of ranks; what cannot be divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rather.config.schema import ModelArgs
from rather.config.strategies import Layout
from rather.losses.objective import configure
from rather.model.export import FileCast, export_model
from rather.model.files import ModelFiles, weight_files
from rather.optim.adamw import local
from rather.optim.rounding import Rounding
from rather.parallel.experts import check_experts, refuse_adapted_experts
from rather.parallel.load import load_divided, load_policy
from rather.parallel.mesh import build_mesh
from rather.train.rank_trainer import RankTrainer
from tests.cells import cells
from tests.model.test_experts import FAMILIES, SMALL
from tests.same.against_whole import export_together, refusal
from tests.same.canonical import Outcome, Setup, joined, make_policy, train, trainer_on, whole
from tests.same.cases import TASKS, layout_of
from tests.same.pool import pool
from tests.tiny import make_model


def in_half_precision(layout: Layout, setup: Setup) -> Outcome:
    return train(trainer_on(layout, setup, torch.bfloat16), setup)


def test_half_precision() -> None:
    """The same products, whose weights are rounded alike; only sums of gradients differ."""
    setup = replace(TASKS["deepseek_v3"], steps=1)
    divided, plain = (
        joined(pool(2).run(in_half_precision, layout_of(layout), setup))
        for layout in ("dp2 zero3 ep2", "dp2 zero3")
    )
    assert divided.losses == pytest.approx(plain.losses, rel=1e-6)
    assert divided.grad_norms == pytest.approx(plain.grad_norms, rel=1e-5)


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
    cast = FileCast(torch.bfloat16, Rounding("dithered"), ModelFiles(weight_files(folder)))
    stored = export_together(policy, mesh, folder, target, cast)
    if stored is not None:
        assert cast.kept.weights == sum(stored[name].numel() for name in stored)
    return loaded


@pytest.mark.parametrize(
    ("family", "name"),
    cells(
        [("deepseek_v3", "dp2 zero3 ep2")],
        [("mixtral", "dp2 zero3 ep2"), ("olmoe", "dp2 ep2"), ("qwen3_moe", "dp2 zero1 ep2 pp2")],
    ),
)
def test_ranks_read_and_write_the_files_of_one_process(
    tmp_path: Path, family: str, name: str
) -> None:
    folder, layout = make_experts(tmp_path / "base", family), layout_of(name)
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


@pytest.mark.parametrize("key", ["tp", "pp", "ep"])
def test_adapters_of_experts_are_not_divided(key: str) -> None:
    policy = make_policy(TASKS["adapters of experts"])
    said = refusal(refuse_adapted_experts, policy, Layout(2, **{key: 2}))
    assert f"adapters cannot be divided; set {key}_size to 1" in said


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
    assert text in refusal(check_experts, AutoConfig.for_model(family, **sizes), ep)
