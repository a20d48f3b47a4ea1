"""Small random models of every type of transformers that answers with text, towers included."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto as auto

from rather.model.check import _shrunken
from tests.model.test_hybrids import HYBRIDS
from tests.padded import padded_logps, random_pairs

# What a default config lacks, and released models have.
RELEASED: dict[str, dict[str, Any]] = {
    name: settings for name, settings in HYBRIDS.items() if "-" not in name
}
TOWER: dict[str, Any] = {
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers", "num_layers", "n_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 64,
}
DEPTHS = {key: number for key, number in TOWER.items() if number == 1}
FIRST_MARK = 100  # ids from here on are placeholders; the words of tests/tiny.py are below
MARK = re.compile(r"_token_(id|index)$|^(image|video|audio)_token")
PAIRS = random_pairs(4, 60, longest=20)


def types() -> list[str]:
    mappings = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
    return sorted({name for key in mappings for name in _classes(key)})


def _classes(key: str) -> dict[str, Any]:
    return dict(getattr(auto, f"MODEL_FOR_{key}_MAPPING_NAMES"))


def class_of(name: str) -> Any:
    keys = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM")
    class_name = next(names[name] for names in map(_classes, keys) if name in names)
    return getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])


def parts_of(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield a config and all in it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from parts_of(value)


def small_config(config: PretrainedConfig, sizes: dict[str, Any]) -> PretrainedConfig:
    """Return a copy with a small language model, and with towers of these sizes."""
    whole = copy.deepcopy(config)
    text = whole.get_text_config()
    small_text = _shrunken(text, 2)
    if text is whole:
        whole = small_text
    else:
        holder, key = next(
            (part, key)
            for part in parts_of(whole)
            for key, value in vars(part).items()
            if value is text
        )
        for part in parts_of(whole):
            if part is whole or part in parts_of(text):
                continue
            for name, size in sizes.items():
                if isinstance(getattr(part, name, None), int):
                    with suppress(Exception):
                        setattr(part, name, size)
        setattr(holder, key, small_text)
    mark = FIRST_MARK
    for part in parts_of(whole):
        for name, value in list(vars(part).items()):
            if MARK.search(name) and value is not None:
                setattr(part, name, [mark] if isinstance(value, list) else mark)
                mark += 1
        if part is small_text or part is whole:
            for name, number in (("pad", 0), ("bos", 1), ("eos", 2)):
                with suppress(Exception):
                    setattr(part, f"{name}_token_id", number)
    return whole


def small_model(name: str) -> Any:
    config = AutoConfig.for_model(name, **RELEASED.get(name, {}))
    problems = []
    for sizes in (TOWER, DEPTHS):
        try:
            torch.manual_seed(0)
            whole_class = class_of(name)
            model = whole_class._from_config(
                small_config(config, sizes), attn_implementation="eager", dtype=torch.float32
            ).eval()
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if parameter.ndim > 1 and not re.search("vis|image|audio|speech", key):
                        parameter.normal_(0, 0.15)
                padded_logps(model, PAIRS)
            return model
        except Exception as error:
            problems.append(error)
    raise problems[0]
