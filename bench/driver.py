"""What a step costs the process that decides, with stub ranks: rank 0 of one program, or a driver on Ray.

    python bench/driver.py                     # about 5 minutes
    python bench/driver.py --ranks 1024 --actors 0

The loop, the cache of the reference, metrics and the ledger of pairs are the real ones. Ranks answer at once, with
numbers of the right size, so that what remains is the host work of one process. Time is the processor time of the
thread that trains, per step. The reference is unknown in the first epoch (computed and stored) and known in the second.
In the first epoch, other threads hash the keys of the cache, a step ahead.

`ranks`: every rank runs the program, under torchrun and with `ray.one_program: true` alike; this is rank 0 of a process
group whose collectives return at once. Collectives are counted, without those of the model and its optimizer: one
per step that sums the step's numbers, and those of sharding. On Ray nothing is called in a step (`ray_calls`).

`driver`: Ray's driver calls both roles in every step; data is what it puts out and what all ranks answer, as pickled.
Ray's own cost is measured apart: 512 calls at a time, dealt out over as many real actors as asked for that do nothing;
the driver's processor time (all its threads) per call. `ray_ms` multiplies it by the two calls per rank of a step.
Actors are processes: one machine carries some dozens of them, not 1,024.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import chain, repeat
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import growth
import numpy as np
import torch
from common import RESULTS, machine, table, told, write_facts
from transformers import LlamaConfig, LlamaForCausalLM

from rather.cluster.cluster import Cluster
from rather.cluster.host import CallResult
from rather.cluster.launch import Roles
from rather.cluster.memory import Ledger
from rather.cluster.resources import connected, private_folder
from rather.config.load import config_from_dict
from rather.config.schema import Timeouts
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
from rather.tracking.json_lines import MetricsPosition
from rather.tracking.run import RunTracker
from rather.train.rank_trainer import StepResult


class Pickled(ForkingPickler):
    """Pickles tensors with their bytes, as Ray does, and not as names of shared memory."""

    _extra_reducers: Any = {}  # noqa: RUF012


PAIRS = 4  # of a rank, in a step
STEPS = 8  # of an epoch
ROUNDS, CALLS = 20, 512  # to real actors
NOTHING = len(Pickled.dumps(None))  # bytes that a rank answers that has nothing to say
growth.MEANS = {"prompt": 180, "chosen": 320, "rejected": 290}  # UltraFeedback's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ranks = [8, 32, 128, 512, 1024]
    parser.add_argument("--ranks", nargs="+", type=int, default=ranks)
    parser.add_argument(
        "--actors", type=int, default=32, help="real ones, for Ray's own cost; 0: none"
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "driver.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print(told(machine()), flush=True)
    ray = ray_cost(args.actors) if args.actors else {}
    results = [measure(count, way) for count in args.ranks for way in ("ranks", "driver")]
    for row in results:
        each = ray.get("processor_us", float("nan")) / 1e3
        row["ray_ms"] = round(row["ray_calls"] * each, 1) if row["ray_calls"] else 0.0
    write_facts(args.json, "driver", results=results, ray=ray)
    names = ("way", "ranks", "unknown_ms", "known_ms", "collectives", "ray_calls", "ray_ms")
    headings = ("way", "ranks", "ms, unknown", "ms, known", "collectives", "Ray calls", "Ray, ms")
    table("host work, per step", headings, [[row[name] for name in names] for row in results])


class StubRay:
    """Ray's three calls, answered at once; counts what passes through them."""

    def __init__(self) -> None:
        self.data = 0  # bytes, sent and answered
        self.calls = 0
        self.collectives = 0  # of rank 0

    def put(self, value: Any) -> Any:
        self.data += len(Pickled.dumps(value))
        return value

    def wait(self, asked: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return asked, []

    def get(self, answers: list[Answer]) -> list[Any]:
        self.data += NOTHING * (len(answers) - 1)
        return [each.value for each in answers]


class Answer:
    """An answer on its way; not compared, as Ray's references are not."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def stub_cluster(name: str, config: Any, ray: StubRay, pairs: int) -> Cluster:
    """Return a cluster whose workers answer at once, the first one with numbers."""
    sums = dict.fromkeys(["weight", "loss", *PER_PAIR, *MOMENTS], 1.0)
    logps = torch.full((pairs, 2), -100.0, dtype=torch.float64)
    first = StepResult(sums, logps, 1.0, 1e-6, None, None, ratios=logps, pull=logps[:, 0])
    later = replace(first, policy=logps.new_empty(0, 2))
    values: dict[str, Any] = {"train_step": chain([first], repeat(later))}
    values["compute_log_probs"] = repeat({"sum": logps})
    sizes = {"train_step": len(Pickled.dumps(CallResult(later)))}
    sizes["compute_log_probs"] = len(Pickled.dumps(CallResult({"sum": logps})))

    def answer(_role: str, method: str, _args: Any, silent: bool) -> Answer:
        ray.calls += len(config.actor_train.devices)  # one for each rank
        ray.data += sizes.get(method, NOTHING)
        return Answer(CallResult(next(values[method]) if method in values else None))

    def seat(rank: int) -> Any:
        nothing = Answer(None)
        call = (lambda *_, silent: nothing) if rank else answer
        remote = {"add": lambda *_: Answer(CallResult()), "call": call}
        own = {name: SimpleNamespace(remote=each) for name, each in remote.items()}
        here = SimpleNamespace(is_gone=False)
        place: Any = {"node": "node", "room": None, "link": None, "process": here}
        return SimpleNamespace(handle=SimpleNamespace(**own), **place)

    manager: Any = SimpleNamespace(
        kind="cpu", ledger=Ledger(), timeouts=Timeouts(), named={}, is_stopped=False,
        cut_off=set(), introduce=lambda _: None,
        refuse_without_ray=lambda: None, seats=lambda mapping, _: [*map(seat, mapping)],
    )  # fmt: skip
    return Cluster(name, None, manager, getattr(config, name), pipeline_config=config)


class StubRank:
    """A role of rank 0 that answers at once."""

    device = "cpu"

    def __init__(self, role: str, pairs: int) -> None:
        self.role, self._first = role, True
        self._logps = torch.full((pairs, 2), -100.0, dtype=torch.float64)

    def pack(self, _batches: Any) -> None: ...

    def train_step(self, *_: Any, **__: Any) -> StepResult:
        sums = dict.fromkeys(["weight", "loss", *PER_PAIR, *MOMENTS], 1.0)
        policy = self._logps if self._first else self._logps.new_empty(0, 2)
        self._first = False
        numbers: Any = {"ratios": self._logps, "pull": self._logps[:, 0]}
        return StepResult(sums, policy, 1.0, 1e-6, None, None, **numbers)

    def compute_log_probs(self, _batches: Any) -> dict[str, Any]:
        return {"sum": self._logps}


@contextmanager
def counted_collectives(ray: StubRay, ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a group whose collectives return at once, and count them."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as inner
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    before = {name: getattr(inner, name) for name in ("all_reduce", "broadcast", "all_gather")}

    def counting(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            ray.collectives += 1
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

    def __init__(self, config: Any, roles: Roles, source: PreparedSteps, own: Path) -> None:
        state, objective = RunState(), from_config(config)
        kept: Any = {"identity": {}, "run_dir": None, "stop": StopRequest()}
        self.parts = parts = RunParts.build(config, roles, source, objective, state, **kept)
        parts.packing.tokens["train"] = 16_384
        stream = parts.reference_stream
        stream._loaded = True
        assert stream.logps
        stream.logps.open(own)
        tracker = RunTracker(config, total_steps=source.total_steps, start_step=0, quiet=True)
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
        """Processor time of the loop's own thread and of all threads, in ms, KB, and counts."""
        ray: Any = sys.modules["ray"]
        times = 1e3 * time.thread_time(), 1e3 * time.process_time()
        return np.array([*times, ray.data / 1e3, ray.collectives, ray.calls])


def measure(ranks: int, way: str) -> dict[str, Any]:
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
        ray: Any = StubRay()
        sys.modules["ray"] = ray
        names = ("actor_train", "reference")
        with ExitStack() as stack:
            if way == "ranks":
                stack.enter_context(counted_collectives(ray, ranks))
                made: Any = [StubRank(name, pairs) for name in names]
                roles = Roles(*made, "cpu", rank=0, drivers=ranks)
            else:
                made = [stub_cluster(name, config, ray, pairs) for name in names]
                roles = Roles(*made, "cpu", here=False)
            driver = Driver(config, roles, source, folder / "own.logps")
            stack.enter_context(closing(driver.parts.reference_stream))
            driver.loop.train()
        del sys.modules["ray"]
    unknown, known = np.split(np.array(driver.costs), [STEPS])
    assert len(known) == STEPS
    first, later = np.median(unknown[1:], axis=0), np.median(known[1:], axis=0)
    row = {
        "way": way,
        "ranks": ranks,
        "pairs": pairs,
        "unknown_ms": round(float(first[0]), 2),
        "known_ms": round(float(later[0]), 2),
        "least_unknown_ms": round(float(unknown[1:, 0].min()), 2),
        "least_known_ms": round(float(known[1:, 0].min()), 2),
        "load": round(os.getloadavg()[0], 1),  # of the machine: other work makes this slower
        "other_threads_ms": round(float(first[1] - first[0]), 1),
        "unknown_kb": round(float(first[2]), 1),
        "known_kb": round(float(later[2]), 1),
        "collectives": f"{first[3]:.0f} unknown, {later[3]:.0f} known",
        "ray_calls": int(first[4]),
    }
    print(row, flush=True)
    return row


def ray_cost(count: int) -> dict[str, float]:
    """Return what Ray itself takes per call: those of a step, dealt out over some real actors."""
    folder = private_folder()
    ray, _ = connected(None, count, folder)

    class Stub:
        def call(self, *_: Any, silent: bool) -> None:
            return None

    try:
        made = ray.remote(Stub).options(num_cpus=0)
        actors = [made.remote() for _ in range(count)]
        ray.get([actor.call.remote(silent=True) for actor in actors])  # all have started
        found = []
        for _ in range(ROUNDS):
            began = time.perf_counter(), time.process_time()
            given = ray.put((1, "x" * 1000))
            refs = [
                actors[i % count].call.remote("role", "method", given, silent=True)
                for i in range(CALLS)
            ]
            submitted = time.perf_counter() - began[0]
            ray.wait(refs, num_returns=CALLS)
            ray.get(refs)
            whole = time.perf_counter() - began[0], time.process_time() - began[1]
            found.append([1e6 * seconds / CALLS for seconds in (submitted, *whole)])
        names = ("submit_us", "call_us", "processor_us")
        median = np.median(np.array(found), axis=0).round(1).tolist()
        return {"actors": count, **dict(zip(names, median, strict=True))}
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        del sys.modules["ray"]


if __name__ == "__main__":
    main()
