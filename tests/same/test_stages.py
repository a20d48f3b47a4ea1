"""Pipelines: the canonical run, cut into stages, gives the same losses, norms and weights under
every schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from rather.config.schema import ModelArgs
from rather.config.strategies import Layout, Pipeline
from rather.data.pack import empty_batch, pack
from rather.errors import ConfigError
from rather.model.layers import Recompute
from rather.model.policy import pair_columns
from rather.parallel import stages
from rather.parallel.apply import divide
from rather.parallel.context import filled_to
from rather.parallel.load import load_divided
from rather.parallel.mesh import Mesh, build_mesh
from rather.parallel.stages import Stages, check_cut, cut
from tests.cells import cells
from tests.same.canonical import (
    MANY_STEPS,
    STEPS,
    VARIANTS,
    Outcome,
    Setup,
    alone,
    assert_same,
    joined,
    make_optimizer,
    make_policy,
    make_trainer,
    pairs_of,
    train,
)
from tests.same.pool import pool

SHORT = 2  # steps, where the twenty of the canonical run would show nothing more


def piped(setup: Setup, layout: Layout, recompute: Recompute = "none") -> Outcome:
    """The run on all ranks of a layout."""
    return joined(pool(layout.devices).run(run, setup, layout, recompute))


def run(setup: Setup, layout: Layout, recompute: Recompute) -> Outcome:
    mesh = build_mesh(layout, "cpu")
    layout = replace(layout, recompute=recompute)
    divided: Any = divide(make_policy(setup), mesh, layout, compute=torch.float32)
    return train(make_trainer(setup, mesh, divided, divided), setup)


def layout_of(pipeline: Pipeline, *, dp: int = 1, **others: Any) -> Layout:
    return Layout(
        dp, pp=pipeline.ranks, schedule=pipeline.schedule, virtual=pipeline.virtual, **others
    )


@pytest.mark.parametrize(
    ("schedule", "steps"),
    cells(
        [("1f1b", STEPS), ("interleaved", STEPS), ("zbv", STEPS)],
        [("gpipe", STEPS), ("zero_bubble", MANY_STEPS), ("dualpipev", MANY_STEPS)],
    ),
)
def test_two_ranks_by_every_schedule(schedule: str, steps: int) -> None:
    setup = Setup(steps=steps)
    assert_same(piped(setup, layout_of(Pipeline.of(2, schedule, None))), alone(setup))


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zbv"])
def test_four_ranks_with_virtual_stages(schedule: str) -> None:
    setup = Setup(steps=SHORT)
    assert_same(piped(setup, layout_of(Pipeline(4, schedule, 2))), alone(setup))


@pytest.mark.parametrize(
    ("variant", "schedule"),
    [("aot", "1f1b"), ("sigmoid and sft", "1f1b"), ("untied", "zbv"), ("qwen3", "zbv")],
)
def test_models_and_losses(variant: str, schedule: str) -> None:
    setup = Setup(steps=SHORT, **VARIANTS[variant])
    assert_same(piped(setup, layout_of(Pipeline.of(2, schedule, None))), alone(setup))


@pytest.mark.parametrize(
    ("schedule", "others"),
    cells(
        [("1f1b", {"cp": 2})],
        [
            ("interleaved", {"dp": 2, "shard": 2, "stage": 1}),
            ("zero_bubble", {"dp": 2, "shard": 2, "stage": 3}),
            ("interleaved", {"tp": 2, "sequence_parallel": True}),
            ("zbv", {"tp": 2}),
        ],
    ),
    ids=str,
)
def test_with_other_axes(schedule: str, others: dict[str, Any]) -> None:
    setup = Setup(steps=SHORT)
    assert_same(piped(setup, layout_of(Pipeline.of(2, schedule, None), **others)), alone(setup))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_layers_that_compute_their_activations_again(schedule: str) -> None:
    setup = Setup(steps=SHORT)
    assert_same(piped(setup, layout_of(Pipeline.of(2, schedule, None)), "full"), alone(setup))


def test_both_ends_on_one_rank_cannot_be_sharded() -> None:
    with pytest.raises(
        AssertionError, match="the embedding that they share cannot be sharded twice"
    ):
        piped(Setup(steps=1), layout_of(Pipeline(2, "zbv", 2), dp=2))
    setup = Setup(steps=SHORT, tied=False)
    assert_same(piped(setup, layout_of(Pipeline(2, "zbv", 2), dp=2)), alone(setup))


# --- weights that change, and weights from files ---


def before_and_after(setup: Setup, layout: Layout) -> list[Tensor]:
    """Log-probs of more micro-batches than run at a time, then with all weights halved."""
    mesh = build_mesh(layout, "cpu")
    policy: Any = make_policy(setup)
    whole = {name: torch.zeros_like(parameter) for name, parameter in policy.named_parameters()}
    if layout.devices > 1:
        policy = divide(policy, mesh, layout, compute=torch.float32)
    trainer = make_trainer(setup, mesh, policy)
    batches = pack([pair for pairs in pairs_of(setup) for pair in pairs], 72, ranks=layout.dp)
    own = batches[mesh.rank("dp") :: layout.dp]
    first = trainer.log_probs(own)["sum"]
    trainer.mix_weights(whole, 0.5)
    return [first, trainer.log_probs(own)["sum"]]


@pytest.mark.parametrize(
    ("pipeline", "others"),
    [
        (Pipeline(2), {"dp": 2, "shard": 2, "stage": 2}),
        (Pipeline(2, "zbv", 2), {}),
    ],
    ids=str,
)
def test_log_probs_follow_the_weights(pipeline: Pipeline, others: dict[str, Any]) -> None:
    setup, layout = Setup(steps=SHORT), layout_of(pipeline, **others)
    expected = before_and_after(setup, Layout(1))
    for found in pool(layout.devices).run(before_and_after, setup, layout):
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5)


def loaded(folder: str, layout: Layout) -> list[float]:
    """Losses of a model of which each rank reads its stages."""
    setup, mesh = Setup(steps=SHORT), build_mesh(layout, "cpu")
    divided: Any = load_divided(folder, ModelArgs(), "cpu", mesh, layout, trains=True)
    return train(make_trainer(setup, mesh, divided), setup).losses


@pytest.mark.parametrize("schedule", ["zbv"])
def test_ranks_read_their_stages_from_files(schedule: str, tmp_path: Path) -> None:
    make_policy(Setup()).causal_lm.save_pretrained(tmp_path)
    layout = layout_of(Pipeline.of(2, schedule, None))
    for losses in pool(2).run(loaded, str(tmp_path), layout):
        assert losses == pytest.approx(alone(Setup(steps=SHORT)).losses, rel=1e-5)


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


@pytest.mark.parametrize("family", ["gpt2", "opt", "falcon"])
def test_families_without_a_plan_are_refused_by_name(family: str) -> None:
    with pytest.raises(
        ConfigError, match=f"model family '{family}' cannot be cut .* no plan of its stages"
    ):
        check_cut(CONFIG_MAPPING[family]())


def test_a_family_that_differs_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stages._PassThrough, "forward", lambda _self, hidden_states, **_: 1.1 * hidden_states
    )
    with pytest.raises(
        ConfigError, match=r"model family 'llama' .* its stages differ from the whole by"
    ):
        check_cut(CONFIG_MAPPING["llama"]())


def test_a_family_that_fails_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stages._PassThrough, "forward", lambda _self, hidden_states, **_: hidden_states[:, :, 1:]
    )
    with pytest.raises(ConfigError, match="model family 'llama' cannot be cut"):
        check_cut(CONFIG_MAPPING["llama"]())


def test_parameters_of_no_stage_are_refused() -> None:
    policy = make_policy(Setup())
    policy.causal_lm.model.soul = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"model\.soul\.weight belongs to no stage"):
        cut(policy, Pipeline(2), 0)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="pp_size: 3 ranks x 3 = 9 stages, but the model has only 8 layers"
    ):
        cut(make_policy(Setup()), Pipeline(3, "interleaved", 3), 0)


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
