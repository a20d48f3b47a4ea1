"""The run that is broken: a tiny model, six steps, evaluations, saves; in one process, on two ranks, or on Ray."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rather.checkpoint.checkpoint import newest_good
from rather.cluster.supervision import report_first_failure
from rather.cluster.worker import ActorWorker
from rather.commands.terminal import guarded
from rather.config.run_config import DPOConfig
from rather.losses.losses import sigmoid
from rather.pipeline.pipeline import DPOPipeline
from tests.faults import inject
from tests.faults.fork_server import LATE, fork_server
from tests.tiny import make_config, metrics, untimed

STEPS = 6
STATE = (
    "progress",
    "trainer",
    "schedule",
    "identity",
)  # how many bytes metrics.jsonl has depends on times
RUN: dict[str, Any] = {
    "platform": "cpu",
    "max_steps": STEPS,
    "logging_steps": 1,
    "eval_steps": 3,
    "save_steps": 2,
    "max_ckpt_to_keep": 1,
    "train_batch_size": 6,
    "actor_train__training_args": {
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    },
    "actor_train__max_tokens_per_microbatch_in_train": 64,  # several micro-batches a step
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"actor_train__device_mapping": [0, 1]},
    "ray": {"reference__device_mapping": [1], "failure_backoff": 0.0},
}


@dataclass(frozen=True)
class Outcome:
    """What two runs that are the same have in common, to the bit."""

    metrics: list[dict[str, Any]]
    files: dict[
        str, str
    ]  # SHA-256 of the tensors of the last checkpoint, and of every file of the model
    state: dict[str, Any]  # counters, schedule and identity of the last checkpoint


@dataclass
class Run:
    """One run folder, and the command that is started until it ends well."""

    folder: Path
    layout: str = "one"
    changes: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    starts: int = 0
    logs: Path = Path()  # of the last start

    @property
    def config(self) -> DPOConfig:
        return config_of(self.folder, self.layout, self.changes)

    def start(self, fault: str = "", logs: Path | None = None) -> list[int]:
        """Exit codes of the processes of one start; what they print is in `logs`."""
        self.starts += 1
        self.logs = logs = logs or self.folder / "starts" / str(self.starts)
        with _environments(self.layout) as own:
            each = [{**self.environment, **process} for process in own]
            work = (self.folder, self.layout, self.changes, fault)
            codes = fork_server().run(train, work, each, logs)
        assert LATE not in codes, f"start {self.starts} did not end: {codes}\n{self.output()}"
        return codes

    def until_it_ends(self, fault: str) -> None:
        """Start the same command again and again; every fault must strike, and nothing else may go wrong."""
        expected = len(inject.parse(fault))
        self.repeat(lambda: self.start(fault), lambda: expected)
        assert self.struck() == expected, f"of {fault}, {self.struck()} struck"

    def repeat(self, start: Callable[[], list[int]], most: Callable[[], int]) -> None:
        """Start until it ends well, `most` times at most besides."""
        while any(codes := start()):
            assert self.starts <= most(), f"start {self.starts} ended with {codes}\n{self.output()}"

    def struck(self) -> int:
        """How many faults struck, in all starts."""
        return len(list((self.config.run_dir / inject.MARKERS).glob("*kind=*")))

    def output(self) -> str:
        logs = sorted(self.logs.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs)

    def outcome(self) -> Outcome:
        run_dir = self.config.run_dir
        last = newest_good(run_dir)
        assert last is not None
        assert last.step == STEPS
        tensors = [file for files in last.groups.values() for file in files]
        model = [file for file in (run_dir / "model").rglob("*") if file.is_file()]
        written = [*tensors, *model, *run_dir.glob("ledger.arrows")]
        files = {str(file.relative_to(run_dir)): _sha(file) for file in written}
        return Outcome(
            untimed(metrics(self.config)), files, {key: last.state[key] for key in STATE}
        )

    def assert_like(self, clean: Outcome) -> None:
        """It is as a run that nobody broke, and killed processes have left nothing in its folder."""
        assert self.outcome() == clean, f"{self.folder}: differs from an uninterrupted run"
        for pattern in (".tmp*", ".old*", ".pieces*"):
            assert list(self.config.run_dir.glob(pattern)) == []


class Drawing(ActorWorker):
    """With a loss that draws random numbers."""

    def build_loss(self) -> Any:
        return lambda x: sigmoid(x) * torch.rand(len(x.policy))


def config_of(folder: Path, layout: str, changes: Mapping[str, Any]) -> DPOConfig:
    """Model, pairs and tokens lie beside the folder, for all runs; the cache of the reference is its own, and cold."""
    own = {"output_dir": str(folder), "logging_dir": str(folder / "logs")}
    own["actor_train__data_args__cache_dir"] = str(folder.parent / "tokenised")
    return make_config(folder.parent, **{**RUN, **LAYOUTS[layout], **own, **changes})


def train(folder: Path, layout: str, changes: Mapping[str, Any], fault: str = "") -> int:
    """Train in a process of its own, as `rather train` does, with faults attached."""

    def work() -> int:
        config = config_of(folder, layout, changes)
        if fault:
            inject.attach(fault, config.run_dir, ray=layout == "ray")
        return DPOPipeline(config).run()

    return guarded((lambda: report_first_failure(work)) if layout == "dp2" else work)


def warm() -> None:
    """All that a run imports and builds at its first time."""
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        assert train(Path(folder) / "warm", "one", {}) == 0


@contextmanager
def _environments(layout: str) -> Iterator[list[dict[str, str]]]:
    """Of each process that starts; two ranks get what torchrun would give them, and its store."""
    if layout != "dp2":
        yield [{}]
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    yield [{**environment, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]


def _sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
