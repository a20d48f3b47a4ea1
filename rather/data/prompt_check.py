"""The prompt that training sees against the one that generation starts from: a model answers what it was taught."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rather.data.pool import Limits, Result, tokenised
from rather.data.read import Source
from rather.data.template import own_template
from rather.data.tokens import Ids
from rather.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AROUND, SHOWN, EXAMPLES = 6, 40, 3


@dataclass(frozen=True)
class Difference:
    """Tokens as text: what both have before and after, and what stands between."""

    source: int
    number: int
    before: list[str]
    training: list[str]
    inference: list[str]
    after: list[str]


@dataclass
class Comparison:
    """Some prompts of each part of the data, as trained and as `apply_chat_template` gives them."""

    tokenizer: PreTrainedTokenizerBase
    by: str  # what makes the prompt at inference
    compared: int = 0
    different: int = 0
    examples: list[Difference] = field(default_factory=list)

    def add(self, result: Result, prompts: Iterable[tuple[int, Ids]]) -> None:
        batch = pa.ipc.open_stream(result.table).read_next_batch()
        numbers = batch.column("number").to_pylist()
        for number, inference in prompts:
            if number not in numbers:  # it gave no pair
                continue
            training: Ids = batch.column("prompt")[numbers.index(number)].as_py()
            self.compared += 1
            if training != inference:
                self.different += 1
                self._keep(self._difference(result.chunk.source, number, training, inference))

    def _keep(self, found: Difference) -> None:
        """The first of each kind."""
        kinds = [(one.training, one.inference) for one in self.examples]
        if len(self.examples) < EXAMPLES and (found.training, found.inference) not in kinds:
            self.examples.append(found)

    def _difference(self, source: int, number: int, training: Ids, inference: Ids) -> Difference:
        start = _common(training, inference)
        left, right = training[start:], inference[start:]
        end = _common(left[::-1], right[::-1])
        before, after = training[max(0, start - AROUND) : start], left[len(left) - end :][:AROUND]
        parts = (before, left[: len(left) - end], right[: len(right) - end], after)
        return Difference(source, number, *(self._texts(ids) for ids in parts))

    def _texts(self, ids: Ids) -> list[str]:
        """Of many the first and the last."""
        if len(ids) > SHOWN:
            return [*self._texts(ids[: SHOWN // 2]), " ... ", *self._texts(ids[-SHOWN // 2 :])]
        return [str(self.tokenizer.decode([token], skip_special_tokens=False)) for token in ids]

    def to_json(self) -> dict[str, Any]:
        told = {"by": self.by, "compared": self.compared, "different": self.different}
        return {**told, "examples": [asdict(one) for one in self.examples]}


def framed_anyway(
    tokenizer: PreTrainedTokenizerBase,
    setup: dict[str, Any],
    first: Result,
    sources: list[Source],
    limits: Limits,
) -> Comparison | None:
    """Of pairs trained as plain text, where the tokenizer has a template that frames the same prompts at inference.

    In a child of its own: rendering under limits is what makes a template of others safe.
    """
    try:
        own = own_template(tokenizer)
        if own is None:
            return None
        found = Comparison(tokenizer, "the tokenizer's own chat template")
        again = {**setup, "recipe": {**setup["recipe"], "template": asdict(own)}}
        for _, head, _ in tokenised([first.chunk], again, sources, 1, limits):
            found.add(first, head["prompts"])
    except DataError:  # a template that cannot be used makes no prompt
        return None
    return found


def _common(left: Ids, right: Ids) -> int:
    shortest = min(len(left), len(right))
    return next((i for i in range(shortest) if left[i] != right[i]), shortest)
