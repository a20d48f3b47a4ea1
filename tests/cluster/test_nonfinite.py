"""Two ranks on Ray, one of which has a NaN: both skip the step, or both go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rather.checkpoint.checkpoint import open_checkpoint
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.faults import inject
from tests.runs import incidents
from tests.tiny import make_config, metrics

FAULT = "step=3,phase=backward,role=actor_train,rank=1,kind=nan"


def run(folder: Path, name: str, **changes: Any) -> DPOConfig:
    config = make_config(
        folder,
        exp_name=name,
        max_steps=4,
        save_steps=1,
        max_ckpt_to_keep=0,
        actor_train__device_mapping=[0, 1],
        actor_train__training_args__per_device_train_batch_size=4,
        actor_train__max_tokens_per_microbatch_in_train=128,  # so that both ranks have pairs
        **changes,
    )
    with inject.attached(FAULT, config.run_dir, ray=True):
        assert DPOPipeline(config).run() == 0
    return config


def weights(config: DPOConfig, step: int) -> dict[str, Tensor]:
    found = open_checkpoint(config.run_dir / f"checkpoint-{step}")
    return {
        name: tensor
        for group in ("model", "optimizer")
        for name, tensor in found.stored(group).items()
    }


@pytest.mark.usefixtures("local_ray")
def test_both_ranks_skip_or_roll_back(tmp_path: Path) -> None:
    skipped = run(tmp_path, "skip")
    two, three = weights(skipped, 2), weights(skipped, 3)
    assert all(torch.equal(tensor, three[name]) for name, tensor in two.items())
    (told,) = incidents(skipped)
    assert (told["kind"], told["step"], told["ranks"]) == ("nonfinite", 3, [1])
    assert 0 < told["pair_count"] == len({pair["line"] for pair in told["pairs"]}) < 8
    back = run(tmp_path, "back", on_nonfinite="rollback")
    assert [(each["kind"], each.get("to")) for each in incidents(back)] == [
        ("nonfinite", None),
        ("rollback", 2),
    ]
    four, again = weights(skipped, 4), weights(back, 4)
    assert all(torch.equal(tensor, again[name]) for name, tensor in four.items())
    assert [line["step"] for line in metrics(back)] == [line["step"] for line in metrics(skipped)]
