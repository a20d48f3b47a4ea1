"""`rather chat`: a conversation with one model, or with two that answer the same questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from rather.commands.terminal import echo
from rather.config.found import NO_TRUST, Trust
from rather.config.run_config import DPOConfig
from rather.config.schema import TrainDataArgs
from rather.data.formats import TextPair
from rather.data.json_rows import DropReason
from rather.data.pool import encoder_of
from rather.data.prepare import recipe_of
from rather.errors import ConfigError, DataError
from rather.model.generate import Decoding, generate
from rather.run_folder.model_source import here, weights_of

COMMANDS = (
    "/reset starts a new conversation, /system TEXT sets the system message, /quit exits, "
    "Ctrl-C stops an answer"
)
INCOMPLETE = "\ufffd"  # a token decodes to this if its bytes continue in the next one


@dataclass
class Speaker:
    """A model and its side of the conversation. Without a chat template it continues the text."""

    name: str
    causal_lm: Any
    tokenizer: Any
    encoder: Any
    turns: list[dict[str, str]] = field(default_factory=list)

    @staticmethod
    def load(name: str, system: str | None = None, *, trust: Trust = NO_TRUST) -> Speaker:
        weights = weights_of(name, trust)
        if weights.is_reward:
            raise ConfigError(
                f"{name}: is a reward model, which writes no text; use `rather score`."
            )
        tokenizer = weights.tokenizer()
        recipe = recipe_of(tokenizer, TrainDataArgs(), DPOConfig().sequence_length)
        encoder = encoder_of(recipe, name)
        speaker = Speaker(name, weights.load(here()).causal_lm, tokenizer, encoder)
        speaker.reset(system)
        return speaker

    def reset(self, system: str | None) -> None:
        """Start a new conversation."""
        if system and self.encoder.recipe.template is None:
            raise ConfigError(f"{self.name}: a system message needs a chat template; it has none.")
        self.turns = [{"role": "system", "content": system}] if system else []

    def answer(self, text: str, decoding: Decoding, show: Callable[[str], None]) -> None:
        """Show the answer as it is generated, and remember it as far as it was completed."""
        turns = [*self.turns, {"role": "user", "content": text}]
        prompt: Any = tuple(turns)
        if self.encoder.recipe.template is None:
            prompt = "".join(turn["content"] for turn in turns)
        try:
            ids = self.encoder.prompt_ids(TextPair(prompt, "", ""))
        except DropReason as reason:
            raise DataError(f"{self.name}: {reason.detail}") from None
        embeddings = self.causal_lm.get_input_embeddings().num_embeddings
        if max(ids, default=0) >= embeddings:
            raise ConfigError(
                f"{self.name}: the prompt has the token id {max(ids)}, but the model has "
                f"{embeddings} embeddings; the tokenizer belongs to another model."
            )
        config = self.causal_lm.config.get_text_config()
        if positions := getattr(config, "max_position_embeddings", None):
            if len(ids) >= positions:
                raise ConfigError(
                    f"{self.name}: the conversation has {len(ids)} tokens, the model only "
                    f"{positions} positions; start again with /reset."
                )
            room = min(decoding.max_new_tokens, positions - len(ids))
            decoding = replace(decoding, max_new_tokens=room)
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
            self.turns = [*turns, {"role": "assistant", "content": shown}]


def chat(
    models: Sequence[str],
    prompt: str | None,
    system: str | None,
    decoding: Decoding,
    seed: int,
    *,
    trust: Trust = NO_TRUST,
) -> None:
    """Print the answers to one prompt, or to questions until /quit or the end of the input."""
    torch.manual_seed(seed)
    speakers = [Speaker.load(name, system, trust=trust) for name in models]

    def ask(text: str) -> None:
        for speaker in speakers:
            if len(speakers) > 1:
                echo(f"── {speaker.name} ──")
            try:
                speaker.answer(text, decoding, partial(echo, nl=False))
            finally:
                echo()

    if prompt is not None:
        return ask(prompt)
    with suppress(ImportError):
        import readline  # noqa: F401 - arrow keys and history for input()
    echo(COMMANDS)
    with suppress(EOFError):
        while (line := input("> ").strip()) != "/quit":
            word, _, argument = line.partition(" ")
            try:
                if word in ("/reset", "/system"):
                    new_system = argument.strip() if word == "/system" else system
                    for speaker in speakers:
                        speaker.reset(new_system)
                    system = new_system
                    echo("(new conversation)")
                elif word.startswith("/") and word[1:].isalpha():
                    echo(f"{word}: unknown command. {COMMANDS}")
                elif line:
                    ask(line)
            except KeyboardInterrupt:
                echo("(stopped)")
            except (ConfigError, DataError) as error:
                echo(str(error))
