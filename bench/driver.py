"""What a step costs rank 0 with stub ranks: host time, collectives and messages.

    python bench/driver.py                     # about 2 minutes
    python bench/driver.py --ranks 1024
    python bench/driver.py --starters 4        # step time of 4 real ranks on Ray and under torchrun: 5 runs each

The loop, the cache of the reference, metrics and the ledger of pairs are the real ones. Ranks answer at once, with
numbers of the right size, so that what remains is the host work of one process. Time is the processor time of the
thread that trains, per step. The reference is unknown in the first epoch (computed and stored) and known in the second.
In the first epoch, other threads hash the keys of the cache, a step ahead.

Every rank runs the program, under torchrun and on Ray alike; this is rank 0 of a process group whose collectives return
at once. Collectives are counted, without those of the model and its optimizer: one per step that sums the step's
numbers, and those of sharding. Nothing of Ray is called in a step: the loop runs without it (`ray_calls`).

`--starters` trains a tiny model with one thread per rank, in turn on Ray and under torchrun, and compares the medians
of the runs' median step times. The machine must be idle.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import growth
import numpy as np
import torch
import yaml
from common import RESULTS, machine, table, told, write_facts
from transformers import LlamaConfig, LlamaForCausalLM

from rather.cluster.launch import Roles
from rather.config.load import config_from_dict
from rather.data.pairs import PairDataset, PairFile
from rather.data.prepare import Prepared
from rather.losses.metrics import MOMENTS, PER_PAIR
from rather.losses.objective import from_config
from rather.pipeline.hook import Hook, Hooks
from rather.pipeline.hooks import (
    CountStep,
    EndRun,
    KeepReferenceLogps,
    LogMetrics,
    TrackMetrics,
    WritePairLedger,
)
from rather.pipeline.loop import RunParts, TrainingLoop
from rather.pipeline.progress import RunState
from rather.pipeline.steps import PreparedSteps
from rather.run_folder.control import StopRequest
from rather.tracking.json_lines import MetricsPosition, read_records
from rather.tracking.run import RunTracker
from rather.tracking.trackers import TrackedRun
from rather.train.rank_trainer import StepResult

ROOT = Path(__file__).parents[1]
PAIRS = 4  # of a rank, in a step
STEPS = 8  # of an epoch
growth.MEANS = {"prompt": 180, "chosen": 320, "rejected": 290}  # UltraFeedback's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ranks = [8, 32, 128, 512, 1024]
    parser.add_argument("--ranks", nargs="+", type=int, default=ranks)
    parser.add_argument("--json", type=Path, default=RESULTS / "driver.json")
    parser.add_argument("--starters", type=int, metavar="RANKS", help="only compare the starters")
    parser.add_argument("--runs", type=int, default=5, help="of each starter")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print(told(machine()), flush=True)
    if args.starters:
        compare_starters(args.starters, args.runs)
        return
    results = [measure(count) for count in args.ranks]
    write_facts(args.json, "driver", results=results)
    names = ("ranks", "unknown_ms", "known_ms", "collectives", "ray_calls")
    headings = ("ranks", "ms, unknown", "ms, known", "collectives", "Ray calls")
    table("host work, per step", headings, [[row[name] for name in names] for row in results])


# --- the same run, started in two ways ---

WARM_UP, TIMED = 10, 60  # steps
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def compare_starters(ranks: int, runs: int) -> None:
    """Print the median step time of runs on Ray and under torchrun, which take turns."""
    starters = {"ray": [sys.executable], "torchrun": [*TORCHRUN, str(ranks)]}
    seconds: dict[str, list[float]] = {name: [] for name in starters}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, ranks)
        for number in range(runs):
            for starter, command in starters.items():
                seconds[starter].append(step_seconds(folder, f"{starter}-{number}", command))
                print(f"{starter} {number + 1}: {1e3 * seconds[starter][-1]:.1f} ms", flush=True)
    medians = {starter: statistics.median(found) for starter, found in seconds.items()}
    rows = [[starter, f"{1e3 * medians[starter]:.2f}"] for starter in starters]
    table(f"step of {ranks} ranks, median of {runs} runs", ["starter", "ms"], rows)
    difference = medians["ray"] / medians["torchrun"] - 1
    print(f"a step on Ray takes {100 * difference:+.1f} % compared with torchrun")


def write_run(folder: Path, ranks: int) -> None:
    """Write a model, pairs and the YAML of a run of both roles on the same devices."""
    sys.path.insert(0, str(ROOT))
    from tests.tiny import make_model, make_pairs

    make_model(folder / "base", hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    pairs = make_pairs(folder / "pairs.jsonl", PAIRS * ranks * STEPS)
    devices = {"device_mapping": list(range(ranks))}
    values = {
        "pretrain": str(folder / "base"),
        "output_dir": str(folder / "output"),
        "logging_dir": str(folder / "logs"),
        "platform": "cpu",
        "sequence_length": 64,
        "max_steps": WARM_UP + TIMED,
        "logging_steps": 1,
        "train_batch_size": PAIRS * ranks,
        "track_with": None,
        "report_html": False,
        "actor_train": {**devices, "data_args": {"file_name": str(pairs)}},
        "reference": {**devices, "cache": {"path": None}},
    }
    values["actor_train"]["training_args"] = {"num_train_epochs": 100}
    (folder / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")


def step_seconds(folder: Path, name: str, starter: list[str]) -> float:
    """Train, and return the median time of a step."""
    command = [*starter, "-m", "rather", "train", str(folder / "run.yaml"), f"exp_name={name}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    records = list(read_records(folder / "output" / name / "metrics.jsonl"))
    steps = [each for each in records if "pairs_per_second" in each][WARM_UP:]
    assert len(steps) == TIMED, name
    return statistics.median(each["pairs"] / each["pairs_per_second"] for each in steps)


# --- rank 0 with stub ranks ---


class Counts:
    """What rank 0 does together with others."""

    collectives = 0
    ray_calls = 0


class NoRay:
    """In the place of Ray: nobody may ask for it."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        self._counts.ray_calls += 1
        raise AttributeError(name)


