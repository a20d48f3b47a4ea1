"""Two machines, as namespaces, under torchrun: they train as one process does, a run folder that
they do not share is refused, and a cut link is reported by name."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from rather.config.load import dump_yaml
from rather.config.schema import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from tests.cluster.namespaces import machines, why_not
from tests.cluster.test_torchrun import config_of
from tests.house.source import ROOT
from tests.tiny import metrics

pytestmark = [pytest.mark.wide, pytest.mark.slow]


def train(config: DPOConfig, folder: Path) -> list[tuple[int, str]]:
    """Return exit code and messages of each of two machines with one rank."""
    file = folder / "dpo.yaml"
    file.write_text(dump_yaml(config))
    with machines(2, folder / "private") as made:
        started = []
        for number, each in enumerate(made):
            launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            launcher += [f"--node-rank={number}", f"--master-addr={made[0].address}"]
            launcher += ["--master-port=29511", "-m", "rather", "train", str(file)]
            environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            started.append(each.start([sys.executable, *launcher], environment, ROOT))
        try:
            said = [each.communicate(timeout=250)[1] for each in started]
        finally:
            for each in started:
                each.kill()
        return [(each.returncode, text) for each, text in zip(started, said, strict=True)]


def test_two_machines_train_as_one_process_and_share_their_run_folder(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    alone = config_of(tmp_path, "alone")
    both = config_of(tmp_path, "both", actor_train__device_mapping=[0, 1])
    assert DPOPipeline(alone).run() == 0
    for code, said in train(both, tmp_path):
        assert code == 0, said
    one, other = ([line["loss"] for line in metrics(c) if "loss" in line] for c in (alone, both))
    assert other == pytest.approx(one, rel=1e-5)


def test_a_run_folder_of_one_machine_is_refused(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    config = config_of(
        tmp_path,
        "apart",
        actor_train__device_mapping=[0, 1],
        output_dir=str(tmp_path / "private" / "output"),
    )
    (first, one), (second, other) = train(config, tmp_path)
    said = one + other  # whichever rank is first reports it for all
    assert first != 0 != second
    assert said.count("is not a folder that all machines share") == 1, said
    assert "-1: No such file or directory" in said  # the name of the second machine


# Joins the others as a run under torchrun does, and then waits for them as in a collective.
RANK = """
import os, sys, threading
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from rather.cluster.host import join_group
from rather.cluster.supervision import Watchdog
from rather.config.schema import Timeouts

address, place = os.environ["MASTER_ADDR"], {"is_master": True, "wait_for_workers": False}
if os.environ["RANK"] == "0":
    agent = dist.TCPStore(address, 29511, **place)
os.environ["MASTER_PORT"] = "29512"
join_group("cpu", "cpu", address, timedelta(seconds=600))
os.environ["MASTER_PORT"] = "29511"
Watchdog(Timeouts(connect=60), Path(os.environ["TMPDIR"]), 2, None).start()
print("started", file=sys.stderr, flush=True)
threading.Event().wait(300)
"""
REPORTED = 60.0  # seconds


def test_both_sides_of_a_cut_link_name_the_other_machine_within_a_minute(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with machines(2, tmp_path / "private") as made:
        own = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": made[0].address, "PYTHONPATH": str(ROOT)}
        ranks = [
            each.start([sys.executable, "-c", RANK], {**own, "RANK": str(number)}, ROOT)
            for number, each in enumerate(made)
        ]
        try:
            for rank in ranks:
                assert rank.stderr is not None
                assert "started\n" in iter(rank.stderr.readline, "")
            made[1].cut()
            began = time.monotonic()
            said = [rank.communicate(timeout=2 * REPORTED)[1] for rank in ranks]
            assert time.monotonic() - began < REPORTED
        finally:
            for rank in ranks:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [5, 5]
    for text, other in zip(said, reversed(made), strict=True):
        assert f"rather: {other.name} ({other.address}) has not answered for 30 s" in text
