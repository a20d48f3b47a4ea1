"""Pipelines as arithmetic, and the keys that ask for them."""

from __future__ import annotations

import pytest

from rather.config.load import config_from_dict
from rather.config.strategies import SCHEDULES, Pipeline, layout
from rather.errors import ConfigError
from tests.config.conftest import smallest, strategy

VIRTUAL = "virtual_pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("details", "pipeline"),
    [
        ("pp_size=4", Pipeline(4, "1f1b", 1)),
        ("pipeline_model_parallel_size=2", Pipeline(2, "1f1b", 1)),
        (f"pp_size=2 + {VIRTUAL}=3", Pipeline(2, "interleaved", 3)),
        (f"pp_size=2 + {VIRTUAL}=null", Pipeline(2, "1f1b", 1)),
        ("pp_size=2 + pipeline_schedule=zbv", Pipeline(2, "zbv", 2)),
        ("pp_size=2 + pipeline_schedule=interleaved", Pipeline(2, "interleaved", 2)),
        (f"pp_size=2 + pipeline_schedule=zero_bubble + {VIRTUAL}=2", Pipeline(2, "zero_bubble", 2)),
        ("", Pipeline(1, "1f1b", 1)),
    ],
)
def test_keys_of_a_pipeline(details: str, pipeline: Pipeline) -> None:
    config = config_from_dict(smallest(*strategy(f"default: {details}")))
    assert layout(config.actor_train).pipeline == pipeline


@pytest.mark.parametrize(
    ("schedule", "refused"), [("zero_bubble", True), ("dualpipev", True), ("1f1b", False)]
)
def test_compiled_layers_have_one_backward_pass(schedule: str, refused: bool) -> None:
    values = smallest("compile=on", *strategy(f"default: pp_size=2 + pipeline_schedule={schedule}"))
    if refused:
        with pytest.raises(ConfigError, match=r"pipeline_schedule: .*compile=on"):
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
