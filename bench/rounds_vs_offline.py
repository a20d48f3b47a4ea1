"""Do rounds on the model's own answers beat pairs of the base? Checkable instructions, one seed a command.

    python bench/rounds_vs_offline.py --model smollm2 --seed 1 --out output/bench-rounds
    python bench/rounds_vs_offline.py --model base --prompts 12 --held-out 6 --tokens 8 --out /tmp/try    # tries the script

Three rounds with 600 new prompts each, four answers of at most 64 tokens, the best against the worst one by the
rule of examples/rounds. Offline trains the base once, with as many pairs in all, from its own answers. Both train
with the same settings, and both are evaluated on the same 300 held-out prompts: greedy answers, pass rate with its
95 % interval, length, drift, diversity and forgetting. The same command continues after a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common import RESULTS, write_facts

from rather.commands.generate import AnswerRequest, generate_answers
from rather.commands.judge import read_answers, score_file
from rather.data.formats import RowLayout, read_row
from rather.files import JsonObject, make_folder
from rather.judges.judge import JudgeOptions, make_judge
from rather.model.generate import Decoding
from rather.tools.rounds.answers import AnswerSource
from rather.tools.rounds.evaluation import half_width
from rather.tools.rounds.run import RoundsRun, run_rounds
from rather.tools.rounds.settings import load_plan

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "rounds"
PAGE = Path(__file__).resolve().parent.parent / "docs" / "rounds.md"
ROUNDS = 3
SPARE = 4 / 3  # offline prompts per prompt of the rounds, to have enough pairs


def main() -> None:
    args = arguments()
    if args.page:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    model = args.model.resolve()
    folder = args.out.resolve() / f"seed-{args.seed}"
    result = args.json.resolve() if args.json else folder / "rounds_vs_offline.json"
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    began = time.perf_counter()
    write_prompts(args)
    rounds = run(args, model, "rounds", [f"prompts-{i}.jsonl" for i in range(1, ROUNDS + 1)])
    pairs = sum(figures["pairs"] for figures in rounds[1:])
    seconds = {"rounds": time.perf_counter() - began}
    offline, offline_pairs = run_offline(args, model, pairs)
    seconds["all"] = time.perf_counter() - began
    last = rounds[-1]
    gain = np.subtract(last.pop("scores"), offline.pop("scores"))
    half = half_width(gain.tolist())
    for figures in rounds[:-1]:
        figures.pop("scores")
    for figures in (*rounds, offline):
        figures["forgetting"] = figures["forgetting"]["loss"]
    facts: JsonObject = {
        "seed": args.seed,
        "settings": vars(args) | {"model": model.name, "out": None, "json": None},
        "pairs": {"rounds": pairs, "offline": offline_pairs},
        "rounds": rounds,
        "offline": offline,
        "gain_of_rounds": [
            float(gain.mean()) - half,
            float(gain.mean()),
            float(gain.mean()) + half,
        ],
        "reached": bool(gain.mean() - half > 0),
        "seconds": seconds,
    }
    write_facts(result, "rounds_vs_offline", **facts)
    print_table(rounds, offline)
    print(f"rounds minus offline: {gain.mean():+.3f} +- {half:.3f}; written to {result}")
    for name in ("rounds/round-0", f"rounds/round-{len(rounds) - 1}", "offline/round-1"):
        show_answers(Path("output") / name / "held_out_scored.jsonl")


def filled(page: str) -> str:
    """Return docs/rounds.md with its table of the seeds in bench/results."""
    seeds = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("rounds_seed*.json"))]
    heads = "base", "round 1", "round 2", "round 3", "offline", "round 3 minus offline"
    lines = [f"| seed | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for seed in seeds:
        rates = [figures["score"] for figures in (*seed["rounds"], seed["offline"])]
        low, gain, high = (f"{100 * number:+.1f}" for number in seed["gain_of_rounds"])
        cells = [*(f"{rate:.1%}" for rate in rates), f"{gain} ({low} to {high})"]
        lines.append(f"| {seed['seed']} | {' | '.join(cells)} |")
    gains = np.array([seed["gain_of_rounds"] for seed in seeds])
    half = float(np.sqrt(((gains[:, 2] - gains[:, 1]) ** 2).sum())) / len(seeds)
    mean = float(gains[:, 1].mean())
    shown = (f"{100 * number:+.1f}" for number in (mean, mean - half, mean + half))
    lines.append(f"| all | | | | | | {'{} ({} to {})'.format(*shown)} |")
    text = "\n".join(lines)
    return re.sub(
        r"(<!-- seeds -->\n).*?(<!-- end -->)", rf"\g<1>{text}\n\g<2>", page, flags=re.DOTALL
    )


def write_prompts(args: argparse.Namespace) -> None:
    """Write the prompts of each round, of the offline training and of the evaluation, all different."""
    sys.path.insert(0, str(EXAMPLE))
    from prompts import prompt

    draw = random.Random(args.seed)
    count = ROUNDS * args.prompts
    offline = round(count * SPARE)
    texts: dict[str, None] = {}
    while len(texts) < offline + args.held_out:
        texts[prompt(draw)] = None
    every = list(texts)
    files = {f"prompts-{i + 1}": every[i * args.prompts :][: args.prompts] for i in range(ROUNDS)}
    files |= {"offline": every[:offline], "held_out": every[offline:]}
    for name, chosen in files.items():
        lines = "".join(json.dumps({"prompt": text}) + "\n" for text in chosen)
        Path(f"{name}.jsonl").write_text(lines)


def write_yaml(args: argparse.Namespace, model: Path, name: str, **changes: Any) -> Path:
    rounds = {
        "held_out_prompts": "held_out.jsonl",
        "answers": args.answers,
        "temperature": args.temperature,
        "max_new_tokens": args.tokens,
        "judge": f"{EXAMPLE / 'rule.py'}:score",
        "reference": args.reference,
    }
    values = {
        "exp_name": name,
        "pretrain": str(model),
        "seed": args.seed,
        "sequence_length": 512,
        "report_html": False,
        "pref_loss": args.loss,
        "rounds": rounds | changes,
        "actor_train": {
            "training_args": {
                "learning_rate": args.learning_rate,
                "per_device_train_batch_size": args.batch,
                "num_train_epochs": args.epochs,
                "warmup_ratio": 0.1,
            }
        },
    }
    if args.loss not in ("listwise", "advantage", "reward_rpo"):
        values |= {"ranked_pairs": "best_vs_worst", "beta": args.beta}
    file = Path(f"{name}.yaml")
    file.write_text(yaml.safe_dump(values))
    return file


def run(args: argparse.Namespace, model: Path, name: str, prompts: list[str]) -> list[JsonObject]:
    """Run rounds, and return the figures of all, with the scores of each prompt."""
    plan = load_plan(write_yaml(args, model, name, count=len(prompts), prompts=prompts))
    done = len(run_rounds(plan)["rounds"])
    return [json.loads((plan.round_folder(i) / "eval.json").read_text()) for i in range(done)]


def run_offline(args: argparse.Namespace, model: Path, pairs: int) -> tuple[JsonObject, int]:
    """Train the base once on its own answers, on as many pairs as the rounds had."""
    request = AnswerRequest(args.answers, Decoding(args.tokens, args.temperature), args.seed)
    generate_answers(str(model), Path("offline.jsonl"), Path("all.jsonl"), request, force=True)
    judge = make_judge(f"{EXAMPLE / 'rule.py'}:score", JudgeOptions())
    score_file(Path("all.jsonl"), judge, Path("all-scored.jsonl"))
    layout = RowLayout(ranked_pairs="best_vs_worst")
    rows = [row.question.row for row in read_answers(Path("all-scored.jsonl"))]
    useful = [row for row in rows if read_row(row, layout).pairs][:pairs]
    scored = "".join(json.dumps(row) + "\n" for row in useful)
    plan = load_plan(write_yaml(args, model, "offline", count=1, prompts="offline.jsonl"))
    folder = plan.round_folder(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scored.jsonl").write_text(scored)
    return OfflineRun(plan).run_once(), len(useful)


class OfflineRun(RoundsRun):
    """One round whose scored answers are there already."""

    def run_once(self) -> JsonObject:
        for number in (0, 1):
            folder = self.plan.round_folder(number)
            make_folder(folder)
            if number:
                self._train(number)
            with AnswerSource(self.plan.model(number), None, folder, number) as source:
                self._evaluate(number, source)
        return self.evaluated[-1]


def print_table(rounds: list[JsonObject], offline: JsonObject) -> None:
    names = (
        "score",
        "score_low",
        "score_high",
        "length",
        "drift",
        "diversity",
        "forgetting",
        "pairs",
    )
    print(f"{'':10}" + "".join(f"{name:>12}" for name in names))
    labels = ["base", *(f"round {i}" for i in range(1, len(rounds)))]
    for label, figures in [*zip(labels, rounds, strict=True), ("offline", offline)]:
        values = [figures.get(name) for name in names]
        print(f"{label:10}" + "".join(f"{'' if v is None else f'{v:.4g}':>12}" for v in values))


def show_answers(file: Path, count: int = 4) -> None:
    print(f"\n{file}")
    for row in read_answers(file)[:count]:
        scores = row.question.row["scores"]
        print(f"  {row.question.prompt}\n    {scores[0]:g}: {row.responses[0]!r}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("smollm2"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=600, help="per round")
    parser.add_argument("--held-out", type=int, default=300)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--loss", default="sigmoid")
    parser.add_argument("--reference", default="first", choices=("first", "previous"))
    parser.add_argument("--out", type=Path, default=Path("output/bench-rounds"))
    parser.add_argument("--json", type=Path, help="default: in the folder of the seed")
    parser.add_argument("--page", action="store_true", help="only fill the table of docs/rounds.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
