"""One device: a role's cluster is its only worker, in this process. No Ray, no process group,
breakpoints work."""

from __future__ import annotations

import pkgutil
from typing import Any

import torch

from rather.cluster.role import RankInfo, Role
from rather.cluster.worker import ActorWorker
from rather.config.schema import DPOConfig
from rather.errors import ConfigError


def local_cluster(name: str, config: DPOConfig) -> ActorWorker:
    """Return the worker of role `name`, which answers the calls of a Role directly."""
    role = config.actor_train if name == "actor_train" else config.reference
    member = RankInfo(device="cpu") if device_kind(config.platform) == "cpu" else RankInfo()
    return worker_class(role.worker_cls, f"{name}.worker_cls")(config, name, member)


def as_local(role: Role, feature: str) -> ActorWorker:
    """Return the worker of a role whose whole model is in this process; `feature` names what needs
    that."""
    if not isinstance(role, ActorWorker):
        raise ConfigError(
            f"{feature} needs one device per policy; remove it, or start without torchrun and Ray."
        )
    return role


def device_kind(platform: str) -> str:
    """Return the kind of this machine's devices: cpu or cuda."""
    if platform == "cuda" and not torch.cuda.is_available():
        raise ConfigError("platform: cuda, but this machine has no GPU that PyTorch can use")
    return "cuda" if platform != "cpu" and torch.cuda.is_available() else "cpu"


def worker_class(value: type | str | None, key: str) -> type[ActorWorker]:
    """Return a worker class, given as such or as a dotted path.

    The author of the config wrote the path and is trusted; nothing else ever sets it.
    """
    try:
        found: Any = pkgutil.resolve_name(value) if isinstance(value, str) else value or ActorWorker
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: '{value}' cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, ActorWorker)):
        raise ConfigError(
            f"{key}: {found!r} is not a subclass of rather.cluster.worker.ActorWorker"
        )
    return found
