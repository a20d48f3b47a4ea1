"""Does the label doctor find flipped labels? Plants flips in real pairs, trains, and looks.

    RATHER_TEST_DATA=/path/to/data python bench/flipped_pairs.py [--sets politeness stories]
    python bench/flipped_pairs.py --merge    # all cells -> bench/results and docs/pairs.md

A cell is one data set, one share of flipped labels and one seed. Its training pairs are flipped by
`data_args.corrections`; the held-out pairs keep their labels. Each cell writes one small JSON when
it is done, so that the same command continues an interrupted one. Settings and score were chosen on
seeds from 100 on (`--seeds 100 101`), the reported seeds are 0, 1 and 2. The score of the doctor is
compared with the first-seen margin and with length alone. On the politeness pairs the run is
repeated with the corrections that the doctor writes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, machine

from rather.config.load import config_from_dict
from rather.data.pairs import hex_id
from rather.data.prepare import prepare
from rather.pipeline.pipeline import DPOPipeline
from rather.report.pairs import CUT, PairHistory, auc, read_ledger

SHARES, SEEDS = (0.1, 0.2, 0.3), (0, 1, 2)
BARS = {"politeness": 0.80, "stories": 0.70}  # AUC at 20 %
FILE, PAGE = RESULTS / "flipped_pairs.json", Path(__file__).parent.parent / "docs" / "pairs.md"
BEGIN, END = "<!-- begin: bench/flipped_pairs.py -->", "<!-- end: bench/flipped_pairs.py -->"


@dataclass(frozen=True)
class Setting:
    """A data set, and the smallest model that learns something from it."""

    pairs: str
    model: str
    learning_rate: float
    epochs: int
    beta: float = 0.1
    batch: int = 16
    length: int = 256
    held_out: int = 100
    most: int | None = None  # pairs
    eval_steps: int | None = None


SETS = {
    "politeness": Setting("rasbt_politeness", "stories260K", 2e-4, 3, held_out=300),
    "stories": Setting("stories260K_vader_onpolicy", "stories260K", 5e-4, 3, length=512),
    "ultrafeedback": Setting(
        "ultrafeedback_train_clean", "stories260K", 5e-4, 3, length=512, most=300
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("RATHER_TEST_DATA"))
    add("--out", type=Path, default=Path("output/bench-flipped"))
    add("--sets", nargs="+", choices=SETS, default=list(SETS))
    add("--seeds", type=int, nargs="+", default=list(SEEDS))
    add("--shares", type=float, nargs="+", default=[0.0, *SHARES])
    add("--change", nargs="*", default=[], help="learning_rate=1e-3: to choose settings")
    add("--no-retrain", action="store_true", help="without the doctor's corrections")
    add("--merge", action="store_true", help="print the tables and write the results")
    args = parser.parse_args()
    if args.merge:
        return merge(args.out)
    if not args.data:
        parser.error("name the data folder with --data or RATHER_TEST_DATA")
    logging.disable(logging.WARNING)
    changes = {key: json.loads(value) for key, _, value in (c.partition("=") for c in args.change)}
    for share in args.shares:
        for name in args.sets:
            for seed in args.seeds:
                setting = Setting(**{**vars(SETS[name]), **changes})
                label = "-".join([name, f"{share:g}", str(seed), *args.change])
                file = args.out / "cells" / f"{label}.json"
                if not file.exists():
                    where = args.data, args.out / "runs" / label, name
                    found = Cell(*where, setting, share, seed, retrain=not args.no_retrain)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps(result := found.run(), indent=1) + "\n")
                    print(label, {k: v for k, v in result.items() if k not in ("setting", "name")})


@dataclass
class Cell:
    data: Path
    folder: Path
    name: str
    setting: Setting
    share: float
    seed: int
    retrain: bool = True

    def run(self) -> dict[str, Any]:
        """Train with planted flips, and, on politeness, once more with the doctor's corrections."""
        began = time.perf_counter()
        self.folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {"name": self.name, "share": self.share, "seed": self.seed}
        found |= {"setting": vars(self.setting), "machine": machine()}
        digests = prepare(self.config("flipped", [])).train.column("pair_hash")
        draw = np.random.default_rng([self.seed, round(1000 * self.share)])
        planted = draw.permutation(np.unique(digests))[: round(self.share * len(digests))]
        files = [self.write("planted", planted)] if self.share else []
        config, found["held_out"] = self.train("flipped", files)
        history = PairHistory.of(read_ledger(config.run_dir))
        health = config.run_dir / "health.jsonl"
        lines = health.read_text().splitlines() if health.exists() else []
        found["health"] = [json.loads(line)["name"] for line in lines]
        if self.share:
            flipped = np.isin(history.ids, planted)
            found |= {name: auc(score, flipped) for name, score in scores(history).items()}
            flagged = history.flip_score > CUT
            found["precision"] = float(flipped[flagged].mean()) if flagged.any() else 0.0
            found["recall"] = float(flagged[flipped].mean())
            if self.retrain and self.name == "politeness":
                extra = self.write("doctor", history.ids[flagged])
                found["held_out_corrected"] = self.train("corrected", [*files, extra])[1]
        return found | {"pairs": len(digests), "seconds": time.perf_counter() - began}

    def write(self, name: str, digests: Sequence[int]) -> str:
        file = self.folder / f"{name}.jsonl"
        lines = [json.dumps({"id": hex_id(int(each)), "flip": True}) for each in digests]
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    def train(self, name: str, corrections: Sequence[str]) -> tuple[Any, dict[str, float]]:
        config = self.config(name, corrections)
        assert DPOPipeline(config).run() == 0
        lines = map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())
        last = [line for line in lines if "eval/loss" in line][-1]
        wanted = ("loss", "rewards/accuracies", "rewards/margins")
        return config, {name: last[f"eval/{name}"] for name in wanted}

    def config(self, name: str, corrections: Sequence[str]) -> Any:
        setting, data = self.setting, Path(self.data)
        training = {"learning_rate": setting.learning_rate, "lr_scheduler_type": "constant"}
        training |= {"per_device_train_batch_size": setting.batch}
        training |= {"num_train_epochs": setting.epochs}
        values: dict[str, Any] = {
            "exp_name": name,
            "output_dir": str(self.folder),
            "logging_dir": str(self.folder / "logs"),
            "pretrain": str(data / "models" / setting.model),
            "sequence_length": setting.length,
            "beta": setting.beta,
            "seed": self.seed,
            "track_with": None,
            "report_html": False,
            "overwrite": True,
            "platform": "cpu",
            "save_steps": None,
            "eval_steps": setting.eval_steps,
            "reference": {"cache": {"path": str(self.folder.parent / "reference")}},
            "actor_train": {
                "data_args": {
                    "file_name": str(self.pairs()),
                    "separator": " ",
                    "overlong": "truncate_response",
                    "cache_dir": str(self.folder.parent / "data"),
                    **({"corrections": list(corrections)} if corrections else {}),
                },
                "training_args": training,
            },
            "validation": {"data_args": {"split": setting.held_out}},
        }
        return config_from_dict(values)

    def pairs(self) -> Path:
        """Return the pairs as plain text: the models have no chat template."""
        file = self.folder.parent / f"{self.setting.pairs}-{self.setting.most}.jsonl"
        if not file.exists():
            with gzip.open(
                Path(self.data) / "pairs" / f"{self.setting.pairs}.jsonl.gz", "rt"
            ) as rows:
                found = [json.loads(line) for line in islice(rows, self.setting.most)]
            for row in found:
                if turns := row.pop("messages", None):
                    row["prompt"] = "\n".join(turn["content"] for turn in turns)
            keys = ("prompt", "chosen", "rejected")
            lines = [json.dumps({key: row[key] for key in keys}) + "\n" for row in found]
            file.write_text("".join(lines))
        return file


