"""Pipelines as arithmetic, and the keys that ask for them."""

from __future__ import annotations

import pytest

from rather.config.load import config_from_dict
from rather.config.strategies import SCHEDULES, Pipeline, layout
from rather.errors import ConfigError
from tests.config.conftest import smallest

DETAILS = "actor_train.strategy_args.strategy_config"
VIRTUAL = "virtual_pipeline_model_parallel_size"


def settings(*details: str, devices: int = 4) -> dict[str, object]:
    return smallest(
        f"actor_train.device_mapping=0-{devices - 1}",
        *(f"{DETAILS}.{detail}" for detail in details),
    )


@pytest.mark.parametrize(
    ("details", "pipeline"),
    [
        (["pp_size=4"], Pipeline(4, "1f1b", 1)),
        (["pipeline_model_parallel_size=2"], Pipeline(2, "1f1b", 1)),
        (["pp_size=2", f"{VIRTUAL}=3"], Pipeline(2, "interleaved", 3)),
        (["pp_size=2", f"{VIRTUAL}=null"], Pipeline(2, "1f1b", 1)),
        (["pp_size=2", "pipeline_schedule=zbv"], Pipeline(2, "zbv", 2)),
        (["pp_size=2", "pipeline_schedule=interleaved"], Pipeline(2, "interleaved", 2)),
        (
            ["pp_size=2", "pipeline_schedule=zero_bubble", f"{VIRTUAL}=2"],
            Pipeline(2, "zero_bubble", 2),
        ),
        ([], Pipeline(1, "1f1b", 1)),
    ],
)
def test_keys_of_a_pipeline(details: list[str], pipeline: Pipeline) -> None:
    assert layout(config_from_dict(settings(*details)).actor_train).pipeline == pipeline


@pytest.mark.parametrize(
    ("details", "message"),
    [
        (
            ["pp_size=2", "pipeline_schedule=1f1"],
            "'1f1' is not allowed: Input should be 'gpipe', '1f1b'",
        ),
        (
            ["pp_size=2", f"{VIRTUAL}=0"],
            "0 is not allowed: Input should be greater than or equal to 1",
        ),
        (
            ["pp_size=2", "pipeline_schedule=1f1b", f"{VIRTUAL}=2"],
            "'1f1b' takes 1 to 1 stages a rank, not 2",
        ),
        (
            ["pp_size=2", "pipeline_schedule=zbv", f"{VIRTUAL}=3"],
            "'zbv' takes 2 to 2 stages a rank, not 3",
        ),
        (
            ["pp_size=2", "pipeline_schedule=interleaved", f"{VIRTUAL}=1"],
            "takes 2 to any stages a rank, not 1",
        ),
        (
            ["pp_size=2", "pipeline_schedule=zbv", "recompute_granularity=selective"],
            "selective needs one backward pass, and 'zbv' has two; set full or null",
        ),
        ([f"{VIRTUAL}=2"], "needs pp_size > 1; remove it"),
        (["pipeline_schedule=gpipe"], "needs pp_size > 1; remove it"),
    ],
)
def test_impossible_schedules(details: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from_dict(settings(*details))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("schedule", "refused"), [("zero_bubble", True), ("dualpipev", True), ("1f1b", False)]
)
def test_compiled_layers_have_one_backward_pass(schedule: str, refused: bool) -> None:
    values = settings("pp_size=2", f"pipeline_schedule={schedule}") | {"compile": "on"}
    if refused:
        with pytest.raises(
            ConfigError,
            match="cannot be combined with compile=on",
        ):
            config_from_dict(values)
    else:
        assert config_from_dict(values).compile == "on"


def test_each_stage_lies_on_one_rank() -> None:
    assert [Pipeline(2, "interleaved", 2).stages_of(rank) for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert [Pipeline(2, "zbv", 2).stages_of(rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert Pipeline(4, "dualpipev", 2).rank_of(7) == 0
    assert Pipeline(4, "interleaved", 2).rank_of(7) == 3


def test_layers_are_shared_out_without_a_gap() -> None:
    pipeline = Pipeline(3)
    assert [list(pipeline.layers_of(stage, 8)) for stage in range(3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7],
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_the_number_of_micro_batches_grows_by_as_little_as_the_schedule_allows(
    schedule: str, ranks: int
) -> None:
    pipeline = Pipeline.of(ranks, schedule, None)
    for bins in range(1, 50):
        number = pipeline.microbatches(bins)
        assert number >= max(bins, pipeline.ranks)
        if bins % pipeline.multiple == 0:
            assert number == bins
        if schedule in ("interleaved", "zero_bubble"):
            assert number % max(1, number // ranks) == 0
