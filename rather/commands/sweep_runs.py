"""The runs of a sweep: planned from one YAML, trained one after another or side by side.

A run that is finished, or was interrupted, is simply trained again: training resumes it, or finds
nothing left to do, and refuses a run folder that belongs to other pairs or settings.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml

from rather.cluster.launch import mappings
from rather.cluster.spmd import started_by_torchrun
from rather.commands.compare import PLACE, differences, leaves
from rather.commands.terminal import guarded, settings
from rather.commands.train import train_run
from rather.config import plugins
from rather.config.load import dump_yaml
from rather.config.redaction import redact
from rather.config.schema import DPOConfig
from rather.data.batch import TokenPair
from rather.errors import ConfigError, RatherError
from rather.losses.objective import from_config
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.steps import EVALUATION_CHUNK, PreparedSteps
from rather.run_folder import control
from rather.run_folder.control import StopRequest
from rather.tracking.json_lines import strict_json

log = logging.getLogger(__name__)
Echo = Callable[[str], None]

PLACES = ("exp_name", "output_dir", "logging_dir")  # of the sweep; its runs get their own
SHARED = ("reference.cache.path", "actor_train.data_args.cache_dir", "system_envs")  # by all runs
NOT_COMPARED = (*PLACE, "overwrite", "resume_from_checkpoint", "")
STATE, CONSOLE = "sweep.json", "console.log"
REPORT = "sweep reference: "  # starts the line of the reference pass; libraries may print after it
SIGNALS = (130, 143)  # exit codes of a run that was asked to stop
# If the sweep is killed, it cannot pass a signal on: the kernel does. PR_SET_PDEATHSIG survives
# exec and refers to the
# thread that started the process. Not a preexec_fn, which would run Python between fork and exec.
TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


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

    def end(self, code: int, error: str = "") -> None:
        self.exit_code = code
        if code in SIGNALS:
            error = "asked to stop; run the same command again to resume"
        self.state = "finished" if not code else "stopped" if code in SIGNALS else "failed"
        self.error = error if code else ""

    def as_json(self) -> dict[str, Any]:
        names = ("values", "state", "exit_code", "error")
        return {name: getattr(self, name) for name in names}


@dataclass
class Sweep:
    """Runs in one folder. They share the caches of the YAML, also with the runs of other sweeps."""

    file: Path
    base: DPOConfig
    axes: Mapping[str, Sequence[str]]
    folder: Path
    runs: Sequence[SweepRun]
    reference: dict[str, Any] | None = None  # cost of the pass before runs side by side

    @property
    def exit_code(self) -> int:
        """Return the code of the run that was asked to stop, else of the first that failed."""
        codes = [run.exit_code for run in self.runs]
        return next((code for code in codes if code in SIGNALS), next(filter(None, codes), 0))

    def save(self) -> None:
        """Write the state, complete or not at all."""
        runs = {run.name: run.as_json() for run in self.runs}
        temporary = self.folder / f".{STATE}-{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(strict_json({"reference": self.reference, "runs": runs}, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a power failure could leave the name without the content
        os.replace(temporary, self.folder / STATE)

    def run(self, echo: Echo) -> None:
        """Train all runs. One that fails is reported, and the others continue."""
        with control.lock(self.folder):
            self.save()
            groups = device_groups([run.config for run in self.runs])
            if len(groups) > 1:
                with StopRequest(patience=None):  # every child saves before it ends
                    self._side_by_side(groups, echo)
            else:
                self._in_turn(echo)

    def _in_turn(self, echo: Echo) -> None:
        for number, run in enumerate(self.runs, 1):
            echo(f"run {number} of {len(self.runs)}: {run.name}")
            run.end(*train_here(run.config))
            self._report(run, echo)
            if run.exit_code in SIGNALS:
                return

    def _side_by_side(self, groups: Sequence[Sequence[str]], echo: Echo) -> None:
        """Train one run per group of devices, after one pass of the reference for all of them."""
        if from_config(self.base).needs_reference:
            echo("computing the reference log-probs of all pairs, once for all runs")
            first = self.runs[0]
            console = first.config.log_dir / CONSOLE
            arguments = ["-m", __name__, *plugins.arguments(), str(self.file), *first.overrides]
            for _, code in run_children([(None, arguments, console)], groups[:1]):
                if code:
                    raise ConfigError(
                        f"the reference pass ended with exit code {code}: {last_message(console)}"
                    )
            lines = console.read_text(encoding="utf-8", errors="replace").splitlines()
            found = [line.removeprefix(REPORT) for line in lines if line.startswith(REPORT)]
            self.reference = json.loads(found[-1])
        imports = plugins.arguments()
        jobs = [
            (
                run,
                ["-m", "rather", "train", *imports, str(self.file), *run.overrides],
                run.config.log_dir / CONSOLE,
            )
            for run in self.runs
        ]
        for run, code in run_children(jobs, groups):
            run.end(code, last_message(run.config.log_dir / CONSOLE))
            self._report(run, echo)

    def _report(self, run: SweepRun, echo: Echo) -> None:
        self.save()
        ended = f" with exit code {run.exit_code}: {run.error}" if run.exit_code else ""
        echo(f"{run.name}: {run.state}{ended}")


def plan_sweep(file: Path, overrides: Sequence[str], *, overwrite: bool = False) -> Sweep:
    """Load and check the config of every run before anything starts."""
    if started_by_torchrun():
        raise ConfigError("A sweep starts its runs itself: start it without torchrun.")
    fixed, axes = read_grid(overrides)
    base = settings(file, fixed)
    name = f"{base.exp_name}-sweep"
    folder = Path(base.output_dir).expanduser() / name
    shared = [
        *(text for text in fixed if _key(text) not in PLACES),
        f"output_dir={folder}",
        f"logging_dir={Path(base.logging_dir).expanduser() / name}",
        f"reference.cache.path={base.reference_cache_dir}",
        f"actor_train.data_args.cache_dir={base.data_cache_dir(base.actor_train.data_args)}",
        *(["overwrite=true"] if overwrite else []),
    ]
    runs = []
    for label, values in combinations(axes).items():
        own = [*shared, *(f"{key}={value}" for key, value in values.items()), f"exp_name={label}"]
        runs.append(SweepRun(label, values, own, settings(file, own)))
    if not overwrite:
        _refuse_other_settings(folder, runs)
    folder.mkdir(parents=True, exist_ok=True)
    return Sweep(file, base, axes, folder, runs)


def _refuse_other_settings(folder: Path, runs: Sequence[SweepRun]) -> None:
    """A run folder from an earlier start must have been trained with the settings of now."""
    changed = []
    for run in runs:
        file = run.config.run_dir / "config.yaml"
        before = _settings_in(file.read_text(encoding="utf-8")) if file.is_file() else {}
        found = differences(before, _settings_in(dump_yaml(run.config))) if before else {}
        changed += [f"{run.name}.{key}: {a!r} before, {b!r} now" for key, (a, b) in found.items()]
    if changed:
        raise ConfigError(
            f"{folder} contains a sweep with other settings:\n  " + "\n  ".join(changed) + "\n"
            "Restore them, choose another exp_name in the YAML, or start from scratch with "
            "--overwrite."
        )


def _settings_in(config: str) -> dict[str, Any]:
    """Return the settings of a config.yaml except paths; nothing if it was cut off."""
    try:
        values = yaml.safe_load(config)
    except yaml.YAMLError:
        return {}
    return {key: value for key, value in leaves(values) if key not in NOT_COMPARED}


# --- the grid ---


def read_grid(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the overrides with one value, and the keys with several.

    Commas separate values; a list as one value is written [0,1].
    """
    fixed, axes = [], {}
    for text in overrides:
        key, values = _key(text), split(text.partition("=")[2])
        problem = ""
        if key == "overwrite":
            problem = "use --overwrite to start a sweep from scratch"
        elif len(values) < 2:
            fixed.append(text)
        elif key in PLACES:
            problem = "the runs of a sweep get their own; give it one value"
        elif key.startswith(SHARED):
            problem = "the runs of a sweep share it; give it one value"
        elif "" in values or len(set(values)) < len(values):
            problem = "separate different values with commas, each value once"
        if problem:
            raise ConfigError(f"{text} (command line): {problem}.")
        if len(values) > 1:
            axes[key] = values
    if not axes:
        raise ConfigError(
            "Nothing to sweep over: give a key several values, such as beta=0.01,0.05,0.1."
        )
    return fixed, axes


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def combinations(axes: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """Return the name of each run -> its values; the last key changes fastest."""
    short = [key.rpartition(".")[2] for key in axes]
    labels = short if len(set(short)) == len(short) else list(axes)
    found: dict[str, dict[str, str]] = {}
    for values in product(*axes.values()):
        name = "_".join(f"{label}-{value}" for label, value in zip(labels, values, strict=True))
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100]
        while name in found:
            name += "x"  # two values that look the same in the name of a folder
        found[name] = dict(zip(axes, values, strict=True))
    return found


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
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_children(
    jobs: Sequence[tuple[Any, Sequence[str], Path]], groups: Sequence[Sequence[str]]
) -> Iterator[tuple[Any, int]]:
    """Run (key, arguments of Python, file for the output), one process per group of devices.

    Yield the key and the exit code of each process that ends. If the sweep ends, so do they.
    """
    waiting, free = list(reversed(jobs)), list(groups)
    running: dict[subprocess.Popen[bytes], tuple[Any, Sequence[str]]] = {}
    try:
        while waiting or running:
            while waiting and free:
                key, arguments, console = waiting.pop()
                devices = free.pop(0)
                running[_start(arguments, devices, console)] = key, devices
            for child in [child for child in running if child.poll() is not None]:
                key, devices = running.pop(child)
                free.append(devices)
                yield key, child.returncode if child.returncode >= 0 else 128 - child.returncode
            time.sleep(0.1)
    finally:
        for child in running:
            child.terminate()
        for child in running:
            child.wait()


