"""`rather sweep`: train every combination of some values, in turn or in parallel, and compare them.

A run that is finished, or was interrupted, is simply trained again: training resumes it, or finds
nothing left to do, and refuses a run folder that belongs to other pairs or settings.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import typer

from rather.cluster.group import started_as_rank
from rather.commands.score import LOSS_KEYS
from rather.commands.terminal import (
    ConfigPath,
    Imports,
    Overrides,
    command,
    echo,
    print_table,
    settings,
)
from rather.commands.train import train_run
from rather.config import plugins
from rather.config.load import dump_yaml
from rather.config.redaction import redact
from rather.config.run_config import DPOConfig
from rather.errors import ConfigError, RatherError
from rather.files import JsonObject, make_folder, own, parse_yaml, read_bytes, replace_own
from rather.losses.metrics import wilson
from rather.losses.objective import from_config
from rather.pipeline.loop import TrainingLoop
from rather.pipeline.pipeline import DPOPipeline
from rather.run_folder import control
from rather.run_folder.control import StopRequest
from rather.run_folder.names import METRICS
from rather.tools.board.runs import FolderProblem, differences, read_config
from rather.tools.child_process import tied
from rather.tools.report.folder import Folder
from rather.tracking.json_lines import FALLS, flatten, strict_json

log = logging.getLogger(__name__)

PLACES = ("exp_name", "output_dir", "logging_dir")  # of the sweep; its runs get their own
STARTING = ("overwrite", "resume_from_checkpoint")  # how a run was started, not what it does
SHARED = ("reference.cache.path", "actor_train.data_args.cache_dir", "system_envs")  # by all runs
VALUE = re.compile(r"""(?:\[.*?\]|\{.*?\}|'.*?'|".*?"|[^,])+""")  # up to a free comma
STATE, CONSOLE = "sweep.json", "console.log"
ACCURACY = "rewards/accuracies"
JUDGED = ("loss", "accuracies", "margins")  # endings of metrics that have a best value
SIGNALS = (130, 143)  # exit codes of a run that was asked to stop


@dataclass
class SweepRun:
    """One run: its own values, the overrides and the config that follow, and what became of it."""

    name: str
    values: Mapping[str, str]
    overrides: Sequence[str]
    config: DPOConfig
    state: str = "waiting"
    exit_code: int = 0
    error: str = ""

    @property
    def console(self) -> Path:
        return self.config.log_dir / CONSOLE

    def as_json(self) -> JsonObject:
        return {name: getattr(self, name) for name in ("values", "state", "exit_code", "error")}


@dataclass
class Sweep:
    """Runs in one folder. They share the caches of the YAML, also with the runs of other sweeps."""

    file: Path
    base: DPOConfig
    axes: Mapping[str, Sequence[str]]
    folder: Path
    runs: Sequence[SweepRun]

    @property
    def exit_code(self) -> int:
        """Return the code of the run that was asked to stop, else of the first that failed."""
        codes = [run.exit_code for run in self.runs]
        return next((code for code in codes if code in SIGNALS), next(filter(None, codes), 0))

    def save(self) -> None:
        """Write the state, complete or not at all."""
        runs = {run.name: run.as_json() for run in self.runs}
        replace_own(self.folder / STATE, strict_json({"runs": runs}, indent=1) + "\n")

    def run(self) -> None:
        """Train all runs. One that fails is reported, and the others continue."""
        with control.lock(self.folder):
            self.save()
            groups = device_groups([run.config for run in self.runs])
            if len(groups) > 1:
                with StopRequest(patience=None):  # every child saves before it ends
                    self._side_by_side(groups)
                return
            for number, run in enumerate(self.runs, 1):
                _say(f"run {number} of {len(self.runs)}: {run.name}")
                self._end(run, *train_here(run.config))
                if run.exit_code in SIGNALS:
                    return

    def _side_by_side(self, groups: Sequence[Sequence[str]]) -> None:
        """Train one run per group of devices, after one pass of the reference for all of them."""
        imports = [*plugins.arguments(), str(self.file)]
        if from_config(self.base).needs_reference:
            _say("computing the reference log-probs of all pairs, once for all runs")
            first = self.runs[0]
            job = first, ["-m", __name__, *imports, *first.overrides]
            for _, code in run_children([job], groups[:1]):
                if code:
                    message = last_message(first.console)
                    raise ConfigError(f"the reference pass ended with exit code {code}: {message}")
        train = ["-m", "rather", "train", *imports]
        jobs = [(run, [*train, *run.overrides]) for run in self.runs]
        for run, code in run_children(jobs, groups):
            self._end(run, code, last_message(run.console))

    def _end(self, run: SweepRun, code: int, error: str) -> None:
        run.exit_code, run.error = code, error if code else ""
        run.state = "failed" if code else "finished"
        if code in SIGNALS:
            run.state, run.error = "stopped", "asked to stop; run the same command again to resume"
        self.save()
        _say(f"{run.name}: {run.state}" + (f" with exit code {code}: {run.error}" if code else ""))


def _say(text: str) -> None:
    typer.secho(f"sweep: {text}", bold=True, err=True)


def plan_sweep(file: Path, overrides: Sequence[str], *, overwrite: bool = False) -> Sweep:
    """Load and check the config of every run before anything starts."""
    if started_as_rank():
        raise ConfigError("A sweep starts its runs itself: start it without torchrun.")
    fixed, axes = read_grid(overrides)
    base = settings(file, fixed)
    folder, place_overrides = folder_of_runs(base, "sweep")
    shared = [*(text for text in fixed if _key(text) not in PLACES), *place_overrides]
    shared += ["overwrite=true"] if overwrite else []
    runs, changed = [], []
    for label, values in combinations(axes).items():
        overrides_of_run = [
            *shared,
            *(f"{key}={setting}" for key, setting in values.items()),
            f"exp_name={label}",
        ]
        run = SweepRun(label, values, overrides_of_run, settings(file, overrides_of_run))
        runs.append(run)
        try:  # a run folder from an earlier start must have the settings of now
            before = read_config(run.config.run_dir)
        except FolderProblem:  # cut off
            before = {}
        now = flatten(parse_yaml(dump_yaml(run.config)))
        for key, (old, new) in differences([before, now]) if before else ():
            if key not in (*PLACES, *STARTING):
                changed.append(f"  {label}.{key}: {old} before, {new} now")
    if changed and not overwrite:
        lines = "\n".join(changed)
        raise ConfigError(
            f"{folder} contains a sweep with other settings:\n{lines}\nRestore them, choose "
            "another exp_name in the YAML, or start from scratch with --overwrite."
        )
    return Sweep(file, base, axes, folder, runs)


def folder_of_runs(base: DPOConfig, kind: str) -> tuple[Path, list[str]]:
    """Return a folder for several runs, and the overrides with which they share their caches."""
    name = f"{base.exp_name}-{kind}"
    folder = Path(base.output_dir).expanduser() / name
    make_folder(folder)
    return folder, [
        f"output_dir={folder}",
        f"logging_dir={Path(base.logging_dir).expanduser() / name}",
        f"reference.cache.path={base.reference_cache_dir}",
        f"actor_train.data_args.cache_dir={base.data_cache_dir(base.actor_train.data_args)}",
    ]


# --- the grid ---


def read_grid(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the overrides with one value, and the keys with several.

    Commas separate values; a list as one value is written [0,1].
    """
    fixed, axes = [], {}
    for text in overrides:
        key, values = _key(text), split(text.partition("=")[2])
        if len(values) < 2:
            fixed.append(text)
        elif key.startswith((*PLACES, *SHARED)):
            raise ConfigError(
                f"{text}: the runs of a sweep cannot differ in it; give it one value."
            )
        else:
            axes[key] = values
    if not axes:
        raise ConfigError(
            "Nothing to sweep over: give a key several values, such as beta=0.01,0.05,0.1."
        )
    return fixed, axes


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def split(text: str) -> list[str]:
    """Return the different values between commas outside of brackets and quotes."""
    return list(dict.fromkeys(text_of_value.strip() for text_of_value in VALUE.findall(text)))


