"""Machines on one machine: Linux namespaces with an address, a hostname, processes and a private
folder of their own. Not a test."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.house.source import ROOT

ANSWERS = 400.0  # seconds of a run, on a busy machine
NETWORK = "10.98.76"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
END_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]
# Mounts of its own hide at the same paths what other machines have there.
SETUP = """
hostname "$1"
mount -t tmpfs -o size=1g tmpfs "$2"
mount -t tmpfs -o size=1g tmpfs /dev/shm
echo ready
sleep infinity & wait  # reaps processes whose parents have ended
"""


def why_not() -> str | None:
    """Return why machines cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    name = f"rather-{os.getpid()}-try"
    try:
        for each in (["add", name], ["exec", name, "unshare", "-ump", "true"], ["del", name]):
            subprocess.run(["ip", "netns", *each], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces cannot be made: {error}"
    return None


@dataclass
class Machine:
    name: str
    address: str
    private: Path  # the same path on all machines, and a folder of its own on each
    switch: str
    port: str  # of the switch
    _first: subprocess.Popen[str] | None = None  # its other processes end with it

    def boot(self) -> None:
        apart = ["--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = [*END_WITH_PARENT, "ip", "netns", "exec", self.name, "unshare", *apart]
        command = [*enter, "sh", "-ec", SETUP, "sh", self.name, str(self.private)]
        self._first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == "ready\n"

    def power_off(self) -> None:
        """End all processes at once, and lose the private folder."""
        if self._first is not None:
            self._first.kill()
            self._first.wait(30)

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        assert self._first is not None
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        enter = ["nsenter", "--target", children.read_text().split()[0]]
        enter += ["--net", "--uts", "--mount", "--pid"]
        enter += END_WITH_PARENT
        own = {**os.environ, **ENVIRONMENT, "TMPDIR": str(self.private), **environment}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen([*enter, *command], env=own, cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    def run(self, *command: str) -> None:
        ended = self.start(command)
        said = ended.communicate(timeout=60)[1]
        assert ended.returncode == 0, said

    def cut(self) -> None:
        """Take the machine off the network."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def slow_down(self, rate: str) -> None:
        """Limit what the machine receives, such as to 2mbit; skip the test if that cannot be."""
        limit = ("tbf", "rate", rate, "burst", "64kb", "latency", "400ms")
        if problem := self._tc("replace", *limit):
            pytest.skip(f"this kernel cannot slow a link: {problem}")

    def mend(self) -> None:
        """Undo both."""
        _ip("-n", self.switch, "link", "set", self.port, "up")
        self._tc("del")

    def _tc(self, do: str, *words: str) -> str:
        command = ["tc", "-n", self.switch, "qdisc", do, "dev", self.port, "root", *words]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        return ended.stderr if ended.returncode else ""


@contextmanager
def machines(number: int) -> Iterator[list[Machine]]:
    """Make so many machines on one network, and remove them; skip the test if that cannot be."""
    if reason := why_not():
        pytest.skip(reason)
    private = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))  # the path of a socket must be short
    stem = f"rather-{os.getpid()}"
    switch = f"{stem}-switch"
    made = [
        Machine(f"{stem}-{i}", f"{NETWORK}.{i + 1}", private, switch, f"port{i}")
        for i in range(number)
    ]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for each in made:
            _ip("netns", "add", each.name)
            peer = ["peer", "name", "eth0", "netns", each.name]
            _ip("-n", switch, "link", "add", each.port, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", each.port, "master", "br0", "up")
            _ip("-n", each.name, "address", "add", f"{each.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", each.name, "link", "set", link, "up")
            each.boot()
        yield made
    finally:
        for each in made:
            each.power_off()
        for name in (*(each.name for each in made), switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(private, ignore_errors=True)


def wait_until(
    condition: Callable[[], object], seconds: float, *running: subprocess.Popen[str]
) -> float:
    """Return the seconds until something is so; fail if it takes longer, or a process ends."""
    began = time.monotonic()
    while True:
        ended = [each for each in running if each.poll() is not None]  # before the last look
        if condition():
            return time.monotonic() - began
        assert not ended, ended[0].communicate()[1]
        assert time.monotonic() < began + seconds, f"nothing within {seconds} s"
        threading.Event().wait(0.05)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