def _start(
    arguments: Sequence[str], devices: Sequence[str], console: Path
) -> subprocess.Popen[bytes]:
    """Start Python with these devices only; its output goes to a file."""
    console.parent.mkdir(parents=True, exist_ok=True)
    tied = ["-S", "-c", TIED, str(os.getpid())] if sys.platform == "linux" else []
    with console.open("wb") as out:
        # In a session of its own, so that Ctrl-C in the terminal reaches it only through the sweep.
        return subprocess.Popen(
            [sys.executable, *tied, *arguments], stdout=out, stderr=out, start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(devices)},
        )  # fmt: skip


def last_message(console: Path) -> str:
    """Return the error that a process printed last."""
    lines = console.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.startswith("rather: ")] or lines[-1:] or [""]
    return f"{said[-1].removeprefix('rather: ')} ({console})"


def device_groups(configs: Sequence[DPOConfig]) -> list[list[str]]:
    """Return the GPUs in groups as large as the largest run needs; one group: run in turn."""
    used: set[int] = set()
    for config in configs:
        actor, reference = mappings(config)
        used.update(actor, reference if from_config(config).needs_reference else [])
    on_cpu = any(config.platform == "cpu" for config in configs) or not torch.cuda.is_available()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    gpus, size = [] if on_cpu else visible, len(used)
    elsewhere = any(config.num_nodes > 1 or config.ray.address is not None for config in configs)
    if elsewhere or used != set(range(size)) or len(gpus) < 2 * size or len(configs) < 2:
        return [gpus]
    return [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]


