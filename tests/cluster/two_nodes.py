"""A driver on a cluster of two Ray nodes: prints where both roles are, and how a third node is
refused. Not a test."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rather.cluster.cluster import Cluster
from rather.cluster.resources import SLOT, ResourceManager
from rather.config.schema import Timeouts
from rather.errors import ConfigError
from tests.tiny import make_config


def main(folder: Path) -> None:
    from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes()
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=1, resources={SLOT: 2}, include_dashboard=False)
        nodes.wait_for_nodes()
        print(json.dumps({**placed(folder, nodes.address), **refused(nodes.address)}))
    finally:
        nodes.shutdown()


def placed(folder: Path, address: str) -> dict[str, list[str]]:
    config = make_config(
        folder,
        num_nodes=2,
        num_gpus_per_node=2,
        actor_train__device_mapping=[0, 1],
        reference__device_mapping=[2, 3],
        ray={"address": address},
    )
    manager = ResourceManager(2, 2, address=address)
    try:
        roles = {"actor_train": config.actor_train, "reference": config.reference}
        clusters = {
            name: Cluster(name, None, manager, role, pipeline_config=config)
            for name, role in roles.items()
        }
        import ray

        actors = ray._private.state.actors().values()
        node_of = {actor["Pid"]: actor["Address"]["NodeID"] for actor in actors}
        return {
            name: [node_of[seat.process.pid] for seat in cluster.seats]
            for name, cluster in clusters.items()
        }
    finally:
        manager.close()


def refused(address: str) -> dict[str, object]:
    began = time.monotonic()
    try:
        ResourceManager(3, 2, address=address, timeouts=Timeouts())
    except ConfigError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    return {}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
