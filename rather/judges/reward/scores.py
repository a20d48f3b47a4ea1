"""The scores that a reward model gives to single answers, as in its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from rather.config.run_config import DPOConfig
from rather.config.schema import TrainDataArgs
from rather.data.batch import TokenPair
from rather.data.formats import TextPair
from rather.data.json_rows import DropReason
from rather.data.messages import as_turns
from rather.data.pool import encoder_of
from rather.data.prepare import recipe_of
from rather.data.prompts import prompt_row
from rather.data.shares import Batches
from rather.errors import DataError, MemoryShortage
from rather.files import JsonObject
from rather.losses.objective import from_config
from rather.model.budget import LADDER, TOKENS
from rather.model.policy import PolicyModel
from rather.run_folder.model_source import Weights, here
from rather.train.rank_trainer import RankTrainer

NO_LIMIT = 1 << 30
CHUNK = 256  # answers that are packed at a time


def reward_scores(weights: Weights, asked: Sequence[tuple[JsonObject, str, str]]) -> list[float]:
    """Return the score of each (row with the prompt, answer, place of the row)."""
    policy = weights.load(here())
    data_args = TrainDataArgs(template=weights.actor.data_args.template if weights.actor else None)
    positions = getattr(policy.causal_lm.config.get_text_config(), "max_position_embeddings", None)
    recipe = recipe_of(weights.tokenizer(), data_args, positions or NO_LIMIT)
    encoder = encoder_of(recipe, weights.name)
    pairs = []
    for row, answer, line in asked:
        try:
            pairs.append(_token_pair(encoder, row, answer))
        except DropReason as reason:
            raise DataError(f"{line}: {weights.name} cannot score it: {reason.detail}") from None
    return answer_sums(policy, pairs, weights.name, at_end=True)


def answer_sums(
    policy: PolicyModel, pairs: Sequence[TokenPair], name: str, *, at_end: bool = False
) -> list[float]:
    """Return the log-prob of each single answer, or `at_end` the score of its last token.

    A bar on stderr shows `name`.
    """
    trainer = RankTrainer(policy, from_config(DPOConfig()))
    kind = here().partition(":")[0]
    sums: list[float] = []
    starts = range(0, len(pairs), CHUNK)
    for start in track(starts, name, console=Console(stderr=True), transient=True):
        chunk = pairs[start : start + CHUNK]
        batches = Batches(chunk, 2 * TOKENS[kind], ladder=LADDER[kind], at_end=at_end)
        try:
            sums += trainer.log_probs(batches)["sum"][:, 0].tolist()
        except torch.OutOfMemoryError as error:
            raise MemoryShortage(f"{error} The answers are too long for this device.") from None
    return sums


def _token_pair(encoder: Any, row: JsonObject, answer: str) -> TokenPair:
    prompt_of_row = prompt_row({name: cell for name, cell in row.items() if cell is not None})
    reply = answer if isinstance(prompt_of_row.prompt, str) else as_turns(answer, "assistant")
    pair = TextPair(
        prompt_of_row.prompt, reply, "", prompt_of_row.tools, prompt_of_row.template_kwargs
    )
    if answer.strip():
        encoded = encoder.encode(pair)
        ids, answered, scored = encoded.prompt, encoded.chosen, encoded.chosen_scored
    else:  # training has no empty answers: the end of the turn is all that is scored
        ids = encoder.prompt_ids(replace(pair, chosen=""), as_trained=True)
        end = encoder.end_of_turn
        answered = [encoder.recipe.eos if end is None else end]
        scored = ((len(ids), len(ids) + 1),)
    prompt, chosen = np.array(ids, np.int32), np.array(answered, np.int32)
    return TokenPair(prompt, chosen, np.empty(0, np.int32), scored, ())
