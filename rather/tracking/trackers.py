"""The trackers of `track_with`: TensorBoard, W&B, trackio, MLflow and SwanLab.

Each receives the same records under the same names, and continues its own run after a resume. A
tracker may raise any exception: its caller switches it off. API keys come from the environment or
the tracker's own login.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rather.config.show import public_values
from rather.errors import ConfigError
from rather.tracking.json_lines import Record, read_records

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

log = logging.getLogger(__name__)

# No telemetry, and no waiting for minutes if a server does not answer.
ENVIRONMENT = {
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
WANDB_TIMEOUTS = {"init_timeout": 30, "finish_timeout": 300}  # seconds; its default is forever
TRACKER_IDS = "trackers.json"  # file with the id that each tracker gave to the run
RESUMED = "resumed_after_step"  # marks a resume for trackers that cannot remove repeated steps


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Record) -> None: ...

    def close(self, *, failed: bool = False) -> None: ...


def check_installed(trackers: Sequence[str]) -> None:
    """Raise a ConfigError if a tracker is missing, before the run has cost anything."""
    if missing := [name for name in trackers if not is_installed(name)]:
        raise ConfigError([
            f"track_with: {name} is not installed; run pip install 'rather[{name}]', or remove it "
            "from track_with."
            for name in missing
        ])  # fmt: skip


def is_installed(package: str) -> bool:
    """Return whether it is a real package; W&B leaves a folder `wandb` that looks like one."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


class TrackedRun:
    """A run as its trackers see it: names, settings, and what they received before a resume.

    Tracker ids are in the run folder, not in the checkpoint, because other trackers do not make it
    another run.
    """

    def __init__(self, config: DPOConfig, start_step: int) -> None:
        for name, value in ENVIRONMENT.items():  # before a tracker's package is imported
            os.environ.setdefault(name, value)
        self.options, self.start_step = config.tracker_kwargs, start_step
        self.project = config.tracker_kwargs.project or "rather"
        self.name = config.tracker_kwargs.name or config.exp_name
        self.folder, self.settings = config.tracker_dir.absolute(), public_values(config)
        self.database = Path(config.logging_dir).expanduser().absolute() / "mlflow.db"
        self._metrics, self._file = config.run_dir / "metrics.jsonl", config.run_dir / TRACKER_IDS
        self._ids: dict[str, str] = {}
        if start_step == 0:
            self._file.unlink(missing_ok=True)
        elif self._file.exists():
            try:
                found = json.loads(self._file.read_text(encoding="utf-8"))
                self._ids = {str(name): str(run_id) for name, run_id in found.items()}
            except (OSError, ValueError, AttributeError) as error:  # damaged by a kill
                log.warning("%s: cannot be read (%s); trackers start a new run", self._file, error)

    def run_id(self, tracker: str) -> str | None:
        """Return the id that the tracker gave to this run, or None."""
        return self._ids.get(tracker)

    def keep_run_id(self, tracker: str, run_id: str) -> None:
        self._ids[tracker] = run_id
        self._file.write_text(json.dumps(self._ids, indent=1) + "\n", encoding="utf-8")

    def settings_for(self, tracker: str) -> dict[str, Any]:
        """Return the settings to show, with a mark if the tracker knows the run already."""
        return self.settings | ({RESUMED: self.start_step} if tracker in self._ids else {})

    def records(self, first: int) -> Iterator[Record]:
        """Return the records from step `first` to the checkpoint.

        A tracker that writes in the background may have lost them in a kill.
        """
        known = read_records(self._metrics) if self.start_step else ()
        return (record for record in known if record["step"] >= first)


