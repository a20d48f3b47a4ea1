"""What a round is worth: its answers to held-out prompts, and what the model has lost for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rather.commands.judge import match_rows, read_answers
from rather.data.batch import TokenPair
from rather.files import JsonObject
from rather.judges.answer_stats import Z, interval
from rather.judges.compare import answer_facts, win_rates
from rather.judges.judge import AnswerRow, compare_means
from rather.judges.reward.scores import answer_sums
from rather.outcome.forgetting import Forgotten, forgetting_of
from rather.run_folder.model_source import here, weights_of
from rather.tools.sweep import release_memory


def evaluate(model: str, first_model: str, answers: Path, base: Evaluated | None) -> JsonObject:
    """Return the figures of a round, as eval.json has them.

    `answers` are those to the held-out prompts, with their scores if there is a judge. `base` is
    the evaluation of the first model; None for that itself.
    """
    rows = read_answers(answers)
    scores = scores_of_rows(rows)
    figures: JsonObject = {"prompts": len(rows)}
    if scores:
        low, high = interval_of_mean(scores)
        mean = float(np.mean(scores))
        figures |= {"score": mean, "score_low": low, "score_high": high, "scores": scores}
    if scores and base:
        figures |= _win_rate(base, rows, scores)
    facts = {name: values[0] for name, values in answer_facts(rows).items()}
    figures |= {"length": facts.pop("mean_length"), **facts}
    figures["drift"] = drift(model, first_model, rows) if base else 0.0
    forgotten = forgetting_of(model).as_json()
    release_memory()
    figures["forgetting"] = forgotten
    if base:
        change = Forgotten.between(base.figures["forgetting"], forgotten)
        figures["forgetting_loss"] = change.loss - change.loss_before
        figures |= {"forgetting_kept": change.kept_share, "forgetting_chance": change.chance}
    figures["diversity"] = diversity(rows)
    return figures


class Evaluated(NamedTuple):
    """The evaluation of an earlier round: its figures, and its answers for comparisons."""

    figures: JsonObject
    scored: Path


def scores_of_rows(rows: Sequence[AnswerRow]) -> list[float]:
    """Return the mean score of the answers to each prompt; [] if they have none."""
    scores = [row.question.row.get("scores") or [] for row in rows]
    if not all(scores):
        return []
    return [float(np.nanmean(np.array(of_prompt, float))) for of_prompt in scores]


def interval_of_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean over prompts; sound for shares of few prompts."""
    if all(0 <= number <= 1 for number in values):
        return interval(values)
    mean, half = float(np.mean(values)), half_width(values)
    return mean - half, mean + half


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean, by the normal distribution."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.inf
    return Z * spread / math.sqrt(len(values))


def is_worse(figures: JsonObject, best: JsonObject) -> bool:
    """Return whether a round scores less than the best, by more than the interval of the change."""
    if "scores" not in figures or "scores" not in best:
        return False
    change = np.subtract(figures["scores"], best["scores"])
    return float(change.mean()) + half_width(change.tolist()) < 0


def _win_rate(base: Evaluated, rows: Sequence[AnswerRow], scores: Sequence[float]) -> JsonObject:
    """Return how often the answers are better than those of the first model."""
    first = read_answers(base.scored)
    match_rows(first, rows, base.scored, base.scored)
    names = ("win_rate", "win_rate_low", "win_rate_high", "win_rate_length_controlled")
    rates = win_rates(compare_means(first, rows, base.figures["scores"], scores))
    return {name: rates[name] for name in names}


def diversity(rows: Sequence[AnswerRow]) -> float:
    """Return the share of different word pairs among those of all answers."""
    texts = [text for row in rows for text in row.responses]
    pairs = [pair for text in texts for pair in pairwise(text.split())]
    return len(set(pairs)) / len(pairs) if pairs else 0.0


def drift(model: str, first_model: str, rows: Sequence[AnswerRow]) -> float | None:
    """Return the mean log-ratio per token of a model and the first one, on the model's answers.

    None if a server did not say the tokens of the answers.
    """
    pairs = []
    for row in rows:
        prompt, answers = (row.question.row.get(n) for n in ("prompt_ids", "response_ids"))
        if not prompt or not answers:
            return None
        pairs += [_token_pair(prompt, ids) for ids in answers if ids]
    if not pairs:
        return None
    sums = [log_probs(name, pairs) for name in (model, first_model)]
    lengths = np.array([len(pair.chosen) for pair in pairs])
    return float(((sums[0] - sums[1]) / lengths).mean())


def _token_pair(prompt: Sequence[int], answer: Sequence[int]) -> TokenPair:
    scored = ((len(prompt), len(prompt) + len(answer)),)
    empty = np.empty(0, np.int32)
    return TokenPair(np.array(prompt, np.int32), np.array(answer, np.int32), empty, scored, ())


def log_probs(model: str, pairs: Sequence[TokenPair]) -> Any:
    """Return the log-probs of single answers under a model."""
    sums = answer_sums(weights_of(model).load(here()), pairs, model)
    release_memory()
    return np.array(sums)
