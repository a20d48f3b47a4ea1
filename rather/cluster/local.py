"""One device: a role's cluster is its only worker, in this process. No Ray, no process group, breakpoints work."""

from __future__ import annotations

import importlib
from typing import Any

from rather.cluster.worker import ActorWorker
from rather.config.schema import DPOConfig
from rather.errors import ConfigError


def local_cluster(name: str, config: DPOConfig) -> ActorWorker:
    """The worker of role `name`, which answers the calls of a cluster directly."""
    role = config.actor_train if name == "actor_train" else config.reference
    return _worker_cls(role.worker_cls, f"{name}.worker_cls")(config, name)


def _worker_cls(value: type | str | None, key: str) -> type[ActorWorker]:
    """A class, or a dotted path written by the config's author, who is trusted; nothing else ever sets it."""
    if value is None:
        return ActorWorker
    found = value if isinstance(value, type) else _imported(value, key)
    if not (isinstance(found, type) and issubclass(found, ActorWorker)):
        raise ConfigError(f"{key}: {found!r} is not a subclass of rather.cluster.worker.ActorWorker")
    return found


def _imported(path: str, key: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: '{path}' cannot be imported: {error}") from error
