"""determinism: canonical gives the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from rather.config.schema import TrainingArgs
from rather.data.batch import PairFacts
from rather.data.pack import pack
from rather.errors import ConfigError
from rather.losses.metrics import Window
from rather.optim.optimizer import Optimizer
from rather.parallel.canonical import LANES, WHOLE_VECTORS, Canonical, RowOptimizer, rows_of
from rather.parallel.mesh import Mesh
from rather.pipeline.pipeline import DPOPipeline
from rather.train.rank_trainer import RankTrainer
from tests.cells import cells
from tests.same.canonical import BUDGET, Outcome, Setup, make_loss, make_policy, pairs_of, whole
from tests.same.pool import pool
from tests.tiny import make_config, metrics

SETUP = Setup(steps=4, lr=1e-3, layers=4)
SAVED_AFTER = 2


def make(setup: Setup, *, by_rows: bool) -> RankTrainer:
    torch.set_num_threads(1)
    mesh = Mesh.build(replicate=dist.get_world_size()) if dist.is_initialized() else Mesh()
    policy = make_policy(setup)
    args = TrainingArgs(learning_rate=setup.lr, weight_decay=0.1)
    options: dict[str, Any] = {"schedule": lambda _: setup.lr, "max_grad_norm": 1.0}
    if by_rows:
        optimizer: Optimizer = RowOptimizer(dict(policy.named_parameters()), mesh, args, **options)
    else:
        optimizer = Optimizer(policy.named_parameters(), args, **options)
    return RankTrainer(
        policy, make_loss(setup), optimizer, mesh=mesh, runner=Canonical(policy, mesh, "cpu")
    )


def train(trainer: RankTrainer, setup: Setup, first: int = 0, last: int | None = None) -> Outcome:
    """Steps packed alike for any number of ranks."""
    outcome, mesh = Outcome([], [], [], {}), trainer.mesh
    for pairs in pairs_of(setup)[first:last]:
        batches = pack(pairs, BUDGET, ranks=LANES)
        facts = PairFacts.of_step(batches)
        own = batches[mesh.rank("dp") :: mesh.size("dp")]
        result = trainer.train_step(own, {"sum": facts.length * -4.2}, facts)
        window = Window()
        window.add(result.sums, pairs=len(pairs), tokens=1)
        outcome.losses.append(window.means()["loss"])
        outcome.grad_norms.append(result.grad_norm)
        outcome.logps.append(result.policy)
    outcome.weights = {name: p.detach().clone() for name, p in trainer.policy.named_parameters()}
    return outcome


def run(loss: str, by_rows: bool) -> Outcome:
    setup = Setup(losses=(loss,), steps=SETUP.steps, lr=SETUP.lr, layers=SETUP.layers)
    return train(make(setup, by_rows=by_rows), setup)


def assert_equal(got: Outcome, expected: Outcome) -> None:
    assert got.losses == expected.losses
    assert got.grad_norms == expected.grad_norms
    assert all(map(torch.equal, got.logps, expected.logps))
    assert all(torch.equal(got.weights[name], weight) for name, weight in expected.weights.items())


@pytest.mark.parametrize("loss", cells(["sigmoid", "aot"], keep=["sigmoid"]))
def test_one_two_and_four_ranks_give_the_same_bits(loss: str) -> None:
    expected = run(loss, by_rows=False)
    for by_rows in (False, True):
        for got in (*pool(2).run(run, loss, by_rows), *pool(4).run(run, loss, by_rows)):
            assert_equal(got, expected)


# --- zero1 ---


def saved(by_rows: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Pieces of model and optimizer after some steps, and the other groups."""
    trainer = make(SETUP, by_rows=by_rows)
    train(trainer, SETUP, 0, SAVED_AFTER)
    groups, numbers = trainer.state()
    return groups["model"], groups["optimizer"], {"rng": groups["rng"], "numbers": numbers}


def resumed(model: dict[str, Any], moments: dict[str, Any], others: dict[str, Any]) -> Outcome:
    trainer = make(SETUP, by_rows=dist.is_initialized())
    trainer.load_state(
        {"model": model, "optimizer": moments, "rng": others["rng"]}, others["numbers"]
    )
    return train(trainer, SETUP, SAVED_AFTER)