class StubRank:
    """A role of rank 0 that answers at once."""

    device = "cpu"

    def __init__(self, role: str, pairs: int) -> None:
        self.role, self._first = role, True
        self.read_requests: Any = tuple
        self._logps = torch.full((pairs, 2), -100.0, dtype=torch.float64)

    def pack(self, _batches: Any) -> None: ...

    def train_step(self, *_: Any, **__: Any) -> StepResult:
        sums = dict.fromkeys(["weight", "loss", *PER_PAIR, *MOMENTS], 1.0)
        policy = self._logps if self._first else self._logps.new_empty(0, 2)
        self._first = False
        numbers: Any = {
            "requests": self.read_requests(),
            "ratios": self._logps,
            "pull": self._logps[:, 0],
        }
        return StepResult(sums, policy, 1.0, 1e-6, None, None, **numbers)

    def compute_log_probs(self, _batches: Any) -> dict[str, Any]:
        return {"sum": self._logps}


@contextmanager
def counted_collectives(counts: Counts, ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a group whose collectives return at once, and count them."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as inner
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    before = {name: getattr(inner, name) for name in ("all_reduce", "broadcast", "all_gather")}

    def counting(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            counts.collectives += 1
            return before[name](*args, **options)

        return call

    try:
        for name in before:
            setattr(inner, name, wrapped := counting(name))
            setattr(dist, name, wrapped)
        yield
    finally:
        for name, original in before.items():
            setattr(inner, name, original)
            setattr(dist, name, original)
        dist.destroy_process_group()


class Driver(Hook):
    """The training loop with given roles, as DPOPipeline builds it, without files.

    As the last hook it measures each step.
    """

    def __init__(
        self, config: Any, roles: Roles, source: PreparedSteps, own: Path, counts: Counts
    ) -> None:
        self.counts = counts
        state, objective = RunState(), from_config(config)
        kept: Any = {"saving": None, "run_dir": None, "stop": StopRequest()}
        self.parts = parts = RunParts.build(config, roles, source, objective, state, **kept)
        parts.packing.tokens["train"] = 16_384
        stream = parts.reference_stream
        stream._loaded = True
        assert stream.logps
        stream.logps.open(own)
        tracker = RunTracker(
            TrackedRun(config), total_steps=source.total_steps, start_step=0, quiet=True
        )
        hooks = Hooks()
        hooks += [
            WritePairLedger(tracker, objective),
            parts.guard,
            CountStep(state, parts.timeline, 0.0),
            LogMetrics(config.logging_steps, state, parts.timeline, source.epoch_at, hooks),
            KeepReferenceLogps(stream),
            EndRun(state, parts.requests, source.total_steps),
            TrackMetrics(tracker, lambda _: MetricsPosition()),
            self,
        ]
        self.loop = TrainingLoop(parts, hooks)
        self.costs: list[Any] = []
        self._before = self._clocks()

    def after_step(self, step: Any, result: StepResult) -> None:
        now = self._clocks()
        self.costs.append(now - self._before)
        self._before = self._clocks()

    def _clocks(self) -> Any:
        """Processor time of the loop's own thread and of all threads, in ms, and counts."""
        times = 1e3 * time.thread_time(), 1e3 * time.process_time()
        return np.array([*times, self.counts.collectives, self.counts.ray_calls])


def measure(ranks: int) -> dict[str, Any]:
    pairs = PAIRS * ranks
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = growth.write_pairs(folder / "pairs.arrow", STEPS * pairs)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
        heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
        LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder / "model")
        mapping = {"device_mapping": list(range(ranks))}
        training = {"num_train_epochs": 2}
        config = config_from_dict(
            {
                "pretrain": str(folder / "model"),
                "output_dir": str(folder),
                "exp_name": "driver",
                "train_batch_size": pairs,
                "actor_train": {
                    **mapping,
                    "training_args": training,
                    "data_args": {"file_name": str(path)},
                },
                "reference": mapping,
                "track_with": None,
                "platform": "cpu",
            }
        )
        dataset = PairDataset(PairFile(path), "driver", [(0, STEPS * pairs, 1.0)])
        source = PreparedSteps.of(config, Prepared(dataset, {}, {}))
        counts = Counts()
        ray: Any = NoRay(counts)
        sys.modules["ray"] = ray
        made: Any = [StubRank(name, pairs) for name in ("actor_train", "reference")]
        roles = Roles(*made, "cpu", rank=0, drivers=ranks)
        driver = Driver(config, roles, source, folder / "own.logps", counts)
        with counted_collectives(counts, ranks), closing(driver.parts.reference_stream):
            driver.loop.train()
        del sys.modules["ray"]
    unknown, known = np.split(np.array(driver.costs), [STEPS])
    assert len(known) == STEPS
    first, later = np.median(unknown[1:], axis=0), np.median(known[1:], axis=0)
    row = {
        "ranks": ranks,
        "pairs": pairs,
        "unknown_ms": round(float(first[0]), 2),
        "known_ms": round(float(later[0]), 2),
        "least_unknown_ms": round(float(unknown[1:, 0].min()), 2),
        "least_known_ms": round(float(known[1:, 0].min()), 2),
        "load": round(os.getloadavg()[0], 1),  # of the machine: other work makes this slower
        "other_threads_ms": round(float(first[1] - first[0]), 1),
        "collectives": f"{first[2]:.0f} unknown, {later[2]:.0f} known",
        "ray_calls": int(first[3]),
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
