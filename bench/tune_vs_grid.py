"""Does `rather tune` find a setting as good as a full grid would?

    python bench/tune_vs_grid.py demo --budget 10m
    RATHER_TEST_DATA=/path/to/data python bench/tune_vs_grid.py ukp --budget 2h

Tunes within the budget. Then every rate of the range test and of the rounds is trained to the end
with every beta, and the chosen setting is compared with the best of them by the loss of each held-out
pair, on UKP of pairs that tuning has not seen: the difference must be within one standard error of
the paired differences. Both parts resume. `--grid-only` trains what does not depend on the tuning,
to run at the same time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, machine

from rather.commands.score import score
from rather.commands.terminal import settings
from rather.config.run_config import DPOConfig
from rather.tools.demo import run_demo
from rather.tools.sweep import combinations, train_here
from rather.tools.tune import AROUND, BETA, RANGE, RATE, Tuning, seconds_of, tune

TEST = "compared.jsonl"
NO_EVALUATION = ["validation.data_args.file_name=null"]  # it is scored at the end
UKP = """\
exp_name: ukp
pretrain: {model}
output_dir: {out}/output
logging_dir: {out}/logs
sequence_length: {length}
beta: 0.1
track_with: null
actor_train:
  data_args: {{file_name: {out}/train.jsonl, separator: " ", overlong: truncate_response}}
  training_args: {{learning_rate: 5.0e-5, per_device_train_batch_size: {batch}}}
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
    add("--tune-on", type=int, default=2000, help="further pairs of ukp, on which tuning decides")
    add("--batch", type=int, default=16, help="pairs of a step of ukp")
    add("--length", type=int, default=256, help="sequence_length of ukp")
    add("--grid-only", action="store_true", help="train the cells known before tuning")
    add("--budget", default="10m")
    add("--out", type=Path, default=Path("output/bench-tune"))
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    out = (args.out / args.set).resolve()
    yaml = demo(out) if args.set == "demo" else ukp(out, args)
    if args.grid_only:
        before = Tuning.of(yaml, [], seconds_of(args.budget))
        for values in grid(before).values():
            losses(before, values)
        return
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
            if total >= args.held_out + args.tune_on
        )
        held, train = order[:size], order[size:]
        for some in (held, train):
            np.random.default_rng(0).shuffle(some)
        (out / "held_out.jsonl").write_text("".join(held[: args.tune_on]))
        (out / TEST).write_text("".join(held[args.tune_on :][: args.held_out]))
        (out / "train.jsonl").write_text("".join(train[: args.pairs]))
        model = args.data / "models" / args.model
        file.write_text(UKP.format(model=model, out=out, length=args.length, batch=args.batch))
    return file


def grid(tuning: Tuning) -> dict[str, dict[str, str]]:
    """Return all cells: every rate that tuning could have chosen, with every beta."""
    rate = tuning.base.actor_train.training_args.learning_rate
    middle = float(tuning.state["rounds"].get("rate", "nan"))
    rates = {rate * factor for factor in RANGE}
    if not math.isnan(middle):  # tuned
        rates |= {middle * factor for factor in AROUND}
    beta = tuning.base.loss_numbers.get("beta") or 0.1
    texts = sorted(
        {f"{each:.3g}" for each in rates}, key=lambda text: abs(math.log(float(text) / rate))
    )
    return combinations({RATE: texts, BETA: [f"{beta * factor:.3g}" for factor in AROUND]})


def losses(tuning: Tuning, values: dict[str, str]) -> Sequence[float]:
    """Train a cell to the end, and return the calibrated loss of each held-out pair."""
    name = next(iter(combinations({key: [value] for key, value in values.items()})))
    own = [f"{key}={value}" for key, value in values.items()]
    base = tuning.base
    config = settings(tuning.file, [*tuning.shared, *own, f"exp_name=grid-{name}", *NO_EVALUATION])
    reference = margins(tuning.folder / "reference.jsonl", base.reference.model_path, base)
    file = config.run_dir / "held_out.jsonl"
    if not file.exists():
        code, error = train_here(config)
        assert code == 0, error
    margin = margins(file, str(config.run_dir / "model"), base) - reference
    factors = np.concatenate([[0.0], np.geomspace(1e-4, 1e3, 2000)]) / np.abs(margin).mean()
    best = min(factors, key=lambda factor: float(np.logaddexp(0, -factor * margin).mean()))
    return [float(each) for each in np.logaddexp(0, -best * margin)]


def margins(file: Path, model: str, config: DPOConfig) -> Any:
    """Return the log-prob of the chosen minus that of the rejected answer, of held-out pairs."""
    if not file.exists():
        data = config.actor_train.data_args
        extra = [f"sequence_length={config.sequence_length}"]
        extra += [f"actor_train.data_args.separator='{data.separator}'"]
        extra += [f"actor_train.data_args.overlong={data.overlong}"]
        own = config.validation.data_args.sets[""][0]
        other = own.with_name(TEST)  # pairs that tuning has not seen
        score(model, other if other.exists() else own, extra, None, [], file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return np.array([row["logps/chosen"] - row["logps/rejected"] for row in rows])


if __name__ == "__main__":
    main()
