"""Reward models: a causal language model with a head of one row, `score`, instead of its words.

Outside, they are `AutoModelForSequenceClassification` with one label.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rather.checkpoint.sharded_tensors import ShardSpec
from rather.errors import ConfigError
from rather.model.files import InMemory, ModelFiles
from rather.model.towers import tower_class

HEAD = "score.weight"


def is_reward_model(config: Mapping[str, Any]) -> bool:
    """Return whether the config of a model or an adapter belongs to a classifier."""
    names = config.get("architectures") or ()
    is_adapter = config.get("task_type") == "SEQ_CLS"
    return is_adapter or any("ForSequenceClassification" in name for name in names)


def auto_class(config: Any, *, reward: bool) -> Any:
    """Return the class that loads a model; prepare the config of a reward model for one label."""
    if not reward:
        if is_reward_model(vars(config)):
            raise ConfigError(
                "pretrain: the model is a reward model, which writes no text; set task: reward, or "
                "score answers with `rather score`"
            )
        return tower_class(config) or AutoModelForCausalLM
    if tower_class(config):
        raise ConfigError(
            f"task: a checkpoint of '{config.model_type}' with a vision or audio tower cannot "
            "become a reward model; use its language model alone"
        )
    classes: Any = AutoModelForSequenceClassification._model_mapping
    if type(config) not in classes:
        raise ConfigError(
            f"task: transformers has no classifier of the family '{config.model_type}', so it "
            "cannot become a reward model; choose another family"
        )
    config.num_labels, config.architectures = 1, [classes[type(config)].__name__]
    return AutoModelForSequenceClassification


def new_head(width: int, seed: int) -> Tensor:
    """Return the start of a head, the same on every rank: scores vary by about 1."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(1, width, generator=draw) / math.sqrt(width + 1)


class RewardFiles(ModelFiles):
    """The weights of a model without the head of its words, and a new head if there is none."""

    def __init__(self, files: Iterable[Path], width: int, seed: int) -> None:
        super().__init__(files)
        self._shards.pop("lm_head.weight", None)
        if HEAD not in self.stored:
            head = new_head(width, seed)
            spec = ShardSpec.full(head.shape)
            self._shards[HEAD] = {spec.offsets: (InMemory(head), spec)}


def merging_files(files: Iterable[Path], model: Any) -> RewardFiles:
    """Return the files of a base that an adapter with a trained head is merged into."""
    return RewardFiles(files, model.score.weight.shape[1], seed=0)  # the adapter's head replaces it


def set_padding(config: Any, tokenizer: Any) -> None:
    """Give model and tokenizer a padding token that ends no text.

    transformers scores the last token that is not padding. If the end token were the padding, a
    padded text would be scored one token earlier than it was trained.
    """
    names = ("pad_token", "bos_token", "unk_token")
    tokens = [getattr(tokenizer, name) for name in names] + list(tokenizer.all_special_tokens)
    ends = {tokenizer.eos_token, *(token for token in tokens if token and "end" in token)}
    free = [token for token in tokens if token and token not in ends]
    if not free:
        raise ConfigError(
            "task: reward: the tokenizer has no special token besides its end token, which cannot "
            "be the padding of a reward model; add a padding token to the tokenizer"
        )
    tokenizer.pad_token = free[0]
    config.get_text_config().pad_token_id = config.pad_token_id = tokenizer.pad_token_id
