"""What two runs must have in common: metrics, and exported weights."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file

from rather.config.run_config import DPOConfig
from tests.runs import assert_equal, exported
from tests.tiny import metrics, untimed

MODEL = "model/model.safetensors"


def series(config: DPOConfig, key: str) -> list[Any]:
    return [line[key] for line in metrics(config) if key in line]


def assert_close(
    alone: DPOConfig,
    config: DPOConfig,
    *keys: str,
    files: tuple[str, ...] = (MODEL,),
    within: float = 1e-6,
) -> None:
    """Losses, further metrics and weights are those of the run in one process, up to rounding."""
    for key in ("loss", *keys):
        assert series(alone, key)
        assert series(config, key) == pytest.approx(series(alone, key), rel=1e-5), key
    for file in files:
        one, other = (load_file(each.run_dir / file) for each in (alone, config))
        assert one.keys() == other.keys()
        assert max(float((one[key] - other[key]).abs().max()) for key in one) < within, file


def assert_same(one: DPOConfig, other: DPOConfig) -> None:
    """All metrics but times are equal, and the weights to the bit."""
    assert untimed(metrics(other)) == untimed(metrics(one))
    assert_equal(exported(other), exported(one))
