"""The runs of a sweep: planned from one YAML, run one after another or side by side, remembered in sweep.json."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import yaml

from rather.cluster.launch import mappings
from rather.cluster.spmd import started_by_torchrun
from rather.commands.compare import PLACE, differences, leaves
from rather.commands.sweep.children import Children, last_words
from rather.commands.sweep.fill import REPORT
from rather.commands.sweep.grid import Grid, read_grid
from rather.commands.terminal import settings
from rather.config import plugins
from rather.config.load import dump_yaml
from rather.config.masking import public_values
from rather.config.redaction import redact
from rather.config.schema import DPOConfig
from rather.data.cache import file_sha
from rather.errors import ConfigError, RatherError
from rather.losses.objective import from_config
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder import control
from rather.run_folder.layout import FINISHED
from rather.run_folder.lock import locked
from rather.run_folder.signals import StopRequest
from rather.tracking import close_logging, setup_logging, worker_log
from rather.tracking.json_lines import strict_json

log = logging.getLogger(__name__)

STATE, PAGE, CONSOLE = "sweep.json", "sweep.html", "console.log"
DONE, FAILED, STOPPED, WAITING = "finished", "failed", "stopped", "waiting"
SIGNALS = (130, 143)  # exit codes of a run that was asked to end
NOT_COMPARED = ("overwrite", "resume_from_checkpoint")


@dataclass(frozen=True)
class Point:
    """One run: the values that are its own, and the overrides and the config that they make."""

    name: str
    values: Mapping[str, str]
    overrides: Sequence[str]
    config: DPOConfig

    @property
    def finished(self) -> bool:
        return (self.config.run_dir / FINISHED).exists()


class Outcome(NamedTuple):
    state: str
    exit_code: int = 0
    error: str = ""


@dataclass
class Sweep:
    """All runs lie in one folder; caches are those of the YAML, so that runs of any sweep share them."""

    file: Path
    base: DPOConfig
    grid: Grid
    folder: Path
    points: Sequence[Point]
    facts: Mapping[str, Any]  # what all runs share, as it may be written down
    runs: dict[str, Outcome] = field(default_factory=dict)
    reference: dict[str, Any] | None = None  # cost of the pass before runs side by side

    @staticmethod
    def planned(file: Path, overrides: Sequence[str], *, overwrite: bool = False) -> Sweep:
        """Every config of the grid is loaded and judged before anything runs."""
        if started_by_torchrun():
            raise ConfigError("a sweep starts its runs itself: start it without torchrun")
        grid = read_grid(overrides)
        base = settings(file, list(grid.fixed))
        name = f"{base.exp_name}-sweep"
        folder = Path(base.output_dir).expanduser() / name
        shared = [
            f"output_dir={folder}",
            f"logging_dir={Path(base.logging_dir).expanduser() / name}",
            f"reference.cache.path={base.reference_cache_dir}",
            f"actor_train.data_args.cache_dir={base.data_cache_dir(base.actor_train.data_args)}",
            *(["overwrite=true"] if overwrite else []),
        ]
        points = []
        for label, values in grid.points().items():
            own = [
                *grid.of_runs,
                *(f"{key}={value}" for key, value in values.items()),
                *shared,
                f"exp_name={label}",
            ]
            points.append(Point(label, values, own, settings(file, own)))
        sweep = Sweep(file, base, grid, folder, points, shared_facts(base))
        if not overwrite:
            sweep._remember()
            sweep._refuse_other_runs()
        return sweep

    # --- what is remembered ---

    def _remember(self) -> None:
        """What an earlier start of the same sweep has done; one with other settings is refused."""
        try:
            past = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
            if not (isinstance(past, dict) and {"facts", "reference", "runs"} <= past.keys()):
                raise ValueError("it is not what a sweep writes")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.folder / STATE}: cannot be read ({error}); delete this file and start the same command again: "
                "finished runs are kept, and the others go on."
            ) from error
        changed = differences(*(dict(leaves(facts)) for facts in (past["facts"], self.facts)))
        changed = {
            key: pair
            for key, pair in changed.items()
            if key.removeprefix("config.") not in self.grid.axes
        }
        for point in self.points:
            then = past["runs"].get(point.name, {}).get("values", point.values)
            changed |= {
                f"{point.name}.{key}": pair for key, pair in differences(then, point.values).items()
            }
        self._refuse(changed)
        self.reference = past["reference"]
        for point in self.points:
            if (
                (known := past["runs"].get(point.name))
                and known["state"] == DONE
                and point.finished
            ):
                self.runs[point.name] = Outcome(DONE)

    def _refuse_other_runs(self) -> None:
        """What lies in the folder of a run must be that run: starting anew may have been interrupted before it."""
        for point in self.points:
            file = point.config.run_dir / "config.yaml"
            then = _told(file.read_text(encoding="utf-8")) if file.is_file() else {}
            now = _told(dump_yaml(point.config))
            self._refuse(
                {
                    f"{point.name}.{key}": pair
                    for key, pair in differences(then, now).items()
                    if then
                }
            )

    def _refuse(self, changed: Mapping[str, Sequence[Any]]) -> None:
        if changed:
            told = [f"{key}: {then!r} then, {now!r} now" for key, (then, now) in changed.items()]
            raise ConfigError(
                f"{self.folder} holds a sweep with other settings:\n  " + "\n  ".join(told) + "\n"
                "Set them back, choose another exp_name in the YAML, or start anew with --overwrite."
            )

    def save(self) -> None:
        """After each run, complete or not at all."""
        runs = {
            p.name: {"values": dict(p.values), **self.outcome(p)._asdict()} for p in self.points
        }
        content = {"facts": self.facts, "reference": self.reference, "runs": runs}
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{STATE}-{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(strict_json(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a loss of power could leave the name without the content
        os.replace(temporary, self.folder / STATE)

    def outcome(self, point: Point) -> Outcome:
        return self.runs.get(point.name, Outcome(WAITING))

    @property
    def exit_code(self) -> int:
        """Of the run that was asked to end, else of the first that failed."""
        codes = [self.outcome(point).exit_code for point in self.points]
        return next((code for code in codes if code in SIGNALS), next(filter(None, codes), 0))

    # --- running ---

    def run(self, tell: Callable[[str], None]) -> None:
        """What is not finished yet. A run that fails is told, and the others go on."""
        with control.lock(self.folder):
            self.save()
            waiting = [point for point in self.points if self.outcome(point).state != DONE]
            if skipped := len(self.points) - len(waiting):
                tell(f"{skipped} of {len(self.points)} runs are finished already")
            groups = device_groups([point.config for point in waiting])
            if len(groups) > 1 and len(waiting) > 1:
                self._side_by_side(waiting, groups, tell)
            else:
                self._in_turn(waiting, tell)

    def _in_turn(self, waiting: Sequence[Point], tell: Callable[[str], None]) -> None:
        for number, point in enumerate(waiting, 1):
            tell(f"run {number} of {len(waiting)}: {point.name}")
            outcome = train_here(point.config)
            self._count(point, outcome, tell)
            if outcome.exit_code in SIGNALS:
                return

    def _side_by_side(
        self, waiting: Sequence[Point], groups: Sequence[Sequence[str]], tell: Callable[[str], None]
    ) -> None:
        """One process for each group of devices; the reference is asked once before, by one of them."""
        free: SimpleQueue[Sequence[str]] = SimpleQueue()
        for group in groups:
            free.put(group)
        with Children() as children:
            if from_config(waiting[0].config).needs_reference and self.reference is None:
                tell("the reference's log-probs of all pairs, once for all runs")
                self.reference = self._filled(waiting[0], groups[0], children)
                self.save()

            def work(point: Point) -> Outcome:
                devices, console = free.get(), point.config.log_dir / CONSOLE
                try:
                    tell(f"{point.name}: starts on {', '.join(devices)}")
                    arguments = ["-m", "rather", "train", *plugins.arguments(), str(self.file)]
                    arguments += point.overrides
                    return _outcome(children.run(arguments, devices, console), console)
                finally:
                    free.put(devices)

            with ThreadPoolExecutor(len(groups)) as pool, children.ended_with(pool):
                for point, outcome in zip(waiting, pool.map(work, waiting), strict=True):
                    self._count(point, outcome, tell)

    def _filled(
        self, point: Point, devices: Sequence[str], children: Children
    ) -> dict[str, Any] | None:
        console = point.config.log_dir / CONSOLE
        code = children.run(
            ["-m", "rather.commands.sweep.fill", *plugins.arguments(), str(self.file), *point.overrides],
            devices,
            console,
        )
        if code:
            raise ConfigError(
                f"the reference's pass ended with exit code {code}: {last_words(console)}"
            )
        lines = console.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line.removeprefix(REPORT) for line in lines if line.startswith(REPORT)]
        found: dict[str, Any] | None = json.loads(told[-1])
        return found

    def _count(self, point: Point, outcome: Outcome, tell: Callable[[str], None]) -> None:
        self.runs[point.name] = outcome
        self.save()
        if outcome.state != DONE:
            tell(
                f"{point.name}: {outcome.state} with exit code {outcome.exit_code}: {outcome.error}"
            )


def _told(config: str) -> dict[str, Any]:
    """The settings of a config.yaml but for its places; none where it was not written to its end."""
    try:
        values = yaml.safe_load(config)
    except yaml.YAMLError:
        return {}
    known = values if isinstance(values, dict) else {}
    return {key: value for key, value in leaves(known) if key not in (*PLACE, *NOT_COMPARED, "")}


def shared_facts(base: DPOConfig) -> dict[str, Any]:
    """Settings as they may be written down, and the content of the pair files."""
    shown = {key: value for key, value in public_values(base).items() if key not in NOT_COMPARED}
    data = base.actor_train.data_args, base.validation.data_args
    files = [*data[0].files, *(file for group in data[1].sets.values() for file in group)]
    digests = {str(file): file_sha(file) for file in files if file.is_file()}
    found: dict[str, Any] = json.loads(
        json.dumps({"config": shown, "sha256": digests}, default=str)
    )
    return found


def train_here(config: DPOConfig) -> Outcome:
    """One run in this process, which keeps nothing of it."""
    try:
        setup_logging(config.log_dir)
        for role in ("actor_train", "reference"):
            worker_log(config.log_dir, role, 0)
        with StopRequest() as stop, locked(config):
            pipeline = DPOPipeline(config)
            pipeline.roles.watch()
            return _outcome(pipeline.run(stop))
    except RatherError as error:
        return Outcome(FAILED, error.exit_code, redact(str(error)))
    except (
        Exception
    ) as error:  # a bug of ours, or of a user's own worker: the other runs need not suffer
        log.exception("%s", config.exp_name)
        return Outcome(FAILED, 1, redact(f"{type(error).__name__}: {error}"))
    finally:
        close_logging()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _outcome(code: int, console: Path | None = None) -> Outcome:
    if code == 0:
        return Outcome(DONE)
    if code in SIGNALS:
        return Outcome(STOPPED, code, "asked to end; the same command goes on")
    return Outcome(FAILED, code, last_words(console) if console else "")


def device_groups(configs: Sequence[DPOConfig]) -> list[list[str]]:
    """The GPUs of this machine in groups of as many as any run takes; a single group where runs go one by one."""
    used = sorted({device for config in configs for device in _devices(config)})
    on_cpu = any(config.platform == "cpu" for config in configs)
    gpus = _visible() if not on_cpu and torch.cuda.is_available() else []
    elsewhere = any(config.num_nodes > 1 or config.ray.address is not None for config in configs)
    if not used or elsewhere or used != list(range(len(used))) or len(gpus) < 2 * len(used):
        return [gpus]
    return [
        gpus[first : first + len(used)] for first in range(0, len(gpus) - len(used) + 1, len(used))
    ]


def _devices(config: DPOConfig) -> list[int]:
    actor, reference = mappings(config)
    return [*actor, *(reference if from_config(config).needs_reference else [])]


def _visible() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    )
