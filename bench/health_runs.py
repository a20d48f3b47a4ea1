"""Does `rather health` name a wrecked model first, and does it leave healthy runs alone?

    RATHER_TEST_DATA=/path/to/data python bench/health_runs.py [--only demo] [--page]

Trains real small models: wrecked ones (learning rate x100 and x1000, a wrong chat template, reversed
labels, 16 to 500 pairs), which must have a serious finding about the cause first, and healthy ones.
`check` runs are on data and a model on which no threshold was chosen. No run has eval_prompts, so
that answers are not part of what is found; they are generated afterwards, to be read.

A serious finding on a healthy run is wrong, and a warning if held-out pairs do not confirm what it
claims. `data/...` findings count facts about the file and are left out. A run that is done is not
trained again, so the same command continues an interrupted one; findings are always derived again
from its folder, by the rules of today.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.config.load import config_from_dict
from rather.config.run_config import DPOConfig
from rather.model.generate import Decoding, generate
from rather.pipeline.pipeline import DPOPipeline
from rather.tools.demo import queries, write_base, write_run
from rather.tracking.health import (
    AT_END,
    Health,
    HealthFinding,
    data_findings,
    read_findings,
    urgency,
)
from rather.tracking.json_lines import read_lines

PAGE = Path(__file__).parent.parent / "docs" / "health.md"
BEGIN, END = "<!-- begin: bench/health_runs.py -->", "<!-- end: bench/health_runs.py -->"
NO_PROMPT = (
    "{{ bos_token }}{% for m in messages if m.role == 'assistant' %}<|assistant|>{{ m.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Row = dict[str, str]


@dataclass(frozen=True)
class Source:
    """Pairs, a model that can learn from them, and the settings at which it does."""

    pairs: str
    model: str
    rate: float
    batch: int = 16
    length: int = 256
    training: Mapping[str, Any] = field(default_factory=dict)


SOURCES = {
    "stories": Source("stories260K_vader_onpolicy", "stories260K", 5e-4),
    "demo": Source("demo", "demo", 6e-3, training={"adam_epsilon": 0.01}),
    "politeness": Source("rasbt_politeness", "stories260K", 2e-4),
    "ukp": Source("ukp_arguments", "stories260K", 2e-4, 8),
    "truthfulqa": Source("truthfulqa_pairs", "stories260K", 2e-4, 8),
    "stories15M": Source("stories15M_vader_onpolicy", "stories15M", 5e-5),
}


@dataclass(frozen=True)
class Run:
    """A run, and whether its model is wrecked; `check`: no threshold was chosen on it."""

    source: str
    kind: str  # wrecked, healthy
    pairs: int = 500
    held_out: int = 100
    times: float = 1.0  # the learning rate
    epochs: float = 1.0
    steps: int | None = None
    reversed_labels: bool = False
    template: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    check: bool = False

    @property
    def cause(self) -> str:
        """What was done to a wrecked run."""
        return "template" if self.template else "labels" if self.reversed_labels else "rate"

    @property
    def name(self) -> str:
        parts = [self.source, self.kind, f"{self.pairs}-pairs"]
        parts += [f"rate-x{self.times:g}"] if self.times != 1 else []
        parts += ["reversed"] if self.reversed_labels else []
        parts += [f"template-{self.template}"] if self.template else []
        parts += [f"{value}" for value in self.changes.values()]
        parts += ["nothing-held-out"] if not self.held_out else []
        return "-".join([*parts, f"seed-{self.seed}"])


def all_runs() -> Iterator[Run]:
    """Yield ten wrecked runs and twenty healthy ones, then those that check both on other data."""
    yield Run("stories", "wrecked", times=100, held_out=40)
    yield Run("stories", "wrecked", pairs=64, times=1000, held_out=0)
    yield Run("stories", "wrecked", pairs=16, times=1000, epochs=2, held_out=16)
    yield Run("demo", "wrecked", times=100)
    yield Run("demo", "wrecked", pairs=128, times=1000, held_out=0)
    yield Run("stories", "wrecked", pairs=100, template="chatml", held_out=40)
    yield Run("demo", "wrecked", pairs=200, template="chatml")
    yield Run("demo", "wrecked", pairs=100, template="no_prompt")
    yield Run("stories", "wrecked", pairs=200, reversed_labels=True, held_out=60)
    yield Run("demo", "wrecked", pairs=200, reversed_labels=True)
    for seed in (1, 2, 3):
        yield Run("stories", "healthy", pairs=200, held_out=40, seed=seed)
        yield Run("demo", "healthy", seed=seed)
    yield Run("stories", "healthy", pairs=64, held_out=24, epochs=2)
    yield Run("stories", "healthy", pairs=16, held_out=16, epochs=2)
    yield Run("demo", "healthy", pairs=64, held_out=24, epochs=3)
    yield Run("demo", "healthy", pairs=16, held_out=16, epochs=3)
    for loss in ("ipo", "simpo", "orpo", "apo_zero", "sigmoid_norm"):
        yield Run("demo", "healthy", pairs=300, changes={"pref_loss": loss}, seed=4)
    yield Run("politeness", "healthy", pairs=300, held_out=60, seed=5)
    yield Run("truthfulqa", "healthy", pairs=300, held_out=60, seed=5)
    yield Run("ukp", "healthy", pairs=150, held_out=40, seed=5)
    yield Run("politeness", "healthy", pairs=64, held_out=24, seed=6, epochs=2)
    yield Run("truthfulqa", "healthy", pairs=64, held_out=24, seed=6, epochs=3)

    yield Run("politeness", "wrecked", pairs=300, times=100, held_out=60, check=True)
    yield Run("truthfulqa", "wrecked", pairs=32, times=1000, held_out=0, check=True)
    yield Run("politeness", "wrecked", pairs=100, template="llama3", held_out=40, check=True)
    yield Run("politeness", "wrecked", pairs=300, reversed_labels=True, held_out=60, check=True)
    yield Run("ukp", "wrecked", pairs=150, times=100, held_out=40, check=True)
    yield Run("ukp", "wrecked", pairs=300, reversed_labels=True, held_out=100, check=True)
    yield Run("stories15M", "wrecked", pairs=48, times=100, held_out=16, check=True)
    yield Run("stories15M", "wrecked", pairs=32, template="gemma", held_out=16, check=True)
    yield Run("politeness", "healthy", pairs=200, held_out=60, seed=7, check=True)
    yield Run("ukp", "healthy", pairs=100, held_out=40, seed=7, check=True)
    yield Run("truthfulqa", "healthy", pairs=200, held_out=60, seed=7, check=True)
    yield Run("stories15M", "healthy", pairs=48, held_out=16, check=True)


# --- training ---


@dataclass
class Bench:
    data: Path
    out: Path

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)

    def train(self, run: Run) -> dict[str, Any]:
        """Train, and return findings, the numbers that judge them, and some answers."""
        began = time.perf_counter()
        config = self.config(run)
        code = DPOPipeline(config).run()
        lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
        records = list(map(json.loads, lines))
        return {
            "run": run.name,
            "exit_code": code,
            "evaluations": [only(record, "eval/") for record in records if "eval/loss" in record],
            "training": [records_of(records)[0], records_of(records)[-1]],
            "answers": self.answers(run, config),
            "seconds": time.perf_counter() - began,
        }

    def config(self, run: Run) -> DPOConfig:
        source = SOURCES[run.source]
        train, held_out = self.files(run)
        values: dict[str, Any] = {
            "exp_name": run.name,
            "output_dir": str(self.out / "runs"),
            "logging_dir": str(self.out / "logs"),
            "pretrain": str(self.model(source.model)),
            "sequence_length": source.length,
            "seed": run.seed,
            "track_with": None,
            "report_html": False,
            "overwrite": True,
            "platform": "cpu",
            "save_steps": None,
            "max_steps": run.steps,
            "actor_train": {
                "data_args": {
                    "file_name": str(train),
                    "separator": "" if source.model == "demo" else " ",
                    "overlong": "truncate_response",
                    "cache_dir": str(self.out / "cache"),
                },
                "training_args": {
                    "learning_rate": source.rate * run.times,
                    "per_device_train_batch_size": source.batch,
                    "num_train_epochs": run.epochs,
                    **source.training,
                },
            },
            **run.changes,
        }
        if run.template:
            values["global_template"] = self.template(run.template)
        if run.held_out:
            values["validation"] = {"data_args": {"file_name": str(held_out)}}
            steps = run.pairs * run.epochs / source.batch
            values["eval_steps"] = max(1, round(steps / 2))
        return config_from_dict(values)

    def model(self, name: str) -> Path:
        if name != "demo":
            return self.data / "models" / name
        folder = self.out / "demo" / "base"
        if not folder.exists():
            training = [query for query in queries() if not query.held_out]
            held_out = [query for query in queries() if query.held_out]
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_run(folder.parent, training, held_out)
            write_base(folder, training)
        return folder

    def template(self, name: str) -> str:
        if name != "no_prompt":
            return name
        file = self.out / "no_prompt.jinja"
        file.write_text(NO_PROMPT)
        return str(file)

    def rows(self, source: Source) -> tuple[list[Row], list[Row]]:
        """Return training and held-out pairs with plain prompts, in the order of their file."""
        if source.model == "demo":
            self.model("demo")
            folder, found = self.out / "demo", []
            for name in ("train", "held_out"):
                rows = json.loads((folder / f"{name}.json").read_text())
                found.append([{"prompt": row.pop("instruction"), **row} for row in rows])
            return found[0], found[1]
        with gzip.open(self.data / "pairs" / f"{source.pairs}.jsonl.gz", "rt") as file:
            rows = [json.loads(line) for line in islice(file, 2000)]
        for row in rows:
            if turns := row.pop("messages", None):
                row["prompt"] = "\n".join(turn["content"] for turn in turns)
        prompts = list(dict.fromkeys(row["prompt"] for row in rows))
        held_out = set(prompts[::4])
        sides = [[row for row in rows if (row["prompt"] in held_out) == side] for side in (0, 1)]
        return sides[0], sides[1]

    def files(self, run: Run) -> tuple[Path, Path]:
        """Write the pairs of a run. Each seed has others; held-out labels are always right."""
        train, held_out = self.rows(SOURCES[run.source])
        folder = self.out / "pairs"
        folder.mkdir(exist_ok=True)
        paths = []
        for name, rows, count in (
            ("train", train, run.pairs),
            ("held_out", held_out, run.held_out),
        ):
            generator = torch.Generator().manual_seed(run.seed)
            order = torch.randperm(len(rows), generator=generator)[:count].tolist()
            swaps = run.reversed_labels and name == "train"
            sides = ("rejected", "chosen") if swaps else ("chosen", "rejected")
            texts = []
            for place in order:
                row = rows[place]
                own = {"prompt": row["prompt"], "chosen": row[sides[0]], "rejected": row[sides[1]]}
                texts.append(json.dumps(own) + "\n")
            paths.append(folder / f"{run.name}-{name}.jsonl")
            paths[-1].write_text("".join(texts))
        return paths[0], paths[1]

    def answers(self, run: Run, config: DPOConfig) -> list[dict[str, str]]:
        """Let the base model and the trained one answer three held-out prompts, greedily."""
        source = SOURCES[run.source]
        prompts = [row["prompt"] for row in self.rows(source)[1][:3]]
        found = [{"prompt": prompt} for prompt in prompts]
        sides = {"before": self.model(source.model), "after": config.run_dir / "model"}
        for side, folder in sides.items():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            texts = [f"{prompt} " for prompt in prompts]
            if tokenizer.chat_template:
                turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
                texts = [
                    tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True)
                    for each in turns
                ]
            plain = not tokenizer.chat_template
            ids = [tokenizer(text.rstrip(), add_special_tokens=plain).input_ids for text in texts]
            drawn = generate(model, tokenizer, ids, Decoding(max_new_tokens=40))
            for row, answer in zip(found, drawn, strict=True):
                row[side] = tokenizer.decode(answer.ids, skip_special_tokens=True)
        return found


def only(record: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    own = {key.removeprefix(prefix): value for key, value in record.items() if prefix in key}
    return {"step": record["step"], **own}


def records_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the training lines without times."""
    return [
        {key: value for key, value in record.items() if not key.startswith("time/")}
        for record in records
        if "loss" in record
    ]


