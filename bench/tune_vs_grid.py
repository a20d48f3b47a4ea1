"""Does `rather tune` find a setting as good as the best of a grid, on pairs that neither has seen?

    python bench/tune_vs_grid.py --model stories15M --train truthfulqa_pairs.jsonl.gz \
        --test 0.3 --budget 240s --name stories15M_truthfulqa

`tune` gets the training pairs and a YAML as `rather init` writes it, which holds out 5 %, or
`--held-out` pairs. `--test` is another file, or the share of the prompts that is put aside first.
Then the YAML that `tune` wrote is trained as it is, and so is every cell of a grid of learning
rates and betas; all are evaluated on the test pairs, with drift and forgetting. The best cell is
chosen on the test pairs themselves, which favours the grid.
Everything resumes: run the same command again after a timeout. The result is
bench/results/tune_NAME.json; `--picture FILE.svg` draws it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from common import RESULTS, machine

from rather.commands.terminal import settings
from rather.data.prepare import prepare
from rather.losses.gain import Gain
from rather.losses.objective import from_config
from rather.outcome.forgetting import SHIPPED, Forgotten
from rather.pipeline.forgetting import Limits
from rather.tools.report.folder import MetricsReader
from rather.tools.sweep import train_here
from rather.tools.tune import (
    NOTHING,
    Rewards,
    print_answers,
    print_result,
    prompts_of,
    seconds_of,
    tune,
)
from rather.tools.tune import write_best as write_yaml

YAML = """\
exp_name: {name}
pretrain: {model}
output_dir: {out}/output
logging_dir: {out}/logs
sequence_length: {length}
beta: 0.1
track_with: null
report_html: false
actor_train:
  data_args: {{file_name: {train}, overlong: truncate_response}}
  training_args: {{learning_rate: {rate}, per_device_train_batch_size: {batch}, num_train_epochs: {epochs}}}
validation:
  data_args: {{{held_out}}}
