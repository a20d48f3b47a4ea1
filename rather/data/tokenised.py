"""Rows that are tokens already, as `rather data --save` and ColossalChat's preparation write them.

Each side has its ids and a mask of the tokens that are scored; an attention mask separates tokens
from padding. A row whose lists do not fit together is dropped and counted like any other bad row.
"""

from __future__ import annotations

from typing import Any

from rather.data.formats import EXTRAS, TOKENISED, RowLayout, TextPair, extras_of
from rather.data.formats.registry import Row
from rather.data.json_rows import DropReason
from rather.data.messages import common_length, wrong_type
from rather.data.tokens import Encoded, Encoder, Ids, Span

SIDES = ("chosen", "rejected")
COLUMNS = tuple(
    f"{side}_{name}" for side in SIDES for name in ("input_ids", "attention_mask", "loss_mask")
)
LARGEST_ID = 2**31 - 1


def is_tokenised(row: Row, layout: RowLayout) -> bool:
    """Return whether tokens are read. ColossalChat's rows have text too, for another format."""
    if layout.format != "auto":
        return layout.format == TOKENISED
    return row.get("chosen_input_ids") is not None and row.get("rejected_input_ids") is not None


def read_tokenised(row: Row, layout: RowLayout, encoder: Encoder) -> tuple[TextPair, Encoded]:
    """Return the pair, with its tokens written out where others have text."""
    named = {ours: row.get(theirs) for ours, theirs in layout.columns.items() if ours in EXTRAS}
    score_all = encoder.recipe.score == "all"
    (chosen, first), (rejected, second) = (_side(row, side, score_all) for side in SIDES)
    extras = extras_of({**row, **named})
    # The prompt is the common beginning, up to the last turn that is scored.
    turn = min(first[-1][0], second[-1][0])
    last = turn if turn > 1 else min(len(chosen), len(rejected)) - 1
    start = min(common_length(chosen, rejected), last)
    if start == 0 and chosen != rejected:
        raise DropReason("prompt_mismatch", "chosen and rejected do not begin with the same token")
    answers = chosen[start:], rejected[start:]
    encoded = encoder.fitted(Encoded(chosen[:start], *answers, first, second))
    prompt, first_text, second_text = (
        " ".join(map(str, ids)) for ids in (encoded.prompt, encoded.chosen, encoded.rejected)
    )
    return TextPair(prompt, first_text, second_text, **extras), encoded


def _side(row: Row, side: str, score_all: bool) -> tuple[Ids, tuple[Span, ...]]:
    """Return one sequence without its padding, and its scored spans."""
    ids = _numbers(row, f"{side}_input_ids", LARGEST_ID)
    ones = [1] * len(ids)
    scored = ones if score_all else _numbers(row, f"{side}_loss_mask", 1)
    attention = f"{side}_attention_mask"
    real = _numbers(row, attention, 1) if row.get(attention) is not None else ones
    if not len(ids) == len(scored) == len(real):
        sizes = f"{len(ids)} ids, {len(scored)} in its loss_mask, {len(real)} in its attention_mask"
        raise DropReason("bad_mask", f"{side} has {sizes}; the numbers must be equal")
    begin = common_length(real, [0] * len(real))
    end = begin + common_length(real[begin:], ones)
    if any(real[end:]):
        raise DropReason("bad_mask", f"{side}_attention_mask has a hole at token {end + 1}")
    if not score_all and any(scored[:begin] + scored[end:]):
        raise DropReason("bad_mask", f"{side}_loss_mask scores padding")
    # Nothing predicts the first token, so it is never scored.
    mask = [0, *scored[begin + 1 : end], 0]
    edges = [i for i in range(1, len(mask)) if mask[i] != mask[i - 1]]
    if not edges:
        detail = f"{side}_loss_mask scores no token that comes after another one"
        raise DropReason("nothing_scored", detail)
    return ids[begin:end], tuple(zip(edges[::2], edges[1::2], strict=True))


def _numbers(row: Row, name: str, largest: int) -> list[int]:
    values: Any = row.get(name)
    if values is None:
        raise DropReason("missing_key", f"{name} must be a list, found null")
    if not isinstance(values, list):
        raise wrong_type(name, "a list", values)
    if not all(isinstance(value, int) and 0 <= value <= largest for value in values):
        raise DropReason("bad_type", f"{name} must hold whole numbers from 0 to {largest}")
    return [int(value) for value in values]
