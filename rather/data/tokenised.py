"""Rows that are tokens already, as `rather data --save` and ColossalChat's preparation write them.

Each side has its ids and a mask of the tokens that are scored; an attention mask tells tokens from padding. A row whose
lists do not fit together is dropped and counted like any other bad row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rather.data.formats import EXTRAS, TOKENISED, Layout, TextPair, extras_of
from rather.data.json_rows import Bad
from rather.data.messages import Refused, kind_of
from rather.data.tokens import Encoded, Encoder, Ids, Span

SIDES = ("chosen", "rejected")
COLUMNS = tuple(
    f"{side}_{name}" for side in SIDES for name in ("input_ids", "attention_mask", "loss_mask")
)
LARGEST_ID = 2**31 - 1


class Side(NamedTuple):
    """One sequence without its padding, and the spans of it that are scored."""

    ids: Ids
    scored: tuple[Span, ...]


def is_tokenised(row: Mapping[str, Any], layout: Layout) -> bool:
    """ColossalChat keeps the text beside the tokens: with another format named, that is read."""
    if layout.format != "auto":
        return layout.format == TOKENISED
    return row.get("chosen_input_ids") is not None and row.get("rejected_input_ids") is not None


def read_tokenised(
    row: Mapping[str, Any], layout: Layout, encoder: Encoder
) -> tuple[TextPair, Encoded] | Bad:
    """The pair, with its tokens written out where others have text, or why there is none."""
    named = {ours: row.get(theirs) for ours, theirs in layout.columns.items() if ours in EXTRAS}
    try:
        chosen, rejected = (_side(row, side, encoder.recipe.score == "all") for side in SIDES)
        extras = extras_of({**row, **named})
    except Refused as refused:
        return refused.bad
    except RecursionError:  # a value nested too deeply to be shown
        return Bad("too_deep", "too many values inside each other")
    if chosen.ids == rejected.ids:
        return Bad("identical_after_truncation", "chosen and rejected are the same tokens")
    start = _boundary(chosen, rejected)
    if start == 0:
        return Bad("prompt_mismatch", "chosen and rejected do not begin with the same token")
    encoded = encoder.fitted(
        Encoded(
            chosen.ids[:start],
            chosen.ids[start:],
            rejected.ids[start:],
            chosen.scored,
            rejected.scored,
        )
    )
    if isinstance(encoded, Bad):
        return encoded
    if not (encoded.chosen_scored and encoded.rejected_scored):
        return Bad("nothing_scored", "no token of an answer is left to score")
    prompt, first, second = (
        " ".join(map(str, ids)) for ids in (encoded.prompt, encoded.chosen, encoded.rejected)
    )
    return TextPair(prompt, first, second, **extras), encoded


def _side(row: Mapping[str, Any], side: str, score_all: bool) -> Side:
    ids = _numbers(row, f"{side}_input_ids", LARGEST_ID)
    scored = [1] * len(ids) if score_all else _numbers(row, f"{side}_loss_mask", 1)
    attention = f"{side}_attention_mask"
    real = _numbers(row, attention, 1) if row.get(attention) is not None else [1] * len(ids)
    if not len(ids) == len(scored) == len(real):
        sizes = f"{len(ids)} ids, {len(scored)} in its loss_mask, {len(real)} in its attention_mask"
        raise Refused("bad_mask", f"{side} has {sizes}; they must be as many")
    begin, end = _without_padding(real, side)
    if not score_all and any(scored[:begin] + scored[end:]):
        raise Refused("bad_mask", f"{side}_loss_mask scores padding")
    spans = _spans(scored[begin:end])
    if not spans:
        raise Refused(
            "nothing_scored", f"{side}_loss_mask scores no token that another one comes before"
        )
    return Side(ids[begin:end], spans)


def _numbers(row: Mapping[str, Any], name: str, largest: int) -> list[int]:
    values = row.get(name)
    if not isinstance(values, list):
        reason = "missing_key" if values is None else "bad_type"
        raise Refused(reason, f"{name} must be a list, found {kind_of(values)}")
    if not all(isinstance(value, int) and 0 <= value <= largest for value in values):
        raise Refused("bad_type", f"{name} must hold whole numbers from 0 to {largest}")
    return [int(value) for value in values]


def _without_padding(real: list[int], side: str) -> tuple[int, int]:
    begin = next((i for i, shown in enumerate(real) if shown), len(real))
    end = next((i for i in range(begin, len(real)) if not real[i]), len(real))
    if any(real[end:]):
        raise Refused("bad_mask", f"{side}_attention_mask has a hole at token {end + 1}")
    return begin, end


def _spans(scored: list[int]) -> tuple[Span, ...]:
    """Where the mask is 1. Nothing predicts the first token, so that it is never scored."""
    edges = [
        i
        for i in range(1, len(scored) + 1)
        if (i < len(scored) and scored[i]) != (i > 1 and scored[i - 1])
    ]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _boundary(chosen: Side, rejected: Side) -> int:
    """How many tokens are the prompt: the common beginning, up to the last turn that is scored."""
    shortest = min(len(chosen.ids), len(rejected.ids))
    common = next((i for i in range(shortest) if chosen.ids[i] != rejected.ids[i]), shortest)
    turn = min(side.scored[-1][0] for side in (chosen, rejected))
    return min(common, turn if turn > 1 else shortest - 1)
