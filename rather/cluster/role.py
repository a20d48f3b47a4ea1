"""Role: the calls that the training loop makes on a policy or a reference, wherever its ranks run.

`ActorWorker` answers them in this process, `Cluster` sends them to Ray actors, and `SpmdCluster`
makes them in all processes that torchrun started: every process runs the loop on its own share, and
all take the same steps, because each computes them from the same config, pairs and seed.

If memory runs out, `train_step` and `compute_log_probs` raise torch.OutOfMemoryError or
BatchTooLarge only if the call can be repeated with smaller micro-batches after `forget`. Otherwise
they raise MemoryShortage.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rather.cluster.health import (
    COMPUTED,
    EXCHANGED,
    ON_RAY,
    ONE,
    Failure,
    first_cause,
    place_of,
    set_environment,
)
from rather.cluster.host import CallResult, interface_to, join_group, use_interface_to
from rather.cluster.memory import Ledger, Room, need_of, shortage
from rather.cluster.worker import ActorWorker, RankInfo, make_worker
from rather.config.run_config import DPOConfig
from rather.config.schema import RoleConfig
from rather.config.strategies import layout
from rather.data.batch import Columns, PairBatch, PairFacts
from rather.data.shares import RunPairs
from rather.errors import BatchTooLarge, ConfigError, DiskError, RatherError
from rather.model.export import Kept
from rather.parallel.load import compute_dtype, cpu_has_bf16, device_of
from rather.parallel.mesh import gather_objects
from rather.train.rank_trainer import Limits, StepResult


class RoleOnRanks:
    """A role whose model is divided over several ranks, on Ray or under torchrun."""

    rooms: Sequence[Room]  # the free memory of each rank before any model was loaded
    device: str  # on which this process gets log-probs

    _run: Callable[..., list[Any]]  # calls a method on all ranks, and returns their values

    def __init__(self, role: str, config: DPOConfig, kind: str, ledger: Ledger) -> None:
        self.role, self.config, self.kind, self.ledger = role, config, kind, ledger
        self.worker_config: RoleConfig = getattr(config, role)
        self.layout = layout(self.worker_config)

    def initialize(self, total_steps: int, model: str | None = None) -> None:
        if model is None and (self.worker_config.trains or self.config.sync_ref_model):
            self._refuse_private_folder()
        self._refuse_unlike_cpus()
        need = need_of(self.config, self.worker_config, self.kind, model)
        self.ledger.add(self.role, need, self.rooms)
        self._run("initialize", total_steps, model)

    def _refuse_unlike_cpus(self) -> None:
        """Ranks would store different dtypes, and the reference cache be keyed by the driver's."""
        own, args = cpu_has_bf16(), self.worker_config.model_args
        unlike = sorted({room.machine for room in self.rooms if room.bf16 != own})
        if unlike and self.kind == "cpu" and compute_dtype(args, "cpu") == torch.bfloat16:
            raise ConfigError(
                f"{self.role}.model_args.dtype: bf16 is computed in another way on a CPU without "
                f"bfloat16 instructions: {', '.join(unlike)} and {socket.gethostname()} differ in "
                "this. Set it to fp32, or use machines of one kind."
            )

    def _refuse_private_folder(self) -> None:
        """Checkpoints would wait for the files of a rank that writes to a folder of its own."""
        run_dir = self.config.run_dir
        # The name is new: a network file system may remember for a while that a name is not there.
        with shared_folder(run_dir / secrets.token_hex(8)) as folder:
            problems = set(filter(None, self._run("folder_problem", folder)))
        if problems:
            raise ConfigError(
                f"output_dir: {run_dir.absolute()} is not a folder that all machines share, and "
                f"every rank writes its part of a checkpoint there ({'; '.join(sorted(problems))}). "
                "Name a folder of a network file system that is mounted on all of them."
            )

    def open_pairs(self, pairs: RunPairs) -> None:
        self._run("open_pairs", pairs)

    def pack(self, batches: Sequence[PairBatch]) -> None:
        """Pack what this process will take of a step; workers in other processes do so there."""

    def embedding_rows(self) -> int:
        return int(self._run("embedding_rows")[0])

    def plan(self, largest_pair: int, make_room: Callable[[], bool] | None = None) -> int:
        return int(min(self._run("plan", largest_pair)))

    def train_step(
        self, batches: Sequence[PairBatch], reference: Columns | None, limits: Limits = None
    ) -> StepResult:
        found: list[StepResult] = self._run("train_step", batches, reference, limits)
        return found[0]

    def compute_log_probs(self, batches: Sequence[PairBatch]) -> Columns:
        found: list[Columns] = self._run("compute_log_probs", batches)
        return found[0]

    # Questions to a reference that works ahead of the policy.

    seconds = 0.0  # that it worked since `take_seconds`

    def ask_log_probs(self, batches: Sequence[PairBatch]) -> Any:
        raise NotImplementedError(f"{self.role} works in turn with the policy")

    def await_log_probs(self, asked: Any) -> Columns:
        raise NotImplementedError

    def drop_questions(self) -> None:
        """Ignore the answers to all questions so far."""

    def take_seconds(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def score(
        self, facts: PairFacts, policy: Columns, reference: Columns | None
    ) -> dict[str, float]:
        return dict(self._run("score", facts, policy, reference)[0])

    def park(self) -> bool:
        return False

    def forget(self) -> None:
        self._run("forget")

    def peak_memory(self) -> int:
        """Return the peak in bytes of the rank that used most."""
        return int(max(self._run("peak_memory")))

    def numbers(self) -> dict[str, Any]:
        return dict(self._run("numbers")[0])

    def write_state(self, folder: Path) -> None:
        """Let every rank write its shards; all machines must see the folder."""
        self._run("write_state", folder.absolute())

    def finish_writing(self) -> None:
        self._run("finish_writing")

    def read_state(self, path: Path, numbers: dict[str, Any]) -> None:
        self._run("read_state", path.absolute(), numbers)

    def write_weights(self, folder: Path, group: str) -> dict[str, tuple[int, str]]:
        written = self._run("write_weights", folder.absolute(), group)
        return {name: facts for each in written for name, facts in each.items()}

    def mix_weights(self, weights: Path, share: float) -> None:
        self._run("mix_weights", weights.absolute(), share)

    def save_model(self, folder: Path, tokenizer: Any, card: str) -> Kept:
        """Let all ranks write their shards, and one merge them into a model, tensor by tensor."""
        with shared_folder(folder) as shards:
            self.write_weights(shards, "model")
            kept: Kept = self._run("export", shards, tokenizer, folder.absolute(), card)[0]
            return kept

    def _error(
        self, failures: Mapping[int, Failure], ranks: int, names: Sequence[str]
    ) -> RatherError:
        """Return the first cause of these failures with its place, and log its trace."""
        rank = first_cause(failures)
        cause = failures[rank]
        level = logging.DEBUG if cause.is_expected else logging.ERROR
        logging.getLogger(f"rather.worker.{self.role}-{rank}").log(level, "%s", cause.trace)
        error = cause.error(place_of(failures, ranks, self.role, names.__getitem__))
        if len(names) == 1 and cause.kind == torch.OutOfMemoryError.__name__:
            return BatchTooLarge(str(error))
        return error


Role = ActorWorker | RoleOnRanks


def log_records(role: str, results: Mapping[int, CallResult]) -> None:
    """Repeat all that the first rank logged, and the warnings of the others, each once."""
    said = set()
    for rank, result in sorted(results.items()):
        for name, level, message in result.records:
            warns = level >= logging.WARNING
            if message not in said and (warns or rank == 0):
                who = f"{role} rank {rank}: " if warns else ""
                logging.getLogger(name).log(level, "%s%s", who, message)
            said.add(message)


@contextmanager
def shared_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to `folder` that all ranks can write to, then remove it.

    Under torchrun all processes call this. If the folder cannot be made, all of them raise the
    error: one that alone goes on, as after a missed save, would leave the others waiting.
    """
    made = folder.absolute().with_name(f".pieces-{folder.name}")
    is_main, failed = not dist.is_initialized() or dist.get_rank() == 0, None
    try:
        if is_main:
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir(parents=True)
    except OSError as error:
        failed = error
    try:
        if dist.is_initialized():
            made, failed = broadcast((made, failed))
        if failed:
            raise failed
        yield made
    finally:
        if is_main:
            shutil.rmtree(made, ignore_errors=True)


# --- one process ---


def as_local(role: Role) -> ActorWorker:
    """Return the worker of a role in this process, which alone can answer prompts."""
    if not isinstance(role, ActorWorker):
        raise ConfigError(
            "eval_prompts needs one device per policy; remove it, or start without torchrun and "
            "Ray."
        )
    return role


def device_kind(platform: str) -> str:
    """Return the kind of this machine's devices: cpu or cuda."""
    if platform == "cuda" and not torch.cuda.is_available():
        raise ConfigError("platform: cuda, but this machine has no GPU that PyTorch can use")
    return "cuda" if platform != "cpu" and torch.cuda.is_available() else "cpu"


# --- torchrun ---


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def join_ranks(
    config: DPOConfig, roles: Mapping[str, int], closing: ExitStack
) -> tuple[RankInfo, Any]:
    """Join the process group of one role, or of all if `roles` are not apart.

    `roles` are those with processes of their own, in the order of torchrun's ranks, and the number
    of their devices. Without others in the group there is none, as on Ray. Returns the place in the
    group, and the store of all ranks if roles are apart.
    """
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    near = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    devices = sum(roles.values())
    if world != devices:
        if len(roles) > 1:
            raise ConfigError(
                f"actor_train and reference have {devices} devices together, and torchrun started "
                f"{world} processes; set --nproc-per-node={devices}"
            )
        raise ConfigError(
            f"actor_train.device_mapping names {devices} devices, and torchrun started {world} "
            f"processes; set actor_train.device_mapping=0-{world - 1}, or "
            f"--nproc-per-node={devices}"
        )
    role, own, size = role_of(rank, roles)
    on_ray, settings = os.environ.get(ON_RAY), getattr(config, role)
    kind = on_ray or device_kind(config.platform)
    per_node = None if near == world else config.num_gpus_per_node or near
    device = "cpu"
    if kind == "cuda":  # on Ray a process sees no other one
        device = "cuda:0" if on_ray else device_of(settings, own, per_node)
    set_environment(config.envs(settings))
    address = "127.0.0.1" if near == world else os.environ["MASTER_ADDR"]
    if near < world and interface_to(address) == "lo":  # as a machine resolves its own name
        address = "192.0.2.1"  # of no machine: its route leads to the others
    # Longer than any deadline of the watchdog, so that the watchdog reports a hang first.
    timeout, place, store = timedelta(seconds=60 + config.timeouts.longest), {}, None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if len(roles) > 1 or attempt != "0":
        found = next(rendezvous("env://", timeout=timeout))[0]
        closing.callback(lambda _: None, found)  # kept: the first process may be its server
        # torchrun --max-restarts keeps its store, with the addresses of processes that are gone.
        store = dist.PrefixStore(f"attempt {attempt}", found)  # type: ignore[attr-defined]
        # Each role counts its own ranks from 0, in a group that does not know the other one.
        prefixed = dist.PrefixStore(role, store)  # type: ignore[attr-defined]
        place = {"store": prefixed, "rank": own, "world_size": size}
    use_interface_to(address)
    if size > 1 or (len(roles) == 1 and not on_ray):
        join_group(kind, device, timeout, **place)
        closing.callback(dist.destroy_process_group)
    elif kind == "cuda":
        torch.cuda.set_device(device)
    return RankInfo(own, size, device, min(near, size)), store


def role_of(rank: int, roles: Mapping[str, int]) -> tuple[str, int, int]:
    """Return the role of one of torchrun's ranks, its rank in that role, and the role's ranks."""
    for role, size in roles.items():
        if rank < size:
            return role, rank, size
        rank -= size
    raise AssertionError(rank)


class SpmdCluster(RoleOnRanks):
    """A role whose calls all processes make at once: each does its share, all get the answer."""

    def __init__(
        self, name: str, config: DPOConfig, member: RankInfo, ledger: Ledger, rooms: Sequence[Room]
    ) -> None:
        super().__init__(name, config, "cpu" if member.device == "cpu" else "cuda", ledger)
        self.member, self.rooms = member, rooms
        self.worker = make_worker(name, config, member)
        self.device = self.worker.device
        self.takes_turns = False  # with another process on the same device

    def pack(self, batches: Sequence[PairBatch]) -> None:
        self.worker.pack(batches)

    def _run(self, method: str, *args: Any) -> list[Any]:
        work, value, problem = getattr(self.worker, method), None, ""
        try:
            if method not in EXCHANGED:
                value = work(*args)
                if self.takes_turns and method in COMPUTED:
                    self.worker.release()
                return [value]
            if method not in ONE or self.member.rank == 0:
                value = work(*args)
        except torch.OutOfMemoryError as error:
            # The others wait for this rank in a collective: repeating the call would not help.
            raise shortage(error) from error
        except DiskError as error:  # all ranks must raise it, or some would wait for this one
            problem = str(error)
        values, problems = zip(*gather_objects((value, problem)), strict=True)
        if any(problems):
            raise DiskError(next(filter(None, problems)))
        return list(values)


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the first rank's value on all ranks; alone there is nobody to tell."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]
