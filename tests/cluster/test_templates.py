"""The templates for Slurm and Kubernetes, as far as one machine can tell."""

from __future__ import annotations

import re
import shlex
import subprocess

import yaml

from tests.house.source import ROOT
from tests.house.test_pages import commands, options

SLURM = ROOT / "examples" / "slurm" / "train.sbatch"
KUBERNETES = ROOT / "examples" / "kubernetes" / "rayjob.yml"


def assert_known(command: str) -> None:
    words = shlex.split(command)
    train = commands()[words[1]]
    assert {word for word in words if word.startswith("--")} <= options(train), command


def test_the_slurm_script_is_shell_and_starts_a_run() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    found = re.search(r"rather train .*", SLURM.read_text())
    assert found
    assert_known(found[0].removesuffix(" &"))


def test_the_kubernetes_job_asks_for_what_its_config_says() -> None:
    job = yaml.safe_load(KUBERNETES.read_text())
    assert_known(job["spec"]["entrypoint"])
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert (group["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (2, 8)
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
