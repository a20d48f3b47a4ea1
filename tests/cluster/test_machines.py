"""What several machines need, as far as one process can show it: without Ray, devices or a second
machine."""

from __future__ import annotations

import errno
import os
import pickle
import select
import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rather.cluster import group, host, launch, links, resources, worker, writer
from rather.cluster.group import RankInfo
from rather.cluster.host import Host
from rather.cluster.launch import Roles
from rather.cluster.links import Link, connection_problem
from rather.cluster.memory import Ledger, Need, Room
from rather.cluster.preflight import refuse_private_folder, refuse_unlike_cpus
from rather.cluster.process import Process
from rather.cluster.resources import ResourceManager, Seat
from rather.cluster.worker import ActorWorker
from rather.config.run_config import DPOConfig
from rather.config.schema import Timeouts
from rather.data.batch import Columns
from rather.data.shares import Batches
from rather.errors import ConfigError, WorkerError, WorkerLost
from rather.losses.objective import from_config
from rather.parallel import tensor
from rather.parallel.load import cpu_has_bf16
from rather.parallel.mesh import Mesh
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.reference_stream import ReferenceStream
from rather.pipeline.steps import Packing, Step
from rather.pipeline.timeline import Timeline
from rather.reference.logps import ReferenceLogps
from rather.train.rank_trainer import StepResult
from tests.reference.test_cache import some_pairs
from tests.tiny import make_config


class OnGpu(torch.Tensor):
    """A tensor that a process without a GPU cannot open."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("attempting to deserialize object on a CUDA device")

    def cpu(self, *_: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float64).as_subclass(OnGpu)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host in this process, whose environment is given back."""
    monkeypatch.setattr(host, "end_with_others", lambda _driver: None)
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    return Host({"A": "1"}, 1, Process.this())


# --- what travels ---


def test_tensors_leave_a_worker_on_the_cpu(process: Host) -> None:
    result = StepResult({}, on_gpu(3, 2), 1.0, 0.1, None, None)
    process.workers["actor_train"] = SimpleNamespace(  # type: ignore[assignment]
        compute_log_probs=lambda: {"sum": on_gpu(3, 2)}, train_step=lambda: result
    )
    for method in ("compute_log_probs", "train_step"):
        answer = pickle.loads(pickle.dumps(process.call("actor_train", method, ())))
    assert torch.equal(answer.policy, torch.ones(3, 2).double())


def two_drivers(
    config: DPOConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.Tensor], list[ReferenceStream], list[list[list[int]]], list[None]]:
    """The messages of the first driver, which the second gets in their order, and what each asks
    its model for. The last list is filled when the second one begins."""
    sent: list[torch.Tensor] = []
    follows: list[None] = []
    streams, seen = [], []
    objective = from_config(config)
    for rank in range(2):
        asked: list[list[int]] = []

        def compute(batches: Batches, asked: list[list[int]] = asked) -> Columns:
            asked += [batch.pair_P.tolist() for batch in batches]
            return {"sum": on_gpu(sum(len(batch.pair_P) for batch in batches), 2)}

        model: Any = SimpleNamespace(compute_log_probs=compute, device="cpu")
        roles = Roles(model, model, "cpu", rank=rank, drivers=2)
        retry: Any = SimpleNamespace(
            packing=Packing(config.actor_train, config.reference, "cpu"),
            run=lambda _use, step, work: work(step.reference),
        )
        source: Any = SimpleNamespace(total_steps=1)
        stream = ReferenceStream(config.reference, roles, Timeline(in_turn=True), retry)
        stream.use_cache(source, objective, partial(ReferenceLogps, config, objective))
        stream._loaded = True
        streams.append(stream)
        seen.append(asked)

    replayed = iter(sent)

    def exchange(numbers: torch.Tensor, src: int) -> None:
        if follows:
            numbers.copy_(next(replayed))
        else:
            sent.append(numbers.clone())

    monkeypatch.setattr(launch.dist, "broadcast", exchange)
    return sent, streams, seen, follows


