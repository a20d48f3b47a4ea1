"""What each rank holds of a 7B model on 8 and a 70B model on 64 and 128 devices, laid out on a CPU without weights.

    python bench/layouts.py                      # all ranks of 8, some of 64 and 128; two minutes on two cores
    python bench/layouts.py --every-rank --json  # all of them, a quarter of an hour; also writes the JSON
    python bench/layouts.py --steps              # a step of one rank on fake tensors, up to 405B on 512 devices
    python bench/layouts.py --gpu 3B             # a real step of a mesh of one rank, on a GPU if there is one

Strategies are written as in a config. A process for each rank meets ranks that are not there (torch's fake process
group), makes the model on the meta device and divides it as a worker does: everything is real but the numbers. Compute
is in bf16. Weights are what lies on the rank between steps: float32 where they are sharded, which is then the master as
well; bf16 otherwise, and what the master has beyond it counts as optimizer. Gradients are float32. A unit is what FSDP
gathers at once, in bf16: zero3 has the root's and those of two layers at a time, the others, and pipelines whatever
their stage, keep all until a step is done.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import RESULTS, SHAPES, ExpertShape, Shape, machine, table, told, write_facts
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rather.checkpoint.sharded_tensors import ShardSpec
from rather.config.compat import DEGREES
from rather.config.load import config_from_dict
from rather.config.schema import ActorConfig, TrainingArgs
from rather.config.strategies import Layout, layout
from rather.data.batch import PairBatch, Segments
from rather.data.pack import pack
from rather.losses.objective import configure
from rather.model.attention import IMPLEMENTATION
from rather.model.budget import LADDER
from rather.model.check import random_pairs
from rather.model.policy import PolicyModel
from rather.model.sizes import sizes_of
from rather.optim.adamw import local
from rather.optim.optimizer import Optimizer
from rather.parallel import apply
from rather.parallel.mesh import Mesh, build_mesh
from rather.parallel.shard import announce, counted, places, units
from rather.parallel.stages import Stage, Stages
from rather.plan.memory import Chosen, Device, MemoryForecast, Work
from rather.train.rank_trainer import RankTrainer

ALLOWED_GIB = 1.0  # of a process that lays out 70B
COMPUTE = torch.bfloat16
FAMILIES = ("llama", "qwen2", "qwen3_moe")
MODELS = {
    **SHAPES,
    "70B": Shape("llama", 8192, 80, 64, 8, 28_672, 128_256, False),
    "405B": Shape("llama", 16_384, 126, 128, 8, 53_248, 128_256, False),
    "30B-A3B": ExpertShape("qwen3_moe", 2048, 48, 32, 4, 768, 151_936, False, 128, 8, 128),
}
ON_CPU = torch.float32  # what a step on fake tensors computes in
TOKENS, PAIR = 4096, 2048  # of the micro-batch of a step, and of its largest pair
ALLOWED_ERROR = 0.1  # of `rather plan`'s activations
EXACT = ("weights", "gradients", "optimizer")
COMPARED = (*EXACT, "activations")


def strategy(name: str, **details: Any) -> dict[str, Any]:
    return {"strategy_name": name, "strategy_config": details}


def megatron(tp: int, pp: int, **details: Any) -> dict[str, Any]:
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    return strategy("megatron_train", **sizes, use_distributed_optimizer=True, **details)


STEPS: list[tuple[str, int, dict[str, Any]]] = [  # of which a rank takes a step on fake tensors
    ("7B", 8, strategy("fsdp2_train")),
    ("7B", 8, strategy("zero2", tp_size=2)),
    ("7B", 8, strategy("zero3", cp_size=2)),
    ("70B", 64, strategy("hsdp", shard_size=8)),
    ("70B", 64, strategy("zero3", tp_size=8, sequence_parallel=True)),
    ("405B", 512, strategy("zero3", tp_size=8, sequence_parallel=True)),
    ("405B", 512, strategy("zero3", tp_size=8, cp_size=2)),
    ("70B", 64, megatron(8, 4, sequence_parallel=True)),
    ("405B", 512, megatron(8, 8, sequence_parallel=True)),
]
CASES: list[tuple[str, int, list[dict[str, Any]]]] = [
    (
        "30B-A3B",
        16,
        [
            megatron(1, 2, expert_model_parallel_size=8),  # ROLL's own example
            strategy("fsdp2_train", ep_size=8),
            strategy("fsdp2_train", ep_size=4, tp_size=2),
        ],
    ),
    (
        "7B",
        8,
        [
            strategy("fsdp2_train"),
            strategy("zero2"),
            strategy("gemini_auto"),
            strategy("zero2", tp_size=2),
            megatron(4, 2, sequence_parallel=True),
        ],
    ),
    (
        "70B",
        64,
        [
            strategy("fsdp2_train"),
            strategy("hsdp", shard_size=8),
            strategy("zero2", tp_size=8),
            strategy("zero3", tp_size=8, sequence_parallel=True),
            megatron(8, 4),
        ],
    ),
    (
        "70B",
        128,
        [
            strategy("hsdp", shard_size=16),
            strategy("fsdp2_train", tp_size=8, cp_size=2),
            megatron(8, 4, sequence_parallel=True),
            megatron(8, 4, context_parallel_size=2),
            megatron(8, 4, virtual_pipeline_model_parallel_size=2),
        ],
    ),
]


@dataclass(frozen=True)
class Held:
    """What one rank holds, in parameters and bytes; `pieces` of them are its own to count, by name."""

    rank: int
    stage: int  # of the pipeline
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    largest_unit: int
    gathered: int
    in_memory: int  # bytes of weights that really exist
    peak_gib: float  # of the process that built it
    seconds: float
    pieces: dict[str, ShardSpec]

    @property
    def counted(self) -> int:
        return sum(prod(piece.sizes) for piece in self.pieces.values())

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.gathered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--every-rank", action="store_true", help="not only the first, last and middle ones"
    )
    parser.add_argument("--processes", type=int, default=2, help="ranks that are built at a time")
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=RESULTS / "layouts.json",
        help="also write the results",
    )
    parser.add_argument(
        "--steps", nargs="?", const="all", help="only steps on fake tensors; of one model"
    )
    parser.add_argument(
        "--gpu", metavar="MODEL", help="only a real step of this model, on one rank"
    )
    args = parser.parse_args()
    if args.gpu:
        step = {"model": args.gpu, **measure_step(MODELS[args.gpu])}
        if args.json:
            write_facts(args.json.with_name("layouts_gpu.json"), "layouts_gpu", results=[step])
        return
    if args.steps:
        steps = take_steps(None if args.steps == "all" else args.steps)
        if args.json:
            write_facts(args.json.with_name("layouts_steps.json"), "layouts_steps", results=steps)
        return
    print(told(machine()), flush=True)
    results = []
    for model, devices, strategies in CASES:
        done = []
        for written in strategies:
            plan = layout_of(written, devices)
            ranks = range(devices) if args.every_rank or devices <= 8 else chosen_ranks(plan)
            held = laid_out(MODELS[model], plan, ranks, args.processes)
            done.append((written, plan, held))
            print(f"{model}: {plan.describe()}: {verdict(MODELS[model], plan, held)}", flush=True)
        report(f"{model} on {devices} devices", done, every=args.every_rank)
        results += [as_json(model, *each) for each in done]
        if args.json:
            write_facts(args.json, "layouts", results=results)


def layout_of(written: dict[str, Any], devices: int) -> Layout:
    details = dict(written["strategy_config"])
    degrees = {
        name: details.pop(key)
        for name, megatron_name in DEGREES.items()
        for key in (name, megatron_name)
        if key in details
    }
    args = {**written, **degrees, "strategy_config": details}
    return layout(ActorConfig.model_validate({"strategy_args": args}), devices)


def chosen_ranks(plan: Layout) -> list[int]:
    """The first and the last rank of each pipeline stage, and the one in the middle of all."""
    each = plan.devices // plan.pp
    ends = (rank for stage in range(plan.pp) for rank in (stage * each, (stage + 1) * each - 1))
    return sorted({*ends, plan.devices // 2})


def laid_out(shape: Shape, plan: Layout, ranks: Iterable[int], processes: int = 2) -> list[Held]:
    """A process for each rank: torch remembers the meshes of a process, with the place of its first rank in them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["rather.pipeline.pipeline", *(f"transformers.models.{f}.modeling_{f}" for f in FAMILIES)]
    )
    with context.Pool(processes, maxtasksperchild=1) as pool:
        return pool.map(partial(rank_of, shape, plan), ranks, chunksize=1)