# --- judging ---

Line = dict[str, float]
# A warning -> whether held-out pairs agree: of the first and the last evaluation, and the best loss.
AGREES: dict[str, Callable[[Line, Line, float], bool]] = {
    "chosen_falling": lambda first, last, best: last["sft_loss"] - first["sft_loss"] > 0.15,
    "margin_saturated": lambda first, last, best: last["rewards/accuracies"] > 0.95,
    "length_exploitation": lambda first, last, best: last["rewards/length_correlation"] > 0.7,
    "accuracy_stuck": lambda first, last, best: last["rewards/accuracies_low"] < 0.55,
    "overfitting": lambda first, last, best: last["calibrated_loss"] > best + 0.005,
}  # fmt: skip


CAUSES = {  # what may come first, by what was done to a run
    "rate": {"model_wrecked", "learning_rate_too_high"},
    "template": {"data/end_as_text", "data/prompt_lost", "answers_unlikely"},
    "labels": {"labels_reversed"},
}


def findings_of(run_dir: Path) -> list[HealthFinding]:
    """Return the findings of a run by the rules of today, the most harmful first."""
    starts, _ = read_lines(run_dir / "starts.jsonl")
    health = Health(starts[-1]["total_steps"])
    records, _ = read_lines(run_dir / "metrics.jsonl")
    found = [one for record in records for one in health.look(record)]
    found += [*data_findings(run_dir), *(x for x in read_findings(run_dir) if x.name in AT_END)]
    return sorted(found, key=lambda one: urgency(one.name, one.severity))