@pytest.mark.parametrize("cache", [{}, {"enabled": False}])
def test_under_torchrun_a_step_is_named_by_the_numbers_of_its_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: dict[str, bool]
) -> None:
    config = make_config(tmp_path, reference__cache=cache)
    sent, (first, second), (asked, followed), follows = two_drivers(config, monkeypatch)
    pairs = some_pairs(range(8))
    step = Step(pairs, [], Batches(pairs, 48))
    columns = first.columns(step)
    assert columns is not None
    follows.append(None)
    found = second.columns(step)
    assert found is not None
    assert torch.equal(found["sum"], columns["sum"].as_subclass(torch.Tensor))
    assert asked == followed != []
    assert type(found["sum"]) is torch.Tensor
    assert len(sent) == 2
    assert {len(message) for message in sent} == {1 + len(columns) * 2 * len(pairs)}


# --- where ---


def test_ranks_meet_at_a_port_of_the_process_that_started_them() -> None:
    manager = ResourceManager.__new__(ResourceManager)
    manager.timeouts, manager.kind, manager._groups, manager._local = Timeouts(), "cpu", {}, None
    address = "127.0.0.1"
    manager._ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: address))
    manager._all = lambda refs, *_: list(refs)  # type: ignore[method-assign]
    joined: list[tuple[Any, ...]] = []
    handle = SimpleNamespace(
        connection_problem=SimpleNamespace(remote=connection_problem),
        join=SimpleNamespace(remote=lambda *place: joined.append(place)),
    )
    same: Any = (Process("same-name", 1, "", ""), 1, None)
    seats = [Seat(handle, "node", address, *same)] * 2
    manager._seats = {(0, 1): seats}
    for _ in range(2):  # they are in a group once
        manager.introduce([0, 1])
    port, limit = manager._groups[0, 1].port, 60 + manager.timeouts.longest
    assert joined == [(rank, 2, address, port, limit, "cpu") for rank in range(2)]
    handle.connection_problem.remote = lambda *_: "timed out"
    with pytest.raises(
        WorkerError,
        match=r"device 1 on .+ cannot reach the process that started it at .+ timed out",
    ):
        manager.open_store(seats)


