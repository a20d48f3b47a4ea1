"""What the rounds of a plan have reached, from their files alone."""

from __future__ import annotations

from collections.abc import Sequence

from rather.commands.terminal import echo, print_table
from rather.config.values import FORGETTING
from rather.files import JsonObject, own, read_json
from rather.pipeline.forgetting import Limits
from rather.run_folder import control
from rather.tools.rounds.settings import Plan

RESULT = "rounds.json"
EVALUATION = "eval.json"
# Figures of eval.json, in metrics.jsonl and in tables.
FIGURES = (
    "score", "win_rate", "length", "drift", "forgetting_loss", "diversity", "pairs", "dropped",
)  # fmt: skip


def limit_problem(figures: JsonObject, limits: Limits) -> str:
    """Return which limit a round exceeds, compared with the first model; "" if none."""
    names = {
        "rounds/drift": "drift",
        f"{FORGETTING}kept": "forgetting_kept",
        f"{FORGETTING}chance": "forgetting_chance",
    }
    known = {
        metric: figures[name] for metric, name in names.items() if figures.get(name) is not None
    }
    return limits.problem(known, {})


def best_round(evaluated: Sequence[JsonObject], limits: Limits) -> int:
    """Return the number of the round with the highest score, the first of equal ones.

    Without a judge there are no scores, and it is the last. A round beyond a limit is never the
    best.
    """
    scores = {
        number: figures.get("score")
        for number, figures in enumerate(evaluated)
        if not limit_problem(figures, limits)
    }
    if None in scores.values():
        return max(scores)
    return max(scores, key=lambda number: (scores[number] or 0.0, -number))


def without_lists(figures: JsonObject) -> JsonObject:
    return {name: figure for name, figure in figures.items() if not isinstance(figure, list | dict)}


def status_of(plan: Plan) -> JsonObject:
    """Return the figures of all evaluated rounds, and whether the command runs."""
    evaluated: list[JsonObject] = []
    for number in range(plan.rounds.count + 1):
        try:
            evaluated.append(read_json(plan.round_folder(number) / EVALUATION, own))
        except (OSError, ValueError):
            break
    try:
        reason = read_json(plan.folder / RESULT, own)["reason"]
    except (OSError, ValueError, KeyError):
        reason = "not finished"
    if control.activity(plan.folder) == "running":
        reason = f"running: round {len(evaluated)} of {plan.rounds.count}"
    best = best_round(evaluated, plan.limits) if evaluated else None
    return {
        "best": best,
        "model": None if best is None else plan.model(best),
        "reason": reason,
        "rounds": [without_lists(figures) for figures in evaluated],
    }


def print_rounds(found: JsonObject) -> None:
    """Print a table of the rounds, and which is the best."""
    rows = []
    for figures in found["rounds"]:
        values = [figures.get(name) for name in FIGURES]
        texts = ["" if figure is None else f"{figure:.4g}" for figure in values]
        rows.append((str(figures["round"]), *texts))
    print_table(("round", *(name.replace("_", " ") for name in FIGURES)), rows)
    echo(f"{found['reason']}.")
    if found["best"] is not None:
        name = f"round {found['best']}" if found["best"] else "the model before the first round"
        echo(f"Best: {name}, in {found['model']}")
