"""`rather chat`: a conversation with one model, or with two that answer the same questions."""

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
from rather.data.json_rows import DropReason
from rather.data.pool import LimitedEncoder, encoder_of
from rather.data.prepare import recipe_of
from rather.data.tokens import Encoder
from rather.errors import ConfigError, DataError
from rather.model.generate import Decoding, generate
from rather.run_folder.model_source import Weights, here

COMMANDS = (
    "/reset starts a new conversation, /system TEXT sets the system message, /quit exits, "
    "Ctrl-C stops an answer"
)
INCOMPLETE = "\ufffd"  # a token decodes to this if its bytes continue in the next one


def seed_sampling(seed: int) -> None:
    torch.manual_seed(seed)


@dataclass
class Speaker:
    """A model and its side of the conversation. Without a chat template it continues the text."""

    name: str
    causal_lm: Any
    tokenizer: Any
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @staticmethod
    def load(weights: Weights, system: str | None) -> Speaker:
        speaker = Speaker(weights.name, weights.load(here()).causal_lm, weights.tokenizer())
        speaker.set_system(system)
        return speaker

    @cached_property
    def encoder(self) -> Encoder | LimitedEncoder:
        return encoder_of(recipe_of(self.tokenizer, DPOConfig(), TrainDataArgs()), self.name)

    def set_system(self, text: str | None) -> None:
        if text and self.encoder.recipe.template is None:
            raise ConfigError(f"{self.name}: a system message needs a chat template; it has none.")
        self.system = text or None

    def answer(self, text: str, decoding: Decoding, show: Callable[[str], None]) -> None:
        """Show the answer as it is generated, and remember it as far as it was completed."""
        asked = [*self.turns, {"role": "user", "content": text}]
        ids = self._prompt(asked)
        decoding = self._limit(decoding, len(ids))
        generated: list[int] = []
        shown = ""

        def receive(tokens: list[int]) -> None:
            nonlocal shown
            generated.extend(tokens)
            decoded = self.tokenizer.decode(generated, skip_special_tokens=True)
            if not decoded.endswith(INCOMPLETE):
                show(decoded[len(shown) :])
                shown = decoded

        try:
            generate(self.causal_lm, self.tokenizer, [ids], decoding, receive)
        finally:
            self.turns = [*asked, {"role": "assistant", "content": shown}]

    def _prompt(self, turns: Sequence[dict[str, str]]) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt: Any = (*system, *turns)
        if self.encoder.recipe.template is None:
            prompt = "".join(turn["content"] for turn in turns)
        try:
            return self.encoder.inference_prompt(TextPair(prompt, "", ""))
        except DropReason as reason:
            raise DataError(f"{self.name}: {reason.detail}") from None

    def _limit(self, decoding: Decoding, prompt: int) -> Decoding:
        config = self.causal_lm.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        if positions is None:
            return decoding
        if prompt >= positions:
            raise ConfigError(
                f"{self.name}: the conversation has {prompt} tokens, the model only {positions} "
                "positions; start again with /reset."
            )
        return replace(decoding, max_new_tokens=min(decoding.max_new_tokens, positions - prompt))


@dataclass(frozen=True)
class Chat:
    """One or two models that get the same questions."""

    speakers: Sequence[Speaker]
    decoding: Decoding
    console: Console

    def ask(self, text: str) -> None:
        """Print the answer of each model, under its name if there are two."""

        def show(piece: str) -> None:
            self.console.out(piece, end="", highlight=False)
            self.console.file.flush()

        for speaker in self.speakers:
            if len(self.speakers) > 1:
                self.console.rule(Text(speaker.name), align="left")
            try:
                speaker.answer(text, self.decoding, show)
            finally:
                self.console.print()

    def talk(self) -> None:
        """Read questions until /quit or the end of the input."""
        with suppress(ImportError):
            import readline  # noqa: F401 - arrow keys and history for input()
        self.console.print(Text(COMMANDS), style="dim")
        with suppress(EOFError):
            while (line := self.console.input("[bold]> [/]").strip()) != "/quit":
                if line:
                    self._handle(line)

    def _handle(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        try:
            if word in ("/reset", "/system"):
                for speaker in self.speakers:
                    if word == "/system":
                        speaker.set_system(rest.strip())
                    speaker.turns = []
                self.console.print("(new conversation)", style="dim")
            elif word.startswith("/") and word[1:].isalpha():
                self.console.print(Text(f"{word}: unknown command. {COMMANDS}"))
            else:
                self.ask(line)
        except KeyboardInterrupt:
            self.console.print("(stopped)", style="dim")
        except (ConfigError, DataError) as error:
            self.console.print(Text(str(error)), style="red")