def is_right(run: Run, cell: dict[str, Any], findings: Sequence[HealthFinding]) -> bool:
    """Return whether a wrecked run has its cause first, or a healthy one no wrong finding."""
    if run.kind == "wrecked":
        first = findings[0] if findings else None
        return bool(first and first.severity == "serious" and first.name in CAUSES[run.cause])
    evaluations = cell["evaluations"]
    best = min((line["calibrated_loss"] for line in evaluations), default=math.nan)
    return all(
        one.severity != "serious"
        and one.name in AGREES
        and AGREES[one.name](evaluations[0], evaluations[-1], best)
        for one in findings
        if not one.name.startswith("data/")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("RATHER_TEST_DATA"))
    add("--out", type=Path, default=Path("output/bench-health"))
    add("--only", default="", help="runs whose name contains this text")
    add("--page", action="store_true", help="write the results and the table of docs/health.md")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    bench = Bench(args.data, args.out)
    runs = [run for run in all_runs() if args.only in run.name]
    results = []
    for run in runs:
        file = args.out / "cells" / f"{run.name}.json"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(bench.train(run), indent=1) + "\n")
        cell = json.loads(file.read_text())
        findings = findings_of(args.out / "runs" / run.name)
        right = is_right(run, cell, findings)
        names = [f"{one.severity} {one.name}" for one in findings]
        print(run.name, "good" if right else "WRONG", names, flush=True)
        facts = {"kind": run.kind, "check": run.check, "right": right}
        shown = [asdict(one) for one in findings]
        results.append({**facts, **cell, "findings": shown})
    if args.page:
        text = json.dumps({"machine": machine(), "runs": results}, indent=1)
        (RESULTS / "health_runs.json").write_text(text + "\n")
        head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        tail = rest.partition(END)[2]
        PAGE.write_text(f"{head}{BEGIN}\n{markdown(runs, results)}\n{END}{tail}", "utf-8")
    print(summary(results))


