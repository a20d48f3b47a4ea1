"""How often do the findings of `rather health` say something wrong? Runs on real pairs, twelve by default.

    RATHER_TEST_DATA=/path/to/data python bench/false_alarms.py [--sets ukp] [--seeds 0]

The rules were changed after runs with seeds 0 to 2; the reported seeds are others. A finding is judged
by what it claims, on held-out pairs, which the rules of training numbers do not see; `data/...`
findings count facts about the file, and are left out. Each run writes one small JSON, so the same
command continues. The rate is that of runs with at least one wrong finding.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, machine
from flipped_pairs import Cell, Setting

from rather.losses.metrics import wilson

SETS = {  # epochs: at least 32 steps with 256 pairs, so that every rule has what it asks for
    name: Setting(
        pairs, "stories260K", 2e-4, epochs,
        length=length, batch=8, most=400, held_out=held_out, eval_steps=12,
    )
    for name, pairs, epochs, length, held_out in (
        ("truthfulqa", "truthfulqa_pairs", 1, 256, 100),
        ("ukp", "ukp_arguments", 1, 256, 100),
        ("orca", "orca_dpo_validation", 2, 512, 60),
        ("llamafactory", "llamafactory_dpo_en_demo", 3, 512, 60),
    )
}  # fmt: skip
PAGE = Path(__file__).parent.parent / "docs" / "health.md"
BEGIN, END = "<!-- begin: bench/false_alarms.py -->", "<!-- end: bench/false_alarms.py -->"
Line = dict[str, float]
# finding -> whether held-out pairs agree: of the first and the last evaluation, and the best loss
AGREES: dict[str, Callable[[Line, Line, float], bool]] = {
    "nothing_learned": lambda first, last, best: last["rewards/ties"] > 0.9,
    "learning_rate_too_high": lambda first, last, best: last["calibrated_loss"] > math.log(2) - 0.002,
    "chosen_falling": lambda first, last, best: last["sft_loss"] - first["sft_loss"] > 0.15,
    "margin_saturated": lambda first, last, best: last["rewards/accuracies"] > 0.95,
    "length_exploitation": lambda first, last, best: last["rewards/length_correlation"] > 0.7,
    "accuracy_stuck": lambda first, last, best: last["rewards/accuracies_low"] < 0.55,
    "overfitting": lambda first, last, best: last["calibrated_loss"] > best + 0.005,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("RATHER_TEST_DATA"))
    add("--out", type=Path, default=Path("output/bench-alarms"))
    add("--sets", nargs="+", choices=SETS, default=list(SETS))
    add("--seeds", type=int, nargs="+", default=[10, 11, 12])
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    runs = []
    for name in args.sets:
        for seed in args.seeds:
            file = args.out / "cells" / f"{name}-{seed}.json"
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                cell = Cell(
                    args.data, args.out / f"{name}-{seed}" / "run", name, SETS[name], 0.0, seed
                )
                file.write_text(json.dumps({"set": name, "seed": seed, **judge(cell)}, indent=1))
            runs.append(json.loads(file.read_text()))
            print(
                {key: runs[-1][key] for key in ("set", "seed", "accuracy", "findings")}, flush=True
            )
    wrong = sum(not all(run["findings"].values()) for run in runs)
    found = {"runs": len(runs), "with_findings": sum(bool(run["findings"]) for run in runs)}
    found |= {"with_a_false_alarm": wrong, "rate": wrong / len(runs)}
    print(json.dumps(found))
    facts = {"machine": machine(), **found, "cells": runs}
    (RESULTS / "false_alarms.json").write_text(json.dumps(facts, indent=1) + "\n")
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{markdown(runs)}\n{END}{rest.partition(END)[2]}", "utf-8")


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/health.md."""
    lines = ["| pairs | runs | held-out accuracy | findings that held-out pairs confirm | wrong |"]
    lines.append("|---|---|---|---|---|")
    for name in SETS:
        own = [run for run in runs if run["set"] == name]
        named = [
            sorted(each for run in own for each, right in run["findings"].items() if right is kind)
            for kind in (True, False)
        ]
        texts = [", ".join(f"`{each}`" for each in part) or "none" for part in named]
        accuracy = sum(run["accuracy"] for run in own) / max(1, len(own))
        lines.append(f"| {name} | {len(own)} | {accuracy:.0%} | {' | '.join(texts)} |")
    wrong = sum(not all(run["findings"].values()) for run in runs)
    most = wilson(wrong / len(runs), len(runs))[1]
    lines += ["", f"{wrong} of {len(runs)} runs had a wrong finding (95 %: at most {most:.0%})."]
    return "\n".join(lines)


def judge(cell: Cell) -> dict[str, Any]:
    """Train, and return which findings the held-out pairs confirm."""
    names: Sequence[str] = [each for each in cell.run()["health"] if not each.startswith("data/")]
    lines = (cell.config("flipped", []).run_dir / "metrics.jsonl").read_text().splitlines()
    evals = [
        {key.removeprefix("eval/"): value for key, value in line.items()}
        for line in map(json.loads, lines)
        if "eval/loss" in line
    ]
    best = min(line["calibrated_loss"] for line in evals)
    first, last = evals[0], evals[-1]
    findings = {name: AGREES[name](first, last, best) for name in names}
    kept = ("calibrated_loss", "sft_loss", "rewards/length_correlation", "rewards/ties")
    numbers = {"first": {k: first[k] for k in kept}, "last": {k: last[k] for k in kept}}
    return {"findings": findings, "accuracy": last["rewards/accuracies"], **numbers}


if __name__ == "__main__":
    main()
