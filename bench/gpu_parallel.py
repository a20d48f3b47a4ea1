"""The code of every parallel axis on one device equals the plain path: the same steps of a Qwen2.5 shape, each way.

    torchrun --nproc-per-node 1 bench/gpu_parallel.py                          # 1.5B, 50 steps, some minutes on an H200
    torchrun --nproc-per-node 1 bench/gpu_parallel.py --ways zero3 tp          # some of them
    torchrun --nproc-per-node 1 bench/gpu_parallel.py --device cpu --model 15M --steps 3 --pairs 2   # over gloo

A folder of random weights is trained once as one process without a mesh does it, and then on meshes of one rank over
NCCL: FSDP2 with its stages, and the code of tensor, context and pipeline parallel with groups of one rank, which a run
would leave out. All start from the same weights and see the same micro-batches and reference log-probs. How far bf16
rounding alone takes two runs apart is seen on the plain path itself, with the same pairs packed into other
micro-batches: three times that is allowed. Exit code 1 when a way goes further, or fails.

loss, norm   the largest relative difference of a step's loss and gradient norm
weights      the norm of what the final weights differ by, relative to how far they moved
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    SHAPES,
    free,
    machine,
    make_steps,
    pairs_of,
    peak_gib,
    synchronize,
    table,
    told,
    write_facts,
)
from torch import Tensor

from rather.config.schema import ModelArgs, TrainingArgs
from rather.config.strategies import Layout, Pipeline
from rather.data.batch import Columns, PairBatch, TokenPair
from rather.data.pack import pack
from rather.losses.objective import configure
from rather.model.budget import LADDER
from rather.model.policy import PolicyModel
from rather.optim.optimizer import Optimizer
from rather.optim.rounding import Rounding
from rather.parallel.load import DTYPES, load_divided, load_policy
from rather.parallel.mesh import Mesh
from rather.parallel.shard import STAGES
from rather.parallel.tensor import check_split
from rather.train.rank_trainer import RankTrainer, WholeModelRunner

BUDGET = 1024  # tokens of a micro-batch; of the yardstick's twice as many
SCALE = 0.25  # of the lengths: sequences of up to 512 tokens
RATE = 1e-5
ALLOWED = 3.0  # times the yardstick, which is no shorter than ...
WARM_UP = 2
SHOWN_LINES = 6  # of an exception


class OneRank(Layout):
    """A pipeline whose only rank holds all its stages: pp 2 takes the way of several, and the stages are told here."""

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(1, self.schedule, self.virtual)


@dataclass(frozen=True)
class Way:
    """A layout, the axes that get a group although it has one rank, and whether FSDP2 runs beneath."""

    layout: Layout
    axes: tuple[str, ...] = ()
    sharded: bool = True

    def mesh(self, device: str) -> Mesh:
        mesh = Mesh.build(device=device) if self.sharded else Mesh(device=device)
        return replace(mesh, groups=dict.fromkeys(self.axes, dist.group.WORLD))


def pipelined(schedule: str, virtual: int, **more: Any) -> Layout:
    return OneRank(1, pp=2, schedule=schedule, virtual=virtual, **more)


WAYS = {
    "ddp": Way(Layout(1, stage=0)),
    "zero1": Way(Layout(1, stage=1)),
    "zero2": Way(Layout(1, stage=2)),
    "zero3": Way(Layout(1, stage=3)),
    "tp": Way(Layout(1), ("tp",), sharded=False),
    "tp by sequence": Way(Layout(1, sequence_parallel=True), ("tp",), sharded=False),
    "tp, zero3": Way(Layout(1, stage=3), ("tp",)),
    "cp": Way(Layout(1, stage=3), ("cp",)),
    "1f1b": Way(pipelined("1f1b", 1), ("pp",), sharded=False),
    "1f1b, zero2": Way(pipelined("1f1b", 1, stage=2), ("pp",)),
    "interleaved": Way(pipelined("interleaved", 2), ("pp",), sharded=False),
    "zero_bubble": Way(pipelined("zero_bubble", 2), ("pp",), sharded=False),
    "zbv": Way(pipelined("zbv", 2), ("pp",), sharded=False),
    "1f1b, tp, cp, zero2": Way(pipelined("1f1b", 1, stage=2), ("pp", "tp", "cp")),
    "zero3 on the host": Way(
        Layout(1, stage=3, host=True)
    ),  # the slowest: the optimizer runs there
}


@dataclass
class Run:
    """What a way gave, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_gib: float = float("nan")

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.median(self.seconds[WARM_UP:] or self.seconds)


