"""The peers by name."""

from __future__ import annotations

from rather.migrate.engine import Peer
from rather.migrate.peers.axolotl import AXOLOTL
from rather.migrate.peers.colossalchat import COLOSSALCHAT
from rather.migrate.peers.llama_factory import LLAMA_FACTORY
from rather.migrate.peers.nemo_rl import NEMO_RL
from rather.migrate.peers.openrlhf import OPENRLHF
from rather.migrate.peers.roll import ROLL
from rather.migrate.peers.swift import SWIFT
from rather.migrate.peers.trl import TRL

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (TRL, LLAMA_FACTORY, AXOLOTL, OPENRLHF, COLOSSALCHAT, NEMO_RL, SWIFT, ROLL)
}