"""
SPLIT = "split: 0.05"  # as `rather init` writes it
NEAR = 0.01  # of the loss, and of the accuracy
QUESTIONS, BASE_RIGHT = 50, 30  # of a result without `chance`, which had SmolLM2-135M's 30 of 50


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path)
    add("--train", type=Path)
    add("--held-out", type=Path)
    add("--test", help="a file, or the share of the prompts of --train that is put aside")
    add("--seed", default="", help="any word: other prompts are put aside")
    add("--name", default="grid")
    add("--budget", default="240s")
    add("--rate", type=float, default=1e-5, help="learning rate of the YAML that is tuned")
    add("--rates", type=float, nargs="+", default=[5e-6, 1.5e-5, 5e-5, 1.5e-4], help="of the grid")
    add("--betas", type=float, nargs="+", default=[0.03, 0.1, 0.3], help="of the grid")
    add("--batch", type=int, default=32)
    add("--epochs", type=float, default=1)
    add("--length", type=int, default=1024)
    add("--by-loss", action="store_true", help="without limits of drift and forgetting")
    add("--steps", type=int, help="only try it out: steps of every run")
    add("--out", type=Path, default=Path("output/bench-tune"))
    add("--picture", type=Path)
    add(
        "--grid-from",
        type=Path,
        help="result.json whose grid counts; only its best cells are trained",
    )
    add("--page", type=Path, help="only write this result into docs/answers.md and its picture")
    add("--table", nargs="+", type=Path, help="only write these results into docs/choosing.md")
    args = parser.parse_args()
    if args.table:
        return write_table([json.loads(file.read_text()) for file in args.table])
    if args.page:
        result = json.loads(args.page.read_text())
        write_page(result)
        (PAGE.parent / "images" / "tune-grid.svg").write_text(picture(result))
        return
    if not all((args.model, args.train, args.test)):
        parser.error("--model, --train and --test are required")
    logging.disable(logging.INFO)
    began = time.monotonic()
    out = (args.out / args.name).resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "base.yaml"
    train, test = put_aside(args.train, args.test, out, args.seed)
    held_out = f"file_name: {args.held_out.resolve()}" if args.held_out else SPLIT
    numbers = {key: getattr(args, key) for key in ("name", "length", "rate", "batch", "epochs")}
    paths = {"out": out, "model": args.model.resolve(), "train": train, "held_out": held_out}
    file.write_text(YAML.format(**paths, **numbers))
    overrides = [f"max_steps={args.steps}"] if args.steps else []
    overrides += ["drift_limit=1e9", "forgetting=off"] if args.by_loss else []
    tuning = tune(file, overrides, seconds_of(args.budget), [])
    found = tuning.result()
    print_result(found)
    print_answers(tuning, found["best"])
    chosen = out / "tuned.yaml"
    values: dict[str, Any] = {}
    if found["best"] != NOTHING:
        write_yaml(tuning, found, chosen)
        values = found["runs"][found["best"]]["values"]
    cells = Cells(file, out, test, overrides)
    grid = json.loads(args.grid_from.read_text())["grid"] if args.grid_from else {}
    for rate, beta in itertools.product(args.rates, args.betas):
        name = f"lr {rate:g}, beta {beta:g}"
        if name not in grid or name in best_cells(grid):
            own = [f"actor_train.training_args.learning_rate={rate}", f"beta={beta}"]
            grid[name] = cells.trained(f"grid-{rate:g}-{beta:g}", file, own)
    tuned = cells.trained("tuned", chosen, []) if values else cells.untrained()
    result = {
        "machine": machine(), "name": args.name, "has_limits": not args.by_loss,
        "test_pairs": len(tuned["rewards"].margins),
        "steps": tuned["steps"], "budget": tuning.budget, "tune_seconds": found["seconds"],
        "seconds": time.monotonic() - began, "chosen": values, "reason": found["reason"],
        "finalists": found["finalists"], **compare(tuned, grid),
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    (out / "result.json").write_text(text + "\n")
    if not args.steps:
        (RESULTS / f"tune_{args.name}.json").write_text(text + "\n")
    if args.picture:
        args.picture.write_text(picture(result))


def put_aside(train: Path, test: str, out: Path, seed: str) -> tuple[Path, Path]:
    """Return the files of training and test pairs; no prompt is in both.

    Messages become plain text, for models without a chat template.
    """
    if Path(test).exists():
        return train.resolve(), Path(test).resolve()
    opened = gzip.open if train.suffix == ".gz" else open
    with opened(train, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    sides: dict[bool, list[str]] = {True: [], False: []}
    for line in lines:
        row = json.loads(line)
        if messages := row.pop("messages", None):
            row["prompt"] = "".join(f"{message['content']}\n" for message in messages)
        digest = hashlib.sha256(f"{seed}{row['prompt']}".encode()).hexdigest()
        sides[int(digest[:8], 16) < float(test) * 2**32].append(f"{json.dumps(row)}\n")
    files = out / "train.jsonl", out / "test.jsonl"
    for written, side in zip(files, (False, True), strict=True):
        written.write_text("".join(sides[side]))
    return files


class Cells:
    """Trains settings to the end and evaluates them on the test pairs; finished ones are read."""

    def __init__(self, file: Path, out: Path, test: Path, overrides: list[str]) -> None:
        base = settings(file, [])
        self.file, self.out = file, out
        self.prompts: dict[int, int] = {}
        self.shared = [
            f"forgetting={SHIPPED}", *overrides, f"output_dir={out}/cells",
            f"logging_dir={out}/logs/cells",
            f"reference.cache.path={base.reference_cache_dir}",
            f"actor_train.data_args.cache_dir={base.data_cache_dir(base.actor_train.data_args)}",
            f"validation.data_args.file_name={test}", "validation.data_args.split=null",
            "eval_steps=null", "save_steps=null", "pair_ledger=true",
        ]  # fmt: skip

    def trained(self, name: str, file: Path, own: list[str]) -> dict[str, Any]:
        print(f"-- {name}", flush=True)
        config = settings(file, [*self.shared, *own, f"exp_name={name}"])
        code, error = train_here(config)
        assert code == 0, error
        self.last = config
        self.prompts = self.prompts or prompts_of(prepare(config).evals.values())
        return self.measured(config, first=False)

    def untrained(self) -> dict[str, Any]:
        return self.measured(self.last, first=True)

    def measured(self, config: Any, *, first: bool) -> dict[str, Any]:
        columns = MetricsReader(config.run_dir / "metrics.jsonl").update()
        place = 0 if first else -1
        last = {name: column.values[place] for name, column in columns.items()}
        beta = from_config(config).terms[0].beta
        rewards = Rewards.of(config.run_dir, beta, self.prompts, first=first)
        texts = columns.get("eval/forgetting/loss")
        return {
            "forgetting_loss_before": texts.values[0] if texts else None,
            "rewards": rewards, "loss": rewards.loss, "accuracy": rewards.accuracy,
            "drift": last["eval/drift"], "steps": int(columns["lr"].steps[-1]),
            "forgetting_loss": last.get("eval/forgetting/loss"),
            "right": last.get("eval/forgetting/right"), "kept": last.get("eval/forgetting/kept"),
            "chance": last.get("eval/forgetting/chance"),
        }  # fmt: skip


def compare(tuned: dict[str, Any], grid: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the paired differences between the tuned setting and the best cells of the grid.

    Once of all cells, and once of those that keep the limits.
    """
    allowed = {name: cell for name, cell in grid.items() if keeps_limits(cell)}
    differences = {}
    for which, cells in (("all cells", grid), ("cells within the limits", allowed)):
        if not cells:
            continue
        top, top_accuracy = best_of(cells)
        paired = []  # cells that were only read have no rewards
        if rewards := cells[top].get("rewards"):
            paired.append(("loss", top, rewards.gain_over(tuned["rewards"])))
        if rewards := cells[top_accuracy].get("rewards"):
            right, tuned_right = rewards.margins > 0, tuned["rewards"].margins > 0
            gain = Gain.of(right * 1.0 - tuned_right, rewards.prompts)
            paired.append(("accuracy", top_accuracy, gain))
        for name, cell, gain in paired:
            differences[f"{name}, {which}"] = {
                "best_cell": cell, "worse_by": gain.mean, "interval": [gain.low, gain.high],
                "near": gain.mean <= NEAR, "near_or_covered": gain.mean <= NEAR or gain.low <= 0,
            }  # fmt: skip
    return {
        "tuned": {name: value for name, value in tuned.items() if name != "rewards"},
        "grid": {name: {key: value for key, value in cell.items() if key != "rewards"}
                 for name, cell in grid.items()},
        "differences": differences,
        "tuned_keeps_limits": keeps_limits(tuned),
    }  # fmt: skip


