"""Member: where a worker stands among those of its role."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """Its rank among `world`, and its device; without one, the device_mapping says it."""

    rank: int = 0
    world: int = 1
    device: str | None = None
