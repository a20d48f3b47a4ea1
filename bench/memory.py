"""Peak memory: activations per token kept, in part or fully recomputed; optimizer states exact and lean.

    python bench/memory.py                       # 1.5B on a GPU, the 15M Llama on a CPU
    python bench/memory.py --shape 7B --eager

Activations: the slope between micro-batches of two sizes of pairs that are nearly all answer, forward and backward,
head included. Optimizer: what it holds after one update, weights and gradients apart, in bf16 (also on a CPU).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, SHAPES, Shape, free, machine, ours, peak_mib, table, told, write_facts
from torch import Tensor

from rather.data.batch import PairBatch, TokenPair
from rather.data.pack import pack
from rather.model.layers import LEVELS, arrange_layers

SIZES = {"cuda": (4096, 8192), "cpu": (512, 1536)}
ACTIVATIONS = ("activations", "MiB at few tokens", "MiB at many", "KiB a token")
STATES = ("precision", "bytes a weight", "with bf16 weights and gradients", "GiB of this shape")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="1.5B" if device == "cuda" else "15M"
    )
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path, default=RESULTS / f"memory_{device}.json")
    args = parser.parse_args()
    shape, compiled = SHAPES[args.shape], device == "cuda" and not args.eager
    print(told(machine()), flush=True)
    activations = [*activation_rows(shape, device, compiled=compiled)]
    free()
    states = [state_row(shape, device, lean=lean) for lean in (False, True)]
    facts: dict[str, Any] = {"shape": args.shape, "compiled": compiled, "sizes": SIZES[device]}
    write_facts(args.json, "memory", **facts, activations=activations, states=states)
    few, many = SIZES[device]
    table(f"{args.shape}: activations at {few} and {many} tokens", ACTIVATIONS, activations)
    table(f"{args.shape}: optimizer", STATES, states)


def activation_rows(shape: Shape, device: str, *, compiled: bool) -> Iterator[tuple[Any, ...]]:
    """Lean states, so that large models leave room."""
    engine = ours(shape, device, reference=False, lean=device == "cuda")
    trainer, sizes = engine.policy, SIZES[device]
    for level in LEVELS:
        arrange_layers(trainer.policy, recompute=level, compiled=compiled)
        peaks = []
        for size in sizes:
            batch = nearly_all_answer(shape, size)

            trainer.rehearse(batch)  # compiles, and makes what stays
            peaks.append(peak_mib(partial(trainer.rehearse, batch)))
            trainer.forget()
        yield level, *peaks, 1024 * (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])


def state_row(shape: Shape, device: str, *, lean: bool) -> tuple[Any, ...]:
    from rather.config.schema import TrainingArgs
    from rather.optim.optimizer import Optimizer

    free()
    model = shape.model(torch.bfloat16, device, "sdpa")
    count = sum(p.numel() for p in model.parameters())
    optimizer = Optimizer(
        model.named_parameters(),
        TrainingArgs(),
        schedule=lambda _: 1e-6,
        max_grad_norm=1.0,
        lean=lean,
    )
    loss = sum(
        (parameter.float().sum() for parameter in model.parameters()),
        torch.zeros((), device=device),
    )
    torch.autograd.backward(loss)  # so that hooks on gradients run
    optimizer.step(1.0)
    optimizer.zero_grad()
    held = held_bytes(optimizer, set(map(id, model.parameters())))
    gradients = 2 if lean else 4  # bytes a weight: added up in bf16 or in float32
    return "lean" if lean else "exact", held / count, held / count + 2 + gradients, held / 2**30


def held_bytes(optimizer: Any, known: set[int]) -> int:
    """Of all tensors that the states of an optimizer hold, parameters apart."""
    tensors: dict[int, Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor) and id(value) not in known:
            tensors[id(value)] = value
        elif isinstance(value, dict | list | tuple):
            for inner in value.values() if isinstance(value, dict) else value:
                visit(inner)

    for state in optimizer._states.values():
        visit(vars(state))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def nearly_all_answer(shape: Shape, tokens: int) -> PairBatch:
    draw = np.random.default_rng(0)
    pairs = []
    for _ in range(tokens // 512):
        prompt, chosen, rejected = (
            draw.integers(3, shape.vocabulary, n, dtype=np.int32) for n in (8, 252, 252)
        )
        pairs.append(TokenPair(prompt, chosen, rejected, ((8, 260),), ((8, 260),)))
    (batch,) = pack(pairs, tokens)
    return batch


if __name__ == "__main__":
    main()
