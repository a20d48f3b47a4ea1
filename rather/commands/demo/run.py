"""`rather demo`: build a base model, align it with `rather train`, and compare their answers."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rather.commands.demo.base import make_model, make_tokenizer, sample, train_base
from rather.commands.demo.shop import Query, answer, manner_of, on_topic, pair, queries
from rather.errors import ConfigError

SEED = 0
MARKER = ".rather-demo"
MADE = ("base", "train.json", "held_out.json", "dpo.yaml", "output", "answers.json")
COLOURS = {"kind": "green", "grumpy": "red", "neither": "yellow"}
ACCURACY = "eval/rewards/accuracies"
YAML = """\
exp_name: demo
output_dir: {output}
logging_dir: {logs}
pretrain: {base}
sequence_length: 128
beta: 0.1
actor_train:
  model_args: {{dtype: fp32}}
  training_args:
    learning_rate: 6.0e-3
    warmup_steps: 8
    adam_epsilon: 0.01  # large for a tiny model: Adam would magnify its near-zero gradients and unlearn the language
    per_device_train_batch_size: 32
  data_args: {{file_name: {train}}}
validation:
  data_args: {{file_name: {held_out}}}
"""


def run_demo(out: Path, console: Console) -> int:
    """Run the whole demo in the folder `out` and return the exit code."""
    started = time.monotonic()
    claim(out)
    torch.set_num_threads(1)  # a second thread hardly helps, and is much slower on busy cores
    training = [query for query in queries() if not query.held_out]
    held_out = [query for query in queries() if query.held_out]
    _title(console, "1. Preference pairs: kind rather than grumpy")
    write_run(out, training, held_out, console)
    _title(console, "2. An undecided base model: trained equally on both manners")
    write_base(out / "base", training, console)
    command = ["train", str(out / "dpo.yaml")]
    _title(console, f"3. The command: rather {shlex.join(command)}")
    console.file.flush()
    if code := subprocess.run([sys.executable, "-m", "rather", *command]).returncode:
        _print(console, f"`rather {shlex.join(command)}` failed with exit code {code}; see above.")
        return code
    _title(console, "4. The same held-out questions, before and after")
    result = compare(out, held_out)
    (out / "answers.json").write_text(json.dumps(result, indent=1))
    show(out, result, time.monotonic() - started, console)
    return 0


def claim(out: Path) -> None:
    """Create the folder, or clear what an earlier demo wrote; refuse a folder with other files."""
    is_own, is_empty = (out / MARKER).is_file(), out.is_dir() and not any(out.iterdir())
    if out.exists() and not (is_own or is_empty):
        raise ConfigError(
            f"{out}: exists and was not created by the demo, so it is left as it is; choose a new "
            "or empty folder with `rather demo --out DIR`."
        )
    out.mkdir(parents=True, exist_ok=True)
    text = f"Created by `rather demo`, which may replace {', '.join(MADE)} here.\n"
    (out / MARKER).write_text(text)
    for path in (out / name for name in MADE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_run(
    out: Path, training: Sequence[Query], held_out: Sequence[Query], console: Console
) -> None:
    """Write what a user would bring: two files of pairs and a YAML."""
    rng = random.Random(SEED)
    for name, part in (("held_out", held_out), ("train", training)):
        rows = [pair(query, rng) for query in part]
        (out / f"{name}.json").write_text(json.dumps(rows, indent=1))
        _print(console, f"{out / name}.json: {len(rows)} pairs")
    (out / "dpo.yaml").write_text(yaml_text(out))
    shown = "  question: {instruction}\n  chosen:   {chosen}\n  rejected: {rejected}"
    _print(console, shown.format(**rows[0]))


def write_base(folder: Path, training: Sequence[Query], console: Console) -> None:
    """Build a model that has seen both manners equally often."""
    rng = random.Random(SEED)
    torch.manual_seed(SEED)

    def draw() -> tuple[str, str]:
        query = rng.choice(training)
        return query.prompt, answer(query, rng.choice(("kind", "grumpy")), rng)

    tokenizer = make_tokenizer(text for _ in range(4000) for text in draw())
    model = make_model(tokenizer)
    _print(console, f"{folder}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train_base(model, tokenizer, draw, console)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def yaml_text(out: Path) -> str:
    """Return the YAML of the run. Paths are quoted as JSON strings, which are YAML too."""
    logs = out / "output" / "logs"
    paths = {"output": out / "output", "logs": logs, "base": out / "base"}
    paths |= {name: out / f"{name}.json" for name in ("train", "held_out")}
    return YAML.format(**{name: json.dumps(str(path)) for name, path in paths.items()})


def compare(out: Path, held_out: Sequence[Query]) -> dict[str, Any]:
    """Ask base and result every held-out question, and rate the answers."""
    run = out / "output" / "demo"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line[ACCURACY] for line in lines if ACCURACY in line]
    prompts = [query.prompt for query in held_out]
    before, after = (sample(folder, prompts, SEED) for folder in (out / "base", run / "model"))

    def rate(answers: Sequence[str], accuracy: float) -> dict[str, float]:
        kind = sum(manner_of(text) == "kind" for text in answers)
        right = sum(on_topic(query, text) for query, text in zip(held_out, answers, strict=True))
        shares = {"preferred": kind / len(answers), "on_topic": right / len(answers)}
        return {**shares, ACCURACY: accuracy}

    rows = zip(prompts, before, after, strict=True)
    return {
        "before": rate(before, accuracies[0]),
        "after": rate(after, accuracies[-1]),
        "answers": [dict(zip(("prompt", "before", "after"), row, strict=True)) for row in rows],
    }


def show(out: Path, result: dict[str, Any], seconds: float, console: Console) -> None:
    """Print some random answers, the shares over all of them, and what to try next."""
    answers = result["answers"]
    table = Table("held-out question", "before", "after", show_lines=True)
    for row in random.Random(SEED).sample(answers, 5):
        sides = (Text(row[side], COLOURS[manner_of(row[side])]) for side in ("before", "after"))
        table.add_row(row["prompt"], *sides)
    summary = Table(f"on all {len(answers)} held-out questions", "before", "after")
    for label, key in (
        ("kind answers (preferred)", "preferred"),
        ("right item with its right place or price", "on_topic"),
        (f"{ACCURACY} (before: all ties)", ACCURACY),
    ):
        summary.add_row(label, *(f"{result[side][key]:.1%}" for side in ("before", "after")))
    console.print(table, summary)
    _title(console, f"Done in {seconds:.0f} seconds")
    model, yaml = out / "output" / "demo" / "model", str(out / "dpo.yaml")
    # In an environment that is not activated, as after `make demo`, `rather` is not on the PATH.
    own = os.path.relpath(Path(sys.executable).with_name("rather"))
    program = "rather" if shutil.which("rather") else own
    data, train = (
        shlex.join((program, *words))
        for words in (
            ("data", yaml, "--show", "3"), ("train", yaml, "exp_name=looser", "beta=0.05")
        )
    )  # fmt: skip
    _print(
        console,
        f"The aligned model, for AutoModelForCausalLM.from_pretrained: {model}\n"
        f"The YAML it was trained with: {yaml}\n"
        f"Every answer before and after: {out / 'answers.json'}\n"
        f"Next, try:\n  {data}\n  {train}",
    )


def _title(console: Console, text: str) -> None:
    console.rule(Text(text), align="left")


def _print(console: Console, text: str) -> None:
    """Print without markup and line breaks, so that paths and commands can be copied."""
    console.print(Text(text), soft_wrap=True)
