"""`rather demo`: make an undecided base model, align it with `rather train`, ask both the same held-out questions."""

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

from rather.commands.demo.base import (
    hide_progress_bars,
    make_model,
    make_tokenizer,
    sample,
    train_base,
)
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
    """Runs the whole demo in the folder `out` and returns the exit code."""
    started = time.monotonic()
    claim(out)
    hide_progress_bars()
    torch.set_num_threads(
        1
    )  # so small a model gains little from two, and is three times slower on busy cores
    training = [query for query in queries() if not query.held_out]
    held_out = [query for query in queries() if query.held_out]
    _title(console, "1. Preference pairs: kind rather than grumpy")
    write_run(out, training, held_out, console)
    _title(console, "2. An undecided base model: trained on both manners alike")
    write_base(out / "base", training, console)
    command = ["train", str(out / "dpo.yaml")]
    _title(console, f"3. The command: rather {shlex.join(command)}")
    console.file.flush()
    code = subprocess.run([sys.executable, "-m", "rather", *command]).returncode
    if code:
        _say(
            console,
            f"`rather {shlex.join(command)}` ended with exit code {code}; its messages are above.",
        )
        return code
    _title(console, "4. The same held-out questions, before and after")
    result = compare(out, held_out)
    (out / "answers.json").write_text(json.dumps(result, indent=1))
    show(out, result, time.monotonic() - started, console)
    return 0


def claim(out: Path) -> None:
    """Makes the folder, or clears what an earlier demo made in it; a folder with anything else is left alone."""
    ours, empty = (out / MARKER).is_file(), out.is_dir() and not any(out.iterdir())
    if out.exists() and not (ours or empty):
        raise ConfigError(
            f"{out}: exists and was not made by the demo, so nothing in it is touched; "
            "name a new or empty folder with `rather demo --out DIR`."
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text(
        "Made by `rather demo`, which may replace " + ", ".join(MADE) + " here.\n"
    )
    for path in (out / name for name in MADE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_run(
    out: Path, training: Sequence[Query], held_out: Sequence[Query], console: Console
) -> None:
    """Writes what a user would bring: two files of pairs and a YAML."""
    rng = random.Random(SEED)
    for name, part in (("held_out", held_out), ("train", training)):
        rows = [pair(query, rng) for query in part]
        (out / f"{name}.json").write_text(json.dumps(rows, indent=1))
        _say(console, f"{out / name}.json: {len(rows)} pairs")
    (out / "dpo.yaml").write_text(yaml_text(out))
    _say(
        console,
        "  question: {instruction}\n  chosen:   {chosen}\n  rejected: {rejected}".format(**rows[0]),
    )


def write_base(folder: Path, training: Sequence[Query], console: Console) -> None:
    """Makes a model that has heard both manners equally often."""
    rng = random.Random(SEED)
    torch.manual_seed(SEED)

    def draw() -> tuple[str, str]:
        query = rng.choice(training)
        return query.prompt, answer(query, rng.choice(("kind", "grumpy")), rng)

    tokenizer = make_tokenizer(text for _ in range(4000) for text in draw())
    model = make_model(tokenizer)
    _say(console, f"{folder}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train_base(model, tokenizer, draw, console)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def yaml_text(out: Path) -> str:
    """The run's YAML. Paths are as the user typed them, and quoted as JSON, which is YAML too."""
    paths = {
        "output": out / "output",
        "logs": out / "output" / "logs",
        "base": out / "base",
        "train": out / "train.json",
        "held_out": out / "held_out.json",
    }
    return YAML.format(**{name: json.dumps(str(path)) for name, path in paths.items()})


def compare(out: Path, held_out: Sequence[Query]) -> dict[str, Any]:
    """Asks base and result every held-out question and judges the answers."""
    run = out / "output" / "demo"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line[ACCURACY] for line in lines if ACCURACY in line]
    prompts = [query.prompt for query in held_out]
    before, after = (sample(folder, prompts, SEED) for folder in (out / "base", run / "model"))

    def judged(answers: Sequence[str], accuracy: float) -> dict[str, float]:
        kind = sum(manner_of(text) == "kind" for text in answers)
        right = sum(on_topic(query, text) for query, text in zip(held_out, answers, strict=True))
        return {
            "preferred": kind / len(answers),
            "on_topic": right / len(answers),
            ACCURACY: accuracy,
        }

    return {
        "before": judged(before, accuracies[0]),
        "after": judged(after, accuracies[-1]),
        "answers": [
            {"prompt": prompt, "before": old, "after": new}
            for prompt, old, new in zip(prompts, before, after, strict=True)
        ],
    }


def show(out: Path, result: dict[str, Any], seconds: float, console: Console) -> None:
    """Prints a few of the answers, drawn by lot, the shares over all of them, and where to go from here."""
    answers = result["answers"]
    table = Table("held-out question", "before", "after", show_lines=True)
    for row in random.Random(SEED).sample(answers, 5):
        table.add_row(
            row["prompt"],
            *(Text(row[side], COLOURS[manner_of(row[side])]) for side in ("before", "after")),
        )
    console.print(table)

    before, after = result["before"], result["after"]
    summary = Table(f"on all {len(answers)} held-out questions", "before", "after")
    for label, key in (
        ("kind answers (preferred)", "preferred"),
        ("right item with its right place or price", "on_topic"),
        (f"{ACCURACY} (before: all ties)", ACCURACY),
    ):
        summary.add_row(label, f"{before[key]:.1%}", f"{after[key]:.1%}")
    console.print(summary)

    _title(console, f"Done in {seconds:.0f} seconds")
    _say(
        console,
        f"The aligned model, for AutoModelForCausalLM.from_pretrained: {out / 'output' / 'demo' / 'model'}",
    )
    _say(
        console,
        f"The YAML it was trained by: {out / 'dpo.yaml'}\nEvery answer before and after: {out / 'answers.json'}",
    )
    _say(console, "Next, try:")
    yaml = str(out / "dpo.yaml")
    for name, *arguments in (
        ("rather", "data", yaml, "--show", "3"),
        ("rather", "train", yaml, "exp_name=looser", "beta=0.05"),
        ("tensorboard", "--logdir", str(out / "output" / "logs")),
    ):
        # In an environment that is not activated, as after `make demo`, the bare name would not be found.
        program = (
            name if shutil.which(name) else os.path.relpath(Path(sys.executable).with_name(name))
        )
        _say(console, "  " + shlex.join((program, *arguments)))


def _title(console: Console, text: str) -> None:
    console.rule(Text(text), align="left")


def _say(console: Console, text: str) -> None:
    """Prints without markup or line breaks of its own, so that paths and commands can be copied."""
    console.print(Text(text), soft_wrap=True)
