"""The Containerfile: what it says, and its steps in a clean Debian.

The second needs root, a network, and a clean root folder in RATHER_CLEAN_ROOT, which it copies:
`debootstrap --variant=minbase bookworm FOLDER`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.release.container import CONTAINERFILE, Container, instructions
from tests.release.tool import release


def test_it_ends_as_a_user_with_a_volume_for_caches() -> None:
    steps = instructions(CONTAINERFILE.read_text(encoding="utf-8"))
    named = dict(steps)  # the last of each kind
    assert named["USER"] == "rather"
    assert named["VOLUME"] == "/cache"
    assert named["ENTRYPOINT"] == '["rather"]'
    assert [name for name, _ in steps].index("USER") > max(
        number for number, (name, _) in enumerate(steps) if name == "RUN"
    )
    assert all(hasattr(Container, f"do_{name.lower()}") for name, _ in steps)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = {word for name, rest in steps if name == "COPY" for word in rest.split()[:-1]}
    assert ignored == ["*", *(f"!{word}" for word in sorted(copied))]


def test_both_devices_are_built_by_one_step_and_others_are_refused(tmp_path: Path) -> None:
    """The step that installs, with stand-ins for the programs it calls."""
    steps = instructions(CONTAINERFILE.read_text(encoding="utf-8"))
    script = [rest for name, rest in steps if name == "RUN"][-1]
    script = script.replace("/tmp/rather", str(tmp_path / "rather"))
    for name in ("python3", "pip"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)

    def build(**arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "rather").mkdir(exist_ok=True)
        shutil.copy(ROOT / "constraints.txt", tmp_path / "rather")
        (tmp_path / "rather" / "rather-1-py3-none-any.whl").touch()
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.run(
            ["/bin/sh", "-c", script],
            env={"PATH": path, "EXTRAS": "ray", **arguments},
            capture_output=True,
            text=True,
            check=False,
        )

    torch = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if "torch==" in line
    ]
    cuda = build(DEVICE="cuda").stdout.splitlines()
    assert cuda[1].endswith(f"constraints.txt {torch[0]}")
    assert cuda[2].endswith("rather-1-py3-none-any.whl[ray]")
    assert not (tmp_path / "rather").exists()
    cpu = build(DEVICE="cpu", CPU_INDEX="an-index").stdout.splitlines()
    assert cpu[1].endswith(f"{torch[0]}+cpu --extra-index-url an-index")
    assert "DEVICE=cpu needs --build-arg CPU_INDEX=URL" in build(DEVICE="cpu").stderr
    assert "DEVICE must be cuda or cpu (got tpu)" in build(DEVICE="tpu").stderr


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Container:
    clean = os.environ.get("RATHER_CLEAN_ROOT")
    if not clean or os.geteuid():
        pytest.skip("needs root, and RATHER_CLEAN_ROOT: a folder made by debootstrap")
    context = tmp_path_factory.mktemp("context")
    wheel, _ = release.build_and_check(ROOT, context / "dist")
    shutil.copy(ROOT / "constraints.txt", context)
    # Steps take packages from this folder, so that pip's settings of this machine need not be copied.
    wheels = context / "wheels"
    command = [sys.executable, "-m", "venv", str(context / "venv")]
    subprocess.run(command, check=True)
    command = [str(context / "venv/bin/python"), "-m", "pip", "wheel", "-q", "-w", str(wheels)]
    constraints = ["-c", str(context / "constraints.txt")]
    subprocess.run([*command, *constraints, f"{wheel}[ray,report]"], check=True)
    root = context / "root"
    subprocess.run(["cp", "-a", clean, str(root)], check=True)
    container = Container(root, {"DEVICE": "cpu", "CPU_INDEX": "unused", "EXTRAS": "ray,report"})
    container.binds = [wheels]
    container.arguments |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    container.build(CONTAINERFILE.read_text(encoding="utf-8"), context)
    return container


@pytest.mark.wide
def test_the_steps_run_in_a_clean_root(container: Container) -> None:
    started = container.start("--version")
    assert started.stdout == f"rather {release.read_version(ROOT)}\n", started.stderr
    demo = container.start("demo")
    assert demo.returncode == 0, demo.stdout[-2000:] + demo.stderr[-2000:]
    model = container.root / "data" / "rather-demo" / "output" / "demo" / "model"
    assert (model / "model.safetensors").stat().st_uid == 1000
    assert (container.root / "cache" / "state").is_dir()
    assert not (container.root / "tmp" / "rather").exists()
    assert container.sh("touch /venv/x", container.variables).returncode != 0
