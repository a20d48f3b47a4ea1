"""Models whose training does not fit a GPU as it is: state on the host, `lean`, and adapters on 4-bit weights.

    python bench/large_gpu.py host                 # 0.5B: same bits; 8B, exact, within 40 GiB of GPU memory
    python bench/large_gpu.py lean                 # 14B, all weights, precision: lean
    python bench/large_gpu.py 4bit --models 70B --pairs 16      # LoRA on 4-bit weights; needs bitsandbytes
    python bench/large_gpu.py 4bit --models 15M --pairs 2 --device cpu     # whether the script runs at all

Random weights, UltraFeedback-like pairs, the forecast of `rather plan` beside what was measured. 4-bit weights are made
layer by layer from a seed and quantised as they come: neither the GPU nor the host ever holds them in bfloat16. With
all weights the reference is cached: neither the GPU nor the host has room for it. A step of short pairs warms up. Cells
of other models that the JSON file already has are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the workers

import torch
from common import (
    PEAK,
    RESULTS,
    SHAPES,
    AdaptersOff,
    Ours,
    Shape,
    _adapt,
    free,
    known_columns,
    machine,
    make_steps,
    needed_by_step,
    ours,
    pairs_of,
    peak_gib,
    resident_gib,
    synchronize,
    table,
    told,
    write_facts,
)

COLUMNS = ("what", "GiB forecast", "measured", "error", "pairs/s", "MFU", "s a step", "how")
MEASURED = 2  # steps
WARM_UP = 0.25  # of the lengths, in the step that warms up
MODELS = {"host": ["8B"], "lean": ["14B"], "4bit": ["32B", "70B"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=list(MODELS))
    parser.add_argument("--models", nargs="+", choices=list(SHAPES))
    parser.add_argument("--pairs", type=int, default=32, help="of a step")
    parser.add_argument("--gib", type=float, default=40.0, help="of GPU memory, for `host`")
    parser.add_argument("--lora", type=int, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(told(machine()), flush=True)
    path = args.json or RESULTS / f"large_gpu_{args.what}.json"
    stored = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else []
    by_name: dict[str, dict[str, Any]] = {cell["what"]: cell for cell in stored}
    rows: list[dict[str, Any]] = []
    if args.what == "host" and args.device == "cuda":
        row = {"what": "0.5B, bits after 3 steps", **same_bits()}
        by_name[row["what"]] = row
        print(row, flush=True)
    train = {"host": on_host, "lean": all_lean, "4bit": in_4_bits}[args.what]
    for model in args.models or MODELS[args.what]:
        row = {"what": f"{model}, {args.what}", "pairs": args.pairs}
        try:
            train(args, model, row)
        except Exception as error:  # one broken cell must not cost the others
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        free()
        rows.append(row)
        by_name[row["what"]] = row
        print(row, flush=True)
        write_facts(path, "large_gpu", cells=list(by_name.values()))
    table(args.what, COLUMNS, [cells(row) for row in rows])


def steps_of(args: argparse.Namespace, shape: Shape) -> list[Any]:
    return make_steps("ultrafeedback", shape.vocabulary, steps=MEASURED, pairs=args.pairs)


def measure(engine: Ours, shape: Shape, steps: list[Any], row: dict[str, Any], known: Any) -> None:
    pairs = len(pairs_of(steps[0]))
    warm = make_steps(
        "ultrafeedback", shape.vocabulary, steps=1, pairs=pairs, seed=1, scale=WARM_UP
    )
    seconds = [taken for taken, _ in engine.run([*warm, *steps], known)][1:]
    row["seconds"] = seconds
    row["step_seconds"] = statistics.median(seconds)
    row["pairs_per_second"] = pairs / row["step_seconds"]
    if known is not None:  # all weights train; needed_by_step counts the gradients of all of them
        needed = [needed_by_step(shape, step, reference=False) for step in steps]
        row["mfu"] = statistics.median(n / s for n, s in zip(needed, seconds, strict=True)) / PEAK
    row["peak_gib"], row["settings"] = peak_gib(), engine.settings


def forecast(
    args: argparse.Namespace, model: str, steps: list[Any], change: dict[str, Any], gib: float
) -> dict[str, Any]:
    """What `rather plan` says before anything is loaded."""
    from plan_vs_measured import Case, config_of

    from rather.config.load import changed
    from rather.model.sizes import sizes_of
    from rather.plan.forecast import Forecast, PairSample
    from rather.plan.memory import Device
    from rather.plan.speed import listed_speed

    with tempfile.TemporaryDirectory() as folder:
        config = changed(config_of(Case("large", model, args.pairs, None), Path(folder)), change)
        sizes = sizes_of(config.actor_train.model_path, config.actor_train.model_args)
        pairs = [pairs_of(step) for step in steps]
        largest = max(pair.tokens for step in pairs for pair in step)
        sample = PairSample(len(steps) * args.pairs, 0, len(steps), 1.0, pairs, largest)
        device = Device(args.device, gib * 2**30)
        speed = listed_speed("h200", sizes.weights, compiled=False)
        online = "lora" in str(change)
        plan = Forecast(config, sizes, device, sample, speed, reference=online)
    return {
        "forecast_gib": plan.parts.total / 2**30,
        "forecast_fits": plan.fits,
        "forecast_recompute": plan.chosen.recompute,
        "forecast_step_seconds": plan.seconds.total if plan.seconds else None,
    }


# --- state on the host ---


def same_bits() -> dict[str, Any]:
    """Whether a state on the host changes a bit of the weights, with deterministic kernels."""
    torch.use_deterministic_algorithms(True)
    steps = make_steps("ultrafeedback", SHAPES["0.5B"].vocabulary, steps=3, pairs=32)
    weights: list[dict[str, torch.Tensor]] = []
    taken = []
    for host in (None, 1 << 20):
        engine = ours(SHAPES["0.5B"], "cuda", reference=False, on_host=host)
        engine.plan(steps, tokens=8192, recompute="full")
        known = [known_columns(32)] * 3
        taken.append([seconds for seconds, _ in engine.run(steps, known)])
        masters = engine.policy.optimizer.masters
        weights.append({name: masters[name].cpu() for name in masters})
        del engine, masters
        free()
    torch.use_deterministic_algorithms(False)
    first, second = weights
    same = all(torch.equal(first[name], second[name]) for name in first)
    return {"same": same, "weights": len(first), "seconds": taken}


def on_host(args: argparse.Namespace, model: str, row: dict[str, Any]) -> None:
    shape = SHAPES[model]
    steps = steps_of(args, shape)
    strategy = "actor_train.strategy_args"
    change = {
        f"{strategy}.strategy_name": "zero2_cpu",
        f"{strategy}.strategy_config": {"recompute_granularity": "full"},
        "actor_train.max_tokens_per_microbatch_in_train": 16384,
    }
    row |= forecast(args, model, steps, change, args.gib)
    if args.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(args.gib / gpu_gib())
    began = time.perf_counter()
    engine = ours(shape, args.device, reference=False, on_host=1 << 20)
    synchronize()
    row["seconds_to_build"] = time.perf_counter() - began
    engine.plan(steps, tokens=16384, recompute="full")
    free()
    measure(engine, shape, steps, row, [known_columns(args.pairs)] * (1 + len(steps)))
    row["host_gib"] = resident_gib()
    if args.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


# --- all weights, lean ---


def all_lean(args: argparse.Namespace, model: str, row: dict[str, Any]) -> None:
    shape = SHAPES[model]
    steps = steps_of(args, shape)
    change = {"precision": "lean", "actor_train.model_args.dtype": "bf16"}
    row |= forecast(args, model, steps, change, gpu_gib())
    began = time.perf_counter()
    engine = ours(shape, args.device, reference=False, lean=True)
    synchronize()
    row["seconds_to_build"] = time.perf_counter() - began
    engine.plan(steps)
    free()
    measure(engine, shape, steps, row, [known_columns(args.pairs)] * (1 + len(steps)))


def gpu_gib() -> float:
    """Memory of the GPU; eight GiB stand for it on a CPU."""
    if not torch.cuda.is_available():
        return 8.0
    return torch.cuda.get_device_properties(0).total_memory / 2**30


# --- adapters on 4-bit weights ---


def in_4_bits(args: argparse.Namespace, model: str, row: dict[str, Any]) -> None:
    from rather.config.schema import TrainingArgs
    from rather.losses.objective import configure
    from rather.model.policy import PolicyModel
    from rather.optim.optimizer import Optimizer, schedule
    from rather.train.rank_trainer import RankTrainer

    shape = SHAPES[model]
    steps = steps_of(args, shape)
    row |= forecast(args, model, steps, adapter_settings(args), gpu_gib())
    began = time.perf_counter()
    policy = PolicyModel(quantised(shape, args.device))
    _adapt(policy.causal_lm, args.lora)
    synchronize()
    row["seconds_to_build"] = time.perf_counter() - began
    row["seconds_a_layer"] = row["seconds_to_build"] / shape.layers
    training = TrainingArgs()
    optimizer = Optimizer(
        policy.named_parameters(), training, schedule=schedule(training, 1000), max_grad_norm=1.0
    )
    trainer = RankTrainer(policy, configure(["sigmoid"], {"beta": 0.1}), optimizer)
    engine = Ours(trainer, AdaptersOff(trainer), compiled=False)
    synchronize()
    began = time.perf_counter()
    engine.plan(steps)
    row["seconds_to_plan"] = time.perf_counter() - began
    free()
    measure(engine, shape, steps, row, None)


def adapter_settings(args: argparse.Namespace) -> dict[str, Any]:
    adapter = "actor_train.model_args"
    return {f"{adapter}.lora_rank": args.lora, f"{adapter}.quantization": "4bit"}


def quantised(shape: Shape, device: str) -> Any:
    """A model whose layers are made, and quantised, one after another."""
    import bitsandbytes as bnb
    from torch import nn

    from rather.model.attention import IMPLEMENTATION

    small = Shape(**{**vars(shape), "layers": 1})
    model = small.model(torch.bfloat16, device, IMPLEMENTATION)
    layers = model.model.layers
    layer_class = type(layers[0])
    model.config.num_hidden_layers = shape.layers
    if hasattr(model.config, "layer_types") and model.config.layer_types:
        model.config.layer_types = model.config.layer_types[:1] * shape.layers
    made = nn.ModuleList()
    for index in range(shape.layers):
        with torch.device(device):
            layer = layer_class(model.config, index).to(torch.bfloat16).eval()
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    child.weight.data.normal_(0, 0.02)
                    setattr(module, name, in_4(child, bnb, device))
        made.append(layer)
    model.model.layers = made
    return model


def in_4(linear: Any, bnb: Any, device: str) -> Any:
    bias = linear.bias is not None
    found = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=bias,
        compute_dtype=torch.bfloat16,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    found.weight = bnb.nn.Params4bit(
        linear.weight.data,
        requires_grad=False,
        compress_statistics=True,
        quant_type="nf4",
        module=found,
    ).to(device)
    if not found.weight.bnb_quantized:
        found.weight = found.weight._quantize(torch.device(device))
    if bias:
        found.bias = torch.nn.Parameter(linear.bias.data, requires_grad=False)
    return found


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    if "failed" in row:
        return (row["what"], row.get("forecast_gib"), row["failed"], *["-"] * 5)
    error = row["forecast_gib"] / row["peak_gib"] - 1
    return (
        row["what"],
        row["forecast_gib"],
        row["peak_gib"],
        f"{error:+.1%}",
        row["pairs_per_second"],
        f"{row['mfu']:.1%}" if "mfu" in row else None,
        row["step_seconds"],
        row["settings"],
    )


if __name__ == "__main__":
    main()
