"""KTO on single answers against DPO on the pairs that they come from: held-out accuracy, over seeds.

    python bench/kto_vs_dpo.py --data shared/data [--seeds 3] [--out bench/results/kto_vs_dpo.json]

Model: stories260K. Pairs: the 240 shortest of rasbt_politeness; a fifth of the prompts is held out by the seed. DPO trains on the
pairs, KTO on each answer alone with its label, in a random order; both see every answer as often, with the same learning
rate and number of steps. Accuracy is the share of held-out pairs whose chosen answer has the larger implicit reward.
KTO must reach 80 % of DPO's gain over 0.5 on average, or the script ends with exit code 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rather.commands.score import score
from rather.config.load import config_from_dict
from rather.pipeline.pipeline import DPOPipeline

SHARE, WANTED = 0.2, 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=240, help="the shortest so many")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with gzip.open(
        given.data / "pairs" / "rasbt_politeness.jsonl.gz", "rt", encoding="utf-8"
    ) as file:
        pairs = [as_text(json.loads(line)) for line in file]
    pairs = sorted(pairs, key=lambda pair: len("".join(pair.values())))[: given.pairs]
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            found.append({"seed": seed, **one_seed(pairs, seed, Path(folder) / str(seed), given)})
            print(json.dumps(found[-1]), flush=True)
    means = {name: fmean(each[name] for each in found) for name in ("dpo", "kto")}
    share = (means["kto"] - 0.5) / (means["dpo"] - 0.5)
    result = {"seeds": found, "mean": means, "share_of_gain": share, "torch": torch.__version__}
    result |= {"epochs": given.epochs, "learning_rate": given.rate, "pairs": len(pairs)}
    print(json.dumps(result["mean"]), f"KTO reaches {share:.0%} of DPO's gain over 0.5")
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if share >= WANTED else 1


def one_seed(
    pairs: list[dict[str, Any]], seed: int, folder: Path, given: argparse.Namespace
) -> dict[str, float]:
    """Return held-out accuracies and seconds of both runs."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    prompts = sorted({pair["prompt"] for pair in pairs})
    held = set(draw.sample(prompts, round(SHARE * len(prompts))))
    sets: dict[str, list[dict[str, Any]]] = {"train": [], "held": []}
    for pair in pairs:
        sets["held" if pair["prompt"] in held else "train"].append(pair)
    singles = [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair in sets["train"]
        for side in ("chosen", "rejected")
    ]
    draw.shuffle(singles)
    for name, rows in {**sets, "singles": singles}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    model = str(given.data / "models" / "stories260K")
    result: dict[str, float] = {}
    for name, task, file, size in (
        ("dpo", "preference", "train", 16),
        ("kto", "unpaired", "singles", 32),
    ):
        config = config_from_dict(
            {
                "exp_name": name, "output_dir": str(folder), "pretrain": model, "seed": seed,
                "task": task, "sequence_length": 512, "track_with": None, "train_batch_size": size,
                "save_steps": None, "logging_steps": 50, "report_html": False,
                "actor_train": {
                    "data_args": {"file_name": str(folder / f"{file}.jsonl")},
                    "training_args": {
                        "learning_rate": given.rate, "num_train_epochs": given.epochs,
                        "warmup_ratio": 0.1, "lr_scheduler_type": "cosine",
                    },
                },
            }
        )  # fmt: skip
        began = time.perf_counter()
        assert DPOPipeline(config).run() == 0
        result[f"{name}_seconds"] = round(time.perf_counter() - began, 1)
        keys = ["sequence_length=512", f"output_dir={folder}"]
        trained = str(config.run_dir / "model")
        numbers = score(trained, folder / "held.jsonl", keys, model, [], None)
        result[name] = numbers["rewards/accuracies"]
    return {**result, "held_out_pairs": len(sets["held"])}


def as_text(pair: dict[str, Any]) -> dict[str, str]:
    """Return a pair of plain text: the model has no chat template."""
    turns = (turn["content"] for turn in pair["messages"])
    return {
        "prompt": "\n".join([*turns, ""]),
        "chosen": pair["chosen"],
        "rejected": pair["rejected"],
    }


if __name__ == "__main__":
    sys.exit(main())