def best_of(cells: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """Return the names of the cells with the lowest loss and with the highest accuracy."""
    return (
        min(cells, key=lambda name: cells[name]["loss"]),
        max(cells, key=lambda name: cells[name]["accuracy"]),
    )


def best_cells(grid: dict[str, dict[str, Any]]) -> set[str]:
    """Return the cells that a tuned setting is compared with pair by pair."""
    allowed = {name: cell for name, cell in grid.items() if keeps_limits(cell)}
    return {*best_of(grid), *(best_of(allowed) if allowed else ())}


def keeps_limits(cell: dict[str, Any]) -> bool:
    """Return whether a model keeps the default limits of drift and forgetting."""
    metrics = {"eval/drift": cell["drift"]}
    if "chance" not in cell:
        cell = {**cell, "chance": chance_of(cell)}
    for name in ("loss", "kept", "chance"):
        value = cell["forgetting_loss" if name == "loss" else name]
        if value is not None:
            metrics[f"eval/forgetting/{name}"] = value
    base = {"forgetting": {"loss": cell["forgetting_loss_before"]}}
    return not Limits().problem(metrics, base)


def chance_of(cell: dict[str, Any]) -> float | None:
    """Return what an older result does not have, from its shares of the shipped questions."""
    if cell["kept"] is None:
        return None
    kept, count = round(cell["kept"] * BASE_RIGHT), round(cell["right"] * QUESTIONS)
    return Forgotten(0.0, 0.0, BASE_RIGHT, kept, count - kept).chance


# --- the page ---

PAGE = Path(__file__).parent.parent / "docs" / "answers.md"
BEGIN, END = "<!-- begin: bench/tune_vs_grid.py --page -->", "<!-- end -->"
HEADINGS = ("learning rate, beta", "loss", "accuracy", "drift", "loss on texts", "right", "kept")


def write_page(result: dict[str, Any]) -> None:
    """Write all cells, and what was tuned, into the page of the docs."""
    chosen = ", ".join(result["chosen"].values()) or "doing nothing"
    named = {**result["grid"], f"tuned: {chosen}": result["tuned"]}
    rows = [HEADINGS, ("---",) * len(HEADINGS)]
    for name, cell in named.items():
        rise = cell["forgetting_loss"] / cell["forgetting_loss_before"] - 1
        numbers = (f"{cell['loss']:.3f}", f"{cell['accuracy']:.1%}", f"{cell['drift']:.2f}",
                   f"{rise:+.1%}", f"{cell['right']:.0%}", f"{cell['kept']:.0%}")  # fmt: skip
        rows.append((name, *numbers))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


CHOOSING = PAGE.with_name("choosing.md")
BEGIN_TABLE = "<!-- begin: bench/tune_vs_grid.py --table -->"
COLUMNS = ("pairs", "test pairs", "chosen", "loss", "best cell", "worse by (95 %)")


def write_table(results: list[dict[str, Any]]) -> None:
    """Write what was chosen for each set, and how far it is from the best cell that may win."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for result in results:
        which = "cells within the limits" if result["has_limits"] else "all cells"
        apart = result["differences"][f"loss, {which}"]
        low, high = apart["interval"]
        rate, beta = result["chosen"].values() if len(result["chosen"]) == 2 else (
            *result["chosen"].values(), "0.1"
        )  # fmt: skip
        rows.append(
            (result["name"].split("_")[1], str(result["test_pairs"]), f"lr {float(rate):.2g}, beta {float(beta):.2g}",
             f"{result['tuned']['loss']:.3f}", apart["best_cell"],
             f"{apart['worse_by']:.3f} ({low:.3f} to {high:.3f})")
        )  # fmt: skip
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    before, _, rest = CHOOSING.read_text().partition(BEGIN_TABLE)
    CHOOSING.write_text(f"{before}{BEGIN_TABLE}\n{table}\n{END}{rest.partition(END)[2]}")


# --- the picture ---

WIDTH, HEIGHT, EDGE = 640, 400, 60


def picture(result: dict[str, Any]) -> str:
    """Draw loss on unseen pairs over drift: the grid, the tuned setting, and doing nothing."""
    cells = result["grid"]
    points = [
        (each["drift"], each["loss"], keeps_limits(each), name) for name, each in cells.items()
    ]
    tuned = result["tuned"]
    drifts = [max(point[0], 1e-3) for point in points] + [max(tuned["drift"], 1e-3)]
    losses = [min(point[1], 1.0) for point in points] + [tuned["loss"], math.log(2)]
    low, high = math.log10(min(drifts)), math.log10(max(drifts))
    bottom, top = min(losses) - 0.01, max(losses) + 0.01

    def at(drift: float, loss: float) -> tuple[float, float]:
        along = (math.log10(max(drift, 1e-3)) - low) / ((high - low) or 1)
        up = (min(loss, 1.0) - bottom) / ((top - bottom) or 1)
        return EDGE + along * (WIDTH - 2 * EDGE), HEIGHT - EDGE - up * (HEIGHT - 2 * EDGE)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    x0, y0 = EDGE, HEIGHT - EDGE
    parts.append(f'<path d="M{x0} {EDGE} V{y0} H{WIDTH - EDGE}" fill="none" stroke="#888"/>')
    y = at(1.0, math.log(2))[1]
    parts.append(f'<path d="M{x0} {y:.1f} H{WIDTH - EDGE}" stroke="#888" stroke-dasharray="4"/>')
    parts.append(f'<text x="{x0 + 6}" y="{y - 6:.1f}" fill="#555">untrained: ln 2</text>')
    for drift in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
        if low - 0.1 <= math.log10(drift) <= high + 0.1:
            x = at(drift, bottom)[0]
            parts.append(f'<text x="{x:.1f}" y="{y0 + 18}" text-anchor="middle">{drift:g}</text>')
    for loss in (bottom + 0.01, (bottom + top) / 2, top - 0.01):
        y = at(1.0, loss)[1]
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">'
                 "drift from the base, nats per token</text>")  # fmt: skip
    parts.append(f'<text x="{x0}" y="{EDGE - 16}">loss on {result["test_pairs"]} unseen pairs '
                 "(dots: grid, hollow: beyond a limit, square: chosen by rather tune)</text>")  # fmt: skip
    for drift, loss, is_allowed, name in points:
        x, y = at(drift, loss)
        fill = "#3b6ea5" if is_allowed else "none"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="#3b6ea5">'
                     f"<title>{name}: loss {loss:.3f}, drift {drift:.2f}</title></circle>")  # fmt: skip
    x, y = at(tuned["drift"], tuned["loss"])
    parts.append(
        f'<rect x="{x - 7:.1f}" y="{y - 7:.1f}" width="14" height="14" fill="none" '
        'stroke="#c0392b" stroke-width="2.5"/>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
