"""The head's log-probs, forward and backward: logits kept, logits computed again, plain log_softmax.

    python bench/head.py                 # the Qwen2.5 shapes on a GPU, the 15M Llama on a CPU
    python bench/head.py --rows 16384

TFLOP/s count the three matrix products that are needed. Memory is what a run takes beyond its inputs, at its peak.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    SHAPES,
    Shape,
    free,
    machine,
    milliseconds,
    peak_mib,
    table,
    told,
    write_facts,
)
from torch import Tensor

from rather.model.head import KEEP_BYTES, token_logps

ROWS = {"cuda": 8192, "cpu": 1024}
COLUMNS = ("shape", "rows", "way", "ms", "us a row", "TFLOP/s", "peak MiB", "error")

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def kept(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    KEEP_BYTES[hidden.device.type] = 1 << 50
    return token_logps(hidden, weight, None, targets)[0]


def computed_again(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    KEEP_BYTES[hidden.device.type] = 0
    return token_logps(hidden, weight, None, targets)[0]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]


WAYS: dict[str, Way] = {"logits kept": kept, "computed again": computed_again, "log_softmax": plain}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = list(SHAPES)[1:] if device == "cuda" else ["15M"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=names)
    parser.add_argument("--rows", type=int, default=ROWS[device])
    parser.add_argument("--repeats", type=int, default=10 if device == "cuda" else 5)
    parser.add_argument("--json", type=Path, default=RESULTS / f"head_{device}.json")
    args = parser.parse_args()
    print(told(machine()), flush=True)
    rows: list[tuple[Any, ...]] = []
    for name in args.shapes:
        rows += [
            (name, args.rows, *row)
            for row in measured(SHAPES[name], args.rows, device, args.repeats)
        ]
        write_facts(args.json, "head", columns=COLUMNS, rows=rows)
    table("head, forward and backward", COLUMNS, rows)


def measured(shape: Shape, rows: int, device: str, repeats: int) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(rows, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    weight = (
        torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=dtype) * 0.02
    ).requires_grad_()
    targets = torch.randint(shape.vocabulary, (rows,), device=device)
    grad = torch.randn(rows, device=device)
    flops = 3 * 2 * shape.head_weights * rows
    exact = plain(hidden.detach().float()[:256], weight.detach().float(), targets[:256])
    results: list[tuple[Any, ...]] = []
    for name, way in WAYS.items():
        free()

        def both(way: Way = way) -> Any:
            return torch.autograd.grad(way(hidden, weight, targets), (hidden, weight), grad)

        peak = failed_or(lambda both=both: peak_mib(both))  # type: ignore[misc]
        taken = failed_or(lambda both=both: milliseconds(both, repeats=repeats))  # type: ignore[misc]
        if taken != taken:
            results.append((name, "OOM", None, None, None, None))
            continue
        error = float((way(hidden[:256], weight, targets[:256]).detach() - exact).abs().max())
        results.append((name, taken, 1e3 * taken / rows, flops / taken / 1e9, peak, error))
    return results


def failed_or(measure: Callable[[], float]) -> float:
    """NaN where the memory does not suffice."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        return float("nan")


if __name__ == "__main__":
    main()