def combinations(axes: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """Return the name of each run -> its values; the last key changes fastest."""
    short = [key.rpartition(".")[2] for key in axes]
    labels = short if len(set(short)) == len(short) else list(axes)
    runs: dict[str, dict[str, str]] = {}
    for values in product(*axes.values()):
        name = "_".join(f"{label}-{setting}" for label, setting in zip(labels, values, strict=True))
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100]
        while name in runs:
            name += "x"  # two values that look the same in the name of a folder
        runs[name] = dict(zip(axes, values, strict=True))
    return runs


# --- training ---


def train_here(config: DPOConfig) -> tuple[int, str]:
    """Train one run in this process; return its exit code and error, and keep nothing of it."""
    try:
        with StopRequest() as stop:
            return train_run(config, stop), ""
    except RatherError as error:
        return error.exit_code, redact(str(error))
    except Exception as error:  # a bug, or a user's own worker: the other runs need not suffer
        log.exception("%s", config.exp_name)
        return 1, redact(f"{type(error).__name__}: {error}")
    finally:
        release_memory()


def release_memory() -> None:
    """Free the memory of a model that is not needed any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_children(
    jobs: Sequence[tuple[SweepRun, Sequence[str]]], groups: Sequence[Sequence[str]]
) -> Iterator[tuple[SweepRun, int]]:
    """Run Python with the arguments of each job, one process per group of devices.

    Yield the run and the exit code of each process that ends. If the sweep ends, so do they.
    """
    waiting, free = list(reversed(jobs)), list(groups)
    running: dict[subprocess.Popen[bytes], tuple[SweepRun, Sequence[str]]] = {}
    try:
        while waiting or running:
            while waiting and free:
                (run, arguments), devices = waiting.pop(), free.pop(0)
                run.console.parent.mkdir(parents=True, exist_ok=True)
                with open(run.console, "wb", opener=own) as console_file:
                    # In its own session: Ctrl-C in the terminal reaches it only through the sweep.
                    child = subprocess.Popen(
                        tied([sys.executable, *arguments]),
                        stdout=console_file, stderr=console_file,
                        env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(devices)},
                        start_new_session=True,
                    )  # fmt: skip
                running[child] = run, devices
            for child in [child for child in running if child.poll() is not None]:
                run, devices = running.pop(child)
                free.append(devices)
                yield run, child.returncode if child.returncode >= 0 else 128 - child.returncode
            time.sleep(0.1)
    finally:
        for child in running:
            child.terminate()
        for child in running:
            child.wait()


def last_message(console: Path) -> str:
    """Return the error that a process printed last."""
    lines = read_bytes(console, opener=own).decode("utf-8", "replace").splitlines()
    messages = [line for line in lines if line.startswith("rather: ")] or lines[-1:] or [""]
    return f"{messages[-1].removeprefix('rather: ')} ({console})"


def device_groups(configs: Sequence[DPOConfig]) -> list[list[str]]:
    """Return the GPUs in groups as large as the largest run needs; one group: run in turn."""
    used: set[int] = set()
    for config in configs:
        used |= {*config.actor_train.devices, *config.reference.devices}
    visible, size = os.environ.get("CUDA_VISIBLE_DEVICES"), len(used)
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    in_turn = not torch.cuda.is_available() or any(
        config.platform == "cpu" or config.num_nodes > 1 or config.ray.address is not None
        for config in configs
    )
    if in_turn or used != set(range(size)) or len(gpus) < 2 * size or len(configs) < 2:
        return [gpus]
    return [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]


@command
def fill_cache(config: ConfigPath, overrides: Overrides = None, imports: Imports = None) -> None:
    """Compute all reference log-probs that the run will need, in its own micro-batches."""
    with closing(DPOPipeline(settings(config, overrides))) as pipeline:
        if cached_logps := pipeline.reference_stream.logps:
            with closing(cached_logps):
                pipeline.initialize()
                for step in TrainingLoop(pipeline.parts).packed_steps():
                    pipeline.reference_stream.columns(step)
                    cached_logps.keep()
                pipeline.evaluate()
                cached_logps.keep()


# --- results ---


def choose_metric(base: DPOConfig, wanted: str | None) -> str | None:
    """Return the metric that decides: as asked, else accuracy or loss on the first held-out set."""
    data_args = base.validation.data_args
    if wanted and not data_args.given:
        raise ConfigError(
            f"--by {wanted}: no pairs are held out; set validation.data_args.file_name or split."
        )
    if wanted and not (wanted.startswith("eval/") and wanted.endswith(JUDGED)):
        raise ConfigError(
            f"--by {wanted}: not a metric with a best value; choose eval/loss, "
            f"eval/{ACCURACY} or eval/rewards/margins; for one of several sets, eval/SET/loss etc."
        )
    first = "" if data_args.split is not None else next(iter(data_args.sets), "")
    name = "loss" if base.rows in ("answers", "scored") else ACCURACY
    default = f"eval/{first}/{name}" if first else f"eval/{name}"
    return wanted or (default if data_args.given else None)


def results(sweep: Sweep, metric: str | None) -> JsonObject:
    """Return the metrics of all runs so far, and which run is the best, as JSON types."""
    key = str(metric)
    runs = [_measured(run, key) for run in sweep.runs]
    ended = [run for run in runs if run["state"] == "finished" and key in run["final"]]
    comparable = [run for run in ended if not math.isnan(run["value"])]
    ranked = sorted(comparable, key=lambda run: run["value"], reverse=not key.endswith(FALLS))
    top = ranked[0] if ranked else {"name": None, "interval": None}
    low, high = top["interval"] or (math.inf, -math.inf)
    near = [run["name"] for run in ranked[1:] if low <= run["value"] <= high]
    return {"metric": metric, "best": top["name"], "not_worse": near, "runs": runs}


def _measured(run: SweepRun, metric: str) -> JsonObject:
    """Return what a run has written so far, with the interval of an accuracy."""
    path = run.config.run_dir
    folder = Folder(path) if (path / METRICS).is_file() else None
    columns = folder.metrics if folder else {}
    times = folder.times if folder else {}
    final = {name: column.values[-1] for name, column in columns.items()}
    number, interval = final.get(metric), None
    if metric.endswith(ACCURACY):
        pairs = final.get(f"{metric.removesuffix(ACCURACY)}pairs")
        interval = wilson(number, pairs) if pairs and number is not None else None
    return {
        "name": run.name,
        "folder": str(path),
        **run.as_json(),
        "steps": folder.step if folder else 0,
        "value": number,
        "interval": interval,
        "reference_forwards": (times.get("reference") or {}).get("forwards"),
        "seconds": times.get("seconds"),
        "final": final,
    }


def print_results(sweep: Sweep, found: JsonObject) -> None:
    """Print a table, which run is the best, and what speaks against trusting it."""
    metric, names = found["metric"], ("value", "reference_forwards", "seconds")
    rows = []
    for run in found["runs"]:
        numbers = ("" if run[name] is None else f"{run[name]:.4g}" for name in names)
        rows.append((run["name"], run["state"], run["steps"], *numbers))
        if run["error"]:
            echo(f"{run['name']}: {run['error']}")
    short = str(metric or "value").rpartition("/")[2]
    headings = ("run", "state", "steps", short, "reference forwards", "seconds")
    print_table(headings, rows, f"Curves of all runs: rather board {sweep.folder}")
    if metric is None:
        echo("No best run: no pairs are held out (validation.data_args).")
    elif found["best"] is None:
        echo(f"No best run: none has finished with a {metric}.")
    else:
        echo(f"Best by {metric}: {found['best']}, in {sweep.folder / found['best']}")
        if near := ", ".join(found["not_worse"]):
            echo(f"Not significantly worse with so few held-out pairs (95 %): {near}")
        keys = ", ".join(key for key in sweep.axes if key in LOSS_KEYS)
        if keys and metric.endswith("loss"):
            echo(f"{metric} has another scale for every {keys}; compare accuracies.")


if __name__ == "__main__":
    typer.run(fill_cache)
