"""Rather: align language models with preference pairs.

    from rather import DPOPipeline, load_config
    DPOPipeline(load_config("dpo.yaml")).run()

Names are loaded when they are asked for, so that `import rather` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rather.api.collate import DataCollatorForPreferenceDataset, StatefulDistributedSampler
    from rather.api.trainer import DPOTrainer
    from rather.cluster.cluster import Cluster
    from rather.cluster.resources import ResourceManager
    from rather.cluster.worker import ActorWorker
    from rather.cluster.worker import ActorWorker as Worker
    from rather.config.load import load_config
    from rather.config.run_config import DPOConfig
    from rather.config.schema import TrainingArgs as TrainingArguments
    from rather.pipeline.pipeline import DPOPipeline

__version__ = "0.1.0"
_HOME = {
    "ActorWorker": "rather.cluster.worker",
    "Cluster": "rather.cluster.cluster",
    "DPOConfig": "rather.config.run_config",
    "DPOPipeline": "rather.pipeline.pipeline",
    "DPOTrainer": "rather.api.trainer",
    "DataCollatorForPreferenceDataset": "rather.api.collate",
    "ResourceManager": "rather.cluster.resources",
    "StatefulDistributedSampler": "rather.api.collate",
    "TrainingArguments": "rather.config.schema:TrainingArgs",
    "Worker": "rather.cluster.worker:ActorWorker",  # the base of your own workers
    "load_config": "rather.config.load",
}
__all__ = [
    "ActorWorker",
    "Cluster",
    "DPOConfig",
    "DPOPipeline",
    "DPOTrainer",
    "DataCollatorForPreferenceDataset",
    "ResourceManager",
    "StatefulDistributedSampler",
    "TrainingArguments",
    "Worker",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rather' has no attribute '{name}'")
    home, _, other = _HOME[name].partition(":")
    return getattr(import_module(home), other or name)
