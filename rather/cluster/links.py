"""Connections between processes: ports, interfaces, and machines that do not answer.

No torch in here: the process of a device imports this before its environment is set.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rather.errors import WorkerError

SIOCGIFADDR = 0x8915  # Linux: the request for the address of an interface


def use_interface_to(address: str) -> None:
    """Let gloo offer the interface to an address, not what this host's own name resolves to."""
    if name := interface_to(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def join_group(kind: str, device: str, timeout: timedelta, **place: Any) -> None:
    """Join the process group of all ranks, or of those that share a store."""
    import torch
    import torch.distributed as dist

    if kind == "cpu":
        dist.init_process_group("gloo", timeout=timeout, **place)
        return
    torch.cuda.set_device(device)
    place["device_id"] = torch.device(device)  # connects all ranks now, before two exchange tensors
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, **place)


def interface_to(address: str) -> str | None:
    """Return the network interface that leads to an IPv4 address; None if none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))  # finds the route; sends nothing
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if probe.getsockname()[0] == socket.inet_ntoa(found[20:24]):
                    return name
    return None


def connect(name: str, address: str, port: int, seconds: float) -> socket.socket:
    """Return a connection to a process, or raise an error that names it."""
    try:
        return socket.create_connection((address, port), seconds)
    except (OSError, OverflowError) as error:
        raise WorkerError(f"{name} cannot be reached at {address}:{port}: {error}") from error


def connection_problem(address: str, port: int, seconds: float) -> str | None:
    """Return why a port cannot be reached; None if it can."""
    try:
        connect("", address, port, seconds).close()
    except WorkerError as error:
        return str(error.__cause__)
    return None


# --- the links between machines ---


def open_port(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Break a connection if the other machine has not answered for so many seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Silence for a third of the time, then four questions.
    ask = {socket.TCP_KEEPIDLE: seconds / 3, socket.TCP_KEEPINTVL: seconds / 6}
    for option, number in (ask | {socket.TCP_KEEPCNT: 4}).items():
        connection.setsockopt(socket.IPPROTO_TCP, option, max(1, round(number)))


class Link:
    """A connection to another machine, whose kernel is asked whether it is there.

    The kernel also answers for a process that is busy, stopped or in a debugger.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        """The other machine is lost if it has not answered for so many seconds."""
        self.connection, self._silent = connection, False
        connection.setblocking(False)
        keep_alive(connection, seconds)

    @property
    def is_silent(self) -> bool:
        """Return whether the machine does not answer. The end of its process is not silence."""
        try:
            self.connection.recv(1)
        except (BlockingIOError, ConnectionError):
            pass
        except OSError:  # reported once
            self._silent = True
        return self._silent