def rank_of(shape: Shape, plan: Layout, rank: int) -> Held:
    """Builds what a rank holds, as rather.parallel.load.load_divided does but for reading the weights."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    apply.check_split = _unchecked  # type: ignore[assignment]
    dist.init_process_group("fake", rank=rank, world_size=plan.devices, store=FakeStore())
    mesh = build_mesh(plan, "cpu")
    dtype = torch.float32 if mesh.sums_gradients else COMPUTE
    policy = PolicyModel(shape.model(dtype, "meta", IMPLEMENTATION))
    divided = apply.divide(policy, mesh, plan, compute=COMPUTE)
    optimizer = Optimizer(
        divided.named_parameters(), TrainingArgs(), schedule=lambda _: 0.0, max_grad_norm=1.0
    )
    held = _held(divided, optimizer, mesh, plan, rank, began)
    dist.destroy_process_group()
    return held


def _unchecked(*_args: Any, **_options: Any) -> None:
    """The self-check of tensor parallel computes with all ranks, and those that are not there compute nothing."""


def _held(
    divided: PolicyModel | Stages,
    optimizer: Optimizer,
    mesh: Mesh,
    plan: Layout,
    rank: int,
    began: float,
) -> Held:
    own, mine = places(divided, mesh), counted(divided, mesh)
    weights = dict(divided.named_parameters())
    # torch's pipelines divide neither gradients nor gathered weights before the last micro-batch of a step.
    whole_gradients, kept = plan.stage == 1 or plan.pp > 1, plan.stage < 3 or plan.pp > 1
    sums = [
        parameter.numel() if whole_gradients else local(parameter).numel()
        for parameter in weights.values()
    ]
    sizes = _unit_sizes(divided)
    return Held(
        rank,
        mesh.rank("pp"),
        parameters=sum(prod(place.sizes) for place in own.values()),
        weights=sum(_bytes(local(parameter)) for parameter in weights.values()),
        gradients=4 * sum(sums),
        optimizer=optimizer.state_bytes(),
        largest_unit=max(sizes, default=0),
        gathered=sum(sizes) if kept else sum(sorted(sizes)[-3:]),
        in_memory=sum(
            _bytes(local(parameter)) for parameter in weights.values() if not parameter.is_meta
        ),
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        seconds=time.perf_counter() - began,
        pieces={name: own[name] for name in own if name in mine},
    )


def _unit_sizes(divided: nn.Module) -> list[int]:
    """Bytes of each unit that FSDP gathers, without the units inside it."""
    parts = [module for module in divided.modules() if isinstance(module, PolicyModel)]
    found: list[nn.Module] = [
        unit for part in parts for unit in units(part) if isinstance(unit, nn.Module)
    ]
    sizes = []
    for unit in found:
        inside = [module for module in unit.modules() if module in found and module is not unit]
        inner = {id(parameter) for module in inside for parameter in module.parameters()}
        sizes.append(
            COMPUTE.itemsize * sum(p.numel() for p in unit.parameters() if id(p) not in inner)
        )
    return sizes


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- a step on fake tensors ---


@dataclass(frozen=True)
class Taken:
    """A step of one rank: what autograd kept after its forward pass, and its collectives."""

    rank: int
    # Bytes. Gradients are those of the rank's own shard.
    weights: int
    gradients: int
    optimizer: int
    activations: int
    planned: dict[str, float]  # the same by `rather plan`
    collectives: dict[str, tuple[int, int]]  # calls, and bytes of their larger side, by name
    boundary: int  # bytes that a pipeline stage sends to the next, and gets back as gradients
    seconds: float

    def error(self, name: str) -> float:
        return float(self.planned[name] / getattr(self, name) - 1)


class Collectives(TorchDispatchMode):
    """Counts the calls of torch.distributed and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in function.namespace:
            name = function._schema.name.split("::")[-1].strip("_")
            calls, size = self.found.get(name, (0, 0))
            tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            self.found[name] = calls + 1, size + max(map(_bytes, tensors), default=0)
        return function(*args, **(kwargs or {}))


