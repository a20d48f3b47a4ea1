"""Every loss on the demo's task: one base model and one set of pairs, then a run for each loss, as a table.

    python bench/losses_on_demo.py [LOSS ...] [--out DIR] [--max-steps N] [--write docs/losses/index.md]

Model, pairs, learning rate and steps are those of `rather demo`; the loss and its numbers are those of its recipe. Each
run must put the chosen answer first on more than 85 % of the held-out pairs, or the script ends with exit code 1. For
ODPO every pair gets the margin 1. The base model is made once and kept in the folder; `--write` puts the table between
the markers of a Markdown page.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from rather.config.load import config_from_dict, load
from rather.config.run_config import DPOConfig
from rather.losses.losses import LOSSES
from rather.pipeline.pipeline import DPOPipeline
from rather.recipes import find_recipe
from rather.tools.demo import (
    ACCURACY,
    SEED,
    Query,
    manner_of,
    on_topic,
    queries,
    sample,
    write_base,
    write_run,
)

RECIPES = {
    "sigmoid": "dpo",
    "sigmoid_norm": "dpo-norm",
    "hinge": "hinge",
    "ipo": "ipo",
    "robust": "robust",
    "exo_pair": "exo",
    "nca_pair": "nca",
    "bco_pair": "bco",
    "sppo_hard": "sppo",
    "aot": "aot",
    "aot_unpaired": "aot-unpaired",
    "apo_zero": "apo-zero",
    "apo_down": "apo-down",
    "discopop": "discopop",
    "odpo": "odpo",
    "orpo": "orpo",
    "simpo": "simpo-llama3-instruct",
    "cpo": "cpo",
    "alphapo": "alphapo",
}
WANTED = 0.85
BEGIN, END = "<!-- begin: bench/losses_on_demo.py -->", "<!-- end: bench/losses_on_demo.py -->"


@dataclass(frozen=True)
class Result:
    loss: str
    recipe: str
    numbers: str
    accuracy: float
    preferred: float
    right: float
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "losses", nargs="*", metavar="LOSS", help=f"of {', '.join(RECIPES)}; all when none is named"
    )
    parser.add_argument("--out", type=Path, default=Path("output/bench-losses"))
    parser.add_argument(
        "--max-steps", type=int, help="end each run early, to try the script out: 8 or more"
    )
    parser.add_argument(
        "--write", type=Path, help="a page with the markers, such as docs/losses/index.md"
    )
    args = parser.parse_args()
    unknown = [name for name in args.losses if name not in RECIPES]
    if unknown:
        parser.error(f"no recipe for {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    held_out = [query for query in queries() if query.held_out]
    prepare(args.out, held_out)
    base = judged(args.out / "base", held_out)
    results = []
    for name in args.losses or RECIPES:
        results.append(train(args.out, name, held_out, args.max_steps))
        print(
            f"{name}: accuracy {results[-1].accuracy:.3f}, {results[-1].seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    text = markdown(results, base, len(held_out))
    print(text)
    (args.out / "results.md").write_text(text, encoding="utf-8")
    if args.write:
        put_between_markers(args.write, text)
    below = [result.loss for result in results if result.accuracy <= WANTED]
    if below:
        print(f"held-out accuracy of {WANTED} or less: {', '.join(below)}", file=sys.stderr)
    return 1 if below else 0


def prepare(out: Path, held_out: Sequence[Query]) -> None:
    """The demo's pairs, base model and YAML; a base model that is there already is used again."""
    out.mkdir(parents=True, exist_ok=True)
    training = [query for query in queries() if not query.held_out]
    write_run(out, training, held_out)
    for file in (out / "train.json", out / "held_out.json"):
        rows = [{**row, "margin": 1.0} for row in json.loads(file.read_text(encoding="utf-8"))]
        file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if not (out / "base" / "config.json").exists():
        write_base(out / "base", training)


def loss_settings(name: str) -> dict[str, Any]:
    """The loss and its numbers, as the recipe writes them."""
    recipe = load(find_recipe(RECIPES[name]))
    return {"pref_loss": recipe.loss_names, **recipe.loss_numbers, **recipe.loss_modifiers}


def config_of(out: Path, name: str, max_steps: int | None) -> DPOConfig:
    """The demo's run with another loss."""
    values = yaml.safe_load((out / "dpo.yaml").read_text(encoding="utf-8"))
    del values["beta"]
    own = {
        "exp_name": name,
        "track_with": None,
        "overwrite": True,
        "save_steps": None,
        "max_steps": max_steps,
    }
    return config_from_dict(values | own | loss_settings(name))


def train(out: Path, name: str, held_out: Sequence[Query], max_steps: int | None) -> Result:
    settings = loss_settings(name)
    config = config_of(out, name, max_steps)
    began = time.perf_counter()
    code = DPOPipeline(config).run()
    seconds = time.perf_counter() - began
    if code:
        raise SystemExit(f"{name}: the run ended with exit code {code}")
    lines = [
        json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    accuracy = [line[ACCURACY] for line in lines if ACCURACY in line][-1]
    numbers = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "pref_loss")
    return Result(
        name, RECIPES[name], numbers, accuracy, *judged(config.run_dir / "model", held_out), seconds
    )


def judged(folder: Path, held_out: Sequence[Query]) -> tuple[float, float]:
    """Shares of held-out questions answered kindly, and with the right item and fact."""
    answers = sample(folder, [query.prompt for query in held_out], SEED)
    kind = sum(manner_of(text) == "kind" for text in answers)
    right = sum(on_topic(query, text) for query, text in zip(held_out, answers, strict=True))
    return kind / len(held_out), right / len(held_out)


def markdown(results: Sequence[Result], base: tuple[float, float], questions: int) -> str:
    lines = [
        f"Held-out accuracy over {questions} pairs; answers sampled to the same {questions} questions. torch "
        f"{torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}; made by "
        "`python bench/losses_on_demo.py`.",
        "",
        "| loss | recipe | numbers | held-out accuracy | kind answers | right fact | seconds |",
        "|---|---|---|---|---|---|---|",
        f"| (base model) | | | | {base[0]:.0%} | {base[1]:.0%} | |",
    ]
    lines += [
        f"| `{r.loss}` | `{r.recipe}` | {r.numbers} | {r.accuracy:.3f} | {r.preferred:.0%} | {r.right:.0%} | "
        f"{r.seconds:.0f} |"
        for r in results
    ]
    return "\n".join(lines) + "\n"


def put_between_markers(page: Path, text: str) -> None:
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page}: the markers {BEGIN} and {END} are missing")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    assert set(RECIPES) == set(LOSSES) - {"sft"}, "every loss with a preference has a recipe"
    sys.exit(main())
