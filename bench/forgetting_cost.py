"""What `forgetting` costs in a short run: the processor time of its two measurements.

    OMP_NUM_THREADS=1 python bench/forgetting_cost.py [--model stories260K] [--steps 100] [--json FILE]

A small model trains for some steps on the politeness pairs. Each measurement is the loss on twenty
texts and fifty greedy answers; the rest of the run is loading, the reference, training, evaluations
and the export. Processor time, because other work on the machine hardly changes it. (The demo's
tokenizer does not know the words of the texts, so that forgetting is not measured there.)
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import machine

from rather.config.load import config_from_dict
from rather.outcome.forgetting import SHIPPED, ForgettingSet
from rather.pipeline.forgetting import LONG_ENOUGH, ForgettingCheck, _tokens_of
from rather.pipeline.pipeline import DPOPipeline


class Timed:
    """Adds up the processor time of some methods, each by its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, owner: Any, method: str, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            began = time.process_time()
            result = function(*args, **options)
            self.seconds.setdefault(name, []).append(time.process_time() - began)
            return result

        setattr(owner, method, timed)


def main() -> None:
    data = os.environ.get("RATHER_TEST_DATA")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--model", default="stories260K")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    timed = Timed()
    timed.wrap(ForgettingCheck, "begin", "begin")
    timed.wrap(ForgettingCheck, "record", "record")
    timed.wrap(ForgettingSet, "measure", "measure")
    checks: list[ForgettingCheck] = []
    tokens: list[float] = []
    make_check = ForgettingCheck.of

    def note_check(*parts: Any) -> ForgettingCheck | None:
        check = make_check(*parts)
        assert check is not None
        checks.append(check)
        tokens.append(_tokens_of(parts[-1]))
        return check

    ForgettingCheck.of = staticmethod(note_check)  # type: ignore[method-assign]
    runs = []
    for _ in range(args.repeats):
        timed.seconds.clear()
        with tempfile.TemporaryDirectory() as folder:
            write_pairs(args.data, Path(folder))
            config = config_of(args, folder)
            began = time.process_time()
            assert DPOPipeline(config).run() == 0
            spent = time.process_time() - began
        forgetting = sum(timed.seconds["begin"]) + sum(timed.seconds["record"])
        rest = spent - forgetting
        runs.append({"forgetting_seconds": forgetting, "other_seconds": rest,
                     "share": forgetting / rest, "records": timed.seconds["record"]})  # fmt: skip
        print(runs[-1], flush=True)
    measured = checks[-1].measured
    found = {
        "model": args.model, "batch": args.batch, "steps": args.steps, "tokens": tokens[-1], "measured_from": LONG_ENOUGH["cpu"],
        "questions": len(measured.prompts), "texts": len(measured.pairs),
        "share": median(run["share"] for run in runs), "runs": runs,
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


def write_pairs(data: Path, folder: Path) -> None:
    """Write the pairs as texts, since the models have no chat template; hold out every tenth."""
    with gzip.open(data / "pairs" / "rasbt_politeness.jsonl.gz", "rt") as rows:
        pairs = [json.loads(line) for line in rows]
    for pair in pairs:
        pair["prompt"] = pair.pop("messages")[0]["content"]
    for name, held_out in (("train", False), ("held_out", True)):
        chosen = [pair for i, pair in enumerate(pairs) if (i % 10 == 0) == held_out]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chosen)))


def config_of(args: argparse.Namespace, folder: str) -> Any:
    """Return settings with forgetting, however short the run is."""
    return config_from_dict(
        {
            "exp_name": "cost",
            "output_dir": folder,
            "logging_dir": f"{folder}/logs",
            "pretrain": str(args.data / "models" / args.model),
            "sequence_length": 256,
            "max_steps": args.steps,
            "track_with": None,
            "report_html": False,
            "logging_steps": 1000,
            "forgetting": str(SHIPPED),
            "actor_train": {
                "data_args": {"file_name": f"{folder}/train.jsonl", "separator": " "},
                "training_args": {
                    "learning_rate": 1e-5,
                    "per_device_train_batch_size": args.batch,
                    "num_train_epochs": 1000,
                },
            },
            "validation": {
                "data_args": {"file_name": f"{folder}/held_out.jsonl", "separator": " "}
            },
        }
    )


if __name__ == "__main__":
    main()
