"""ROLL: its YAML is read by `rather train` as it is; the table shows what happens to each key."""

from __future__ import annotations

from typing import Any

from rather.config import compat
from rather.config.keys import table
from rather.config.load import composed_values
from rather.tools.migrate.engine import Peer
from rather.tools.migrate.rules import Line, Lines, Rule, facts

NULLABLE = ("actor_train.model_args.lora_rank", "actor_train.model_args.moe_aux_loss_coef")


class OwnKeys(dict[str, Any]):
    """Keep every key of Rather's schema, also in sections whose keys are free."""

    def get(self, key: str, _: Any = None) -> Rule | None:
        is_free = ".strategy_config." in key or key.startswith("system_envs.")
        rule: Rule | None = super().get(key, Lines([Line([], "=", key)]) if is_free else None)
        return rule


LINES = [
    *(f"{key} ~ {note}" for key, note in compat.IGNORED.items()),
    *(f"{key} ! {note}" for key, note in compat.REFUSED.items()),
    *(f"{key} ~ Hydra's own" for key in ("hydra", "defaults", *compat.GROUPS)),
    *(f"{key} if =none = {key}=none" for key in NULLABLE),
    *(f"{key} = {key}" for key in table()),
]
PEER = Peer(
    "roll",
    OwnKeys(facts("\n".join(LINES))),
    version="0.3",
    defaults="""
        pref_loss=sigmoid beta=0.1 actor_train.training_args.learning_rate=5e-5
        actor_train.training_args.per_device_train_batch_size=8 actor_train.model_args.dtype=bf16
        actor_train.model_args.moe_aux_loss_coef=none
        actor_train.model_args.lora_rank=8 if actor_train.model_args.lora_target set
        actor_train.model_args.lora_rank=none
    """,
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
