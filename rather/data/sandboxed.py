"""An Encoder whose template, a program of others, runs in a child process within the limits of data preparation."""

from __future__ import annotations

import json
import weakref
from dataclasses import asdict
from typing import Any

from rather.data.formats import Layout, TextPair
from rather.data.json_rows import Bad
from rather.data.pool import Asker, Child, Limits
from rather.data.tokens import Encoded, Encoder, Ids, Note, Recipe


def encoder_of(recipe: Recipe, name: str, limits: Limits | None = None) -> Encoder | LimitedEncoder:
    """For texts that come one by one; an error begins with `name`. Without a template there is nothing to limit."""
    return LimitedEncoder(recipe, name, limits or Limits()) if recipe.template else Encoder(recipe)


class LimitedEncoder:
    """Asked as an Encoder is. Its child starts with the first question and ends with it, or with this process."""

    def __init__(self, recipe: Recipe, name: str, limits: Limits) -> None:
        self.recipe, self.asker, self.limits = recipe, Asker(name), limits
        self._child: Child | None = None

    @property
    def end_of_turn(self) -> int | None:
        found: int | None = self._asked("end_of_turn", None)
        return found

    def training_prompt(self, text: str) -> Ids | Bad:
        found: Ids | Bad = self._asked("training_prompt", text)
        return found

    def inference_prompt(self, pair: TextPair) -> Ids | Bad:
        found: Ids | Bad = self._asked("inference_prompt", asdict(pair))
        return found

    def encode(self, pair: TextPair) -> Encoded | Bad:
        found = self._asked("encode", asdict(pair))
        if isinstance(found, Bad):
            return found
        spans = {
            name: tuple(map(tuple, found[name])) for name in ("chosen_scored", "rejected_scored")
        }
        return Encoded(**{**found, **spans, "notes": [Note(*note) for note in found["notes"]]})

    def _asked(self, question: str, given: Any) -> Any:
        if self._child is None:
            self._child = Child(
                {"recipe": self.recipe.to_json(), "layout": asdict(Layout())}, self.limits
            )
            self._close = weakref.finalize(self, self._child.close)
        try:
            as_json = json.dumps(given, default=str)  # a row of Python may hold a date
            head, _ = self._child.ask(self.asker, {"ask": question}, as_json.encode())
        except (
            BaseException
        ):  # Ctrl-C as well: its answer would be taken for that to the next question
            self._close()
            self._child = None
            raise
        return Bad(*head["bad"]) if "bad" in head else head["found"]
