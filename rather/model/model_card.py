"""The model card next to the exported weights: what they are and how they were trained."""

from __future__ import annotations

from rather.config.redaction import redact
from rather.config.schema import DPOConfig


def model_card(config: DPOConfig, step: int, pairs: int, *, with_reference: bool) -> str:
    """Return Markdown with the front matter that model hubs read."""
    training = config.actor_train.training_args
    settings = config.loss_numbers | config.loss_modifiers
    numbers = ", ".join(f"{key} {value}" for key, value in settings.items())
    names = " + ".join(config.loss_names)
    reference = f"`{config.reference.model_path}`" if with_reference else "none"
    settings_of_adapter = config.actor_train.model_args.adapter_settings or {}
    said = ", ".join(
        f"{key} {value}" for key, value in settings_of_adapter.items() if value not in (None, False)
    )
    adapter = f"\n| adapter | {said} |" if said else ""
    card = f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [rather, preference-alignment, {", ".join(config.loss_names)}]
---

# {config.exp_name}

`{config.actor_train.model_path}` aligned with preference pairs by Rather.

| | |
|---|---|
| loss | {names}{f" ({numbers})" if numbers else ""} |
| reference | {reference} |{adapter}
| pairs | {pairs} in training, {config.global_batch()} per step, {step} steps |
| learning rate | {training.learning_rate} ({training.lr_scheduler_type}) |
| sequence length | {config.sequence_length} |
| seed | {config.seed} |
"""
    return redact(card)  # a URL of a model may contain a password
