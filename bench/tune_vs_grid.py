"""Does `rather tune` find a setting as good as a full grid would?

    python bench/tune_vs_grid.py demo --budget 10m
    RATHER_TEST_DATA=/path/to/data python bench/tune_vs_grid.py ukp --budget 2h

Tunes within the budget. Then every rate of the range test and of the rounds is trained to the end
with every beta, and each result is compared with the best of them by the loss of each held-out
pair: the difference must be within one standard error of the paired differences. Both parts resume.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, machine

from rather.commands.demo import run_demo
from rather.commands.score import score
from rather.commands.sweep import combinations, train_here
from rather.commands.terminal import settings
from rather.commands.tune import AROUND, BETA, RANGE, RATE, Tuning, seconds_of, tune

UKP = """\
exp_name: ukp
pretrain: {model}
output_dir: {out}/output
logging_dir: {out}/logs
sequence_length: 256
beta: 0.1
track_with: null
actor_train:
  data_args: {{file_name: {out}/train.jsonl, separator: " "}}
  training_args: {{learning_rate: 5.0e-5, per_device_train_batch_size: 16}}
validation:
  data_args: {{file_name: {out}/held_out.jsonl}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("set", choices=("demo", "ukp"))
    add("--data", type=Path, default=os.environ.get("RATHER_TEST_DATA"))
    add("--model", default="stories15M", help="for ukp")
    add("--pairs", type=int, default=2000, help="training pairs of ukp")
    add("--held-out", type=int, default=2000, help="held-out pairs of ukp, of other topics")
    add("--budget", default="10m")
    add("--out", type=Path, default=Path("output/bench-tune"))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    out = (args.out / args.set).resolve()
    yaml = demo(out) if args.set == "demo" else ukp(out, args)
    tuning = tune(yaml, [], seconds_of(args.budget), [])
    found, total = tuning.result(), max(run["steps"] for run in tuning.state["runs"].values())
    best = found["runs"][found["best"]]
    cells = {name: losses(tuning, values) for name, values in grid(tuning).items()}
    own = losses(tuning, best["values"])
    means = {name: statistics.fmean(each) for name, each in cells.items()}
    top = min(means, key=means.__getitem__)
    apart = np.array(own) - np.array(cells[top])
    error = float(apart.std(ddof=1) / len(apart) ** 0.5)
    result = {
        "machine": machine(), "set": args.set, "held_out": len(own), "budget": tuning.budget,
        "seconds": found["seconds"], "chosen": best["values"], "steps": total,
        "chosen_loss": statistics.fmean(own), "grid": means, "grid_best": top,
        "difference": float(apart.mean()), "standard_error": error,
        "within_one_error": bool(apart.mean() <= error),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    (RESULTS / f"tune_{args.set}.json").write_text(json.dumps(result, indent=1) + "\n")


def demo(out: Path) -> Path:
    if not (out / "demo" / "dpo.yaml").exists():
        out.mkdir(parents=True, exist_ok=True)
        assert run_demo(out / "demo") == 0
    return out / "demo" / "dpo.yaml"


def ukp(out: Path, args: argparse.Namespace) -> Path:
    """Split by topic, so that no argument of a held-out pair was trained on."""
    file = out / "ukp.yaml"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        topics = defaultdict(list)
        with gzip.open(args.data / "pairs" / "ukp_arguments.jsonl.gz", "rt") as rows:
            for row in map(json.loads, rows):
                row["prompt"] = row.pop("messages")[0]["content"]  # the model has no chat template
                topics[row["topic"]].append(json.dumps(row) + "\n")
        order = [line for topic in sorted(topics) for line in topics[topic]]
        size = next(  # whole topics
            total
            for total in np.cumsum([len(topics[topic]) for topic in sorted(topics)])
            if total >= args.held_out
        )
        held, train = order[: args.held_out], order[size:]
        np.random.default_rng(0).shuffle(train)
        (out / "held_out.jsonl").write_text("".join(held))
        (out / "train.jsonl").write_text("".join(train[: args.pairs]))
        file.write_text(UKP.format(model=args.data / "models" / args.model, out=out))
    return file


def grid(tuning: Tuning) -> dict[str, dict[str, str]]:
    """Return all cells: every rate that tuning could have chosen, with every beta."""
    rate = tuning.base.actor_train.training_args.learning_rate
    middle = float(tuning.state["rounds"]["rate"])
    rates = {*(rate * factor for factor in RANGE), *(middle * factor for factor in AROUND)}
    beta = tuning.base.loss_numbers.get("beta") or 0.1
    texts = sorted({f"{each:.3g}" for each in rates}, key=float)
    return combinations({RATE: texts, BETA: [f"{beta * factor:.3g}" for factor in AROUND]})


def losses(tuning: Tuning, values: dict[str, str]) -> Sequence[float]:
    """Train a cell to the end, and return the calibrated loss of each held-out pair."""
    name = next(iter(combinations({key: [value] for key, value in values.items()})))
    own = [f"{key}={value}" for key, value in values.items()]
    config = settings(tuning.file, [*tuning.shared, *own, f"exp_name=grid-{name}"])
    file = config.run_dir / "held_out.scores.jsonl"
    if not file.exists():
        code, error = train_here(config)
        assert code == 0, error
        pairs = config.validation.data_args.sets[""][0]
        reference = config.reference.model_path
        extra = [f"actor_train.data_args.separator='{config.actor_train.data_args.separator}'"]
        score(str(config.run_dir / "model"), pairs, extra, reference, [], file)
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    margin = np.array([
        row["logps/chosen"] - row["reference_logps/chosen"]
        - row["logps/rejected"] + row["reference_logps/rejected"]
        for row in rows
    ])  # fmt: skip
    factors = np.concatenate([[0.0], np.geomspace(1e-4, 1e3, 2000)]) / np.abs(margin).mean()
    best = min(factors, key=lambda factor: float(np.logaddexp(0, -factor * margin).mean()))
    return [float(each) for each in np.logaddexp(0, -best * margin)]


if __name__ == "__main__":
    main()
