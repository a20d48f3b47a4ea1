"""Cost per token and memory of the driver from a thousand to a million pairs: both should stay flat.

    python bench/growth.py                       # about 3 minutes
    python bench/growth.py --pairs 1000 100000   # other sizes

Pairs of random tokens are written straight into the pair file that preparing data makes. For each size a process of
its own opens it as the pipeline does, then samples, takes and packs steps from all over the epochs (the driver's
work), and trains a tiny model on them. Times are those of its own thread, so that neighbours do not count; memory is
what no file backs, since pages of the mapped file can be dropped at any time. Drawing the order of an epoch is shared
among all its tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from common import (
    RESULTS,
    Shape,
    anonymous_mib,
    known_columns,
    machine,
    ours,
    table,
    told,
    write_facts,
)
from numpy.typing import NDArray

from rather.data.cache import BATCH_ROWS, batch_writer
from rather.data.pack import pack
from rather.data.pairs import SCHEMA, PairDataset, PairFile
from rather.data.sampler import Order

TINY = Shape("llama", 32, 2, 2, 2, 64, 256, True)
BATCH = 64
BUDGET = 4096
MEANS = {
    "prompt": 20,
    "chosen": 32,
    "rejected": 29,
}  # a tenth of UltraFeedback's, so that a million fit a small disk
ALLOWED = 0.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", type=int, default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument(
        "--steps",
        type=int,
        default=160,
        help="driver's steps of each size; a quarter of them train",
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "growth.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measured(Path(args.child[0]), int(args.child[1]))))
        return
    print(told(machine()), flush=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for count in args.pairs:
            path = write_pairs(Path(folder) / f"{count}.arrow", count)
            command = [sys.executable, __file__, "--child", str(path), str(args.steps)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            results.append({"pairs": count, **json.loads(done.stdout.splitlines()[-1])})
            print(f"{count:,} pairs done", flush=True)
            write_facts(args.json, "growth", results=results, spread=spreads(results))
            path.unlink()
    report(results)


def write_pairs(path: Path, count: int) -> Path:
    """Random pairs in the file that preparing makes, a record batch at a time."""
    draw = np.random.default_rng(0)
    with batch_writer(path) as add:
        for first in range(0, count, BATCH_ROWS):
            add(record_batch(draw, first, min(first + BATCH_ROWS, count)))
    return path


def record_batch(draw: np.random.Generator, first: int, end: int) -> Any:
    rows = end - first
    lengths = {
        name: draw.integers(mean // 2, mean + mean // 2 + 1, rows) for name, mean in MEANS.items()
    }
    columns: dict[str, Any] = {name: lists(lengths[name], draw) for name in MEANS}
    for side in ("chosen", "rejected"):
        spans = np.stack([lengths["prompt"], lengths["prompt"] + lengths[side]], axis=1)
        offsets = np.arange(0, 2 * rows + 1, 2, dtype=np.int32)
        columns[f"{side}_scored"] = pa.ListArray.from_arrays(
            offsets, spans.astype(np.int32).ravel()
        )
    numbers = np.arange(first, end)
    columns |= {
        "weight": np.ones(rows),
        "margin": np.full(rows, np.nan),
        "soft_label": np.full(rows, np.nan),
    }
    columns |= {"id": pa.array([""] * rows), "source": np.zeros(rows, np.int32), "number": numbers}
    hashes = [field.name for field in SCHEMA if field.type == pa.uint64()]
    columns |= {name: numbers.astype(np.uint64) for name in hashes}
    return pa.record_batch(
        [pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA
    )


def lists(lengths: NDArray[np.int64], draw: np.random.Generator) -> Any:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(
        offsets, draw.integers(3, TINY.vocabulary, offsets[-1], dtype=np.int32)
    )


def measured(path: Path, steps: int) -> dict[str, float]:
    """Runs in a process of its own."""
    torch.set_num_threads(1)
    before = anonymous_mib()
    with PeakOfAnonymous() as memory:
        began = time.perf_counter()
        file = PairFile(path)
        dataset = PairDataset(file, "", [(0, len(file), 1.0)])
        order = Order(tuple(dataset.parts), BATCH, seed=0, groups=dataset.groups)
        opened = time.perf_counter() - began
        driver = sampling_and_packing(dataset, order, steps)
    trained = training(dataset, order, steps // 4)
    return {
        "opening_ms": 1e3 * opened,
        "driver_us": 1e6 * driver,
        "training_us": 1e6 * (trained + driver),
        "driver_mib": memory.peak - before,
        "process_mib": memory.peak,
    }


def sampling_and_packing(dataset: PairDataset, order: Order, steps: int) -> float:
    """Seconds a token."""
    began = time.thread_time()
    order.epoch(0)
    drawing = (time.thread_time() - began) / len(dataset)  # a pair
    seconds, tokens = [], []
    for number in range(steps):
        began = time.thread_time()
        pairs = dataset.take(order.step(number))
        pack(pairs, BUDGET)
        seconds.append(time.thread_time() - began)
        tokens.append(sum(pair.tokens for pair in pairs))
    each = statistics.median(s / t for s, t in zip(seconds, tokens, strict=True))
    return each + drawing * BATCH / statistics.mean(tokens)


def training(dataset: PairDataset, order: Order, steps: int) -> float:
    """Seconds a token of the tiny model's steps, packing left out."""
    engine = ours(TINY, "cpu", reference=False)
    known, costs = known_columns(BATCH), []
    for number in range(steps):
        pairs = dataset.take(order.step(number))
        batches = pack(pairs, BUDGET)
        columns = {name: column[: len(pairs)] for name, column in known.items()}
        began = time.process_time()
        engine.policy.train_step(batches, columns)
        costs.append((time.process_time() - began) / sum(pair.tokens for pair in pairs))
    return statistics.median(costs)


class PeakOfAnonymous:
    """The largest anonymous memory of this process while the block runs, looked at a hundred times a second."""

    def __enter__(self) -> PeakOfAnonymous:
        self.peak, self.done = anonymous_mib(), threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(0.01):
            self.peak = max(self.peak, anonymous_mib())


def spreads(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """How much the largest exceeds the smallest."""
    keys = ("driver_us", "training_us", "process_mib")
    return {key: max(r[key] for r in results) / min(r[key] for r in results) - 1 for key in keys}


def report(results: Sequence[dict[str, float]]) -> None:
    names = {
        "pairs": "pairs",
        "opening_ms": "opening ms",
        "driver_us": "driver us a token",
        "training_us": "with training us a token",
        "driver_mib": "driver's data MiB",
        "process_mib": "driver peak MiB",
    }
    table(
        "cost per token by size",
        list(names.values()),
        [[result[key] for key in names] for result in results],
    )
    for key, spread in spreads(results).items():
        verdict = "flat" if spread <= ALLOWED else f"NOT within {ALLOWED:.0%}"
        print(f"{names[key]}: {spread:.1%} between the smallest and the largest, {verdict}")


if __name__ == "__main__":
    main()