class TensorBoard:
    """Writes scalars; what an earlier, killed run wrote after the checkpoint is dropped."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # importing it takes seconds

        purge = run.start_step + 1 if run.start_step else 0
        self._writer = SummaryWriter(str(run.folder), purge_step=purge)

    def log(self, step: int, metrics: Record) -> None:
        for name, value in _values(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # otherwise a kill loses the last two minutes

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class _LoggedRun:
    """A tracker whose package returns a run with `log` and `finish`."""

    _run: Any

    def log(self, step: int, metrics: Record) -> None:
        self._run.log(_values(metrics), step=step)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish()


class Wandb(_LoggedRun):
    """Weights & Biases. If its server does not answer, the run is kept in local files."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        options = {
            "id": run.run_id("wandb") or secrets.token_hex(4),
            "resume": "allow",
            "reinit": "create_new",
            "dir": str(run.folder),
            "project": run.project,
            "name": run.name,
            "tags": run.options.tags,
            "notes": run.options.notes,
            "config": run.settings_for("wandb"),
            "allow_val_change": True,
            "settings": wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, **WANDB_TIMEOUTS
            ),
        }
        run.keep_run_id("wandb", options["id"])
        mode = run.options.mode or os.environ.get("WANDB_MODE", "online")
        self._run = self._start(wandb, mode, options)
        # It writes in the background, and each offline start has a file of its own.
        for record in run.records(self._run.step):
            self.log(int(record["step"]), record)

    @staticmethod
    def _start(wandb: Any, mode: str, options: dict[str, Any]) -> Any:
        if mode != "online":
            return wandb.init(mode=mode, **options)
        try:
            if not wandb.login(prompt=False, verify=False):
                raise PermissionError("no key: run `wandb login` or set WANDB_API_KEY")
            run = wandb.init(mode=mode, **options)
            log.info("W&B shows the run at %s", run.url)
            return run
        except Exception as error:
            log.warning(
                "W&B is not available (%s): the run is kept in %s/wandb; `wandb sync` sends it.",
                error, options["dir"],
            )  # fmt: skip
            wandb.teardown()  # otherwise its service still holds the id
            return wandb.init(mode="offline", **options)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio(_LoggedRun):
    """trackio: a local SQLite file, or the Space that TRACKIO_SPACE_ID names."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        known, project, name = run.run_id("trackio"), run.project, run.name
        with redirect_stdout(StringIO()):  # it prints a greeting
            resume = "allow" if known else "never"
            self._run = trackio.init(
                project=project, name=name, config=run.settings, resume=resume, embed=False
            )
        last_step = partial(SQLiteStorage.get_max_step_for_run, project, name)
        # It looks runs up by name, so it may have found another one.
        if known and self._run.id != known and last_step(known) is not None:
            raise RuntimeError(
                f"project {project} has a newer run {name}; set tracker_kwargs.name to another name"
            )
        run.keep_run_id("trackio", self._run.id)
        if not known:
            return
        if not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")):
            last = last_step(self._run.id)
            for record in run.records(0 if last is None else last + 1):  # it writes twice a second
                self.log(int(record["step"]), record)
        self._run.log({RESUMED: run.start_step}, step=run.start_step)

    def close(self, *, failed: bool = False) -> None:
        with redirect_stdout(StringIO()):
            self._run.finish()


class MLflow:
    """MLflow: an SQLite file next to the logs, or the server that tracker_kwargs.uri names."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = run.options.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            run.database.parent.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{run.database}"
        self._client = client = MlflowClient(uri)
        if known := run.run_id("mlflow"):
            client.update_run(known, "RUNNING")
            client.set_tag(known, RESUMED, str(run.start_step))
            self._id = known
            return
        found = client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else client.create_experiment(run.project)
        notes = {"mlflow.note.content": run.options.notes} if run.options.notes else {}
        tags = dict.fromkeys(run.options.tags, "") | notes
        self._id = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        run.keep_run_id("mlflow", self._id)
        params = [Param(_mlflow_name(name), value) for name, value in _flatten(run.settings)]
        for start in range(0, len(params), 100):  # the most that a batch takes
            client.log_batch(self._id, params=params[start : start + 100])

    def log(self, step: int, metrics: Record) -> None:
        from mlflow.entities import Metric

        now, values = int(time.time() * 1000), _values(metrics).items()
        self._client.log_batch(
            self._id,
            metrics=[Metric(_mlflow_name(name), float(value), now, step) for name, value in values],
        )

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class SwanLab(_LoggedRun):
    """SwanLab."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        run_id, settings = run.run_id("swanlab"), run.settings_for("swanlab")
        run.keep_run_id("swanlab", run_id := run_id or secrets.token_hex(8))
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=run.project, name=run.name, description=run.options.notes,
            tags=run.options.tags, config=settings, mode=run.options.mode,
            log_dir=str(run.folder / "swanlog"), id=run_id, resume="allow",
        )  # fmt: skip

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(*(("crashed", "the run ended with an error") if failed else ()))


TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}


def _values(metrics: Record) -> dict[str, float | int]:
    return {name: value for name, value in metrics.items() if name != "step"}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _mlflow_name(name: str) -> str:
    """Replace the characters that MLflow does not accept."""
    return re.sub(r"[^\w\-. /:]", "_", name)
