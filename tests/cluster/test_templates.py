"""The templates for Slurm and Kubernetes, as far as one machine can tell."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
from pathlib import Path

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


SRUN = """#!/bin/bash
# Stands in for Slurm's srun: runs the command once for each task, on this machine.
tasks=1
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && tasks=${1#*=}; shift; done
trap 'kill -TERM $(jobs -p)' TERM
for ((task = 0; task < tasks; task++)); do "$@" & done
wait; code=$?; wait; exit $code
"""
RECORD = """#!/bin/bash
trap 'echo saved >> "$SLURM_SUBMIT_DIR/calls"; exit 143' TERM
echo "$(basename "$0") $*" "$(stat -c %a "$RAY_AUTH_TOKEN_PATH")" "$RAY_AUTH_MODE" >> "$SLURM_SUBMIT_DIR/calls"
[[ $0 == */ray ]] && exec sleep 600
sleep 600 & wait
"""


def read_lines(pipe: int, count: int) -> list[str]:
    text = b""
    while text.count(b"\n") < count:
        assert select.select([pipe], [], [], 60)[0], text
        text += os.read(pipe, 65536)
    return text.decode().splitlines()


def test_the_slurm_script_runs(tmp_path: Path) -> None:
    """With stand-ins for Slurm's commands: one Ray node per machine, a private token, its signal."""
    stubs = {
        "scontrol": "#!/bin/bash\necho node-a; echo node-b; echo node-c\n",
        "getent": "#!/bin/bash\necho 10.0.0.1 $2\n",
        "srun": SRUN,
        "ray": RECORD,
        "rather": RECORD,
    }
    for name, text in stubs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-c]", "SLURM_JOB_NUM_NODES": "3",
    }  # fmt: skip
    command = ["bash", str(SLURM), "dpo.yaml", "max_steps=5"]
    os.mkfifo(tmp_path / "calls")
    pipe = os.open(tmp_path / "calls", os.O_RDWR)
    with subprocess.Popen(command, env=environment, start_new_session=True) as script:
        try:
            begun = read_lines(pipe, 4)
            os.kill(script.pid, signal.SIGTERM)  # Slurm's signal before the time limit
            assert script.wait(60) == 143
            saved = read_lines(pipe, 1)
        finally:
            os.killpg(script.pid, signal.SIGKILL)
    joins = "ray start --address=10.0.0.1:6379 --block 600 token"
    assert [*sorted(begun), *saved] == [
        "rather train dpo.yaml --address 10.0.0.1:6379 timeouts.connect=120 max_steps=5 600 token",
        joins,
        joins,
        "ray start --head --node-ip-address=10.0.0.1 --port=6379 --include-dashboard=false --block"
        " 600 token",
        "saved",
    ]
    assert not list(tmp_path.glob(".ray-token-*"))
