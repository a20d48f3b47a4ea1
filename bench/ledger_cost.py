"""What the ledger of pairs costs: steps with and without it, in turn, in one run.

    python bench/ledger_cost.py [--steps 400] [--json bench/results/ledger_cost.json]

Every second step of a run writes its pairs to the ledger, the others do not. All steps train on the
same pairs, so that their times differ by the ledger and by noise alone. Each step with the ledger is
compared with the one before it, by processor time of the process and by the clock; the result is the
median of these differences, with the interval of a bootstrap.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from common import machine

from rather.config.load import config_from_dict
from rather.pipeline.hooks import WritePairLedger
from rather.pipeline.loop import TrainingLoop
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.report.pairs import read_ledger


class Costs:
    """Leaves the ledger out in every second step, and measures training and ledger of all steps."""

    def __init__(self) -> None:
        self.seconds: list[list[float]] = []
        self._train_step, self._write = TrainingLoop.train_step, WritePairLedger.after_step
        TrainingLoop.train_step = lambda loop, step: self._train(loop, step)  # type: ignore[method-assign]
        WritePairLedger.after_step = lambda *args: self._log(*args)  # type: ignore[method-assign]

    def _train(self, loop: TrainingLoop, step: Any) -> Any:
        policy: Any = loop.parts.roles.actor_train
        policy.unused = {} if step.number % 2 == 0 else {"ratios": None, "pull": None}
        self.seconds.append([0.0, 0.0])
        with self._measured():
            return self._train_step(loop, step)

    def _log(self, hook: WritePairLedger, step: Any, result: Any) -> None:
        if step.number % 2 == 0:
            with self._measured():
                self._write(hook, step, result)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        began = time.process_time(), time.perf_counter()
        yield
        now = time.process_time(), time.perf_counter()
        for clock, (before, after) in enumerate(zip(began, now, strict=True)):
            self.seconds[-1][clock] += after - before


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
        with gzip.open(args.data / "pairs" / f"{args.pairs}.jsonl.gz", "rt") as rows:
            pairs = [json.loads(line) for line in islice(rows, args.batch)]
        for pair in pairs:  # the model has no chat template
            pair["prompt"] = pair.pop("messages")[0]["content"]
        Path(folder, "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
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
                        "file_name": f"{folder}/pairs.jsonl",
                        "separator": " ",
                    },
                    "training_args": {
                        "learning_rate": 1e-6,
                        "per_device_train_batch_size": args.batch,
                        "num_train_epochs": args.steps,
                    },
                },
            }
        )
        costs = Costs()
        assert DPOPipeline(config).run() == 0
        written = read_ledger(config.run_dir).num_rows
        assert written == args.steps // 2 * args.batch  # every second step
    seconds = np.array(costs.seconds[4 : args.steps // 2 * 2])  # the first ones fill caches
    off, on = seconds[0::2], seconds[1::2]
    draw = np.random.default_rng(0)
    rows = draw.integers(len(on), size=(2000, len(on)))
    found: dict[str, Any] = {"model": args.model, "steps": len(seconds), "batch": args.batch}
    for column, name in enumerate(("processor", "clock")):
        apart, typical = (on - off)[:, column], float(np.median(off[:, column]))
        low, high = np.quantile(np.median(apart[rows], axis=1), (0.025, 0.975)) / typical
        share = float(np.median(apart)) / typical
        found[name] = {"seconds_off": typical, "share": share, "interval": [low, high]}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
