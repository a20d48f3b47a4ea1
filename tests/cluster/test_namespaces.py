"""Two machines, as namespaces, under torchrun: they train as one process does, and a run folder
that they do not share is refused."""

from __future__ import annotations

import sys
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
