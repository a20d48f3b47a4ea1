"""trl.experimental.bco, which TRL removed before 1.16: its names say what to use instead."""

from __future__ import annotations

from typing import Any

from rather.errors import ConfigError


def __getattr__(name: str) -> Any:
    if name in ("BCOConfig", "BCOTrainer"):
        raise ConfigError(
            f"{name}: TRL 1.16 has no BCO trainer. Use `rather train` with task: unpaired and "
            "pref_loss: bco, or loss_type='bco_pair' of rather.trl.DPOConfig for pairs."
        )
    raise AttributeError(name)