# --- the pass of the reference before runs side by side ---


def fill_cache(config: DPOConfig) -> dict[str, Any] | None:
    """Compute all log-probs that the run will need, in its own micro-batches; return the cost."""
    with closing(DPOPipeline(config)) as pipeline:
        known = pipeline.reference_logps
        if known is None:
            return None
        pipeline.initialize()
        with closing(known):
            for pairs in _pairs_of_run(pipeline):
                pipeline.reference_stream.columns(pipeline.packing.to_evaluate(pairs))
                known.keep()
            return known.report()


def _pairs_of_run(pipeline: DPOPipeline) -> Iterator[Sequence[TokenPair]]:
    """Yield the pairs of each step, then those of the evaluation, in the order of the run."""
    source = pipeline.source
    assert isinstance(source, PreparedSteps)
    for done in range(source.total_steps):
        yield source.pairs_after(done)
    for held_out in pipeline.data.evals.values():
        for first in range(0, len(held_out), EVALUATION_CHUNK):
            yield held_out.take(range(first, min(first + EVALUATION_CHUNK, len(held_out))))


def _print_fill() -> int:
    prefix, words = "--import=", sys.argv[1:]
    plugins.request(Path(word.removeprefix(prefix)) for word in words if word.startswith(prefix))
    file, *overrides = [word for word in words if not word.startswith(prefix)]
    print(REPORT + json.dumps(fill_cache(settings(Path(file), overrides))))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(_print_fill))
