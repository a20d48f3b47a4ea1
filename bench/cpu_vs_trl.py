"""Pairs/s and memory of ours and of TRL on a CPU: a 15M-parameter Llama, vocabulary 32,000, fp32, the same pairs.

    python bench/cpu_vs_trl.py            # about 10 minutes on 2 cores; needs the `bench` extra
    python bench/cpu_vs_trl.py --quick    # fewer steps and pairs, TRL at one batch size: about 3 minutes

Each system runs in a process of its own with all cores, one after the other. TRL runs with its defaults, and at its
best: without recomputing activations, at the batch size that is fastest on pairs of a quarter of the length. A step
of such short pairs also warms up every run, unmeasured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    SHAPES,
    Cell,
    known_columns,
    machine,
    make_steps,
    ours,
    peak_gib,
    ratio,
    resident_gib,
    table,
    told,
    write_json,
)
from trl_peer import require_trl, run_trl

SHAPE = SHAPES["15M"]
SHORT = 0.25
PAIRS = {"ultrafeedback": 8, "long": 4}  # of an optimizer step, for every system
GOALS = {
    ("ultrafeedback", "online"): 4,
    ("ultrafeedback", "cached"): 6,
    ("long", "online"): 8,
    ("long", "cached"): 10,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=RESULTS / "cpu_vs_trl.json")
    parser.add_argument("--lengths", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(**json.loads(args.child))))
        return
    require_trl()
    print(told(machine()), flush=True)
    cells: list[Cell] = []
    for lengths in args.lengths:
        for cell in compared(lengths, quick=args.quick):
            cells.append(cell)
            write_json(args.json, "cpu_vs_trl", cells, quick=args.quick)
    report(cells)


def compared(lengths: str, *, quick: bool) -> Iterator[Cell]:
    """All cells of one kind of pairs."""
    pairs = PAIRS[lengths] // 2 if quick else PAIRS[lengths]
    few, more = (1, 2) if quick else (2, 4)
    yield measured("ours", lengths, "online", pairs=pairs, steps=more)
    yield measured("ours", lengths, "cached", pairs=pairs, steps=more)
    size = 1 if quick else fastest_batch(lengths, pairs)
    trl = {"pairs": pairs, "per_device": size}
    yield measured("TRL, best settings", lengths, "online", steps=few, variant="best", **trl)
    if not quick:
        trl["per_device"] = min(pairs, 8)  # transformers' default is 8
        yield measured("TRL, defaults", lengths, "online", steps=1, variant="default", **trl)


def fastest_batch(lengths: str, pairs: int) -> int:
    """Pairs a batch at which TRL is fastest, each tried on a step of short pairs after another such step."""
    seconds = {}
    for size in (1, 2, 4, 8):
        if size <= pairs:
            tried = run_child(
                lengths,
                "online",
                pairs=pairs,
                steps=1,
                scale=SHORT,
                variant="best",
                per_device=size,
            )
            seconds[size] = tried["seconds"][-1]
    print(
        f"{lengths}: a step of short pairs by TRL, seconds at pairs a batch: {seconds}", flush=True
    )
    return min(seconds, key=lambda size: seconds[size])


def measured(system: str, lengths: str, reference: str, *, pairs: int, **settings: Any) -> Cell:
    """A cell from a process of its own; its first step warms up."""
    got = run_child(lengths, reference, pairs=pairs, **settings)
    cell = Cell(
        system, lengths, reference, pairs, got["seconds"][1:], got["peak_gib"], got["settings"]
    )
    cell.more = {"before_training_gib": got["start_gib"]}
    print(
        f"{lengths}, {system}, {reference}: {cell.pairs_per_second:.3g} pairs/s, {cell.peak_gib:.3g} GiB",
        flush=True,
    )
    return cell


def run_child(lengths: str, reference: str, **settings: Any) -> dict[str, Any]:
    task = json.dumps({"lengths": lengths, "reference": reference, **settings})
    command = [sys.executable, __file__, "--child", task]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{task} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def child(
    lengths: str,
    reference: str,
    pairs: int,
    steps: int,
    scale: float = 1.0,
    variant: str = "",
    per_device: int = 0,
) -> dict[str, Any]:
    """One system over a short step and `steps` others; what it took."""
    sizes = {"vocabulary": SHAPE.vocabulary, "pairs": pairs}
    work = make_steps(lengths, steps=1, scale=SHORT, seed=1, **sizes)
    work += make_steps(lengths, steps=steps, scale=scale, **sizes)
    start = resident_gib()
    if variant:
        return {
            **asdict(run_trl(SHAPE, "cpu", work, variant=variant, per_device=per_device)),
            "start_gib": start,
        }
    cached = reference == "cached"
    engine = ours(SHAPE, "cpu", reference=not cached)
    engine.plan(work)
    known = [known_columns(pairs)] * len(work) if cached else None
    seconds = [second for second, _ in engine.run(work, known)]
    settings = f"fp32, {engine.settings}"
    return {"seconds": seconds, "peak_gib": peak_gib(), "settings": settings, "start_gib": start}


def report(cells: Sequence[Cell]) -> None:
    rows = []
    for cell in cells:
        trl = {c.system: c for c in cells if c.lengths == cell.lengths}
        goal = GOALS[cell.lengths, cell.reference] if cell.system == "ours" else None
        rows.append(
            (
                cell.lengths,
                cell.system,
                cell.reference,
                cell.pairs,
                cell.pairs_per_second,
                *(
                    ratio(cell, trl[name]) if name in trl else None
                    for name in ("TRL, defaults", "TRL, best settings")
                ),
                goal,
                cell.peak_gib,
                cell.peak_gib - cell.more["before_training_gib"],
                cell.settings,
            )
        )
    title = f"{torch.get_num_threads()} threads; x TRL: same steps, its reference online"
    sizes = ("peak GiB", "of it training", "settings")
    ratios = ("x TRL default", "x TRL best", "goal")
    table(title, ("pairs", "system", "reference", "a step", "pairs/s", *ratios, *sizes), rows)


if __name__ == "__main__":
    main()
