"""Machines on one machine: Linux namespaces with an address, a hostname and a private folder of
their own. Not a test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.98.76"
# A mount of its own hides at the same path what other machines have there.
SETUP = 'hostname "$1"; mount -t tmpfs tmpfs "$2"; shift 2; exec "$@"'


def why_not() -> str | None:
    """Return why machines cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    name = f"rather-{os.getpid()}-try"
    try:
        for each in (["add", name], ["exec", name, "unshare", "-um", "true"], ["del", name]):
            subprocess.run(["ip", "netns", *each], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces cannot be made: {error}"
    return None


@dataclass(frozen=True)
class Machine:
    name: str
    address: str
    private: Path  # the same path on all machines, and a folder of its own on each
    switch: str
    port: str  # of the switch

    def cut(self) -> None:
        """Take the machine off the network."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], cwd: Path
    ) -> subprocess.Popen[str]:
        enter = ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount"]
        setup = ["sh", "-ec", SETUP, "sh", self.name, str(self.private)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        own = {**os.environ, "TMPDIR": str(self.private), **environment}
        return subprocess.Popen([*enter, *setup, *command], env=own, cwd=cwd, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


@contextmanager
def machines(number: int, private: Path) -> Iterator[list[Machine]]:
    """Make so many machines on one network, and remove them."""
    stem = f"rather-{os.getpid()}"
    switch = f"{stem}-switch"
    made = [
        Machine(f"{stem}-{i}", f"{NETWORK}.{i + 1}", private, switch, f"port{i}")
        for i in range(number)
    ]
    private.mkdir()
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for i, each in enumerate(made):
            _ip("netns", "add", each.name)
            peer = ["peer", "name", "eth0", "netns", each.name]
            _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", *peer)
            _ip("-n", switch, "link", "set", f"port{i}", "master", "br0", "up")
            _ip("-n", each.name, "address", "add", f"{each.address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", each.name, "link", "set", link, "up")
        yield made
    finally:
        for name in (*(each.name for each in made), switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
