"""The bytes that a run writes to the disk: checkpoints, the model, caches."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rather.config.schema import DPOConfig
from rather.plan.state import adapter_weights
from rather.reference.logprob_cache import RECORD

if TYPE_CHECKING:
    from rather.model.sizes import Shapes, Sizes

SAVED = {"exact": 12, "lean": 6}  # bytes of a weight with its moments in a checkpoint


@dataclass(frozen=True)
class DiskBytes:
    """Bytes by purpose. While a checkpoint is written, those that are kept are still there."""

    checkpoints: float
    model: float
    data: float
    reference: float

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


def checkpoint_bytes(config: DPOConfig, shapes: Shapes) -> int:
    """Return the bytes of one checkpoint; with an adapter it holds only the adapter's weights."""
    args = config.actor_train.model_args
    trained = adapter_weights(args, shapes) if args.has_adapter else sum(map(prod, shapes.values()))
    return trained * SAVED[config.precision]


def disk_of(
    config: DPOConfig, sizes: Sizes, *, steps: int, pairs: int, data: int, reference: bool
) -> DiskBytes:
    """Return the bytes of a run; `pairs` have reference log-probs, `data` is the tokenised data."""
    each = checkpoint_bytes(config, sizes.shapes)
    saves = max(1, -(-steps // config.save_steps)) if config.save_steps else 1
    kept = min(saves, (config.max_ckpt_to_keep or saves) + 1)
    moving = sizes.weights * sizes.stored if config.sync_ref_model else 0
    args, model = config.actor_train.model_args, sizes.weights * sizes.stored
    if args.has_adapter:
        model += 4 * adapter_weights(args, sizes.shapes)
    # Both answers, in the cache and in the run's own log.
    records = 2 * 2 * RECORD * pairs if reference else 0
    return DiskBytes(kept * (each + moving), model * (2 if config.save_best else 1), data, records)


def free_disk(folder: Path) -> int:
    """Return the free bytes where the folder is, or will be made."""
    here = folder.expanduser().absolute()
    while not here.exists():
        here = here.parent
    return shutil.disk_usage(here).free
