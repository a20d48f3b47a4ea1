"""A script as TRL's users start it: python -m tests.trl.launched MODEL PAIRS_PER_DEVICE OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

from rather.trl import DPOConfig, DPOTrainer
from tests.golden.trl_run import make_rows


def train(model: str, size: int, out: Path) -> list[dict[str, Any]]:
    """Train for two steps of four pairs; return log_history, and write it with the world's size."""
    args = DPOConfig(
        output_dir=str(out), per_device_train_batch_size=size, max_steps=2, logging_steps=1,
        learning_rate=1e-3, bf16=False, report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_list(make_rows("chat")[:8])
    trainer = DPOTrainer(model, args=args, train_dataset=rows)
    trainer.train()
    history: list[dict[str, Any]] = trainer.state.log_history
    if trainer.is_world_process_zero():
        result = {"processes": args.world_size, "history": history}
        out.with_suffix(".json").write_text(json.dumps(result))
    return history


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
