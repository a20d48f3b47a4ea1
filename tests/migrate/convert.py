"""Convert values as `rather migrate` converts a file, and look at what became of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rather.config.inherit import value_at
from rather.tools.migrate.engine import Migrated, full, migrate
from rather.tools.migrate.peers import PEERS
from rather.tools.migrate.rules import IMPOSSIBLE, MISSING, UNKNOWN, Outcome

TRAINING, MODEL, DATA = (f"actor_train.{name}_args" for name in ("training", "model", "data"))
LR, RANK, DTYPE = f"{TRAINING}.learning_rate", f"{MODEL}.lora_rank", f"{MODEL}.dtype"
FILE = f"{DATA}.file_name"
STRATEGY = "actor_train.strategy_args.strategy_name"
BASIC = {"model_name_or_path": "m", "dataset_name": "d.jsonl", "learning_rate": 1e-6, "bf16": True}


def of(
    values: dict[str, Any],
    peer: str = "trl",
    trainer: str | None = None,
    devices: int | None = None,
    folder: Path | None = None,
) -> Migrated:
    return migrate((folder or Path()) / "source.yaml", values, PEERS[peer], devices, trainer)


def problems(result: Migrated) -> dict[str, str]:
    bad = (MISSING, IMPOSSIBLE, UNKNOWN)
    return {row.key: row.status for row in result.rows if row.status in bad}


def row_of(result: Migrated, key: str) -> Outcome:
    [row] = [row for row in result.rows if row.key == key]
    return row


def values_of(result: Migrated, expected: dict[str, Any]) -> dict[str, Any]:
    """Return the values of these keys; `pairs` is the number of pairs of a step."""
    own = {"pairs": result.config.global_batch()}
    return {key: own[key] if key in own else value_at(result.config, full(key)) for key in expected}
