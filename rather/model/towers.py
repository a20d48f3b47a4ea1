"""Checkpoints with a vision or audio tower: text pairs train their language model alone.

Pairs with images keep the tower; see vision.py.

The class of the checkpoint is loaded, and its tower is left out of the model that trains: it would
only wait, for text never reaches it. So whatever divides, adapts, rounds, saves or counts a model
sees the language model alone. The export copies the tower from the source.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

log = logging.getLogger(__name__)


class _LeftOut(nn.Module):
    """Takes the place of a part that only images or sounds would reach."""

    # Qwen2-Audio asks for it even without sounds; whatever is moved there cannot be computed with.
    device = torch.device("meta")


def tower_class(config: PretrainedConfig) -> Any:
    """Return the class of a checkpoint with a tower, or None if it is a language model alone."""
    if config.get_text_config() is config or config.is_encoder_decoder:
        return None
    for name in config.architectures or ():
        if name.endswith("ForCausalLM"):
            return None
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            return model_class
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)


def new_model(
    loader: Any, config: PretrainedConfig, *, keeps_tower: bool = False, **options: Any
) -> Any:
    """Return a model with new weights, by an Auto class or by the class of a checkpoint."""
    if isinstance(loader, type) and issubclass(loader, PreTrainedModel):
        options.pop("trust_remote_code", None)
        model = loader._from_config(config, **options)
    else:
        model = loader.from_config(config, **options)
    return model if keeps_tower else leave_tower_out(model)


def leave_tower_out(model: Any) -> Any:
    """Remove from a model what is not its language model or head; return the same model."""
    decoder = model.get_decoder() if tower_class(model.config) else model
    if decoder is model or has_tower(model):
        return model
    path = next(name for name, module in model.named_modules() if module is decoder)
    head, holder, count = model.get_output_embeddings(), model, 0
    for child_name in path.split("."):
        for name, child in list(holder.named_children()):
            size = sum(parameter.numel() for parameter in child.parameters())
            if name != child_name and child is not head and size:
                setattr(holder, name, _LeftOut())
                count += size
        holder = getattr(holder, child_name)
    model.left_out = count  # the parameters of the tower
    return model


def report_tower(model: Any) -> None:
    """Log once that a tower does not train."""
    if getattr(model, "left_out", 0):
        sounds_only = not hasattr(model.config, "vision_config")
        _report("audio" if sounds_only else "vision", model.left_out)


@cache
def _report(kind: str, parameters: int) -> None:
    log.info("%s tower frozen: %s parameters, text only", kind, f"{parameters:,}")


def has_tower(model: Any) -> bool:
    """Return whether the checkpoint of a model has more parts than its language model."""
    return bool(getattr(model, "left_out", 0)) or getattr(model, "sees_images", False)


def decoder_of(causal_lm: Any) -> Any:
    """Return the language model without its head."""
    if has_tower(causal_lm):
        decoder = causal_lm.get_decoder()
        return decoder.model if hasattr(decoder, "lm_head") else decoder  # Llama 4: with its head
    base = causal_lm.base_model
    return causal_lm.model if base is causal_lm else base  # Llama 4 names its base otherwise


def set_attention(causal_lm: Any, implementation: str) -> None:
    """Choose the attention of the language model; transformers warns of towers that are absent."""
    chooser = decoder_of(causal_lm) if has_tower(causal_lm) else causal_lm
    chooser.set_attn_implementation(implementation)
