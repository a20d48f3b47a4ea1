"""Does the label doctor find flipped labels? Plants flips in real pairs, trains, and looks.

    RATHER_TEST_DATA=/path/to/data python bench/flipped_pairs.py [--sets politeness stories]
    python bench/flipped_pairs.py --merge    # all cells -> bench/results and docs/pairs.md

A cell is one data set, one share of flipped labels and one seed. Its training pairs are flipped by
`data_args.corrections`; the held-out pairs keep their labels. A finished run is kept and only judged
again, so that the same command continues an interrupted one. Settings and score were chosen on seeds
from 100 on (`--seeds 100 101`), the cut on seeds 3 to 7. The score of the doctor is compared with the
first-seen margin and with length alone, and its `likely_flipped` with every pair
that the model disagrees with (flip score above 0.5). Cells without flips count how many right labels
it accuses. `--retrain` repeats runs of the politeness pairs with the corrections of the doctor.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, machine

from rather.config.load import config_from_dict, load
from rather.data.pairs import hex_id
from rather.data.prepare import prepare
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder.names import FINISHED
from rather.tools import demo
from rather.tools.report.pairs import UNDECIDED, Doctor, Flags, Floats, PairHistory, auc

SHARES, SEEDS = (0.1, 0.2, 0.3), tuple(range(10))
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
    "demo": Setting("demo", "demo", 6e-3, 2),  # pairs, model and the other keys of `rather demo`
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
    add("--retrain", action="store_true", help="also with the doctor's corrections")
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
                cell = Cell(
                    args.data, args.out / "runs" / label, name, setting, share, seed, args.retrain
                )
                file = args.out / "cells" / f"{label}.json"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(result := cell.run(), indent=1) + "\n")
                print(label, {k: v for k, v in result.items() if k not in ("setting", "name")})


@dataclass
class Cell:
    data: Path
    folder: Path
    name: str
    setting: Setting
    share: float
    seed: int
    retrain: bool = False

    def run(self) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {"name": self.name, "share": self.share, "seed": self.seed}
        result |= {"machine": machine(), "setting": vars(self.setting)}
        digests = prepare(self.config("flipped", ())).train.column("pair_hash")
        draw = np.random.default_rng([self.seed, round(1000 * self.share)])
        planted = draw.permutation(np.unique(digests))[: round(self.share * len(digests))]
        files = [self.write("planted", planted.tolist())] if self.share else []
        config, result["held_out"] = self.train("flipped", files)
        doctor = Doctor.of(config.run_dir)
        noise, errors = doctor.noise, doctor.held_out.noise if doctor.held_out else None
        result |= {"pairs": len(digests), "contradicted": noise.share, "evidence": noise.evidence}
        result["contradicted_held_out"] = errors.share if errors else None
        result |= judged(doctor, np.isin(doctor.history.ids, planted))
        if self.share and self.retrain and self.name == "politeness":
            extra = self.write("doctor", doctor.ids_of("likely_flipped"))
            result["held_out_corrected"] = self.train("corrected", [*files, extra])[1]
        return result

    def write(self, name: str, digests: Sequence[int]) -> str:
        file = self.folder / f"{name}.jsonl"
        lines = [json.dumps({"id": hex_id(int(each)), "flip": True}) for each in digests]
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    def train(self, name: str, corrections: Sequence[str]) -> tuple[Any, dict[str, float]]:
        config = self.config(name, corrections)
        if not (config.run_dir / FINISHED).exists():
            assert DPOPipeline(config).run() == 0
        lines = map(json.loads, (config.run_dir / "metrics.jsonl").read_text().splitlines())
        last = [line for line in lines if "eval/loss" in line][-1]
        wanted = ("loss", "rewards/accuracies", "rewards/margins")
        return config, {name: last[f"eval/{name}"] for name in wanted}

    def demo_config(self, name: str, corrections: Sequence[str]) -> Any:
        shop = self.folder.parent / "demo"
        if not (shop / "base" / "config.json").exists():
            shop.mkdir(parents=True, exist_ok=True)
            training = [query for query in demo.queries() if not query.held_out]
            held_out = [query for query in demo.queries() if query.held_out]
            demo.write_run(shop, training, held_out)
            demo.write_base(shop / "base", training)
        changes = [f"exp_name={name}", f"output_dir={self.folder}", f"seed={self.seed}"]
        changes += [f"actor_train.training_args.num_train_epochs={self.setting.epochs}"]
        changes += ["report_html=false", "save_steps=null", "overwrite=true", "platform=cpu"]
        if corrections:
            changes.append(f"actor_train.data_args.corrections=[{','.join(corrections)}]")
        return load(shop / "dpo.yaml", changes)

    def config(self, name: str, corrections: Sequence[str]) -> Any:
        if self.name == "demo":
            return self.demo_config(name, corrections)
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


def judged(doctor: Doctor, flipped: Flags) -> dict[str, Any]:
    """Return how many pairs are accused, and how many of them rightly."""
    history, likely = doctor.history, doctor.findings["likely_flipped"]
    disagrees = history.flip_score > UNDECIDED
    result: dict[str, Any] = {"accused": int(likely.sum()), "disagrees": int(disagrees.sum())}
    result["why_none"] = doctor.why_none
    if not flipped.any():
        return result
    for name, score in scores(history).items():
        result[name] = auc(score, flipped)
    for name, flags in {"": likely, "_disagrees": disagrees}.items():
        result[f"precision{name}"] = float(flipped[flags].mean()) if flags.any() else None
        result[f"recall{name}"] = float(flags[flipped].mean())
    if likely.any():
        result["recall_score"] = recall_at(history.flip_score, flipped, result["precision"])
    return result


def recall_at(score: Floats, flipped: Flags, precision: float) -> float:
    """Return the recall of the lowest cut of a score that has at least this precision."""
    order = np.argsort(-score, kind="stable")
    right = np.cumsum(flipped[order])
    good = np.flatnonzero(right >= precision * np.arange(1, len(order) + 1) - 1e-9)
    return float(right[good[-1]] / flipped.sum()) if len(good) else 0.0


def scores(history: PairHistory) -> dict[str, Floats]:
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
    lines = ["| pairs, flipped | runs | AUC | first seen | length alone | likely_flipped |"
             " precision | recall | precision of disagrees | recall |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name in SETS:
        for share in SHARES:
            own = [c for c in cells if (c["name"], c["share"]) == (name, share)]
            if not own:
                continue
            length = [max(c["shorter"], c["longer"]) for c in own]
            texts = [spread([c["doctor"] for c in own]), spread([c["first_seen"] for c in own])]
            texts.append(spread(length))
            texts.append(", ".join(str(c["accused"]) for c in own))
            for key in ("precision", "recall", "precision_disagrees", "recall_disagrees"):
                texts.append(spread([c[key] for c in own if c[key] is not None]))
            lines.append(f"| {name}, {share:.0%} | {len(own)} | {' | '.join(texts)} |")
    lines += ["", "| pairs with right labels | runs | pairs | held-out accuracy | likely_flipped |"
              " disagrees |", "|---|---|---|---|---|---|"]  # fmt: skip
    for name in SETS:
        own = [c for c in cells if is_clean(c, name)]
        if own:
            accused = spread([c["accused"] / c["pairs"] for c in own], ".2%")
            disagrees = spread([c["disagrees"] / c["pairs"] for c in own], ".2%")
            held_out = spread([accuracy(c, "held_out") for c in own], ".1%")
            texts = [str(len(own)), str(own[0]["pairs"]), held_out, accused, disagrees]
            lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join([*lines, *corrected_lines(cells)])


def corrected_lines(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of runs that were repeated with the doctor's corrections."""
    clean = {c["seed"]: accuracy(c, "held_out") for c in cells if is_clean(c, "politeness")}
    lines = ["", "| politeness, flipped | accuracy without flips | with flips | corrected |",
             "|---|---|---|---|"]  # fmt: skip
    for share in SHARES:
        own = [c for c in cells if (c["name"], c["share"]) == ("politeness", share)]
        own = [c for c in own if c["seed"] in clean and "held_out_corrected" in c]
        if own:
            best = statistics.fmean(clean[c["seed"]] for c in own)
            worse = statistics.fmean(accuracy(c, "held_out") for c in own)
            after = statistics.fmean(accuracy(c, "held_out_corrected") for c in own)
            lines.append(f"| {share:.0%} | {best:.1%} | {worse:.1%} | {after:.1%} |")
    return lines if len(lines) > 3 else []


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Return mean, lowest and highest."""
    if not values:
        return "-"
    mean, low, high = statistics.fmean(values), min(values), max(values)
    return f"{mean:{form}} ({low:{form}} to {high:{form}})"


def is_clean(cell: dict[str, Any], name: str) -> bool:
    return bool(cell["name"] == name and cell["share"] == 0)


def accuracy(cell: dict[str, Any], key: str) -> float:
    return float(cell[key]["rewards/accuracies"])


if __name__ == "__main__":
    main()
