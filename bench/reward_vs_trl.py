"""A reward model by Rather and by TRL's RewardTrainer: the same pairs and settings, held-out accuracy and time.

    python bench/reward_vs_trl.py --data shared/data [--seeds 3] [--out bench/results/reward_vs_trl.json]

Needs the extra `bench` (TRL). Model: stories15M or stories260K. Pairs: drawn by the seed from rasbt_politeness; a fifth of
the prompts is held out. Both sides: 16 pairs per step, the same tokens (at most 256), AdamW, linear schedule, no warm-up,
clipping at 1, float32, one CPU thread. Each run has its own process; time is that process's own CPU time from the first
step to the trained weights, so that other work on the machine does not count. Data preparation, evaluation and export
are outside of it on both sides. Accuracy is the share of held-out pairs whose chosen answer has the larger score.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

SIZE, RATE = 16, 5e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="stories15M")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("rather", "trl"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.only:
        print(json.dumps((ours if given.only == "rather" else theirs)(given)))
        return 0
    runs: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        with TemporaryDirectory() as folder:
            write_pairs(given, seed, Path(folder))
            for side in ("rather", "trl"):
                command = [sys.executable, __file__, *sys.argv[1:], "--only", side]
                command += ["--folder", folder, "--seed", str(seed)]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                runs.append(
                    {"side": side, "seed": seed, **json.loads(done.stdout.splitlines()[-1])}
                )
                print(json.dumps(runs[-1]), flush=True)
        ratio = summarise(given, runs)
    return 0 if ratio < 0.5 else 1  # the goal of this comparison


def summarise(given: argparse.Namespace, runs: list[dict[str, Any]]) -> float:
    """Print the means over the seeds so far, and write them; return the ratio of the times."""
    means = {
        side: {
            key: fmean(run[key] for run in runs if run["side"] == side)
            for key in ("accuracy", "seconds")
        }
        for side in ("rather", "trl")
    }
    ratio = means["rather"]["seconds"] / means["trl"]["seconds"]
    result = {"model": given.model, "pairs": given.pairs, "epochs": given.epochs, "runs": runs}
    result |= {"mean": means, "time_ratio": ratio}
    print(json.dumps(means), f"{ratio:.2f} of TRL's time", flush=True)
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return ratio


def write_pairs(given: argparse.Namespace, seed: int, folder: Path) -> None:
    file = given.data / "pairs" / "rasbt_politeness.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    pairs = [
        {"prompt": "\n".join(turn["content"] for turn in row["messages"]) + "\n"}
        | {side: row[side] for side in ("chosen", "rejected")}
        for row in rows
    ]
    draw = random.Random(seed)
    pairs = draw.sample(pairs, given.pairs)
    prompts = sorted({pair["prompt"] for pair in pairs})
    held = set(draw.sample(prompts, len(prompts) // 5))
    for name, is_held in (("train", False), ("held", True)):
        own = [json.dumps(pair) for pair in pairs if (pair["prompt"] in held) == is_held]
        (folder / f"{name}.jsonl").write_text("\n".join(own) + "\n", encoding="utf-8")


def ours(given: argparse.Namespace) -> dict[str, float]:
    from rather.config.load import config_from_dict
    from rather.pipeline.hooks import Evaluate
    from rather.pipeline.loop import TrainingLoop
    from rather.pipeline.pipeline import DPOPipeline

    folder = given.folder
    config = config_from_dict(
        {
            "exp_name": "reward", "output_dir": str(folder), "task": "reward", "seed": given.seed,
            "pretrain": str(given.data / "models" / given.model), "sequence_length": 256,
            "train_batch_size": SIZE, "track_with": None, "save_steps": None, "report_html": False,
            "actor_train": {
                "data_args": {"file_name": str(folder / "train.jsonl")},
                "model_args": {"dtype": "fp32"},
                "training_args": {
                    "learning_rate": RATE, "num_train_epochs": given.epochs, "warmup_ratio": 0.0,
                    "lr_scheduler_type": "linear", "weight_decay": 0.0,
                },
            },
            "validation": {"data_args": {"file_name": str(folder / "held.jsonl")}},
        }
    )  # fmt: skip
    pipeline = DPOPipeline(config)
    spent = {"steps": 0.0, "evaluations": 0.0}
    train, evaluate = TrainingLoop.train_step, Evaluate.evaluate

    def timed(loop: TrainingLoop, step: Any) -> Any:
        began = spent.setdefault("began", time.process_time() - spent["evaluations"])
        result = train(loop, step)
        spent["seconds"] = time.process_time() - began - spent["evaluations"]
        spent["steps"] += 1
        return result

    def not_timed(hook: Evaluate, result: Any) -> None:
        began = time.process_time()
        evaluate(hook, result)
        spent["evaluations"] += time.process_time() - began

    TrainingLoop.train_step = timed  # type: ignore[method-assign]
    Evaluate.evaluate = not_timed  # type: ignore[method-assign]
    assert pipeline.run() == 0
    lines = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [json.loads(line) for line in lines if "eval/rewards/accuracies" in line][-1]
    found = {"accuracy": last["eval/rewards/accuracies"], "steps": spent["steps"]}
    return {**found, "seconds": spent["seconds"]}


def theirs(given: argparse.Namespace) -> dict[str, float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
    from trl import RewardConfig, RewardTrainer

    set_seed(given.seed)
    name = str(given.data / "models" / given.model)
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.unk_token or tokenizer.bos_token
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, dtype="float32")
    model.config.pad_token_id = tokenizer.pad_token_id
    sets = {
        kind: Dataset.from_list(
            [json.loads(line) for line in (given.folder / f"{kind}.jsonl").read_text().splitlines()]
        )
        for kind in ("train", "held")
    }
    args = RewardConfig(
        output_dir=str(given.folder / "trl"), per_device_train_batch_size=SIZE, max_length=256,
        learning_rate=RATE, num_train_epochs=given.epochs, lr_scheduler_type="linear",
        weight_decay=0.0, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", seed=given.seed, disable_tqdm=True, logging_steps=50,
    )  # fmt: skip
    trainer = RewardTrainer(
        model, args=args, train_dataset=sets["train"], eval_dataset=sets["held"],
        processing_class=tokenizer,
    )  # fmt: skip
    began = time.process_time()
    trainer.train()
    seconds = time.process_time() - began
    collate, right = trainer.data_collator, 0
    model.eval()
    for row in trainer.eval_dataset:  # its own metric is a mean of batches
        with torch.no_grad():
            chosen, rejected = model(**collate([row])).logits[:, 0].tolist()
        right += chosen > rejected
    found = {"accuracy": right / len(trainer.eval_dataset), "steps": trainer.state.global_step}
    return {**found, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
