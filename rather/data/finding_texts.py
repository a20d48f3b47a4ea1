"""What was found, in words: one sentence with its number, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import sqrt
from typing import Any

from rather.data.statistics import (
    Contradictions,
    Finding,
    Leak,
    LengthBias,
    Look,
    Repeats,
    Truncation,
)

LENGTH_MATTERS, LENGTH_DECIDES = 0.65, 0.8  # accuracy of taking the longer answer, or the shorter
WORTH_A_WARNING, MANY = 0.01, 0.05  # of the pairs
LEAKED = 0.1  # of the prompts
SEVERITIES = ("serious", "warning", "info")


def findings(look: Look) -> list[Finding]:
    """The worst first."""
    return sorted(_all(look), key=lambda finding: SEVERITIES.index(finding.severity))


def _all(look: Look) -> Iterator[Finding]:
    for name, leak in look.leaks.items():
        yield from _leaked(name, leak)
    yield from _prompted(look)
    for name, one in look.sets.items():
        yield from _contradicted(name, one.pairs, one.contradictions)
        yield from _repeated(name, one.pairs, one.repeats)
    for name, cut in look.truncation.items():
        yield from _cut(name, cut)
    yield from _biased(look.sets["train"].pairs, look.sets["train"].length_bias)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.2g} %"


def by_set(look: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The numbers as a table: what, and one column for each set. `look` is that of a data report."""
    cuts, leaks = look["truncation"], look["leaks"]
    columns = [_column(one, cuts.get(name), leaks.get(name)) for name, one in look["sets"].items()]
    return [(what, *(column[what] for column in columns)) for what in columns[0]]


def _column(
    one: Mapping[str, Any], cut: Mapping[str, Any] | None, leak: Mapping[str, Any] | None
) -> dict[str, str]:
    again, against, bias = one["repeats"], one["contradictions"], one["length_bias"]
    return {
        "pairs": f"{one['pairs']:,}",
        "different prompts": f"{again['prompts']:,}",
        "  nearly an earlier one": f"{again['near_prompts']:,}",
        "pairs that came before": f"{again['pairs_again']:,}",
        "  nearly came before": f"{again['near_pairs']:,}",
        "contradicted pairs": f"{against['swapped']:,}",
        "pairs with an answer judged both ways": f"{against['both_ways']:,}",
        "prompts that are also in train": f"{leak['same_prompts']:,}" if leak else "",
        "  nearly in train": f"{leak['near_prompts']:,}" if leak else "",
        "pairs that are also in train": f"{leak['same_pairs']:,}" if leak else "",
        "cut to sequence_length": f"{cut['cut_prompts'] + cut['cut_answers']:,}" if cut else "",
        "dropped as too long": f"{cut['dropped']:,}" if cut else "",
        "chosen is longer": percent(bias["chosen_longer"]),
        "right by taking the longer answer": percent(bias["longer_wins"]),
        "correlation of length and chosen": f"{bias['correlation']:+.2f}",
        "median of chosen minus rejected tokens": f"{bias['difference']:+.0f}",
    }


def _by_share(share: float) -> str:
    return "serious" if share >= MANY else "warning" if share >= WORTH_A_WARNING else "info"


def _leaked(name: str, leak: Leak) -> Iterator[Finding]:
    if not leak.share:
        return
    nearly = (
        f" ({leak.same_prompts} the same, {leak.near_prompts} nearly)" if leak.near_prompts else ""
    )
    advice = "Take these rows out of one of the two, or let validation.data_args.split hold out whole prompts."
    if not leak.same_prompts:
        advice = "Look whether they ask the same (data_report.json names the first places), and take those out."
    pairs = (
        f", {leak.same_pairs} of its {leak.pairs} pairs with both answers"
        if leak.same_pairs
        else ""
    )
    yield Finding(
        "leakage",
        "serious" if leak.share >= LEAKED else "warning",
        name,
        round(leak.share, 4),
        f"{percent(leak.share)} of the prompts of {name} are also in train{nearly}{pairs}: "
        "its scores partly tell what is remembered, not what is learnt.",
        advice,
    )


def _prompted(look: Look) -> Iterator[Finding]:
    told = look.inference
    if not told.get("different"):
        return
    share = told["different"] / told["compared"]
    first = told["examples"][0]
    trained, asked = ("".join(first[side])[:80] for side in ("training", "inference"))
    yield Finding(
        "prompt_difference",
        "serious" if share >= 0.5 else "warning",
        "train",
        round(share, 4),
        f"{told['different']} of {told['compared']} prompts that were compared differ from those at inference: "
        f"training has {trained!r} where {told['by']} gives {asked!r}.",
        "Prompt the trained model with exactly the training prompt, or choose the data_args.template that it is served "
        "with.",
    )


