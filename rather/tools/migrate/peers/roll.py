"""ROLL: its YAML is read by `rather train` as it is; the table shows what happens to each key."""

from __future__ import annotations

from functools import partial
from typing import Any

from rather.config import compat
from rather.config.keys import table
from rather.config.load import composed_values
from rather.tools.migrate.engine import Peer
from rather.tools.migrate.rules import (
    CONVERTED,
    IMPOSSIBLE,
    NEEDLESS,
    NOT_NEEDED,
    Given,
    Outcome,
    Rule,
    needless,
)

RANK, ROUTER = (f"actor_train.model_args.{key}" for key in ("lora_rank", "moe_aux_loss_coef"))


class OwnKeys(dict[str, Any]):
    """Keep every key of Rather's schema; report other keys as the config loader does."""

    def get(self, key: str, _: Any = None) -> Rule | None:
        first = key.partition(".")[0]
        if key in compat.IGNORED:
            return needless(compat.IGNORED[key])
        if key in compat.REFUSED:
            note = compat.REFUSED[key]
            return lambda value, given: Outcome(IMPOSSIBLE if value else NEEDLESS, note=note)
        if first in ("hydra", "defaults", *compat.GROUPS):
            return needless("Hydra's own")
        if key in table() or ".strategy_config." in key or first == "system_envs":
            return partial(kept, key)
        return None


def kept(key: str, value: Any, given: Given) -> Outcome:
    is_empty = value is None and key not in (RANK, ROUTER)
    return NOT_NEEDED if is_empty else Outcome(CONVERTED, {key: value})


PEER = Peer(
    "roll",
    OwnKeys({**table(), **compat.IGNORED, **compat.REFUSED}),
    version="0.3",
    defaults={
        "pref_loss": "sigmoid",
        "beta": 0.1,
        "actor_train.training_args.learning_rate": 5e-5,
        "actor_train.training_args.per_device_train_batch_size": 8,
        "actor_train.model_args.dtype": "bf16",
        ROUTER: None,
        RANK: lambda given: 8 if given.get("actor_train.model_args.lora_target") else None,
    },
    marks="actor_train.strategy_args.strategy_name actor_train.training_args.learning_rate "
    "checkpoint_config.type is_offload_states rollout_batch_size "
    "actor_train.infer_batch_size",
    reader=composed_values,
    whole=" ".join(("reference.data_args", "hydra", *compat.GROUPS)),
    always=(
        "beta, ipo and label_smoothing count here; ROLL's pipeline never hands them to its loss.",
        "The schedule is as long as the run; ROLL divides it by the number of data-parallel ranks.",
        "The file also runs as it is: rather train FILE.",
    ),
)
