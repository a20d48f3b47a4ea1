"""Seconds from `rather train` to its first optimizer step, uncompiled and compiled, with warm caches.

    python bench/start.py                    # 0.5B on this machine; writes results/start.json
    python bench/start.py --model 15M --compile off

The model has random weights, the tokenizer and the rows are those of the demo. Each cell runs the command twice in
processes of their own: the first run fills the caches (byte code, tokens, kernels), the second is measured. The clock
starts before Python does, so imports count, and so do the reference, the rehearsal of the planner and compiling.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import RESULTS, SHAPES, table, write_facts

from rather.tools.demo import make_tokenizer, pair, queries

PAIRS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    parser.add_argument("--compile", nargs="+", choices=("off", "on"), default=["off", "on"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = write_run(Path(folder), args.model)
        cells = {mode: [first_step(config, mode) for _ in range(2)] for mode in args.compile}
    columns = ["compile", "first run", "second run"]
    rows = [[mode, *seconds] for mode, seconds in cells.items()]
    table(f"{args.model}: seconds to the first step", columns, rows)
    write_facts(RESULTS / "start.json", "start", model=args.model, columns=columns, rows=rows)


def write_run(folder: Path, model: str) -> Path:
    """Write the model, the rows and the config of a run of one step."""
    draw, asked = random.Random(0), list(queries())[:PAIRS]
    rows = [pair(query, draw) for query in asked]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cuda = torch.cuda.is_available()
    weights = SHAPES[model].model(torch.bfloat16, "cuda" if cuda else "cpu", "sdpa")
    weights.save_pretrained(folder / "model")
    make_tokenizer(text for row in rows for text in row.values()).save_pretrained(folder / "model")
    config = {
        "pretrain": str(folder / "model"),
        "sequence_length": 128,
        "beta": 0.1,
        "max_steps": 1,
        "output_dir": str(folder),
        "report_html": False,
        "actor_train": {
            "training_args": {"learning_rate": 1e-6, "per_device_train_batch_size": len(rows)},
            "data_args": {"file_name": str(folder / "pairs.jsonl")},
        },
    }
    file = folder / "dpo.yaml"
    file.write_text(json.dumps(config))
    return file


def first_step(config: Path, mode: str) -> float:
    """Return the seconds until the metrics of the first step are in the run folder."""
    name = f"{mode}-{time.monotonic_ns()}"
    metrics = config.parent / name / "metrics.jsonl"
    command = [sys.executable, "-m", "rather", "train", str(config), f"exp_name={name}"]
    command += [f"compile={mode}", "save_steps=1000"]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        while not (metrics.exists() and '"lr"' in metrics.read_text()):
            if run.poll():
                raise SystemExit(f"{' '.join(command)}: exit code {run.returncode}")
            time.sleep(0.05)
        seconds = time.perf_counter() - begun
        run.wait()
    return seconds


if __name__ == "__main__":
    main()
