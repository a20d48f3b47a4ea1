"""Two machines of two ranks each, as namespaces, under torchrun: they train as one process does,
resume after one was lost, and report by name what is wrong with a machine."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rather.config.load import dump_yaml
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.cluster.compare import assert_close, assert_same
from tests.cluster.namespaces import ANSWERS, Machine, machines, wait_until
from tests.cluster.test_torchrun import config_of
from tests.faults import inject

pytestmark = [pytest.mark.wide, pytest.mark.slow]


def run_of(folder: Path, name: str, **changes: Any) -> DPOConfig:
    return config_of(folder, name, actor_train__device_mapping=[0, 1, 2, 3], **changes)


def start(made: list[Machine], config: DPOConfig, fault: str = "") -> list[subprocess.Popen[str]]:
    """Start two ranks on each machine."""
    file = Path(config.logging_dir).parent / f"{config.exp_name}.yaml"
    file.write_text(dump_yaml(config))
    started = []
    for number, each in enumerate(made):
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        launcher += [f"--node-rank={number}", f"--master-addr={made[0].address}"]
        launcher += ["--master-port=29511", "-m", "rather", "train", str(file)]
        if fault:
            launcher.append(f"--import={inject.plugin(fault, config.run_dir)}")
        started.append(each.start([sys.executable, *launcher]))
    return started


def train(made: list[Machine], config: DPOConfig) -> list[tuple[int, str]]:
    """Return exit code and messages of each machine."""
    started = start(made, config)
    said = [each.communicate(timeout=ANSWERS)[1] for each in started]
    return [(each.returncode, text) for each, text in zip(started, said, strict=True)]


def test_machines_train_as_one_process_also_over_a_slow_link(tmp_path: Path) -> None:
    alone = config_of(tmp_path, "alone")
    both, slow = (run_of(tmp_path, name) for name in ("both", "slow"))
    assert DPOPipeline(alone).run() == 0
    with machines(2) as made:
        for config in (both, slow):
            for code, said in train(made, config):
                assert code == 0, said
            made[1].slow_down("2mbit")
    assert_close(alone, both)
    assert_same(both, slow)


def test_a_machine_that_is_lost_at_a_random_step_is_replaced_with_the_same_bits(
    tmp_path: Path,
) -> None:
    draw = random.Random(0)
    step, victim = draw.randint(2, 8), draw.randint(0, 1)
    clean, struck = (run_of(tmp_path, name, max_steps=8) for name in ("clean", "struck"))
    fault = f"step={step},phase=backward,role=actor_train,rank={2 * victim},kind=hang"
    with machines(2) as made:
        for code, said in train(made, clean):
            assert code == 0, said
        started = start(made, struck, fault)
        markers = struck.run_dir / inject.MARKERS
        wait_until(lambda: any(markers.glob("*kind=hang")), ANSWERS, *started)
        made[victim].power_off()
        said = started[1 - victim].communicate(timeout=ANSWERS)[1]
        assert started[1 - victim].returncode != 0, said
        made[victim].boot()
        for code, said in train(made, struck):
            assert code == 0, said
    assert_same(clean, struck)


def test_a_run_folder_of_one_machine_is_refused(tmp_path: Path) -> None:
    with machines(2) as made:
        config = run_of(tmp_path, "apart", output_dir=str(made[0].private / "output"))
        (first, one), (second, other) = train(made, config)
    said = one + other  # whichever rank is first reports it for all
    assert first != 0 != second
    assert said.count("is not a folder that all machines share") == 1, said
    assert f"{made[1].name}: No such file or directory" in said


# Joins the others as a run under torchrun does, and then waits for them as in a collective.
RANK = """
import os, sys, threading
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from rather.cluster.links import join_group, use_interface_to
from rather.cluster.supervision import Watchdog
from rather.config.schema import Timeouts

address, place = os.environ["MASTER_ADDR"], {"is_master": True, "wait_for_workers": False}
if os.environ["RANK"] == "0":
    agent = dist.TCPStore(address, 29511, **place)
os.environ["MASTER_PORT"] = "29512"
use_interface_to(address)
join_group("cpu", "cpu", timedelta(seconds=600))
os.environ["MASTER_PORT"] = "29511"
Watchdog(Timeouts(connect=60), Path(os.environ["TMPDIR"]), 2, None).start()
print("started", file=sys.stderr, flush=True)
threading.Event().wait(300)
"""
LIMIT = 600.0  # seconds


def test_both_sides_of_a_cut_link_name_the_other_machine() -> None:
    with machines(2) as made:
        own = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own["MASTER_ADDR"] = made[0].address
        ranks = [
            each.start([sys.executable, "-c", RANK], RANK=str(number), **own)
            for number, each in enumerate(made)
        ]
        for rank in ranks:
            assert rank.stderr is not None
            assert "started\n" in iter(rank.stderr.readline, "")
        made[1].cut()
        said = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [5, 5]
    for text, other in zip(said, reversed(made), strict=True):
        assert f"rather: {other.name} ({other.address}) has not answered for 30 s" in text
