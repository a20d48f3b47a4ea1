"""`rather chat`: a conversation with a model in the terminal, or one answer; with a second model beside it if asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from rather.config.schema import DPOConfig, TrainDataArgs
from rather.data.formats import TextPair
from rather.data.json_rows import Bad
from rather.data.prepare import recipe_of
from rather.data.sandboxed import LimitedEncoder, encoder_of
from rather.data.tokens import Encoder
from rather.errors import ConfigError, DataError
from rather.model.generate import Decoding, generate
from rather.run_folder.model_source import Weights, here

COMMANDS = (
    "/reset begins anew, /system TEXT sets the system message, /quit ends; Ctrl-C stops an answer"
)
HALF_A_CHARACTER = "\ufffd"  # what a token decodes to whose bytes go on in the next one


@dataclass
class Speaker:
    """A model and its own side of the conversation. Without a chat template it goes on with the text."""

    name: str
    causal_lm: Any
    tokenizer: Any
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @staticmethod
    def of(weights: Weights, system: str | None) -> Speaker:
        speaker = Speaker(weights.name, weights.load(here()).causal_lm, weights.tokenizer(), system)
        if system:
            speaker.refuse_system()
        return speaker

    @cached_property
    def encoder(self) -> Encoder | LimitedEncoder:
        return encoder_of(recipe_of(self.tokenizer, DPOConfig(), TrainDataArgs()), self.name)

    def refuse_system(self) -> None:
        if self.encoder.recipe.template is None:
            raise ConfigError(
                f"{self.name}: has no chat template, so there is no place for a system message"
            )

    def answer(self, text: str, decoding: Decoding, tell: Callable[[str], None]) -> None:
        """Tells the answer piece by piece, and remembers it. One that is broken off is remembered as far as it came."""
        asked = [*self.turns, {"role": "user", "content": text}]
        ids = self._prompt(asked)
        decoding = self._within(decoding, len(ids))
        spoken = _Spoken(self.tokenizer, tell)
        try:
            generate(self.causal_lm, self.tokenizer, [ids], decoding, spoken.hear)
        finally:
            self.turns = [*asked, {"role": "assistant", "content": spoken.text}]

    def _prompt(self, turns: Sequence[dict[str, str]]) -> list[int]:
        if self.encoder.recipe.template is None:
            prompt: Any = "".join(turn["content"] for turn in turns)
        else:
            prompt = (
                *([{"role": "system", "content": self.system}] if self.system else []),
                *turns,
            )
        found = self.encoder.inference_prompt(TextPair(prompt, "", ""))
        if isinstance(found, Bad):
            raise DataError(f"{self.name}: {found.detail}")
        return found

    def _within(self, decoding: Decoding, prompt: int) -> Decoding:
        positions = getattr(
            self.causal_lm.config.get_text_config(), "max_position_embeddings", None
        )
        if positions is None:
            return decoding
        if prompt >= positions:
            raise ConfigError(
                f"{self.name}: the conversation has {prompt} tokens and the model {positions} positions; /reset it"
            )
        return replace(decoding, max_new_tokens=min(decoding.max_new_tokens, positions - prompt))


class _Spoken:
    """The text of the tokens so far, told as soon as its characters are whole."""

    def __init__(self, tokenizer: Any, tell: Callable[[str], None]) -> None:
        self.tokenizer, self.tell = tokenizer, tell
        self.ids: list[int] = []
        self.text = ""

    def hear(self, tokens: list[int]) -> None:
        self.ids += tokens
        whole = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not whole.endswith(HALF_A_CHARACTER):
            self.tell(whole[len(self.text) :])
            self.text = whole


@dataclass(frozen=True)
class Chat:
    """One or two models that hear the same."""

    speakers: Sequence[Speaker]
    decoding: Decoding
    console: Console

    @staticmethod
    def with_models(
        models: Sequence[Weights],
        system: str | None,
        decoding: Decoding,
        seed: int | None,
        console: Console,
    ) -> Chat:
        torch.manual_seed(seed or 0)
        return Chat([Speaker.of(weights, system) for weights in models], decoding, console)

    def ask(self, text: str) -> None:
        """The answer of each model, as it comes; under its name where there are two."""
        for speaker in self.speakers:
            if len(self.speakers) > 1:
                self.console.rule(Text(speaker.name), align="left")
            try:
                speaker.answer(text, self.decoding, self._tell)
            finally:
                self.console.print()

    def _tell(self, piece: str) -> None:
        self.console.out(piece, end="", highlight=False)
        self.console.file.flush()

    def talk(self) -> None:
        """Until /quit or the end of the input."""
        with suppress(ImportError):
            import readline  # noqa: F401 - arrow keys and history for input()
        self.console.print(Text(COMMANDS), style="dim")
        while True:
            try:
                said = self.console.input("[bold]> [/]").strip()
            except EOFError:
                return
            if said == "/quit":
                return
            if said:
                self._hear(said)

    def _hear(self, said: str) -> None:
        word, _, rest = said.partition(" ")
        try:
            if word == "/reset":
                self._begin_anew()
            elif word == "/system":
                for speaker in self.speakers:
                    speaker.refuse_system()
                    speaker.system = rest.strip() or None
                self._begin_anew()
            elif word.startswith("/") and word[1:].isalpha():
                self.console.print(Text(f"{word} is not known: {COMMANDS}"))
            else:
                self.ask(said)
        except KeyboardInterrupt:
            self.console.print("(stopped)", style="dim")
        except (ConfigError, DataError) as error:
            self.console.print(Text(str(error)), style="red")

    def _begin_anew(self) -> None:
        for speaker in self.speakers:
            speaker.turns = []
        self.console.print("(a new conversation)", style="dim")
