"""Habits that neither drift nor forgetting shows: repeated sentences, lost first words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rather.data.pairs import PairDataset

SAMPLE = 256  # chosen answers: the share of a habit is known to +- 0.06
SENTENCE = 12  # characters: shorter lines, as in lists and code, may come again
END = re.compile(r"[.!?。！？\n]")
WITHIN = frozenset(",.;:!?)]}、。，；：！？）")  # marks that follow words


def repeats(text: str) -> bool:
    """Return whether a sentence comes again."""
    sentences = [part for part in map(str.strip, END.split(text)) if len(part) >= SENTENCE]
    return len(set(sentences)) < len(sentences)


def starts_within(text: str) -> bool:
    """Return whether a text begins in the middle of a sentence, in scripts that have capitals."""
    first = text.lstrip()[:1]
    return first.islower() or first in WITHIN


HABITS = {"repeats": repeats, "starts_within": starts_within}


def chosen_texts(train: PairDataset, tokenizer: Any) -> list[str]:
    """Return some chosen answers, spread over all pairs."""
    pairs = train.take(range(0, len(train), 1 + len(train) // SAMPLE))
    return [tokenizer.decode(pair.chosen, skip_special_tokens=True) for pair in pairs]


def habit_metrics(
    prefix: str, before: Sequence[str], after: Sequence[str], chosen: Sequence[str]
) -> dict[str, float]:
    """Compare answers with those of the base to the same prompts, and with chosen answers."""
    metrics = {}
    for name, has in HABITS.items():
        old, new, usual = (list(map(has, texts)) for texts in (before, after, chosen))
        changes = [b - a for a, b in zip(old, new, strict=True)]
        metrics[f"{prefix}policy/{name}"] = fmean(new)
        metrics[f"{prefix}usual/{name}"] = max(fmean(old), fmean(usual))
        metrics[f"{prefix}{name}_chance"] = chance_of(changes.count(1), changes.count(-1))
    return metrics


def chance_of(more: int, fewer: int) -> float:
    """Return how likely chance alone changes so many answers one way and so few the other.

    This is McNemar's exact test, one-sided, with the mid-p value, which is less timid with few
    answers.
    """
    ways = doubled = 1  # integers: a float cannot hold the ways of 1,024 changed answers
    for i in range(fewer):
        doubled += ways
        ways = ways * (more + fewer - i) // (i + 1)
        doubled += ways
    return doubled / (2 << more + fewer)
