"""Compares the prompt that training sees with the prompt that generation starts from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import takewhile
from typing import TYPE_CHECKING

import pyarrow as pa

from rather.data.pool import ChildLimits, ChunkResult, tokenised
from rather.data.read import DataFile
from rather.data.report import Json
from rather.data.template import own_template
from rather.data.tokens import Ids
from rather.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AROUND, SHOWN, EXAMPLES = (
    6,
    40,
    3,
)  # tokens around a difference, most tokens of it, differences kept


class PromptCheck:
    """Some prompts of each part of the data, as trained and as `apply_chat_template` gives them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, by: str) -> None:
        """`by` names what makes the prompt at inference."""
        self.tokenizer, self.by = tokenizer, by
        self.compared = self.different = 0
        self.examples: list[Json] = []

    def add(self, result: ChunkResult, prompts: Iterable[tuple[int, Ids]]) -> None:
        batch = pa.ipc.open_stream(result.table).read_next_batch()
        numbers = batch.column("number").to_pylist()
        for number, inference in prompts:
            if number not in numbers:  # the row gave no pair
                continue
            training: Ids = batch.column("prompt")[numbers.index(number)].as_py()
            self.compared += 1
            if training != inference:
                self.different += 1
                self._keep(result.chunk.source, number, training, inference)

    def _keep(self, source: int, number: int, training: Ids, inference: Ids) -> None:
        """Keep the first example of each kind of difference, with the tokens around it as text."""
        start = _common(training, inference)
        left, right = training[start:], inference[start:]
        end = _common(left[::-1], right[::-1])
        found = {
            "before": training[max(0, start - AROUND) : start],
            "training": left[: len(left) - end],
            "inference": right[: len(right) - end],
            "after": left[len(left) - end :][:AROUND],
        }
        texts = {name: self._texts(ids) for name, ids in found.items()}
        kinds = [(one["training"], one["inference"]) for one in self.examples]
        if len(kinds) < EXAMPLES and (texts["training"], texts["inference"]) not in kinds:
            self.examples.append({"source": source, "number": number, **texts})

    def _texts(self, ids: Ids) -> list[str]:
        """Return the text of each token; of many, only the first and the last ones."""
        if len(ids) > SHOWN:
            return [*self._texts(ids[: SHOWN // 2]), " ... ", *self._texts(ids[-SHOWN // 2 :])]
        return [str(self.tokenizer.decode([token], skip_special_tokens=False)) for token in ids]

    def to_json(self) -> Json:
        return {name: getattr(self, name) for name in ("by", "compared", "different", "examples")}


def check_own_template(
    tokenizer: PreTrainedTokenizerBase,
    setup: Json,
    first: ChunkResult,
    sources: list[DataFile],
    limits: ChildLimits,
) -> PromptCheck | None:
    """Compare pairs trained as plain text with what the tokenizer's template gives at inference.

    The template is rendered in a child process: only there it is limited in time and memory.
    """
    try:
        own = own_template(tokenizer)
        if own is None:
            return None
        found = PromptCheck(tokenizer, "the tokenizer's own chat template")
        again = {**setup, "recipe": {**setup["recipe"], "template": asdict(own)}}
        for _, head, _ in tokenised([first.chunk], again, sources, 1, limits):
            found.add(first, head["prompts"])
    except DataError:  # a template that cannot be used makes no prompt
        return None
    return found


def _common(left: Ids, right: Ids) -> int:
    """Return how many tokens both begin with."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )
