"""Pipelines: log-probs, files and gradients of a model that is cut, and which models can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from rather.config.schema import ModelArgs
from rather.config.strategies import Layout, Pipeline
from rather.data.pack import empty_batch, pack
from rather.model.policy import pair_columns
from rather.parallel import stages
from rather.parallel.context import filled_to
from rather.parallel.load import load_divided
from rather.parallel.mesh import Mesh, build_mesh
from rather.parallel.stages import Stages, check_cut, cut
from tests.cells import cells
from tests.same.against_whole import refusal
from tests.same.canonical import (
    Setup,
    alone,
    make_optimizer,
    make_policy,
    make_trainer,
    pairs_of,
    train,
    trainer_on,
)
from tests.same.cases import layout_of
from tests.same.pool import pool

SHORT = Setup(steps=2)


def test_both_ends_on_one_rank_cannot_be_sharded() -> None:
    text = "the embedding that they share cannot be sharded twice"
    with pytest.raises(AssertionError, match=text):
        pool(4).run(trainer_on, layout_of("dp2 pp2 zbv"), SHORT)


# --- weights that change, and weights from files ---


def before_and_after(layout: Layout) -> list[Tensor]:
    """Log-probs of more micro-batches than run at a time, then with all weights halved."""
    trainer = trainer_on(layout, SHORT)
    zeros = {name: torch.zeros_like(p) for name, p in make_policy(SHORT).named_parameters()}
    batches = pack([pair for pairs in pairs_of(SHORT) for pair in pairs], 72, ranks=layout.dp)
    own = batches[trainer.mesh.rank("dp") :: layout.dp]
    first = trainer.log_probs(own)["sum"]
    trainer.mix_weights(zeros, 0.5)
    return [first, trainer.log_probs(own)["sum"]]


@pytest.mark.parametrize("layout", ["dp2 zero2 pp2", "pp2 zbv"])
def test_log_probs_follow_the_weights(layout: str) -> None:
    expected = before_and_after(Layout(1))
    for found in pool(layout_of(layout).devices).run(before_and_after, layout_of(layout)):
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5)


def loaded(folder: str, layout: Layout) -> list[float]:
    """Losses of a model of which each rank reads its stages."""
    mesh = build_mesh(layout, "cpu")
    divided = load_divided(folder, ModelArgs(), "cpu", mesh, layout, trains=True)
    return train(make_trainer(SHORT, mesh, divided), SHORT).losses


def test_ranks_read_their_stages_from_files(tmp_path: Path) -> None:
    make_policy(SHORT).causal_lm.save_pretrained(tmp_path)
    for losses in pool(2).run(loaded, str(tmp_path), layout_of("pp2 zbv")):
        assert losses == pytest.approx(alone(SHORT).losses, rel=1e-5)


# --- gradients in half precision ---


def narrow_gradients(schedule: str) -> dict[str, Tensor]:
    """Of a bfloat16 model, added up over micro-batches."""
    setup = Setup(steps=1, tied=False)
    mesh, pipeline = Mesh.build(pp=2), Pipeline.of(2, schedule, 1)
    own = cut(make_policy(setup).bfloat16(), pipeline, mesh.rank("pp"))
    model: Any = Stages(own, pipeline, mesh, torch.bfloat16)
    optimizer = make_optimizer(model, setup)
    batches = pack(pairs_of(setup)[0], 72)
    model.backward(batches, (), lambda _batch, columns: columns["sum"].sum())
    return {
        name: gradient
        for name in optimizer.parameters
        if (gradient := optimizer.gradient(name)) is not None
    }


def test_a_divided_backward_pass_adds_up_in_float32() -> None:
    whole, divided = (
        pool(2).run(narrow_gradients, schedule) for schedule in ("1f1b", "zero_bubble")
    )
    for one, other in zip(whole, divided, strict=True):
        assert one.keys() == other.keys() != set()
        for name, gradient in one.items():
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, other[name]), name


# --- cutting ---


def test_stages_share_out_all_parameters() -> None:
    for tied in (True, False):
        whole = dict(make_policy(Setup(tied=tied)).named_parameters())
        names = [
            name
            for rank in range(3)
            for stage in cut(make_policy(Setup(tied=tied)), Pipeline(3), rank)
            for name, parameter in stage.named_parameters()
            if parameter.shape == whole[name].shape
        ]
        twice = ["causal_lm.model.embed_tokens.weight"] if tied else []
        assert sorted(names) == sorted([*whole, *twice])


def test_a_model_without_memory_can_be_cut() -> None:
    with torch.device("meta"):
        policy = make_policy(Setup())
    (stage,) = cut(policy, Pipeline(2), 1)
    assert stage.tied
    assert all(parameter.is_meta for parameter in stage.parameters())


@pytest.mark.parametrize(
    "family",
    cells(
        ["llama", "gemma2", "granite"],
        ["qwen2", "qwen3", "mistral", "gemma", "gemma3_text", "cohere", "phi", "phi3", "olmo2", "smollm3",
         "gpt_neox", "mixtral"],
    ),
)  # fmt: skip
def test_families_that_can_be_cut(family: str) -> None:
    check_cut(CONFIG_MAPPING[family]())


@pytest.mark.parametrize(
    ("family", "change", "text"),
    [
        *((family, None, "no plan of its stages") for family in ("gpt2", "opt", "falcon")),
        ("llama", lambda hidden: 1.1 * hidden, "its stages differ from the whole by"),
        ("llama", lambda hidden: hidden[:, :, 1:], ""),
    ],
)
def test_families_that_cannot_be_cut_are_named(
    monkeypatch: pytest.MonkeyPatch, family: str, change: Any, text: str
) -> None:
    if change:
        monkeypatch.setattr(
            stages._PassThrough, "forward", lambda _self, hidden_states, **_: change(hidden_states)
        )
    said = refusal(check_cut, CONFIG_MAPPING[family]())
    assert f"model family '{family}' cannot be cut" in said
    assert text in said


def test_parameters_of_no_stage_and_more_stages_than_layers_are_refused() -> None:
    policy = make_policy(Setup())
    said = refusal(cut, policy, Pipeline(3, "interleaved", 3), 0)
    assert "pp_size: 3 ranks x 3 = 9 stages, but the model has only 8 layers" in said
    policy.causal_lm.model.soul = nn.Linear(2, 2)
    assert "model.soul.weight belongs to no stage" in refusal(cut, policy, Pipeline(2), 0)


def test_filled_up_micro_batches_have_the_same_log_probs() -> None:
    policy = make_policy(Setup())
    batch = pack(pairs_of(Setup(steps=1))[0], 72)[0]
    filled = filled_to(batch, len(batch.ids_N) + 300)
    empty = empty_batch(300)
    with torch.no_grad():
        assert torch.allclose(
            pair_columns(policy, filled)["sum"], pair_columns(policy, batch)["sum"], rtol=1e-6
        )
        assert len(filled.ids_N) == len(batch.ids_N) + 300
        assert pair_columns(policy, empty)["sum"].shape == (0, 2)
