"""A local Ray starts: on a busy machine at a later try, and where a script imported Ray
before."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from rather.cluster import cleanup, resources
from rather.cluster.process import Process
from rather.errors import WorkerError

RAYLET = """\
[2026-11-16 06:53:01,100 I 4564 4564] (raylet) main.cc:12: Starting.
[2026-11-16 06:53:03,207 C 4564 4564] (raylet) node_manager.cc:3576:  An unexpected system state \
has occurred. Check failed: status.has_value() Timed out waiting for file /tmp/ray/agent_port_1
"""


@pytest.mark.parametrize(("failures", "starts"), [(3, True), (4, False)])
def test_a_local_ray_has_four_tries_and_quotes_its_raylet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, starts: bool
) -> None:
    import ray

    tried: list[dict[str, Any]] = []
    pauses: list[float] = []
    logs = tmp_path / "ray" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text(RAYLET)
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(resources, "private_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(resources.time, "sleep", pauses.append)

    def init(**options: Any) -> None:
        tried.append(options)
        if len(tried) <= failures:
            raise Exception("The current node timed out during startup")

    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # as it may be set already: no file is made
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if starts:
        assert resources.connected(None, 3, tmp_path) == (ray, True)
    else:
        with pytest.raises(WorkerError, match="did not start in 4 attempts: The current") as found:
            resources.connected(None, 3, tmp_path)
        assert "raylet: status.has_value() Timed out waiting for file" in str(found.value)
        assert "torchrun --nproc-per-node 3 -m rather train" in str(found.value)
    assert len(tried) == 4
    assert pauses == sorted(set(pauses))  # they grow
    ports = [options.pop("_metrics_export_port") for options in tried]
    assert all(ports)  # a free one each time
    assert tried[0] == tried[3]
    assert tried[0]["_temp_dir"] == str(tmp_path / "ray")
    assert tried[0]["resources"] == {resources.SLOT: 3.0}


class FakeProcess:
    """One of Ray's own processes, as subprocess knows it."""

    def __init__(self, code: int | None = None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> resources.LocalRay:
    """A local Ray with two processes, whose watch looks often; an exit of the process is raised."""
    monkeypatch.setattr(resources, "CHECK_START", 0.01)
    monkeypatch.setattr(resources, "RAY_REPORTS", 0.05)
    found = resources.LocalRay(tmp_path / "ray")
    alive: Any = [("gcs_server", FakeProcess()), ("raylet", FakeProcess())]
    found.started = alive
    return found


@pytest.mark.defect("X22")
def test_a_process_of_ray_that_dies_while_ray_waits_is_reported(
    local: resources.LocalRay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray's own call would return after a minute or more, by ending this process with code 1."""
    ended: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(os, "_exit", ended.put)
    with local.watched():
        fake: Any = local.started[0][1]
        fake.code = -9
        assert ended.get(timeout=10) == WorkerError.exit_code
    told = "rather: Ray's process gcs_server died (signal 9) while the run started. Run the same"
    assert capsys.readouterr().err.startswith(told)


@pytest.mark.defect("U18")
def test_the_start_of_a_local_ray_has_a_limit_and_says_that_it_goes_on(
    local: resources.LocalRay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    ended: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(os, "_exit", ended.put)
    monkeypatch.setattr(resources, "STILL_STARTING", 0.02)
    with caplog.at_level("INFO", "rather"), local.watched(0.2):
        assert ended.get(timeout=10) == WorkerError.exit_code
    assert "a local Ray is still starting after" in caplog.text
    assert "rather: a local Ray did not start within 0 s while" in capsys.readouterr().err


@pytest.mark.defect("X22")
def test_what_ray_raises_because_its_raylet_died_is_one_line(local: resources.LocalRay) -> None:
    manager: Any = resources.ResourceManager.__new__(resources.ResourceManager)
    manager._local = local
    fake: Any = local.started[1][1]
    with pytest.raises(ValueError, match="all are alive"), manager._watched():
        raise ValueError("all are alive")
    fake.code = 1
    with (
        pytest.raises(
            WorkerError, match=r"Ray's process raylet died \(exit code 1\) while the run"
        ),
        manager._watched(),
    ):
        raise ValueError("a raw line of Ray")


@pytest.mark.defect("X18")
def test_nothing_with_the_mark_of_a_local_ray_is_left(tmp_path: Path) -> None:
    """Agents have no other parent left once the raylet is dead."""
    script = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"]
    own, other = (
        subprocess.Popen(script, stdout=subprocess.PIPE, env={**os.environ, resources.MARK: name})
        for name in (str(tmp_path), f"{tmp_path}-other")
    )
    for process in (own, other):
        assert process.stdout
        process.stdout.readline()
    resources.LocalRay(tmp_path).kill()
    assert own.wait(10) == -9
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.defect("X18")
def test_a_worker_that_ray_does_not_miss_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = Process.this()
    seats: list[Any] = [
        SimpleNamespace(process=alive, link=None),
        SimpleNamespace(process=replace(alive, started="0"), link=None),
    ]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(wait=lambda refs, **_: ([], refs)))
    manager: Any = SimpleNamespace(
        refuse_without_ray=lambda: None, timeouts=SimpleNamespace(link=9.0)
    )
    calls = resources.RankCalls(manager, seats, ["0", "1"])
    calls.wait()
    assert calls.failures == {}, "Ray has a few seconds to say why"
    monkeypatch.setattr(resources, "RAY_NOTICES", -1.0)
    calls.wait()
    [(rank, failure)] = calls.failures.items()
    assert (rank, failure.kind) == (1, "WorkerLost")


PARENT = """
import os, subprocess, sys
from pathlib import Path
from rather.cluster.cleanup import STARTED, Cleaner
cleaner = Cleaner("RATHER_RAY", Path(sys.argv[1]), "Again.")
if sys.argv[2] == "started":
    cleaner.send(STARTED)
agent = subprocess.Popen(["sleep", "60"], env={**os.environ, "RATHER_RAY": sys.argv[1]})
print(agent.pid, flush=True)
os._exit(1)  # as Ray does
"""


@pytest.mark.parametrize("state", ["starts", "started"])
def test_a_local_ray_is_ended_after_its_driver_was(tmp_path: Path, state: str) -> None:
    """Its error stream is closed by the last process that has it."""
    folder = tmp_path / "ray"
    folder.mkdir()
    command = [sys.executable, "-c", PARENT, str(folder), state]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = "rather: this process was ended while the run started. Again.\n"
    assert ended.stderr == (said if state == "starts" else "")
    assert not folder.exists()
    with suppress(FileNotFoundError):  # its new parent may not have collected it
        assert Path(f"/proc/{int(ended.stdout)}/stat").read_text().split()[2] in "ZX"


def test_a_driver_that_waits_inside_ray_is_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    driver = subprocess.Popen(["sleep", "60"])
    raylet = subprocess.Popen(["true"])
    raylet.wait()
    parent = cleanup.Parent(driver.pid)
    parent.watched["raylet"] = raylet.pid
    monkeypatch.setattr(parent, "listen", lambda seconds: None)
    monkeypatch.setattr(cleanup, "PATIENCE", 0.0)
    cleanup.clean_up_after(parent, resources.MARK, str(tmp_path / "ray"), "Again.")
    assert driver.wait(10) == -9
    told = "rather: Ray's process raylet died while the run started. Again.\n"
    assert capsys.readouterr().err == told


REGISTERS = """
import functools, os, signal, subprocess
from ray._private import services, worker
from rather.cluster.resources import ResourceManager

register, start_raylet = worker.connect, services.start_raylet

@functools.wraps(start_raylet)
def start(*args, **options):
    global raylet
    info = start_raylet(*args, **options)
    raylet = info.process.pid
    return info

def connect(*args, **options):
    os.kill(raylet, signal.SIGSTOP)
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {raylet}"])
    return register(*args, **options)

services.start_raylet, worker.connect = start, connect
ResourceManager(1, 2, platform="cpu")
"""


@pytest.mark.wide
@pytest.mark.defect("X22")
def test_a_raylet_that_dies_while_the_driver_registers_leaves_one_line_and_nothing_else(
    tmp_path: Path,
) -> None:
    """Ray ends the driver itself, with code 1 and its own words."""
    with tempfile.TemporaryDirectory(prefix="x", dir="/tmp") as short:
        environment = {**os.environ, "RAY_TMPDIR": short}
        command = [sys.executable, "-c", REGISTERS]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment
        )
        assert ended.returncode
        [told] = [line for line in ended.stderr.splitlines() if line.startswith("rather: ")]
        assert told.startswith("rather: Ray's process raylet died while the run started. Run the")
        assert not list(Path(short).iterdir())


SCRIPT = """
import os
import ray
from pathlib import Path
from rather.cluster.resources import ResourceManager
from tests.cluster.test_ray_security import LOOPBACK, listening

for _ in range(2):
    manager = ResourceManager(1, 1)
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    found = listening()
    assert found and found <= LOOPBACK, found
    assert ray.get(ray.remote(lambda: 7).options(num_cpus=0).remote()) == 7
    manager.close()
    assert not token.exists()
print("both")
"""


@pytest.mark.wide
@pytest.mark.slow
def test_a_script_may_import_ray_first_and_have_two_of_them() -> None:
    """Ray reads its environment when it is imported: loopback and the token of each run reach it
    all the same."""
    unset = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=unset, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout.split() == ["both"], ended.stderr
