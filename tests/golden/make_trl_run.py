"""Trains a tiny model with real TRL for ten full-batch steps and stores its losses, grad norms and
token ids.

python -m tests.golden.make_trl_run # needs the `bench` extra (trl, accelerate, datasets)
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from tests.golden.trl_run import SETTINGS, SHAPES, STEPS, make_model, make_rows

OUT = Path(__file__).parent / "trl_run_1_16.json"


class Recording(DPOTrainer):  # type: ignore[misc]
    """The log rounds losses; this one keeps them."""

    losses: list[float]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_loss(*args, **kwargs)
        self.losses.append(float(result.detach()))
        return result


def made(shape: str, folder: Path, settings: dict[str, Any]) -> Recording:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    args = DPOConfig(
        output_dir=str(folder / "out"), model_init_kwargs={"dtype": "float32"}, **settings
    )
    data = Dataset.from_list(make_rows(shape))
    return Recording(str(folder), args=args, train_dataset=data, processing_class=tokenizer)


def run(shape: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    trainer = made(shape, folder, settings)
    trainer.losses = []
    parts = ("prompt", "chosen", "rejected")
    tokens = [
        {f"{part}_ids": row[f"{part}_ids"] for part in parts} for row in trainer.train_dataset
    ]
    trainer.train()
    steps = settings["gradient_accumulation_steps"]
    losses = [sum(trainer.losses[i : i + steps]) / steps for i in range(0, STEPS * steps, steps)]
    norms = [float(line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
    assert len(losses) == len(norms) == STEPS
    return {"tokens": tokens, "loss": losses, "grad_norm": norms}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name))
        runs = {shape: run(shape, folder, SETTINGS) for shape in SHAPES}
    versions = {each.__name__: each.__version__ for each in (trl, transformers, torch, accelerate)}
    lines = [f"{json.dumps(shape)}: {json.dumps(result)}" for shape, result in runs.items()]
    OUT.write_text(
        '{"versions": ' + json.dumps(versions) + ",\n" + ",\n".join(lines) + "}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
