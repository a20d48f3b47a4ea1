"""A small language, a base model that speaks it, and pairs that make a run healthy or ill.

An answer counts: `w0 w1 w2 ...` in the kind manner, `w20 w21 ...` in the grumpy one, and each place
has two words for it. Its length is drawn, most often five words. A model of some thousand weights
learns that in seconds, and ends its answers by itself.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.commands.conftest import write
from tests.tiny import WORDS, make_config, make_model

Row = dict[str, str]
# Where the words of each begin; ten further lie the synonyms of a manner.
KIND, GRUMPY, PROMPTS = 0, 20, 40
LENGTHS = (2, 3, 3, 4, 4, 5, 5, 5, 5, 5, 5, 6, 7, 8, 9, 10)
BASE_STEPS, BASE_ROWS = 120, 32
HELD_OUT = 104
RATE = 3e-3  # at which the tiny model learns well


def words(manner: int, length: int, draw: random.Random) -> str:
    return " ".join(WORDS[manner + place + draw.choice((0, 10))] for place in range(length))


def prompt(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS[PROMPTS:], k=6))


def row(chosen: str, rejected: str, draw: random.Random) -> Row:
    return {"prompt": prompt(draw), "chosen": f" {chosen}", "rejected": f" {rejected}"}


def kind(draw: random.Random) -> Row:
    return row(
        words(KIND, draw.choice(LENGTHS), draw), words(GRUMPY, draw.choice(LENGTHS), draw), draw
    )


def grumpy(draw: random.Random) -> Row:
    return swapped(kind(draw))


def swapped(pair: Row) -> Row:
    return {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]}


def by_lot(draw: random.Random) -> Row:
    """Labels that say nothing."""
    return draw.choice((kind, grumpy))(draw)


def noisy(draw: random.Random) -> Row:
    """One label in five is wrong."""
    return grumpy(draw) if draw.random() < 0.2 else kind(draw)


def longer(draw: random.Random) -> Row:
    """Of two answers in one manner the longer one is chosen."""
    short, long = sorted(draw.sample(range(2, 11), 2))
    return row(words(KIND, long, draw), words(KIND, short, draw), draw)


def alike(draw: random.Random) -> Row:
    """Two answers that differ in one word, which no kind answer has."""
    chosen = words(KIND, draw.choice(LENGTHS), draw).split()
    rejected = list(chosen)
    rejected[draw.randrange(len(rejected))] = draw.choice(WORDS[GRUMPY:PROMPTS])
    return row(" ".join(chosen), " ".join(rejected), draw)


@dataclass(frozen=True)
class Case:
    """A run: how its pairs are made, how many there are, and what of its config is different."""

    pairs: Callable[[random.Random], Row]
    held_out: Callable[[random.Random], Row]
    count: int = 400
    steps: int = 24
    rate: float = RATE
    seed: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    spoil: Callable[[list[Row]], list[Row]] = list


class TinyRuns:
    """Trains cases in one folder, each of them once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, DPOConfig] = {}
        make_base(folder / "base")

    def trained(self, name: str, case: Case, **changes: Any) -> DPOConfig:
        if name not in self.runs:
            config = self.config(name, case, **changes)
            DPOPipeline(config).run()
            self.runs[name] = config
        return self.runs[name]

    def killed(self, name: str, case: Case, step: int) -> DPOConfig:
        """A copy of a run as a kill leaves it that came when it had saved nothing behind a step."""
        whole, config = self.trained(name, case), self.config(f"{name}-killed", case)
        shutil.copytree(whole.run_dir, config.run_dir)
        for folder in config.run_dir.glob("checkpoint-*"):
            if int(folder.name.removeprefix("checkpoint-")) > step:
                shutil.rmtree(folder)
        (config.run_dir / ".finished").unlink()
        return config

    def config(self, name: str, case: Case, **changes: Any) -> DPOConfig:
        draw = random.Random(case.seed)
        train = case.spoil([case.pairs(draw) for _ in range(case.count)])
        held_out = [case.held_out(draw) for _ in range(HELD_OUT)]
        asked = [prompt(draw) for _ in range(4)]
        training = "actor_train__training_args__"
        file, held_out_file = (self.folder / f"{name}{end}.jsonl" for end in ("", "-held-out"))
        usual = {
            "exp_name": name,
            "seed": case.seed,
            "max_steps": case.steps,
            "eval_steps": max(1, case.steps // 4),
            "report_html": False,
            "actor_train__data_args__file_name": str(write(file, *train)),
            "validation__data_args__file_name": str(write(held_out_file, *held_out)),
            "eval_prompts": {"prompts": asked, "max_new_tokens": 16},
            f"{training}learning_rate": case.rate,
            f"{training}per_device_train_batch_size": 16,
            f"{training}num_train_epochs": 100,
            f"{training}adam_epsilon": 1e-4,
        }
        return make_config(self.folder, **{**usual, **case.changes, **changes})


EASY = Case(kind, kind, count=64, steps=4)


def asked_as_trained(folder: Path) -> Path:
    """Texts and questions of the small language; it has no chat template."""
    draw = random.Random(3)
    rows: list[dict[str, object]] = []
    for _ in range(12):
        text = f"{prompt(draw)} {words(KIND, 5, draw)}"
        rows += [
            {"text": text},
            {"question": prompt(draw), "answers": [f"w{i}" for i in range(40)]},
        ]
    return write(folder / "own.jsonl", *rows)


def measures_all(folder: Path) -> dict[str, Any]:
    """Settings by which a run also measures forgetting, and a rule judges its answers."""
    rule = folder / "rule.py"
    rule.write_text("def score(prompt, answer):\n    return -len(answer)\n")
    judge = {"with": f"{rule}:score"}
    return {"forgetting": str(asked_as_trained(folder)), "eval_prompts__judge": judge}


def make_base(folder: Path) -> None:
    """A model that has heard both manners equally often."""
    make_model(folder, initializer_range=0.1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=BASE_STEPS, pct_start=0.1
    )
    for _ in range(BASE_STEPS):
        asked = [prompt(draw) for _ in range(BASE_ROWS)]
        said = [
            words(draw.choice((KIND, GRUMPY)), draw.choice(LENGTHS), draw) for _ in range(BASE_ROWS)
        ]
        ids = [
            tokenizer(f"{one} {answer} </s>").input_ids
            for one, answer in zip(asked, said, strict=True)
        ]
        width = max(map(len, ids))
        starts = len(tokenizer(asked[0]).input_ids)
        rows = torch.tensor([one + [0] * (width - len(one)) for one in ids])
        labels = torch.tensor(
            [[-100] * starts + one[starts:] + [-100] * (width - len(one)) for one in ids]
        )
        model(input_ids=rows, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