@dataclass(frozen=True)
class Work:
    """What all ways train on: a folder, the pairs of each step, and their reference log-probs once they are known."""

    folder: Path
    steps: Sequence[Sequence[TokenPair]]
    device: str
    dtype: str
    budget: int = BUDGET
    rounding: Rounding = field(default_factory=Rounding)
    known: Sequence[Columns] = ()

    @property
    def args(self) -> ModelArgs:
        return ModelArgs.model_validate({"dtype": self.dtype})

    def batches(self) -> Iterator[list[PairBatch]]:
        for pairs in self.steps:
            yield pack(pairs, self.budget, ladder=LADDER[self.device.split(":")[0]])


# --- the ways ---


def plain_trainer(work: Work) -> RankTrainer:
    """As a worker alone builds it."""
    options = {"exact": True, "rounding": work.rounding}
    policy = load_policy(str(work.folder), work.args, work.device, **options)
    return RankTrainer(policy, _loss(), _optimizer(policy))


def trainer_of(way: Way, work: Work) -> RankTrainer:
    """As a worker among several builds it."""
    mesh = way.mesh(work.device)
    options = {"trains": True, "rounding": work.rounding}
    divided = load_divided(str(work.folder), work.args, work.device, mesh, way.layout, **options)
    whole = isinstance(divided, PolicyModel)
    if "tp" in way.axes and whole:
        check_split(divided.causal_lm.config, mesh, sequence_parallel=way.layout.sequence_parallel)
    runner = WholeModelRunner(divided, STAGES[way.layout.stage]) if whole else None
    optimizer = _optimizer(divided, DTYPES[work.dtype])
    return RankTrainer(divided, _loss(), optimizer, mesh=mesh, runner=runner)


def _loss() -> Any:
    return configure(["sigmoid"], {"beta": 0.1})


def _optimizer(policy: Any, compute: torch.dtype | None = None) -> Optimizer:
    # Gradients of 1e-9 are noise from the order of sums; with an epsilon below them Adam makes whole steps of it.
    training = TrainingArgs(learning_rate=RATE, weight_decay=0.1, adam_epsilon=1e-6)
    return Optimizer(
        policy.named_parameters(),
        training,
        schedule=lambda _: RATE,
        max_grad_norm=1.0,
        exact=policy.exact,
        rounding=policy.rounding,
        compute=compute,
    )


def frozen_trainer(way: Way, work: Work) -> RankTrainer:
    """A reference, as a worker among several builds it."""
    mesh = way.mesh(work.device)
    options = {"trains": False, "rounding": work.rounding}
    divided = load_divided(str(work.folder), work.args, work.device, mesh, way.layout, **options)
    whole = isinstance(divided, PolicyModel)
    runner = WholeModelRunner(divided, STAGES[way.layout.stage]) if whole else None
    return RankTrainer(divided, _loss(), mesh=mesh, runner=runner)


def reference_of(work: Work, way: Way | None = None) -> list[Columns]:
    """Log-probs of the weights in the folder: of a whole model, or of one divided this way."""
    trainer = frozen_trainer(way, work) if way else plain_trainer(work)
    found = [trainer.log_probs(batches) for batches in work.batches()]
    return [{name: column.cpu() for name, column in columns.items()} for columns in found]


def train(trainer: RankTrainer, work: Work) -> Run:
    run = Run()
    for batches, reference in zip(work.batches(), work.known, strict=True):
        synchronize()
        began = time.perf_counter()
        result = trainer.train_step(batches, reference)
        synchronize()
        run.seconds.append(time.perf_counter() - began)
        run.losses.append(result.sums["loss"] / result.sums["weight"])
        run.norms.append(result.grad_norm)
    run.peak_gib = peak_gib()
    return run


# --- how far they are apart ---


@dataclass(frozen=True)
class Apart:
    loss: float
    norm: float
    weights: float

    def within(self, allowed: Apart, times: float) -> bool:
        return all(
            mine <= times * max(vars(allowed)[n], vars(LEAST)[n]) for n, mine in vars(self).items()
        )


LEAST = Apart(loss=1e-6, norm=1e-5, weights=1e-4)  # ... what float32 takes two runs apart


class Plain:
    """The plain path's run and its final weights, which wait on the host: what every way is compared with."""

    def __init__(self, work: Work) -> None:
        trainer = plain_trainer(work)
        start = on_the_host(trainer.weights())
        self.run, self.device = train(trainer, work), work.device
        self.weights = on_the_host(trainer.weights())
        self.moved = self._distance(start)

    def apart(self, run: Run, weights: Mapping[str, Tensor]) -> Apart:
        return Apart(
            _largest(run.losses, self.run.losses),
            _largest(run.norms, self.run.norms),
            self._distance(weights) / self.moved,
        )

    def _distance(self, others: Mapping[str, Tensor]) -> float:
        assert others.keys() == self.weights.keys(), "other parameters than the plain path's"
        squares = [
            (others[name].to(self.device) - own.to(self.device)).double().square().sum()
            for name, own in self.weights.items()
        ]
        return float(torch.stack(squares).sum().sqrt())