@pytest.mark.parametrize("deaths", [2, 3])
def test_processes_that_die_while_they_start_are_started_again(
    deaths: int, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.exceptions import ActorDiedError

    manager, starts = ResourceManager.__new__(ResourceManager), 0
    manager._cluster, manager.devices, manager._seats = "this machine", 1, {}

    def get(*_: Any, **__: Any) -> list[str]:
        if starts <= deaths:
            raise ActorDiedError
        return ["started"]

    def start(*_: Any) -> list[Any]:
        nonlocal starts
        starts += 1
        return manager._all([], "start a process", 1.0)

    manager._ray, manager._start = SimpleNamespace(get=get), start  # type: ignore[assignment, method-assign]
    manager._link = list  # type: ignore[method-assign, assignment]
    if deaths == 3:
        with pytest.raises(WorkerLost, match="this machine: could not start a process"):
            manager.seats([0], {})
        assert manager._seats == {}
        return
    assert manager.seats([0], {}) == ["started"]
    assert "starting again (3 of 3)" in caplog.text


@pytest.mark.parametrize("dies", [False, True])
def test_the_process_that_does_not_start_is_named_with_its_machine(dies: bool) -> None:
    """Of two: the first has started and the second is late, or the first is late and it dies."""
    from ray.exceptions import ActorDiedError, GetTimeoutError

    ends = {"a": GetTimeoutError, "b": ActorDiedError} if dies else {"b": GetTimeoutError}
    manager = ResourceManager.__new__(ResourceManager)
    manager._cluster = "the Ray cluster at 10.0.0.1:6379"

    def get(asked: Any, **_: Any) -> None:
        if error := ends.get("b" if isinstance(asked, list) else asked):
            raise error

    manager._ray = SimpleNamespace(get=get)
    kind, why = (WorkerLost, "") if dies else (WorkerError, "timed out after 3 s$")
    with pytest.raises(kind, match=rf"^device 1 on b: could not start: {why}"):
        manager._all(["a", "b"], "start", 3.0, ["device 0 on a", "device 1 on b"])


def test_nodes_that_are_missing_are_refused_with_the_arithmetic() -> None:
    manager = ResourceManager.__new__(ResourceManager)
    manager.num_nodes, manager.num_gpus_per_node, manager.devices = 3, 2, 6
    manager.kind, manager._resource, manager.cut_off = "cpu", resources.SLOT, set()
    manager._cluster, manager.timeouts = "the Ray cluster", Timeouts(connect=0.01)
    nodes = [{"Alive": True, "NodeID": name, "Resources": {resources.SLOT: 2.0}} for name in "ab"]
    manager._ray = SimpleNamespace(nodes=lambda: nodes)
    with pytest.raises(ConfigError) as refused:
        manager._reserve()
    for text in (
        "num_nodes 3 x num_gpus_per_node 2 = 6 CPU workers (rather_slot) are requested",
        "has 2 + 2 on 2 nodes, so 2 of 3 nodes have 2: 1 missing",
    ):
        assert text in str(refused.value)


def test_a_link_is_silent_if_the_kernel_of_the_other_machine_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Link(socket.create_connection(server.getsockname()[:2]), seconds=30)
        own, other = link.connection, server.accept()[0]
        asks = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert [own.getsockopt(socket.IPPROTO_TCP, each) for each in asks] == [10, 5, 4]
        assert not link.is_silent
        other.close()  # its process has ended, which is reported in another way
        select.select([own], [], [], 5)
        assert not link.is_silent
        own.close()
    answers: list[Any] = [OSError(errno.EHOSTUNREACH, ""), BlockingIOError()]

    def recv(_: int) -> bytes:
        raise answers.pop(0)

    link.connection = SimpleNamespace(recv=recv)  # type: ignore[assignment]
    assert link.is_silent
    assert link.is_silent  # also when it is asked again


def test_the_driver_is_linked_to_each_other_machine_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = ResourceManager.__new__(ResourceManager)
    manager.timeouts, manager._server = Timeouts(connect=0.5), "10.0.0.1:6379"
    manager._all = lambda asked, *_: list(asked)  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = {"127.0.0.1": server.getsockname()[1], "192.0.2.1": 9}  # the second is nowhere
        handle = SimpleNamespace(listen=SimpleNamespace(remote=ports.__getitem__))
        here, room = Process.this(), Room("m", 0, 0, 0)
        there = replace(here, kernel="of another machine")
        nodes = [("own", "127.0.0.1", here), *[("b", "127.0.0.1", there)] * 2]
        nodes.append(("c", "192.0.2.1", there))
        seats = [
            Seat(handle, name, address, process, device, room)
            for device, (name, address, process) in enumerate(nodes)
        ]
        linked = [seat.link is not None for seat in manager._link(seats)]
    assert linked == [False, True, False, False]
    assert "device 3 on" in caplog.text
    assert "cannot be reached at 192.0.2.1:9" in caplog.text


def test_a_machine_of_the_same_name_is_another_machine() -> None:
    this = Process.this()
    assert this.is_here
    elsewhere = replace(this, pid=1 << 30, kernel="of another machine")
    assert not elsewhere.is_here
    assert not elsewhere.is_gone  # a worker would end with its driver


@pytest.mark.parametrize(
    ("near", "master", "expected"), [(2, "somewhere", "lo"), (1, "127.0.1.1", "outside")]
)
def test_gloo_uses_the_interface_that_leads_to_the_others(
    process: Host,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    near: int,
    master: str,
    expected: str,
) -> None:
    """A machine may resolve its own name to loopback, where the others cannot reach it."""
    routes = {"127.0.0.1": "lo", "127.0.1.1": "lo", "192.0.2.1": "outside"}
    assert links.interface_to("127.0.0.1") == "lo"
    for module in (links, group):
        monkeypatch.setattr(module, "interface_to", routes.get)
    del os.environ["PYTORCH_ALLOC_CONF"]  # as if nobody had set it yet
    sizes = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(near)}
    os.environ.update(sizes, MASTER_ADDR=master)
    seen: dict[str, str] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.update(os.environ))
    config = make_config(tmp_path, actor_train__device_mapping=[0, 1])
    member, _ = group.join_ranks(config, {"actor_train": config.actor_train}, ExitStack())
    assert seen["GLOO_SOCKET_IFNAME"] == expected
    assert member == RankInfo(0, 2, "cpu", near)
    assert "expandable_segments" in seen["PYTORCH_ALLOC_CONF"]  # read at the first use of a GPU