def _contradicted(name: str, pairs: int, found: Contradictions) -> Iterator[Finding]:
    if found.swapped:
        share = found.swapped / pairs
        yield Finding(
            "contradictory_pairs",
            "serious" if share >= MANY else "warning",
            name,
            round(share, 4),
            f"{found.swapped} pairs of {name} ({percent(share)}) are contradicted: the same two answers to the same "
            "prompt are preferred the other way round elsewhere. What one teaches the other takes back.",
            "Keep the judgement that you trust; where people simply disagree, robust or label_smoothing helps.",
        )
    if found.both_ways:
        share = found.both_ways / pairs
        yield Finding(
            "answers_both_ways",
            "info",  # pairs drawn from one ranking look just so
            name,
            round(share, 4),
            f"{found.both_ways} further pairs of {name} ({percent(share)}) have an answer that is chosen in one row "
            "and rejected in another, against different answers.",
            "Right where rows are parts of one ranking; otherwise look at how the rows were judged.",
        )


def _repeated(name: str, pairs: int, found: Repeats) -> Iterator[Finding]:
    if found.pairs_again:
        share = found.pairs_again / pairs
        yield Finding(
            "duplicate_pairs",
            _by_share(share),
            name,
            round(share, 4),
            f"{found.pairs_again} pairs of {name} ({percent(share)}) came before, but for case and white space: each "
            "counts once more.",
            "Remove them, unless they are meant to weigh more; a weight column says so openly.",
        )
    if found.near_pairs:
        share = found.near_pairs / found.compared
        yield Finding(
            "near_duplicate_pairs",
            "warning" if share >= MANY else "info",
            name,
            round(share, 4),
            f"{found.near_pairs} pairs of {name} ({percent(share)}) nearly repeat an earlier one: prompt, chosen and "
            "rejected share 70 % of their runs of three tokens with it.",
            "Keep one of each kind where they came from copying or from a template.",
        )
    if found.near_prompts:
        share = found.near_prompts / found.prompts
        yield Finding(
            "near_duplicate_prompts",
            "warning" if share >= 4 * MANY else "info",
            name,
            round(share, 4),
            f"{found.near_prompts} of the {found.prompts} different prompts of {name} ({percent(share)}) are nearly "
            "an earlier one.",
            "Look whether the data is as varied as its size suggests.",
        )
    if found.compared < pairs:
        yield Finding(
            "sampled",
            "info",
            name,
            round(found.compared / pairs, 4),
            f"near duplicates were looked for among {found.compared:,} of the {pairs:,} pairs of {name}: "
            "there are more than were found.",
            "Nothing to do; what is exactly the same was looked for among all.",
        )


def _cut(name: str, found: Truncation) -> Iterator[Finding]:
    cut = found.cut_prompts + found.cut_answers
    if not cut:
        return
    share = cut / found.pairs
    what = (
        "prompts lose their beginning"
        if found.cut_prompts
        else "answers lose their end and their end token"
    )
    yield Finding(
        "truncation",
        _by_share(share),
        name,
        round(share, 4),
        f"{cut} pairs of {name} ({percent(share)}) are cut to sequence_length ({found.sequence_length}): {what}.",
        "Raise sequence_length, or set data_args.overlong to drop.",
    )


def _biased(pairs: int, found: LengthBias) -> Iterator[Finding]:
    accuracy = max(found.longer_wins, 1 - found.longer_wins)
    chance = 0.5 + 1.5 / sqrt(pairs)  # three standard deviations of a coin
    if accuracy < max(LENGTH_MATTERS, chance):
        return
    which = "longer" if found.longer_wins > 0.5 else "shorter"
    yield Finding(
        "length_bias",
        "serious" if accuracy >= LENGTH_DECIDES else "warning",
        "train",
        round(accuracy, 4),
        f"taking the {which} answer is right in {percent(accuracy)} of the pairs (median difference "
        f"{found.difference:+.0f} tokens, correlation {found.correlation:+.2f}): a model may learn just that.",
        "Watch the length of answers during evaluation; ld_alpha, a length-normalised loss (simpo, sigmoid_norm) or "
        "pairs of similar length help.",
    )