def test_each_rank_has_the_moments_of_its_rows_and_all_can_be_resumed_elsewhere() -> None:
    model, moments, others = saved(by_rows=False)
    parts = pool(2).run(saved, True)
    for got, expected in (
        (whole([part[0] for part in parts]), model),
        (whole([part[1] for part in parts]), moments),
    ):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    held = [sum(piece.tensor.numel() for piece in part[1].values()) for part in parts]
    assert max(held) < 0.55 * sum(held)
    expected = resumed(model, moments, others)
    for outcome in pool(4).run(resumed, model, moments, others):
        assert_equal(outcome, expected)


@pytest.mark.parametrize("shape", [(63, 32), (64,), (300,), (7, 5), (128, 3), (1, 64)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_begin_at_whole_vectors_and_make_up_the_parameter(
    shape: tuple[int, ...], ranks: int
) -> None:
    places = [rows_of(shape, rank, ranks) for rank in range(ranks)]
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [tensor[place.slices] for place in places]
    assert torch.equal(torch.cat(parts), tensor)
    assert all(int(part.flatten()[0]) % WHOLE_VECTORS == 0 for part in parts if part.numel())


# --- whole runs ---

TIMES = ("pairs_per_second", "tokens_per_second", "time/reference", "time/train", "time/wait")


def run_config(folder: Path, devices: int, strategy: str) -> DPOConfig:
    """Several ragged micro-batches, a smaller last step, evaluation, a reference that moves and is
    asked anew."""
    return make_config(
        folder,
        exp_name=f"{strategy}-{devices}",
        determinism="canonical",
        train_batch_size=12,
        max_steps=5,
        save_steps=3,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        actor_train__device_mapping=list(range(devices)),
        actor_train__strategy_args={"strategy_name": strategy},
        actor_train__training_args={"learning_rate": 1e-3},
        actor_train__max_tokens_per_microbatch_in_train=64,
        actor_train__max_tokens_per_microbatch_in_infer=100,
    )


def assert_same_bits(config: DPOConfig, expected: DPOConfig) -> None:
    """In every metric but those of time, and in every weight of the exported model."""
    told = [
        [{k: v for k, v in line.items() if k not in TIMES} for line in metrics(c)]
        for c in (config, expected)
    ]
    assert told[0] == told[1]
    assert len(told[0]) > 5
    exported = [
        load_file(each.run_dir / "model" / "model.safetensors") for each in (config, expected)
    ]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(exported[0][name], weight) for name, weight in exported[1].items())


def as_torchrun_does(config: DPOConfig) -> int:
    """One process of a run that torchrun started; the pool's group stands for the one that it would
    join."""
    place = {
        "RANK": dist.get_rank(),
        "LOCAL_RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
    }
    environment = {
        "TORCHELASTIC_RUN_ID": "test",
        **{name: str(number) for name, number in place.items()},
    }
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        return DPOPipeline(config).run()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("canonical")


@pytest.mark.parametrize("strategy", cells(["ddp", "zero1"], keep=["zero1"]))
def test_runs_on_one_two_and_four_workers_write_the_same_bits(folder: Path, strategy: str) -> None:
    alone = run_config(folder, 1, strategy)
    assert DPOPipeline(alone).run() == 0
    for devices in (2, 4):
        config = run_config(folder, devices, strategy)
        assert set(pool(devices).run(as_torchrun_does, config)) == {0}
        assert_same_bits(config, alone)


def test_every_worker_has_as_many_threads_as_configured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    told = run_config(folder, 1, "ddp").model_copy(update={"system_envs": {"OMP_NUM_THREADS": "3"}})
    for config in (run_config(folder, 1, "ddp"), told):
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        ActorWorker(config, "actor_train")._prepare_process()
    assert asked == [1, 3]


def test_micro_batches_that_do_not_fit_are_not_split(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(folder, 1, "ddp").model_copy(update={"exp_name": "large"})

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(RankTrainer, "train_step", full)
    with pytest.raises(
        ConfigError, match=r"determinism: .*max_tokens_per_microbatch_in_train to less"
    ):
        DPOPipeline(config).run()


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model_args\.dtype"):
        Canonical(make_policy(SETUP).half(), Mesh(), "cpu")
    with pytest.raises(ConfigError, match="1, 2 or 4 devices"):
        Canonical(make_policy(SETUP), Mesh({"tp": 2}), "cpu")