def on_the_host(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.to("cpu", copy=True) for name, weight in weights.items()}


def _largest(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(mine, theirs, strict=True))


def yardstick(plain: Plain, work: Work) -> tuple[Run, Apart]:
    """The plain path on the same pairs in other micro-batches."""
    trainer = plain_trainer(work)
    run = train(trainer, replace(work, budget=2 * work.budget))
    return run, plain.apart(run, trainer.weights())


def attempt(way: Way, plain: Plain, work: Work) -> tuple[Run, Apart]:
    trainer = trainer_of(way, work)
    run = train(trainer, work)
    return run, plain.apart(run, trainer.weights())


# --- the script ---


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """A process group of this process, as torchrun or nobody has started it; backends as under `rather train`."""
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_world_size() == 1, (
            "this compares one rank with one process: --nproc-per-node 1"
        )
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    args = arguments()
    device = "cuda:0" if args.device == "cuda" else "cpu"
    if args.device == "cuda":
        torch.cuda.set_device(device)
    torch.set_flush_denormal(True)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    print(told(machine()), flush=True)
    with tempfile.TemporaryDirectory() as folder, one_rank(device):
        rows = compared(args, prepared(args, Path(folder), device))
    report(args, rows)
    bad = [name for name, row in rows.items() if row["verdict"] not in ("", "same")]
    print(
        f"{len(rows) - 2 - len(bad)} of {len(rows) - 2} ways are the plain path within rounding",
        flush=True,
    )
    sys.exit(1 if bad else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SHAPES), default="1.5B")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=16, help="of a step")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="what it computes in; else bf16, on a CPU fp32"
    )
    parser.add_argument("--rounding", choices=("dithered", "nearest"), default="dithered")
    parser.add_argument("--json", type=Path, help="also write the results")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    return args


def prepared(args: argparse.Namespace, folder: Path, device: str) -> Work:
    """Random weights in a folder, seeded pairs, and the reference's log-probs."""
    shape = SHAPES[args.model]
    shape.model(DTYPES[args.dtype], device, "eager").save_pretrained(folder)
    steps = make_steps(
        "ultrafeedback", shape.vocabulary, steps=args.steps, pairs=args.pairs, scale=SCALE
    )
    pairs, rounding = [pairs_of(step) for step in steps], Rounding(args.rounding)
    work = Work(folder, pairs, device, args.dtype, rounding=rounding)
    return replace(work, known=reference_of(work))


def compared(args: argparse.Namespace, work: Work) -> dict[str, dict[str, Any]]:
    free()
    plain = Plain(work)
    rows = {"plain": row(plain.run)}
    say("plain", rows["plain"])
    free()
    run, allowed = yardstick(plain, work)
    rows["plain, packed otherwise"] = row(run, allowed)
    say("plain, packed otherwise", rows["plain, packed otherwise"])
    for name in args.ways:
        free()
        began = time.perf_counter()
        try:
            run, apart = attempt(WAYS[name], plain, work)
            rows[name] = row(run, apart, "same" if apart.within(allowed, ALLOWED) else "TOO FAR")
        except (
            Exception
        ) as error:  # one broken way must not cost the others, which took minutes of a GPU
            print("".join(traceback.format_exception(error)[-SHOWN_LINES:]), flush=True)
            rows[name] = {"verdict": f"{type(error).__name__}: {error}"[:200]}
        say(name, rows[name] | {"took": time.perf_counter() - began})
        if args.json:
            write_facts(
                args.json,
                "gpu_parallel",
                model=args.model,
                steps=args.steps,
                dtype=args.dtype,
                ways=rows,
            )
    return rows


def row(run: Run, apart: Apart | None = None, verdict: str = "") -> dict[str, Any]:
    numbers = vars(apart) if apart else {}
    return {
        **numbers,
        "ms": run.milliseconds,
        "gib": run.peak_gib,
        "last loss": run.losses[-1],
        "verdict": verdict,
    }


def say(name: str, facts: Mapping[str, Any]) -> None:
    shown = (
        f"{key} {value:.3g}" if isinstance(value, float) else str(value)
        for key, value in facts.items()
    )
    print(f"{name}: {', '.join(part for part in shown if part)}", flush=True)


def report(args: argparse.Namespace, rows: Mapping[str, Mapping[str, Any]]) -> None:
    columns = {
        "loss": "loss", "norm": "norm", "weights": "weights",
        "ms": "ms a step", "gib": "peak GiB", "last loss": "last loss", "verdict": "verdict",
    }  # fmt: skip
    title = f"{args.model}, {args.dtype}, {args.steps} steps of {args.pairs} pairs: how far from the plain path"
    lines = [(name, *(facts.get(key) for key in columns)) for name, facts in rows.items()]
    table(title, ("way", *columns.values()), lines)


if __name__ == "__main__":
    main()