def step_of(shape: Shape, written: dict[str, Any], devices: int, rank: int) -> Taken:
    """Take forward and backward of one micro-batch, as a rank does; a stage with fake boundary tensors.

    The model is built on the meta device; its parameters then become fake tensors, which have sizes and no values.
    """
    torch.set_num_threads(1)
    began, plan = time.perf_counter(), layout_of(written, devices)
    apply.check_split = _unchecked  # type: ignore[assignment]
    dist.init_process_group("fake", rank=rank, world_size=devices, store=FakeStore())
    mesh = build_mesh(plan, "cpu")
    divided: Any = PolicyModel(shape.model(ON_CPU, "meta", IMPLEMENTATION))
    divided = apply.divide(divided, mesh, plan, compute=ON_CPU)
    state = state_of(divided)
    if plan.pp > 1:
        (divided,) = divided.stages
    answers = [(1, (PAIR - 1) // 2, (PAIR - 1) // 2)] * (TOKENS // PAIR)
    batch = pack(random_pairs(shape.vocabulary, answers), TOKENS, ladder=LADDER["cpu"])[0]
    own = divided.share(batch)
    lengths = zip(own.segments.q_lens, own.segments.k_lens, strict=True)
    masked = sum(queries * keys for queries, keys in lengths if queries < keys)
    # FSDP rebuilds its inputs, and the lengths of segments cannot be computed from fake tensors.
    known = {name: getattr(own.segments, name) for name in ("q_lens", "k_lens")}
    for name, lengths in known.items():
        setattr(Segments, name, property(lambda _, lengths=lengths: lengths))
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True), Collectives() as collectives:
        divided.to_empty(device="cpu")
        announce(divided, "zero3" if plan.stage == 3 else "zero2", last=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out, boundary = forward(divided, own, shape.hidden)
        weights = _weight_storages(divided)
        held = sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in weights)
        kept.clear()
        out.backward(torch.empty_like(out))
    dist.destroy_process_group()
    planned = planned_bytes(shape, written, devices, batch, stage=mesh.rank("pp"))
    # On a CPU, attention keeps a mask of each segment with more keys than queries; a GPU has none.
    stages = plan.pipeline.stages_of(mesh.rank("pp"))
    layers = sum(len(plan.pipeline.layers_of(stage, shape.layers)) for stage in stages)
    planned["activations"] += masked * layers * ON_CPU.itemsize
    seconds = time.perf_counter() - began
    return Taken(rank, *state, held, planned, collectives.found, boundary, seconds)


def state_of(divided: nn.Module) -> tuple[int, int, int]:
    """Return the bytes of weights, of the gradients of the rank's own part, and of the optimizer."""
    named = list(divided.named_parameters())
    optimizer = Optimizer(named, TrainingArgs(), schedule=lambda _: 0.0, max_grad_norm=1.0)
    own = [local(parameter) for _, parameter in named]
    return sum(map(_bytes, own)), 4 * sum(x.numel() for x in own), optimizer.state_bytes()


def forward(divided: Any, own: PairBatch, width: int) -> tuple[Tensor, int]:
    """Return the output of a model or stage, and the bytes that a stage before it has sent."""
    if not isinstance(divided, Stage):
        return divided.pair_sums(*divided(own), own)["sum"], 0
    divided.batches = [own]
    if divided.first:
        return divided(where=0), 0
    hidden = torch.empty(1, len(own.ids_N) // divided.token_parts, width, requires_grad=True)
    return divided(hidden, where=0), _bytes(hidden)


def _weight_storages(divided: nn.Module) -> set[int]:
    """The storages of shards, and of what FSDP has gathered from them."""
    tensors = [local(parameter) for parameter in divided.parameters()]
    for module in divided.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            tensors += [each._unsharded_param for each in group.fsdp_params] if group else []
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def planned_bytes(
    shape: Shape,
    written: dict[str, Any],
    devices: int,
    batch: PairBatch,
    kind: str = "cpu",
    dtype: str = "fp32",
    stage: int | None = None,
) -> dict[str, float]:
    """What `rather plan` computes for this micro-batch, without recomputation."""
    with tempfile.TemporaryDirectory() as folder:
        shape.model(COMPUTE, "meta", IMPLEMENTATION).config.save_pretrained(folder)
        mapping = list(range(devices))
        role = {
            "strategy_args": written,
            "device_mapping": mapping,
            "model_args": {"dtype": dtype},
            "data_args": {"file_name": "none"},
        }
        sizes = {"num_gpus_per_node": devices, "reference": {"device_mapping": mapping}}
        config = config_from_dict({"pretrain": folder, "actor_train": role, **sizes})
        shapes = sizes_of(folder, config.actor_train.model_args)
        device = Device(kind, 1e18)
        how: Any = {"reference": False, "compiled": False, "stage": stage}
        forecast = MemoryForecast(config, shapes, device, **how)
        chosen = Chosen(TOKENS, "none", narrow=False, parked=False)
        work = Work(len(batch.ids_N), len(batch.rows_U), batches=1, seen=1)
        peak, state = forecast.peak(chosen, work), forecast.state().by_purpose
        found = {"weights": state.weights, "gradients": state.gradients}
        found |= {"optimizer": state.master + state.moments, "total": peak.total}
        return found | {"activations": peak.activations}


def take_steps(only: str | None) -> list[dict[str, Any]]:
    """A step of one rank of each layout, in a process of its own; raises if the plan is wrong."""
    context, found, rows = multiprocessing.get_context("spawn"), [], []
    for model, devices, written in STEPS:
        if only not in (None, model):
            continue
        plan = layout_of(written, devices)
        each = devices // plan.pp
        ranks = [stage * each for stage in range(plan.pp)] if plan.pp > 1 else [devices // 2 - 1]
        for rank in ranks:
            with context.Pool(1) as pool:
                taken = pool.apply(step_of, (MODELS[model], written, devices, rank))
            for name, most in [*dict.fromkeys(EXACT, 1e-9).items(), ("activations", ALLOWED_ERROR)]:
                assert abs(taken.error(name)) <= most, f"{name} of {model}, {written}: {taken}"
            sent = [f"{k} {n} x, {b / 2**30:.2f}" for k, (n, b) in taken.collectives.items()]
            sent += [f"boundary {taken.boundary / 2**30:.2f}"] if taken.boundary else []
            numbers = [
                f"{getattr(taken, name) / 2**30:.3f} ({taken.error(name):+.2%})"
                for name in COMPARED
            ]
            rows.append((f"{model}, {spelled(written, plan)}", rank, *numbers, "; ".join(sent)))
            print(*rows[-1], flush=True)
            found.append(
                {"model": model, "devices": devices, "strategy_args": written, **asdict(taken)}
            )
    head = ("layout", "rank", *(f"{name} GiB" for name in COMPARED), "collectives: calls, GiB")
    table(f"a micro-batch of {TOKENS} tokens; in brackets, how much more is planned", head, rows)
    return found


# --- a real step ---


def measure_step(shape: Shape) -> dict[str, Any]:
    """Take two steps of a mesh of one rank, with random weights, and compare memory with the plan."""
    on_gpu = torch.cuda.is_available()
    kind, compute = ("cuda", COMPUTE) if on_gpu else ("cpu", ON_CPU)
    policy = PolicyModel(shape.model(compute, kind, IMPLEMENTATION))
    named = list(policy.named_parameters())
    made: Any = {"schedule": lambda _: 1e-6, "max_grad_norm": 1.0}
    optimizer = Optimizer(named, TrainingArgs(), **made)
    answers = [(1, (PAIR - 1) // 2, (PAIR - 1) // 2)] * (TOKENS // PAIR)
    batch = pack(random_pairs(shape.vocabulary, answers), TOKENS, ladder=LADDER[kind])[0]
    trainer = RankTrainer(policy, configure(["sigmoid"], {"beta": 0.1}), optimizer)
    reference = {"sum": torch.zeros(len(batch.pair_P), 2, dtype=torch.float64, device=kind)}
    peaks = []
    for _ in range(2):  # the first one makes the moments
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        result = trainer.train_step([batch], reference)
        assert result.skip_reason is None, result
        peaks.append(torch.cuda.max_memory_allocated() if on_gpu else None)
    planned = planned_bytes(shape, strategy("ddp"), 1, batch, kind, "bf16" if on_gpu else "fp32")
    found = {
        "weights": sum(_bytes(parameter) for _, parameter in named),
        "optimizer": optimizer.state_bytes(),
        "total": peaks[-1],
    }
    rows = [
        (name, size / 2**30, planned[name] / 2**30, f"{planned[name] / size - 1:+.1%}")
        for name, size in found.items()
        if size
    ]
    table(f"one rank on {kind}", ("", "measured GiB", "planned GiB", "error"), rows)
    return {"kind": kind, "measured": found, "planned": planned}


# --- what must hold ---


def verdict(shape: Shape, plan: Layout, held: Sequence[Held]) -> str:
    """Raises where weights were held; where all ranks were built, also unless their pieces are the model."""
    peak = max(each.peak_gib for each in held)
    assert not any(each.in_memory for each in held), "weights were made"
    assert peak < ALLOWED_GIB, f"a process took {peak:.2f} GiB"
    built = f"{len(held)} of {plan.devices} ranks built in {sum(each.seconds for each in held) / len(held):.1f} s each"
    if len(held) < plan.devices:
        return built
    whole = whole_shapes(shape)
    assert_tiled(whole, [each.pieces for each in held])
    return f"{built}, their pieces are the {sum(map(prod, whole.values())) / 1e9:.2f}B parameters of the model"


def whole_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    policy = PolicyModel(shape.model(COMPUTE, "meta", IMPLEMENTATION))
    return {name: tuple(parameter.shape) for name, parameter in policy.named_parameters()}


def assert_tiled(whole: dict[str, tuple[int, ...]], ranks: Sequence[dict[str, ShardSpec]]) -> None:
    """Every parameter is there, whole, without a gap and without an element that two ranks count."""
    for name, shape in whole.items():
        found = [rank[name] for rank in ranks if name in rank and prod(rank[name].sizes)]
        assert all(place.whole == shape for place in found), name
        assert sum(prod(place.sizes) for place in found) == prod(shape), (
            f"{name}: a gap, or two that count it"
        )
        for number, place in enumerate(found):
            assert not any(place.overlap(other) for other in found[:number]), (
                f"{name}: two ranks count the same"
            )
    assert all(rank.keys() <= whole.keys() for rank in ranks), "a piece of nothing"


# --- reports ---


def report(
    title: str, done: Iterable[tuple[dict[str, Any], Layout, list[Held]]], *, every: bool
) -> None:
    sizes = ("weights", "gradients", "optimizer", "gathered", "all", "largest unit")
    columns = (
        "layout",
        "rank",
        "stage",
        "parameters M",
        *(f"{size} GiB" for size in sizes),
        "process GiB",
    )
    rows = []
    for written, plan, held in done:
        shown = (
            held
            if every and plan.devices <= 8
            else [h for h in held if h.rank in chosen_ranks(plan)]
        )
        for each in shown:
            numbers = (
                each.weights,
                each.gradients,
                each.optimizer,
                each.gathered,
                each.total,
                each.largest_unit,
            )
            label = spelled(written, plan) if each is shown[0] else ""
            gib = [number / 2**30 for number in numbers]
            rows.append((label, each.rank, each.stage, each.parameters / 1e6, *gib, each.peak_gib))
    table(f"{title}: bytes per rank without activations", columns, rows)


def spelled(written: dict[str, Any], plan: Layout) -> str:
    """The name, the degrees it became, and what is divided where."""
    degrees = [
        f"{axis}{size}"
        for axis in ("dp", "tp", "pp", "cp", "ep")
        if (size := getattr(plan, axis)) > 1
    ]
    more = [f"{plan.dp // plan.shard} x {plan.shard}"] if 1 < plan.shard < plan.dp else []
    more += [f"{plan.virtual} stages a rank"] if plan.virtual > 1 else []
    more += ["sequence parallel"] if plan.sequence_parallel else []
    more += ["divided on the host"] if plan.host else []
    return ", ".join([f"{written['strategy_name']} {' '.join(degrees)}", *more])


def as_json(
    model: str, written: dict[str, Any], plan: Layout, held: Sequence[Held]
) -> dict[str, Any]:
    ranks = [
        {key: value for key, value in asdict(each).items() if key != "pieces"} for each in held
    ]
    return {
        "model": model,
        "devices": plan.devices,
        "strategy_args": written,
        "became": plan.describe(),
        "ranks": ranks,
    }


if __name__ == "__main__":
    main()
