"""What a bf16 file keeps of an adapter that is merged into it, and of full training.

    RATHER_TEST_DATA=/path/to/data python bench/merge.py

Trains LoRA and all weights of a bf16 model in float32, then writes each result as bf16 with
`rather merge` or `rather export`, with nearest and with dithered rounding. Log-probs of held-out
answers come from plain transformers and PEFT in float32: of base and adapter, or of the float32
weights, and of the file. Runs on a CPU in minutes and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import write_facts
from quality import BETA, kept_share, plain_model, row_of, token_pairs
from torch import Tensor

TRAININGS = (("LoRA", 1e-5), ("LoRA", 2e-4), ("full", 5e-5))
ROUNDINGS = ("nearest", "dithered")
RANK = 8
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    every = token_pairs(args.model, args.pairs)
    places = {round(i * len(every) / args.held_out) for i in range(args.held_out)}
    training = [row_of(pair) for i, pair in enumerate(every) if i not in places]
    (args.out / "train.jsonl").write_text("\n".join(map(json.dumps, training)))
    held_out = [pair for i, pair in enumerate(every) if i in places]
    rows = [row for kind, rate in TRAININGS for row in measured(args, held_out, kind, rate)]
    if args.json:
        numbers = {name: getattr(args, name) for name in ("steps", "batch", "held_out")}
        write_facts(args.json, "merge", settings=numbers, rows=rows)
    print(markdown(args, rows))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    data = os.environ.get("RATHER_TEST_DATA")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=data, help="folder with models/ and pairs/")
    add("--model", type=Path, help="a bf16 model; default: stories15M of the data folder")
    add("--pairs", type=Path, help=".jsonl or .jsonl.gz; default: stories15M_vader_onpolicy")
    add("--steps", type=int, default=30, help="optimizer steps of a run")
    add("--batch", type=int, default=16, help="pairs of a step")
    add("--held-out", type=int, default=32, help="pairs that are scored")
    add("--out", type=Path, default=Path("output/bench-merge"), help="for runs; emptied first")
    add("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(arguments)
    if not args.data and not (args.model and args.pairs):
        parser.error("name the data folder with --data or RATHER_TEST_DATA")
    args.model = args.model or args.data / "models/stories15M"
    args.pairs = args.pairs or args.data / "pairs/stories15M_vader_onpolicy.jsonl.gz"
    return args


def measured(
    args: argparse.Namespace, pairs: Sequence[Mapping[str, list[int]]], kind: str, rate: float
) -> list[Row]:
    """Train once, write the result with each rounding, and compare."""
    from peft import PeftModel

    from rather.commands.export import export, merge
    from rather.optim.rounding import Rounding

    run_dir = train(args, kind, rate)
    source, checkpoint = plain_model(args.model, "cpu"), run_dir / f"checkpoint-{args.steps}"
    before = {name: weight.clone() for name, weight in weights_in(source).items()}
    base = log_probs(source, pairs)
    if kind == "LoRA":
        adapted: Any = PeftModel.from_pretrained(source, run_dir / "adapter")
        exact = log_probs(adapted, pairs)
        masters = weights_in(adapted.merge_and_unload())
    else:
        export(str(checkpoint), run_dir / "float32", dtype="fp32")
        trained = plain_model(run_dir / "float32", "cpu")
        exact, masters = log_probs(trained, pairs), weights_in(trained)
    rows = []
    for rounding in ROUNDINGS:
        out, rule = run_dir / rounding, Rounding(rounding)  # type: ignore[arg-type]
        if kind == "LoRA":
            said = merge(str(run_dir / "adapter"), out, rounding=rule)
        else:
            said = export(str(checkpoint), out, rounding=rule)
        print(f"{kind}, {rate:g}, {rounding}: {said}", file=sys.stderr)
        written = plain_model(out, "cpu")
        found = log_probs(written, pairs)
        rows.append({
            "training": kind, "rate": rate, "rounding": rounding,
            "kept": kept_share(before, masters, weights_in(written)),
            "change": mean_difference(exact, base), "error": mean_difference(found, exact),
            "true_margin": margin(exact, base), "margin": margin(found, base),
        })  # fmt: skip
    return rows


def train(args: argparse.Namespace, kind: str, rate: float) -> Path:
    """Train with float32 weights and return the run folder."""
    from transformers import AutoConfig

    from rather.config.load import config_from_dict
    from rather.pipeline.pipeline import DPOPipeline

    model: dict[str, Any] = {"dtype": "fp32"}
    training = {
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": args.batch,
        "num_train_epochs": args.steps,
    }
    config = config_from_dict({
        "exp_name": f"{kind}-{rate:g}",
        "output_dir": str(args.out),
        "logging_dir": str(args.out / "logs"),
        "pretrain": str(args.model),
        "beta": BETA,
        "sequence_length": AutoConfig.from_pretrained(args.model).max_position_embeddings,
        "max_steps": args.steps,
        "save_steps": None,
        "report_html": False,
        "actor_train": {
            "model_args": model | ({"lora_rank": RANK} if kind == "LoRA" else {}),
            "training_args": training,
            "data_args": {"file_name": str(args.out / "train.jsonl")},
        },
    })  # fmt: skip
    with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
        code = DPOPipeline(config).run()
    if code:
        raise SystemExit(f"{config.exp_name}: the run ended with exit code {code}")
    return config.run_dir


# --- scores: plain transformers, nothing of Rather ---


def weights_in(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


@torch.no_grad()
def log_probs(model: Any, pairs: Sequence[Mapping[str, list[int]]]) -> list[list[Tensor]]:
    """Return for each pair the log-probs of the tokens of both answers."""
    model.eval()
    found = []
    for pair in pairs:
        found.append([])
        for side in ("chosen", "rejected"):
            ids, answer = torch.tensor([pair["prompt"] + pair[side]]), len(pair[side])
            each = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            found[-1].append(each.gather(-1, ids[0, 1:, None])[-answer:, 0].double())
    return found


def mean_difference(one: list[list[Tensor]], other: list[list[Tensor]]) -> float:
    """Return the mean absolute difference per token."""
    ones, others = (torch.cat([side for pair in each for side in pair]) for each in (one, other))
    return float((ones - others).abs().mean())


def margin(policy: list[list[Tensor]], reference: list[list[Tensor]]) -> float:
    gaps = [float(p[0].sum() - r[0].sum() - p[1].sum() + r[1].sum())
            for p, r in zip(policy, reference, strict=True)]  # fmt: skip
    return BETA * sum(gaps) / len(gaps)


def markdown(args: argparse.Namespace, rows: Sequence[Row]) -> str:
    lines = [
        f"`{args.model.name}`, {args.steps} steps of {args.batch} pairs, LoRA of rank {RANK}; "
        f"{args.held_out} held-out pairs. Log-probs are mean absolute differences per token.",
        "",
        "| training | learning rate | rounding | share kept | log-probs: change by training "
        "| log-probs: error of the file | margin in float32 | margin of the file |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['training']} | {row['rate']:g} | {row['rounding']} | {row['kept']:.3f} "
        f"| {row['change']:.2e} | {row['error']:.2e} | {row['true_margin']:.4f} "
        f"| {row['margin']:.4f} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
