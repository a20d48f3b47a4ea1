"""The answer does not depend on how pairs are batched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runs import exported, trained
from tests.tiny import metrics

pytestmark = pytest.mark.usefixtures("no_self_check")

SHAPES: dict[str, dict[str, Any]] = {
    "one pair a micro-batch": {"actor_train__max_tokens_per_microbatch_in_train": 1},
    "all pairs in one": {"actor_train__max_tokens_per_microbatch_in_train": 10**6},
    "three accumulation steps": {
        "actor_train__training_args__per_device_train_batch_size": 4,
        "actor_train__training_args__gradient_accumulation_steps": 3,
        "actor_train__max_tokens_per_microbatch_in_train": 100,
        "actor_train__max_tokens_per_microbatch_in_infer": 70,
        "actor_train__infer_batch_size": 2,
    },
}


def run(folder: Path, name: str, **changes: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    config = trained(folder, name, **changes)
    return metrics(config), exported(config)


def test_three_shapes_give_one_answer(tmp_path: Path) -> None:
    runs = [
        run(
            tmp_path,
            f"shape{i}",
            max_steps=8,
            **{
                "actor_train__training_args__num_train_epochs": 4.0,
                "actor_train__training_args__learning_rate": 1e-5,
                "actor_train__training_args__per_device_train_batch_size": 12,
                **shape,
            },
        )
        for i, shape in enumerate(SHAPES.values())
    ]
    (first_lines, first_weights), *others = runs
    assert [line["step"] for line in first_lines if "loss" in line] == list(range(1, 9))
    assert first_lines[-1]["eval/loss"] < first_lines[0]["eval/loss"]  # it does learn
    for lines, weights in others:
        for one, other in zip(first_lines, lines, strict=True):
            for key in one.keys() & {"loss", "eval/loss", "grad_norm", "logps/chosen", "sft_loss"}:
                assert other[key] == pytest.approx(one[key], rel=1e-5), (key, one["step"])
        for name, weight in weights.items():
            assert torch.allclose(weight, first_weights[name], rtol=0, atol=1e-6), name


def test_weights_of_pairs_are_a_weighted_mean(tmp_path: Path) -> None:
    """A pair of weight 2 counts as the same pair twice, in the loss, the gradient and the metrics."""
    rows = [
        {"prompt": "w1 w2", "chosen": " w3 w4", "rejected": " w50", "weight": 2},
        {"prompt": "w5", "chosen": " w6", "rejected": " w40 w41 w42", "weight": 1},
    ]
    results = []
    for name, data in (
        ("weighted", rows),
        ("twice", [{**r, "weight": 1} for r in (rows[0], rows[0], rows[1])]),
    ):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, data)))
        results.append(
            run(
                tmp_path,
                name,
                actor_train__data_args__file_name=str(file),
                max_steps=3,
                actor_train__training_args__num_train_epochs=3.0,
            )
        )
    (weighted, weights), (twice, other_weights) = results
    for one, other in zip(weighted, twice, strict=True):
        for key in ("loss", "grad_norm", "rewards/margins"):
            if key in one:
                assert other[key] == pytest.approx(one[key], rel=1e-5)
    for name, weight in weights.items():
        assert torch.allclose(weight, other_weights[name], atol=1e-5)