def test_the_allocator_is_set_before_a_process_uses_its_gpu(process: Host) -> None:
    assert os.environ["A"] == "1"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_torchrun_uses_the_devices_that_the_config_names(
    process: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    joined: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **place: joined.update(place))
    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost")
    config = make_config(tmp_path, actor_train__device_mapping=[4, 6])
    assert (
        group.join_ranks(config, {"actor_train": config.actor_train}, ExitStack())[0].device
        == "cuda:6"
    )
    assert joined["device_id"] == torch.device("cuda:6")
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    config = make_config(
        tmp_path, num_nodes=2, num_gpus_per_node=4, actor_train__device_mapping=[0, 5]
    )
    assert (
        group.join_ranks(config, {"actor_train": config.actor_train}, ExitStack())[0].device
        == "cuda:1"
    )


# --- groups and twins ---


def test_all_ranks_of_a_group_call_it_before_two_of_them_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[Any] = []
    dist.init_process_group("fake", rank=0, world_size=24, store=FakeStore())
    try:
        reduce = dist.all_reduce
        monkeypatch.setattr(
            dist,
            "all_reduce",
            lambda x, **given: (called.append(given["group"]), reduce(x, **given)),
        )
        mesh = Mesh.build(pp=3, replicate=2, shard=2, tp=2)
    finally:
        dist.destroy_process_group()
    assert mesh.groups.keys() == {"pp", "replicate", "shard", "tp", "dp"}
    assert called == list(mesh.groups.values())


