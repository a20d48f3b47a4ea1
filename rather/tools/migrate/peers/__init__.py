"""The peers by name: each is the PEER of the module of its name."""

from __future__ import annotations

from importlib import import_module

from rather.tools.migrate import NAMES
from rather.tools.migrate.engine import Peer

PEERS: dict[str, Peer] = {
    name: import_module(f"{__name__}.{name.replace('-', '_')}").PEER for name in NAMES
}
