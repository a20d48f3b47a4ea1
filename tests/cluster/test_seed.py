"""The cluster of the seed: name, worker class, resource manager, worker config; and a loss of the
user's own."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from rather import ActorWorker, Cluster, DPOConfig, DPOPipeline, ResourceManager
from rather.data.batch import PairLogps
from rather.data.pack import pack
from tests.padded import random_pairs
from tests.tiny import make_config

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


class TwiceTheMargin(ActorWorker):
    """A loss of the user's own."""

    def build_loss(self) -> Any:
        return own_loss


def own_loss(x: PairLogps) -> Any:
    assert x.reference is not None
    margin = (x.policy - x.reference) @ x.policy.new_tensor([1.0, -1.0])
    return 5 - 2 * margin


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DPOConfig:
    folder = tmp_path_factory.mktemp("seed")
    return make_config(folder, actor_train__device_mapping=[0, 1], reference__device_mapping=[2])


def test_seed_000_the_two_clusters(config: DPOConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rather")
    resource_manager = ResourceManager(num_nodes=1, num_gpus_per_node=3)
    try:
        actor_train = Cluster(
            name="actor_train",
            worker_cls="roll.pipeline.dpo.actor_worker.ActorWorker",
            resource_manager=resource_manager,
            worker_config=config.actor_train,
        )
        reference = Cluster(
            name="reference",
            worker_cls="roll.pipeline.dpo.actor_worker.ActorWorker",
            resource_manager=resource_manager,
            worker_config=config.reference,
        )
        for cluster in (actor_train, reference):
            cluster.initialize(total_steps=2)
        batches = pack(random_pairs(6, 60, seed=1), 64, ranks=2)
        known = reference.compute_log_probs(batches)
        first, second = (actor_train.train_step(batches, known).sums["loss"] for _ in range(2))
        assert first == pytest.approx(6 * math.log(2), abs=1e-6)
        assert second != first
        own = Cluster("actor_train", TwiceTheMargin, resource_manager, config.actor_train)
        own.initialize(total_steps=2)
        assert own.train_step(batches, known).sums["loss"] == pytest.approx(6 * 5, abs=1e-4)
    finally:
        resource_manager.close()
    assert "pass pipeline_config=" in caplog.text


def test_seed_000_the_pipeline_makes_its_clusters(config: DPOConfig) -> None:
    pipeline = DPOPipeline(pipeline_config=config)
    try:
        assert isinstance(pipeline.actor_train, Cluster)
        assert isinstance(pipeline.reference, Cluster)
        assert (len(pipeline.actor_train.seats), len(pipeline.reference.seats)) == (2, 1)
    finally:
        pipeline.close()