def markdown(runs: Sequence[Run], results: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/health.md: wrecked runs one by one, healthy ones counted."""
    lines = ["| wrecked run | pairs, held out | first finding | its number |", "|---|---|---|---|"]
    for run, result in zip(runs, results, strict=True):
        if run.kind == "wrecked":
            done = {
                "rate": f"learning rate x{run.times:g}",
                "template": f"template {run.template}",
                "labels": "reversed labels",
            }
            name = f"{run.source}, {done[run.cause]}" + (" (check)" if run.check else "")
            first = result["findings"][0] if result["findings"] else {"name": "none", "number": 0}
            cells = (name, f"{run.pairs}, {run.held_out}", f"`{first['name']}`")
            number = f"{first['number']:.3g}" + ("" if result["right"] else ", **missed**")
            lines.append(f"| {' | '.join(cells)} | {number} |")
    return "\n".join([*lines, "", summary(results)])


def summary(results: Sequence[dict[str, Any]]) -> str:
    parts = []
    for check in (False, True):
        for kind, text in (
            ("wrecked", "wrecked runs have their cause first"),
            ("healthy", "healthy runs have no wrong finding"),
        ):
            right = [x["right"] for x in results if (x["kind"], x["check"]) == (kind, check)]
            where = "check runs: " if check else ""
            parts.append(f"{where}{sum(right)} of {len(right)} {text}")
    return "; ".join(parts) + "."


if __name__ == "__main__":
    main()
