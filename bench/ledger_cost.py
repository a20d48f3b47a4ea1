"""What the ledger of pairs costs: steps with and without it, in turn, in one run.

    python bench/ledger_cost.py [--steps 400] [--json bench/results/ledger_cost.json]

Every second step of a run writes its pairs to the ledger, the others do not. Both kinds see pairs of
the same distribution, so the medians of their times can be compared; the interval is a bootstrap of
the ratio of medians. The time of a step is measured around everything that the loop does for it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import machine

from rather.config.load import config_from_dict
from rather.pipeline.pipeline import DPOPipeline


class Alternating(DPOPipeline):
    """Leaves the ledger out in every second step, and measures all of them."""

    def _train_step(self, step: Any, reference: Any) -> Any:
        on = self.config.model_copy(update={"pair_ledger": step.number % 2 == 0})
        whole, self.config = self.config, on
        began = time.perf_counter()
        try:
            return super()._train_step(step, reference)
        finally:
            self.config = whole
            self.seconds.append(time.perf_counter() - began)

    seconds: list[float] = []  # noqa: RUF012 - one run


def main() -> None:
    data = os.environ.get("RATHER_TEST_DATA")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--model", default="stories260K")
    parser.add_argument("--pairs", default="rasbt_politeness")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        config = config_from_dict(
            {
                "exp_name": "cost",
                "output_dir": folder,
                "logging_dir": f"{folder}/logs",
                "pretrain": str(args.data / "models" / args.model),
                "sequence_length": 256,
                "max_steps": args.steps,
                "track_with": None,
                "report_html": False,
                "save_steps": None,
                "logging_steps": 1000,
                "actor_train": {
                    "data_args": {
                        "file_name": str(args.data / "pairs" / f"{args.pairs}.jsonl.gz"),
                        "separator": " ",
                    },
                    "training_args": {
                        "learning_rate": 1e-6,
                        "per_device_train_batch_size": args.batch,
                        "num_train_epochs": 1000,
                    },
                },
            }
        )
        assert Alternating(config).run() == 0
    seconds = np.array(Alternating.seconds[4:])  # the first ones start caches
    off, on = seconds[0::2], seconds[1::2]
    draw, ratios = np.random.default_rng(0), []
    for _ in range(2000):
        again = [np.median(draw.choice(each, len(each))) for each in (on, off)]
        ratios.append(again[0] / again[1])
    low, high = np.quantile(ratios, (0.025, 0.975))
    found = {"model": args.model, "steps": len(seconds), "batch": args.batch}
    found |= {"median_on": float(np.median(on)), "median_off": float(np.median(off))}
    found |= {"ratio": found["median_on"] / found["median_off"], "interval": [low, high]}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
