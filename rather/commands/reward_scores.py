"""The scores that a reward model gives to single answers, as in its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rather.commands.score import forward, settings_for
from rather.config.run_config import DPOConfig
from rather.data.batch import TokenPair
from rather.data.formats import TextPair
from rather.data.json_rows import DropReason
from rather.data.messages import as_turns
from rather.data.pool import encoder_of
from rather.data.prepare import recipe_of
from rather.data.prompts import prompt_row
from rather.errors import DataError
from rather.files import JsonObject
from rather.model.policy import PolicyModel
from rather.pipeline.steps import EVALUATION_CHUNK
from rather.run_folder.model_source import Weights, here

NO_LIMIT = 1 << 30


def reward_scores(
    weights: Weights, file: Path, asked: Sequence[tuple[JsonObject, str, str]]
) -> list[float]:
    """Return the score of each (row with the prompt, answer, place of the row)."""
    config = settings_for(weights, file, [])
    policy = weights.load(here())
    data_args = config.actor_train.data_args
    recipe = recipe_of(weights.tokenizer(), data_args, config.sequence_length)
    positions = getattr(policy.causal_lm.config.get_text_config(), "max_position_embeddings", None)
    encoder = encoder_of(replace(recipe, sequence_length=positions or NO_LIMIT), str(file))
    pairs = []
    for row, answer, line in asked:
        try:
            pairs.append(_token_pair(encoder, row, answer))
        except DropReason as reason:
            raise DataError(f"{line}: {weights.name} cannot score it: {reason.detail}") from None
    return answer_sums(policy, config, pairs, weights.name)


def answer_sums(
    policy: PolicyModel, config: DPOConfig, pairs: Sequence[TokenPair], name: str
) -> list[float]:
    """Return the score or the log-prob of each single answer."""
    chunks = (pairs[i : i + EVALUATION_CHUNK] for i in range(0, len(pairs), EVALUATION_CHUNK))
    _, columns = forward(policy, config, chunks, len(pairs), name)
    sums: list[float] = columns["sum"][:, 0].tolist()
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
