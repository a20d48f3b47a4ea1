"""The scores that a reward model gives to single answers, as in its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from rather.commands.score import settings_for
from rather.data.batch import TokenPair
from rather.data.formats import TextPair
from rather.data.json_rows import DropReason
from rather.data.messages import as_turns
from rather.data.pool import encoder_of
from rather.data.prepare import recipe_of
from rather.data.prompts import prompt_row
from rather.errors import DataError, MemoryShortage
from rather.files import JsonObject
from rather.losses.objective import from_config
from rather.pipeline.steps import Packing
from rather.run_folder.model_source import Weights, here
from rather.train.rank_trainer import RankTrainer

AT_ONCE = 64  # answers that are packed together
NO_LIMIT = 1 << 30


def reward_scores(
    weights: Weights, file: Path, asked: Sequence[tuple[JsonObject, str, str]]
) -> list[float]:
    """Return the score of each (row with the prompt, answer, place of the row)."""
    config = settings_for(weights, file, [])
    device = here()
    policy = weights.load(device)
    data_args = config.actor_train.data_args
    recipe = recipe_of(weights.tokenizer(), data_args, config.sequence_length, config.parity)
    positions = getattr(policy.causal_lm.config.get_text_config(), "max_position_embeddings", None)
    encoder = encoder_of(replace(recipe, sequence_length=positions or NO_LIMIT), str(file))
    pairs = []
    for row, answer, place in asked:
        try:
            pairs.append(_token_pair(encoder, row, answer))
        except DropReason as reason:
            raise DataError(f"{place}: {weights.name} cannot score it: {reason.detail}") from None
    trainer = RankTrainer(policy, from_config(config))
    packing = Packing(config, device.partition(":")[0])
    scores: list[float] = []
    starts = range(0, len(pairs), AT_ONCE)
    for first in track(starts, weights.name, console=Console(stderr=True), transient=True):
        batches = packing.pack(pairs[first : first + AT_ONCE], "actor_train")
        try:
            scores += trainer.log_probs(batches)["sum"][:, 0].tolist()
        except torch.OutOfMemoryError as error:
            raise MemoryShortage(f"{error} The answers are too long for this device.") from None
    return scores


def _token_pair(encoder: Any, row: JsonObject, answer: str) -> TokenPair:
    given = prompt_row({name: value for name, value in row.items() if value is not None})
    reply = answer if isinstance(given.prompt, str) else as_turns(answer, "assistant")
    pair = TextPair(given.prompt, reply, "", given.tools, given.template_kwargs)
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