def test_twins_are_compared_on_the_devices_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group of NCCL alone moves no tensor of a CPU; `meta` stands in for a GPU."""
    from transformers import AutoConfig

    kinds: set[str] = set()

    def split(policy: Any, *_: Any, **__: Any) -> None:
        kinds.update(parameter.device.type for parameter in policy.parameters())
        raise ConfigError("seen")

    monkeypatch.setattr(tensor, "split_model", split)
    group: Any = SimpleNamespace(group_name="tp")
    mesh = Mesh({"tp": 2}, {"tp": 0}, {"tp": group}, "meta")
    config = AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ConfigError, match="seen"):
        tensor.check_split(config, mesh)
    assert kinds == {"meta"}


# --- folders, keys and memory ---


def test_memory_is_counted_by_machine_also_if_two_have_one_name() -> None:
    need = Need(0.0, 6.0, 6.0, "weights")
    apart = [Room("node", device, 8, 0, kernel=f"kernel {device}") for device in range(2)]
    Ledger().add("actor_train", need, apart)
    together = [room._replace(kernel="one") for room in apart]
    with pytest.raises(ConfigError, match=r"memory: node has .+: 2 x actor_train weights"):
        Ledger().add("actor_train", need, together)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_cpus_that_store_bf16_in_another_way_are_refused_with_their_names(
    tmp_path: Path, dtype: str
) -> None:
    args = make_config(tmp_path, actor_train__model_args={"dtype": dtype}).actor_train.model_args
    own = Room("own", 0, 1 << 40, 0, bf16=cpu_has_bf16())
    rooms = [own, own._replace(machine="other", bf16=not own.bf16)]
    if dtype == "fp32":
        refuse_unlike_cpus("actor_train", args, "cpu", rooms)
        return
    with pytest.raises(ConfigError, match=r"actor_train.model_args.dtype: bf16 .+: other and "):
        refuse_unlike_cpus("actor_train", args, "cpu", rooms)


def test_the_trial_folder_of_a_killed_rank_is_removed_by_the_next_start(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_steps=1)
    folders: list[Path] = []

    def remember(folder: Path) -> list[str | None]:
        folders.append(folder)
        return []

    refuse_private_folder(config.run_dir, remember)
    folders[0].mkdir()  # as if the first rank had been killed before it removed it
    assert DPOPipeline(config).run() == 0
    assert not folders[0].exists()


def test_a_run_folder_that_a_machine_does_not_share_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks the second has a disk of its own at the same path."""
    config = make_config(tmp_path)
    ranks = [ActorWorker(config, "actor_train", RankInfo(n, 2, "cpu")) for n in range(2)]

    def problems_in(folder: Path, disk: Path) -> list[str | None]:
        roots = (Path("/"), disk)
        return [
            rank.folder_problem(root / folder.relative_to("/"))
            for rank, root in zip(ranks, roots, strict=True)
        ]

    refuse_private_folder(config.run_dir, partial(problems_in, disk=Path("/")))
    other = tmp_path / "other"
    (other / config.run_dir.absolute().relative_to("/")).mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"output_dir: .+ is not a folder that all machines share.+No such file"
    ):
        refuse_private_folder(config.run_dir, partial(problems_in, disk=other))
    assert not list(config.run_dir.glob(".pieces*"))
    # A rank asks before it loads its model.
    loaded: list[str] = []
    monkeypatch.setattr(worker, "refuse_private_folder", lambda *_: loaded.append("folder"))
    monkeypatch.setattr(ActorWorker, "_prepare_process", lambda _: loaded.append("model"))
    monkeypatch.setattr(worker, "Peak", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ranks[0].initialize(1)
    assert loaded == ["folder", "model"]


def test_the_reference_cache_is_keyed_by_the_devices_that_compute(tmp_path: Path) -> None:
    """A driver without a GPU writes what workers on GPUs computed in bfloat16."""
    config = make_config(tmp_path, reference__device_mapping=[5])
    names = []
    for kind in ("cpu", "cuda"):
        model: Any = SimpleNamespace(device="cpu")
        roles, none = Roles(model, model, kind), SimpleNamespace()
        source: Any = none
        objective = from_config(config)
        stream = ReferenceStream(config.reference, roles, Timeline(in_turn=True), source)
        stream.use_cache(source, objective, partial(ReferenceLogps, config, objective))
        assert stream.logps is not None
        stream.logps.open()
        assert stream.logps.folder is not None
        names.append(stream.logps.folder.name)
    assert "-float32-" in names[0]
    assert "-bfloat16" in names[1]


@pytest.mark.parametrize(("reference", "expected"), [([0], 0.7), ([1], 0.3)])
def test_only_roles_of_one_process_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: list[int], expected: float
) -> None:
    shares: list[float] = []
    config = make_config(
        tmp_path,
        actor_train__strategy_args={"gpu_memory_utilization": 0.3},
        reference__strategy_args={"gpu_memory_utilization": 0.4},
        reference__device_mapping=reference,
    )
    monkeypatch.setattr(os, "environ", dict(os.environ))
    own = ActorWorker(config, "actor_train", RankInfo(device="cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(worker.torch, "manual_seed", lambda _: None)
    own._prepare_process()
    assert shares == [pytest.approx(expected)]


def test_a_copy_of_the_state_counts_the_ranks_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "free_memory", lambda: 3 * writer.GIB)
    state: Any = {"model": {"w": torch.empty(writer.GIB // 4, device="meta")}}
    for near, wanted in ((2, True), (4, False)):
        own = ActorWorker(make_config(tmp_path), "actor_train", RankInfo(0, 16, "cpu", near)).writer
        assert own._copies(state) is wanted


def test_the_last_error_of_a_raylet_is_cut(tmp_path: Path) -> None:
    logs = tmp_path / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text(f"[now C 1 1] (raylet) a.cc: Check failed: {'x' * 400}\n")
    assert resources._last_of_raylet(tmp_path) == f"Its raylet: {'x' * 300}."
