"""Pairs/s, strict MFU and memory of ours and of TRL with Liger on one GPU: a Qwen2.5 shape with random weights.

    python bench/gpu_vs_trl.py --model 1.5B              # needs the `bench` extra; some minutes
    python bench/gpu_vs_trl.py --model 7B --only ours --lengths ultrafeedback --profile

Both systems train on the same seeded pairs in one process, ours first: Liger changes functions of transformers. TRL
runs at its best: bf16 weights without autocast, Liger's layer kernels on policy and reference, no recompute, batches
padded by two loader processes, the batch sizes below (halved until they fit). Two steps of other pairs warm up each
system. `cached` is compared with TRL online, and with TRL's precomputed reference; the time to precompute it is not
counted. The JSON is written after every cell.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    PEAK,
    RESULTS,
    SHAPES,
    Cell,
    Ours,
    Step,
    free,
    known_columns,
    machine,
    make_steps,
    needed_by_step,
    ours,
    peak_gib,
    ratio,
    speed_of_light,
    synchronize,
    table,
    told,
    write_json,
)
from trl_peer import require_trl, run_trl

from rather.data.batch import Columns

LENGTHS = ("ultrafeedback", "long", "four")
PAIRS = {"ultrafeedback": 64, "long": 32, "four": 96}  # of an optimizer step, for both
PAIRS_7B = {"ultrafeedback": 64, "long": 16, "four": 48}
STEPS = {"135M": 9, "0.5B": 5, "1.5B": 5, "3B": 3, "7B": 2}  # that are measured
TRL_BATCH = {
    "135M": 32,
    "0.5B": 16,
    "1.5B": 8,
    "3B": 8,
    "7B": 4,
}  # pairs; the fastest found on an H200
TRL_BATCH_LONG = {"135M": 16, "0.5B": 8, "1.5B": 4, "3B": 4, "7B": 1}
GOAL_MFU = {"0.5B": (0.45, 0.46), "1.5B": (0.54, 0.56), "3B": (0.57, 0.59), "7B": (0.56, 0.60)}
GOAL_RATIO = {
    "0.5B": (5.0, 6.5),
    "1.5B": (2.4, 3.2),
    "3B": (2.3, 3.1),
    "7B": (2.3, 3.1),
}  # UltraFeedback-like
WARM_UP = 2
# Detach the profiler after use: otherwise it slows down whatever is measured later in this process.
os.environ.setdefault("TEARDOWN_CUPTI", "1")


def main() -> None:
    args = arguments()
    if args.only != "ours":
        require_trl("liger-kernel")
    shape, cells = SHAPES[args.model], []
    lora = f"_lora{args.lora}" if args.lora else ""
    lora += "_experts" if args.lora_experts else ""
    path = args.json or RESULTS / f"gpu_vs_trl_{args.model}{lora}.json"
    work = {lengths: measured_steps(args, lengths) for lengths in args.lengths}
    light = {lengths: speed_of_light(shape, steps) for lengths, steps in work.items()}
    print(told(machine()), flush=True)

    def add(cell: Cell) -> None:
        cell.rate(shape, work[cell.lengths])
        cells.append(cell)
        write_json(
            path, "gpu_vs_trl", cells, model=args.model, weights=shape.weights, speed_of_light=light
        )
        print(line(cell), flush=True)

    if args.only != "trl":
        for cell in our_cells(args, work):
            add(cell)
        free()
    if args.only != "ours":
        for cell in trl_cells(args, work):
            add(cell)
    report(args, cells, light)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(STEPS), required=True)
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--only", choices=("ours", "trl"))
    parser.add_argument(
        "--default",
        action="store_true",
        help="also TRL's own defaults (UltraFeedback-like lengths)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="where the time of one of our steps goes"
    )
    parser.add_argument("--lean", action="store_true", help="ours with precision: lean")
    parser.add_argument("--rounding", choices=("dithered", "nearest"), default="dithered")
    parser.add_argument(
        "--offload", action="store_true", help="our reference on the host, as reference.offload: on"
    )
    parser.add_argument("--eager", action="store_true", help="ours without torch.compile")
    parser.add_argument(
        "--budget", type=int, help="tokens of our micro-batches; else chosen by memory"
    )
    parser.add_argument(
        "--recompute", choices=("none", "half", "selective", "full"), help="else chosen by memory"
    )
    parser.add_argument(
        "--lora", type=int, help="rank of an adapter on all linear layers, for both"
    )
    parser.add_argument(
        "--lora-experts", action="store_true", help="an adapter on stacked experts too, ours only"
    )
    parser.add_argument("--pairs", type=int, help="of an optimizer step")
    parser.add_argument("--steps", type=int, help="measured steps")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measured_steps(
    args: argparse.Namespace, lengths: str, *, seed: int = 0, **options: Any
) -> list[list[Any]]:
    pairs = args.pairs or (PAIRS_7B if args.model == "7B" else PAIRS)[lengths]
    count = options.pop("steps", args.steps or STEPS[args.model])
    vocabulary = SHAPES[args.model].vocabulary
    return make_steps(lengths, vocabulary, steps=count, pairs=pairs, seed=seed, **options)


def or_failed(cell: Cell, measure: Callable[[], None]) -> Cell:
    """The cell with its numbers, or with the reason why it has none; memory is free again either way."""
    try:
        measure()
    except torch.OutOfMemoryError:
        cell.failed = "OOM"
    except (
        Exception
    ) as error:  # one broken cell must not cost the others, which took minutes of a GPU
        cell.failed = f"{type(error).__name__}: {error}"[:300]
    return cell


# --- ours ---


def our_cells(args: argparse.Namespace, work: dict[str, list[Any]]) -> Iterator[Cell]:
    """Online for all lengths, then cached without the reference in memory. What online did not fit starts anew."""
    engine: Ours | None = None
    for reference in ("online", "cached"):
        for lengths, steps in work.items():
            cell = Cell("ours", lengths, reference, len_pairs(steps))
            free()

            def measure(cell: Cell = cell, steps: list[Any] = steps) -> None:
                nonlocal engine
                engine = prepared(args, engine, cell.reference, steps)
                run_ours(args, engine, cell, steps)

            yield or_failed(cell, measure)
            if cell.failed:
                engine = None
        if engine:
            engine.forget_reference()


def prepared(
    args: argparse.Namespace, engine: Ours | None, reference: str, steps: Sequence[Step]
) -> Ours:
    """An engine with its micro-batches planned for these pairs and the memory that is free now."""
    if engine is None:
        compiled, online = not args.eager, reference == "online"
        options = {"lean": args.lean, "compiled": compiled, "rounding": args.rounding}
        options |= {"lora": args.lora, "lora_experts": args.lora_experts}
        engine = ours(SHAPES[args.model], "cuda", reference=online, **options)
    if args.offload and engine.reference:
        engine.reference.park()
    engine.plan(steps, tokens=args.budget, recompute=args.recompute)
    free()
    return engine


def run_ours(args: argparse.Namespace, engine: Ours, cell: Cell, steps: Sequence[Step]) -> None:
    warm = measured_steps(args, cell.lengths, seed=1, steps=WARM_UP)
    known: list[Columns] | None = None
    if cell.reference == "cached":
        known = [known_columns(cell.pairs)] * (len(warm) + len(steps))
    while not cell.seconds:
        try:
            cell.seconds = [seconds for seconds, _ in engine.run([*warm, *steps], known)][WARM_UP:]
        except torch.OutOfMemoryError:
            if engine.budget < 4096:
                raise
        if (
            not cell.seconds
        ):  # as the pipeline does; here, where the exception holds nothing any more
            engine.policy.forget()
            free()
            engine.halve()
    cell.settings = engine.settings
    cell.peak_gib = peak_gib()
    if args.profile:
        shape = SHAPES[args.model]
        split = profiled(engine, steps[:1], known, shape.vocabulary)
        cell.more["profile_ms"] = split
        kernels = sum(split[kind] for kind in BLOCK_AND_HEAD) / 1e3
        needed = needed_by_step(shape, steps[0], reference=cell.reference == "online")
        cell.more["ceiling"] = needed / kernels / PEAK


KINDS = {  # parts of kernel names, first match counts
    "attention": ("flash", "fmha", "sum_by_key"),
    "head": ("row_statistics", "logits_gradient"),
    "optimizer": ("split_kernel", "lean_kernel", "adam", "multi_tensor", "lpnorm"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "copies": ("memcpy", "memset"),
}

# The ceiling: what MFU would be if nothing else took time.
BLOCK_AND_HEAD = ("attention", "head", "matrix products", "head products", "elementwise")


def profiled(
    engine: Ours, steps: Sequence[Step], known: Sequence[Columns] | None, vocabulary: int
) -> dict[str, float]:
    """Milliseconds of one step by kind of kernel, and those in which the GPU had nothing to do."""
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True
    ) as profiler:
        (wall, _), *_ = engine.run(steps, known)
        synchronize()
    split = dict.fromkeys([*KINDS, "head products", "elementwise"], 0.0)
    names: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            kind = next(
                (k for k, parts in KINDS.items() if any(p in event.name.lower() for p in parts)),
                "elementwise",
            )
            split[kind] += event.self_device_time_total / 1e3
            names[event.name] = names.get(event.name, 0.0) + event.self_device_time_total / 1e3
    for average in profiler.key_averages(group_by_input_shape=True):
        if average.key in ("aten::mm", "aten::addmm") and any(
            vocabulary in s for s in average.input_shapes if s
        ):
            split["head products"] += average.self_device_time_total / 1e3
    split["matrix products"] -= split["head products"]
    split["gaps"] = wall * 1e3 - sum(split.values())
    largest = sorted(names.items(), key=lambda item: -item[1])[:12]
    table("one step by kernel", ("kernel", "ms"), [(name[:150], ms) for name, ms in largest])
    return {**split, "wall": wall * 1e3}


# --- TRL ---


def trl_cells(args: argparse.Namespace, work: dict[str, list[Any]]) -> Iterator[Cell]:
    variants = [("best", "online"), ("precomputed", "cached")]
    for lengths, steps in work.items():
        if args.default and lengths == "ultrafeedback":
            yield trl_cell(args, lengths, "online", "default", steps)
        for variant, reference in variants:
            yield trl_cell(args, lengths, reference, variant, steps)


def trl_cell(
    args: argparse.Namespace, lengths: str, reference: str, variant: str, steps: Sequence[Step]
) -> Cell:
    cell = Cell(f"TRL, {variant}", lengths, reference, len_pairs(steps))
    warm = measured_steps(args, lengths, seed=1, steps=WARM_UP)
    batch = (
        (TRL_BATCH_LONG if lengths == "long" else TRL_BATCH)[args.model]
        if variant != "default"
        else 8
    )

    def measure() -> None:
        run = run_trl(
            SHAPES[args.model],
            "cuda",
            [*warm, *steps],
            variant=variant,
            per_device=batch,
            lora=args.lora,
        )
        cell.seconds, cell.peak_gib = run.seconds[WARM_UP:], run.peak_gib
        cell.settings = run.settings
        cell.more["precompute_seconds"] = run.precompute_seconds

    while or_failed(cell, measure).failed == "OOM" and batch > 1:
        print(f"TRL, {variant}, {lengths}: {batch} pairs a batch do not fit", flush=True)
        cell.failed, batch = "", batch // 2
        free()
    free()
    return cell


# --- reports ---


def len_pairs(steps: Sequence[Step]) -> int:
    return sum(len(prompt.pairs) for prompt in steps[0])


def line(cell: Cell) -> str:
    numbers = (
        f"{cell.pairs_per_second:.4g} pairs/s, MFU {cell.mfu or 0:.1%}, {cell.peak_gib:.4g} GiB"
    )
    return f"{cell.system}, {cell.lengths}, {cell.reference}: {cell.failed or numbers} ({cell.settings})"


def report(args: argparse.Namespace, cells: Sequence[Cell], light: dict[str, float]) -> None:
    rows = []
    for cell in cells:
        best = [c for c in cells if c.lengths == cell.lengths and c.system == "TRL, best"]
        precomputed = [
            c for c in cells if c.lengths == cell.lengths and c.system == "TRL, precomputed"
        ]
        beside = cell.system == "ours" and cell.reference == "cached"
        goal = None
        if (
            cell.system == "ours"
            and cell.lengths == "ultrafeedback"
            and args.model in GOAL_MFU
            and not args.lora
        ):
            goal = f"{GOAL_RATIO[args.model][beside]}x, {GOAL_MFU[args.model][beside]:.0%}"
        rows.append(
            (
                cell.lengths,
                cell.system,
                cell.reference,
                cell.failed.split(":")[0] or cell.pairs_per_second,
                None if cell.mfu is None else f"{cell.mfu:.1%}",
                cell.of_light,
                ratio(cell, best[0]) if best else None,
                ratio(cell, precomputed[0]) if beside and precomputed else None,
                goal,
                cell.peak_gib,
                cell.pairs,
                cell.settings,
            )
        )
        if split := cell.more.get("profile_ms"):
            title = f"one step of ours, {cell.lengths}, {cell.reference}, ms"
            title += f"; the kernels of blocks and head alone: {cell.more['ceiling']:.1%}"
            table(title, list(split), [list(split.values())])
    told_light = ", ".join(f"{lengths} {value:.4g}" for lengths, value in light.items())
    title = f"{args.model}; the standard algorithm at 790 TFLOP/s with no overhead, pairs/s: {told_light}"
    ratios = ("x light", "x TRL", "x TRL precomp.", "goal")
    table(
        title,
        (
            "pairs",
            "system",
            "reference",
            "pairs/s",
            "strict MFU",
            *ratios,
            "peak GiB",
            "a step",
            "settings",
        ),
        rows,
    )
    for cell in cells:
        if ":" in cell.failed:
            print(f"{cell.system}, {cell.lengths}, {cell.reference}: {cell.failed}")


if __name__ == "__main__":
    main()
