"""What a step costs the driver on Ray: its own time and data with stub workers, and Ray's own cost beside it.

    python bench/driver.py                     # about 3 minutes
    python bench/driver.py --ranks 8 64 512

The loop, the clusters of both roles and the cache of the reference are the real ones. The workers answer at once, with
numbers of the right size, so that what remains is the driver. Time is the processor time of the thread that trains, per
step; data is what the driver puts out once per step, and what all ranks answer, as pickled. The reference is unknown in
the first epoch (computed and stored) and known in the second. A thread beside it hashes the keys of the cache, once
for each pair: the difference of both epochs over all threads. Ray's own cost is measured apart, as the time to submit
calls to real actors and to get their answers, because it grows with the calls and not with the driver.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from contextlib import closing
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
from rather.config.load import config_from_dict
from rather.config.schema import Timeouts
from rather.data.pairs import PairDataset, PairFile
from rather.data.prepare import Prepared
from rather.losses.metrics import MOMENTS, PER_PAIR
from rather.losses.objective import from_config
from rather.pipeline.loop import TrainingLoop
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.steps import PreparedSteps
from rather.report.write import LiveReport
from rather.run_folder.control import StopRequest
from rather.tracking.run import NoTracker
from rather.train.rank_trainer import StepResult

PAIRS = 4  # of a rank, in a step
STEPS = 8  # of an epoch
CALLS = 1024  # to real actors
ACTORS = 4
growth.MEANS = {"prompt": 180, "chosen": 320, "rejected": 290}  # UltraFeedback's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ranks = [8, 16, 32, 64, 128, 256, 512, 1024]
    parser.add_argument("--ranks", nargs="+", type=int, default=ranks)
    parser.add_argument("--no-ray", action="store_true", help="leave out Ray's own cost")
    parser.add_argument("--json", type=Path, default=RESULTS / "driver.json")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print(told(machine()), flush=True)
    ray = {} if args.no_ray else ray_cost()
    results = [measure(count) for count in args.ranks]
    for row in results:
        row["ray_ms"] = 2 * row["ranks"] * ray.get("call_us", float("nan")) / 1e3
    write_facts(args.json, "driver", results=results, ray=ray)
    headings = ("ranks", "pairs", "ms, unknown", "ms, known", "sent, KB", "answered, KB", "Ray, ms")
    names = ("ranks", "pairs", "unknown_ms", "known_ms", "sent_kb", "answered_kb", "ray_ms")
    table("driver, per step", headings, [[row[name] for name in names] for row in results])


class StubRay:
    """Ray's three calls, answered at once; counts what passes through them."""

    def __init__(self) -> None:
        self.sent = self.answered = 0

    def put(self, value: Any) -> Any:
        self.sent += len(ForkingPickler.dumps(value))
        return value

    def wait(self, asked: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return asked, []

    def get(self, answer: Any) -> Any:
        return answer.value


class Answer:
    """An answer on its way; not compared, as Ray's references are not."""

    def __init__(self, value: Any) -> None:
        self.value = value


def stub_cluster(name: str, config: Any, ray: StubRay, pairs: int) -> Cluster:
    """Return a cluster whose workers answer at once, the first one with numbers."""
    sums = dict.fromkeys(["weight", "loss", *PER_PAIR, *MOMENTS], 1.0)
    values = {
        "train_step": StepResult(sums, torch.zeros(0, 2), 1.0, 1e-6, None, None),
        "compute_log_probs": {"sum": torch.full((pairs, 2), -100.0, dtype=torch.float64)},
    }
    known = {method: CallResult(value) for method, value in values.items()}
    sizes = {method: len(ForkingPickler.dumps(result)) for method, result in known.items()}
    nothing = len(ForkingPickler.dumps(None))

    def call(_role: str, method: str, _args: Any, silent: bool) -> Answer:
        ray.answered += nothing if silent else sizes.get(method, nothing)
        return Answer(None if silent else known.get(method, CallResult()))

    handle = SimpleNamespace(
        add=SimpleNamespace(remote=lambda *_: Answer(CallResult())),
        call=SimpleNamespace(remote=call),
    )
    seat = SimpleNamespace(handle=handle, node="node", room=None)
    manager: Any = SimpleNamespace(
        kind="cpu", ledger=Ledger(), timeouts=Timeouts(), named={}, is_stopped=False,
        refuse_without_ray=lambda: None, seats=lambda mapping, _: [seat] * len(mapping),
    )  # fmt: skip
    return Cluster(name, None, manager, getattr(config, name), pipeline_config=config)


class Driver(TrainingLoop):
    """The training loop with given roles, as DPOPipeline builds it, without files."""

    def __init__(self, config: Any, roles: Roles, source: PreparedSteps, own: Path) -> None:
        self.config, self.roles, self.source, self.run_dir = config, roles, source, None
        self.stop, self.tracker, self.evaluators = StopRequest(), NoTracker(), []
        self.page, self._export = LiveReport(own.parent, wanted=False), None
        self._build_loop({})
        source.packing = self.packing
        self.packing.tokens["train"] = 16_384
        parts = (config, roles, self.timeline, self.retry, source, from_config(config))
        self.reference_stream = ReferenceStream(*parts)
        self.reference_stream._loaded = True
        assert self.reference_stream.logps
        self.reference_stream.logps.open(own)
        self.seconds: list[Any] = []
        self._before = self._clocks()

    def _ends_after(self, step: Any, result: StepResult) -> bool:
        ends = super()._ends_after(step, result)
        now = self._clocks()
        self.seconds.append(now - self._before)
        self._before = now
        return ends

    def _clocks(self) -> Any:
        """Processor time of the loop's own thread, and of all threads."""
        return np.array([time.thread_time(), time.process_time()])


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
                "pair_ledger": False,
                "platform": "cpu",
            }
        )
        dataset = PairDataset(PairFile(path), "driver", [(0, STEPS * pairs, 1.0)])
        source = PreparedSteps.of(config, Prepared(dataset, {}, {}))
        ray: Any = StubRay()
        sys.modules["ray"] = ray
        roles = [stub_cluster(name, config, ray, pairs) for name in ("actor_train", "reference")]
        driver = Driver(config, Roles(*roles, "cpu", here=False), source, folder / "own.logps")
        ray.sent = ray.answered = 0
        with closing(driver.reference_stream):
            driver._train()
        del sys.modules["ray"]
    unknown, known = np.split(1e3 * np.array(driver.seconds), [STEPS])
    assert len(known) == STEPS
    first, later = np.median(unknown[1:], axis=0), np.median(known[1:], axis=0)
    row = {
        "ranks": ranks,
        "pairs": pairs,
        "unknown_ms": round(float(first[0]), 2),
        "known_ms": round(float(later[0]), 2),
        "hashing_us_per_pair": round(float(first[1] - later[1]) * 1e3 / pairs, 1),
        "sent_kb": round(ray.sent / 1e3 / len(driver.seconds), 1),
        "answered_kb": round(ray.answered / 1e3 / len(driver.seconds), 1),
    }
    print(row, flush=True)
    return row


def ray_cost() -> dict[str, float]:
    """Return what Ray itself takes to submit a call to a real actor and to get its answer."""
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)

    class Stub:
        def call(self, *_: Any, silent: bool) -> None:
            return None

    try:
        made = ray.remote(Stub).options(num_cpus=0)
        actors = [made.remote() for _ in range(ACTORS)]
        given = ray.put((1, "x" * 1000))
        best = {"submit_us": float("inf"), "call_us": float("inf")}
        for _ in range(4):
            began = time.perf_counter()
            refs = [
                actors[i % ACTORS].call.remote("role", "method", given, silent=True)
                for i in range(CALLS)
            ]
            submitted = time.perf_counter() - began
            ray.wait(refs, num_returns=CALLS)
            for ref in refs:
                ray.get(ref)
            whole = time.perf_counter() - began
            found = {"submit_us": 1e6 * submitted / CALLS, "call_us": 1e6 * whole / CALLS}
            best = {name: round(min(best[name], found[name]), 1) for name in best}
        return best
    finally:
        ray.shutdown()
        del sys.modules["ray"]


if __name__ == "__main__":
    main()
