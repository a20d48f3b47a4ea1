"""A GPU that runs out of memory: the run continues with smaller micro-batches, same result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rather.config.run_config import DPOConfig
from rather.errors import MemoryShortage
from rather.pipeline.loop import TrainingLoop
from rather.pipeline.pipeline import DPOPipeline
from tests.tiny import make_config, make_model, make_pairs, metrics, rows_of

pytestmark = pytest.mark.gpu

MODEL: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
PAIRS = 192  # of about 20 tokens in a step: several thousand in one micro-batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("shortage")
    make_model(found / "base", **MODEL)
    make_pairs(found / "pairs.jsonl", PAIRS)
    make_pairs(found / "held_out.jsonl", 9, seed=1)
    return found


@pytest.fixture
def free_again() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def run(folder: Path, name: str, **changes: Any) -> tuple[DPOConfig, list[dict[str, Any]]]:
    """In float32, where sums differ least; the size of micro-batches and their treatment are told."""
    told = {
        "actor_train__max_tokens_per_microbatch_in_train": 8192,
        "actor_train__model_args__dtype": "fp32",
        "reference__model_args__dtype": "fp32",
        "train_batch_size": PAIRS,
        "max_steps": 3,
        "deterministic": True,
        "actor_train__training_args": {
            "learning_rate": 1e-5,
            "adam_epsilon": 1e-6,
            "num_train_epochs": 3.0,
        },
    }
    config = make_config(folder, exp_name=name, **{**told, **changes})
    assert DPOPipeline(config).run() == 0
    return config, [line for line in metrics(config) if "lr" in line]


def test_an_out_of_memory_step_is_repeated_with_smaller_micro_batches(
    folder: Path, free_again: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other work takes the memory once the planner has looked: what is left holds half a micro-batch."""
    enough, expected = run(folder, "enough")
    taken: list[torch.Tensor] = []
    train_step = TrainingLoop.train_step

    def trained(loop: TrainingLoop, *args: Any) -> Any:
        if not taken:
            torch.cuda.reset_peak_memory_stats()
            result = train_step(loop, *args)
            torch.cuda.empty_cache()
            resting, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            taken.append(torch.empty(0))
            limit = resting + 0.7 * (peak - resting)
            torch.cuda.set_per_process_memory_fraction(
                limit / torch.cuda.get_device_properties(0).total_memory
            )
            return result
        return train_step(loop, *args)

    monkeypatch.setattr(TrainingLoop, "train_step", trained)
    short, lines = run(folder, "short")
    told = rows_of(short.run_dir / "incidents.jsonl")
    assert {each["kind"] for each in told} == {"out_of_memory"}
    assert "actor_train" in {each["role"] for each in told}
    for mine, theirs in zip(lines, expected, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    models = [load_file(each.run_dir / "model" / "model.safetensors") for each in (short, enough)]
    for name, weight in models[1].items():
        assert torch.allclose(models[0][name], weight, atol=1e-5), name


def test_a_full_device_lists_memory_use(folder: Path, free_again: None) -> None:
    torch.cuda.empty_cache()
    weights = sum(
        tensor.nbytes for tensor in load_file(folder / "base" / "model.safetensors").values()
    )
    room = (
        torch.cuda.memory_allocated() + 4.2 * weights
    )  # weights, moments and the reference, but no gradients
    torch.cuda.set_per_process_memory_fraction(
        room / torch.cuda.get_device_properties(0).total_memory
    )
    with pytest.raises(
        MemoryShortage, match=r"(?s)masters and moments .*Any of these needs less:"
    ) as caught:
        run(folder, "none")
    assert caught.value.exit_code == 8
