"""Long pairs on one GPU: tokens/s, peak memory and its forecast; a Qwen2.5-7B shape with random weights.

    python bench/long_gpu.py --lengths 32768 65536 131072          # LoRA; some minutes on an H200
    python bench/long_gpu.py --lengths 32768 --lean                # all weights, precision: lean
    python bench/long_gpu.py --trl --lengths 32768 65536 131072    # the longest pair that TRL with Liger holds
    python bench/long_gpu.py --model 15M --device cpu --lengths 512    # whether the script runs at all

One pair a step, nine tenths of it prompt; positions are raised in the config. The forecast is made first, from a
config.json alone. The reference runs online. TRL trains with recomputation, its fused head and Liger's layers. A short
pair warms up each length. Cells of other lengths and systems that the JSON file already has are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the workers

import numpy as np
import torch
from common import (
    PEAK,
    RESULTS,
    SHAPES,
    Prompt,
    Shape,
    free,
    machine,
    needed_by_step,
    ours,
    pairs_of,
    peak_gib,
    table,
    told,
    write_facts,
)

WARM_UP = 2048  # tokens of the pair that warms up: its speed is not measured
COLUMNS = (
    "system",
    "tokens",
    "GiB forecast",
    "measured",
    "error",
    "s a step",
    "tokens/s",
    "MFU",
    "how",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="7B", choices=list(SHAPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--lora", type=int, default=16)
    parser.add_argument("--lean", action="store_true", help="all weights in precision: lean")
    parser.add_argument("--steps", type=int, default=2, help="measured, after one that warms up")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--trl", action="store_true", help="TRL instead of ours")
    parser.add_argument("--json", type=Path, default=RESULTS / "long_gpu.json")
    args = parser.parse_args()
    print(told(machine()), flush=True)
    rows: list[dict[str, Any]] = []
    earlier = stored_cells(args.json, args.model)
    engine: Any = None
    for length in args.lengths:
        sizes = [min(WARM_UP, length), *[length] * args.steps]
        steps = [[pair_of(size, SHAPES[args.model], seed)] for seed, size in enumerate(sizes)]
        row: dict[str, Any] = {"system": "TRL" if args.trl else "ours", "tokens": length}
        try:
            if args.trl:
                run_trl(args, steps, row)
            else:
                engine = run_ours(args, engine, steps, row)
        except torch.OutOfMemoryError as error:
            row["failed"] = f"out of memory: {str(error).splitlines()[0]}"[:150]
        except Exception as error:  # one broken cell must not cost the others
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        free()
        rows.append(row)
        print(row, flush=True)
        cells_by_key = {key_of(cell): cell for cell in [*earlier, *rows]}
        stored = [cells_by_key[key] for key in sorted(cells_by_key)]
        write_facts(args.json, "long_gpu", model=args.model, cells=stored)
        if args.trl and "failed" in row:
            break
    table(f"{args.model}, one pair a step", COLUMNS, [cells(row) for row in rows])


def stored_cells(path: Path, model: str) -> list[dict[str, Any]]:
    """What earlier commands have measured with this model."""
    if not path.exists():
        return []
    facts = json.loads(path.read_text(encoding="utf-8"))
    return list(facts["cells"]) if facts["model"] == model else []


def key_of(cell: dict[str, Any]) -> tuple[str, int]:
    return cell["system"], cell["tokens"]


def pair_of(length: int, shape: Shape, seed: int) -> Prompt:
    """A prompt of nine tenths, and two answers that share the rest."""
    draw = np.random.default_rng(seed)
    answer = length // 20
    sizes = (length - 2 * answer, answer, answer)
    prompt, *answers = (draw.integers(3, shape.vocabulary, size, dtype=np.int32) for size in sizes)
    return Prompt(prompt, tuple(answers))


def run_ours(args: argparse.Namespace, engine: Any, steps: list[Any], row: dict[str, Any]) -> Any:
    shape = SHAPES[args.model]
    row |= forecast(args, steps[1:])  # not the pair that warms up
    if engine is None:
        options = {"lean": True} if args.lean else {"lora": args.lora}
        engine = ours(shape, args.device, reference=not args.lean, **options)
        engine.policy.policy.causal_lm.config.max_position_embeddings = 1 << 20
    began = time.perf_counter()
    engine.plan(steps)
    row["seconds_to_plan"] = time.perf_counter() - began
    free()
    known = None
    if args.lean:
        from common import known_columns

        known = [known_columns(1)] * len(steps)
    row["seconds"] = [seconds for seconds, _ in engine.run(steps, known)][1:]
    row["settings"] = engine.settings
    row["peak_gib"] = peak_gib()
    rate(row, shape, steps[1:], reference=not args.lean)
    return engine


def rate(row: dict[str, Any], shape: Shape, steps: list[Any], *, reference: bool) -> None:
    seconds = sorted(row["seconds"])[len(row["seconds"]) // 2]
    row["step_seconds"] = seconds
    row["tokens_per_second"] = row["tokens"] / seconds
    if not reference:  # all weights train; needed_by_step counts the gradients of all of them
        row["mfu"] = needed_by_step(shape, steps[0], reference=reference) / seconds / PEAK


def forecast(args: argparse.Namespace, steps: list[Any]) -> dict[str, Any]:
    """What `rather plan` says before anything is loaded."""
    from plan_vs_measured import Case, config_of

    from rather.model.sizes import sizes_of
    from rather.plan.forecast import Forecast, PairSample

    precision = "lean" if args.lean else "exact"
    rank = None if args.lean else args.lora
    case = Case("long", args.model, 1, None, rank=rank, precision=precision)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(case, Path(folder))
        sizes = sizes_of(config.actor_train.model_path, config.actor_train.model_args)
        pairs = [pairs_of(step) for step in steps]
        sample = PairSample(len(steps), 0, len(steps), 1.0, pairs, pairs[0][0].tokens)
        device = device_of(args.device)
        plan = Forecast(config, sizes, device, sample, None, reference=not args.lean)
    return {
        "forecast_gib": plan.parts.total / 2**30,
        "forecast_fits": plan.fits,
        "forecast_recompute": plan.chosen.recompute,
    }


def device_of(kind: str) -> Any:
    from rather.plan.memory import Device

    if kind == "cpu":
        return Device("cpu", 8 * 2**30)
    return Device("cuda", torch.cuda.get_device_properties(0).total_memory)


def run_trl(args: argparse.Namespace, steps: list[Any], row: dict[str, Any]) -> None:
    from trl_peer import run_trl

    shape, device = SHAPES[args.model], args.device
    run = run_trl(shape, device, steps, variant="long", per_device=1, lora=args.lora)
    row["seconds"], row["peak_gib"], row["settings"] = run.seconds[1:], run.peak_gib, run.settings
    rate(row, SHAPES[args.model], steps[1:], reference=True)


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    if "failed" in row:
        return (row["system"], row["tokens"], row.get("forecast_gib"), row["failed"], *["-"] * 5)
    error = row["forecast_gib"] / row["peak_gib"] - 1 if "forecast_gib" in row else None
    return (
        row["system"],
        row["tokens"],
        row.get("forecast_gib"),
        row["peak_gib"],
        None if error is None else f"{error:+.1%}",
        row["step_seconds"],
        row["tokens_per_second"],
        f"{row['mfu']:.1%}" if "mfu" in row else None,
        row["settings"],
    )


if __name__ == "__main__":
    main()