def scores(history: PairHistory) -> dict[str, Any]:
    """Return the scores to compare; a higher one means more likely flipped."""
    return {
        "doctor": history.flip_score,
        "first_seen": -history.first,
        "mean": -history.mean,
        "last": -history.last,
        "gradient_weight": history.gradient_weight,
        "shorter": -history.longer,
        "longer": history.longer,
    }


def merge(out: Path) -> None:
    """Print a table and write the results of the reported seeds."""
    cells = [json.loads(file.read_text()) for file in sorted((out / "cells").glob("*.json"))]
    cells = [cell for cell in cells if cell["seed"] in SEEDS]
    FILE.write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    table = markdown(cells)
    print(table)
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", "utf-8")


def markdown(cells: Sequence[dict[str, Any]]) -> str:
    """Return the tables of docs/pairs.md."""
    lines = ["| pairs | flipped | AUC doctor | first seen | length alone | precision | recall |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in SETS:
        for share in SHARES:
            own = [c for c in cells if (c["name"], c["share"]) == (name, share)]
            if not own:
                continue
            length = [max(c["shorter"], c["longer"]) for c in own]
            texts = [spread([c["doctor"] for c in own]), spread([c["first_seen"] for c in own])]
            texts += [spread(length), spread([c["precision"] for c in own])]
            texts.append(spread([c["recall"] for c in own]))
            lines.append(f"| {name} | {share:.0%} | {' | '.join(texts)} |")
    clean = {c["seed"]: accuracy(c, "held_out") for c in cells if is_clean(c, "politeness")}
    head = "| politeness, flipped | accuracy without flips | with flips | corrected | recovered |"
    lines += ["", head, "|---|---|---|---|---|"]
    for share in SHARES:
        own = [c for c in cells if (c["name"], c["share"]) == ("politeness", share)]
        own = [c for c in own if c["seed"] in clean]
        if own:
            best = statistics.fmean(clean[c["seed"]] for c in own)
            worse = statistics.fmean(accuracy(c, "held_out") for c in own)
            after = statistics.fmean(accuracy(c, "held_out_corrected") for c in own)
            cost = best - worse
            part = f"{(after - worse) / cost:.0%}" if cost > 0 else "nothing was lost"
            lines.append(f"| {share:.0%} | {best:.1%} | {worse:.1%} | {after:.1%} | {part} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def is_clean(cell: dict[str, Any], name: str) -> bool:
    return bool(cell["name"] == name and cell["share"] == 0)


def accuracy(cell: dict[str, Any], key: str) -> float:
    return float(cell[key]["rewards/accuracies"])


if __name__ == "__main__":
    main()
