"""A local Ray is private: it listens on loopback, requires its token, and logs no secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import grpc
import pytest

from rather.cluster.cluster import Cluster
from rather.cluster.resources import ResourceManager, _use_token
from rather.cluster.worker import ActorWorker
from rather.errors import WorkerError
from tests.tiny import make_config

pytestmark = pytest.mark.usefixtures("local_ray")
LISTEN = "0A"  # in the kernel's table of connections
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def descendants(root: int) -> set[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:  # it ended meanwhile
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def sockets(pid: int) -> set[str]:
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def listening() -> set[str]:
    """Addresses on which this process and all that it started listen, as the kernel writes them."""
    own = {inode for pid in descendants(os.getpid()) for inode in sockets(pid)}
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return {
        fields[1].partition(":")[0] for fields in lines if fields[3] == LISTEN and fields[9] in own
    }


def test_every_port_is_on_loopback() -> None:
    found = listening()
    assert found
    assert found <= LOOPBACK


def test_the_token_is_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) == 64
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name)
    before = os.umask(0)
    try:
        _use_token(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert (tmp_path / "token").read_text() != file.read_text()
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "method", ["JobInfoGcsService/GetAllJobInfo", "NodeInfoGcsService/GetAllNodeInfo"]
)
def test_a_request_without_the_token_is_refused(method: str) -> None:
    import ray

    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()
    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        ask = channel.unary_unary(f"/ray.rpc.{method}")
        assert ask(b"", timeout=30, metadata=[("authorization", f"Bearer {token}")]) is not None
        for headers in ([], [("authorization", "Bearer " + "0" * 64)], [("authorization", token)]):
            with pytest.raises(grpc.RpcError) as refused:
                ask(b"", timeout=30, metadata=headers)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


OTHER_USER = 65534  # nobody


def test_another_user_cannot_reach_the_files_of_ray() -> None:
    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    assert (session / "sockets" / "raylet").exists()
    above = [folder for folder in session.parents if folder.name.startswith("rather-")]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in above] == [0o700]
    if os.geteuid() == 0:
        child = os.fork()
        if not child:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            try:
                os.rename(session / "sockets" / "raylet", session / "sockets" / "mine")
            except PermissionError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


CANARY = "canary-of-a-worker-0001"


class Leaky(ActorWorker):
    """Says, prints and raises what only its environment should hold."""

    def initialize(self, *args: object, **kwargs: object) -> None:
        self.log.warning("using %s", os.environ["MY_TOKEN"])
        raise ValueError(f"401 for {os.environ['MY_TOKEN']}")


def test_secrets_of_a_worker_are_in_no_log_and_no_argument(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import ray

    path = f"{Leaky.__module__}.{Leaky.__name__}"
    config = make_config(tmp_path, system_envs={"MY_TOKEN": CANARY}, reference__worker_cls=path)
    manager = ResourceManager(1, 1)
    try:
        made = Cluster("reference", path, manager, config.reference, pipeline_config=config)
        with pytest.raises(WorkerError, match=r"ValueError: 401 for \[hidden\]"):
            made.initialize(1)
        arguments = b"".join(
            Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())
        )
    finally:
        manager.close()
    assert b"ray::" in arguments
    assert CANARY.encode() not in arguments
    assert "using [hidden]" in caplog.text
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    files = [
        file
        for folder in (session / "logs", tmp_path)
        for file in folder.rglob("*")
        if file.is_file()
    ]
    assert files
    assert not [file for file in files if CANARY.encode() in file.read_bytes()]
