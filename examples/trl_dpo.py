"""A script for TRL that trains with Rather: only the import of config and trainer differs.

    python examples/trl_dpo.py MODEL PAIRS.jsonl OUT

MODEL is a folder or a name of the hub. Rows have prompt, chosen and rejected.
"""

from __future__ import annotations

import sys

from datasets import load_dataset

from rather.trl import DPOConfig, DPOTrainer  # instead of: from trl import DPOConfig, DPOTrainer


def main(model: str, pairs: str, out: str) -> None:
    args = DPOConfig(
        output_dir=out, beta=0.1, num_train_epochs=1, per_device_train_batch_size=4, logging_steps=1
    )
    rows = load_dataset("json", data_files=pairs, split="train")
    trainer = DPOTrainer(model, args=args, train_dataset=rows)
    trainer.train()
    trainer.save_model(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
