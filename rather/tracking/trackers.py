"""The trackers of `track_with`: TensorBoard, W&B, trackio, MLflow and SwanLab.

Each receives the same records under the same names, and continues its own run after a resume. API
keys come from the environment or the tracker's own login.
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
from typing import TYPE_CHECKING, Any

from rather.config.show import public_values
from rather.errors import ConfigError
from rather.files import write_own
from rather.tracking.json_lines import Record, flatten, read_object, read_records

if TYPE_CHECKING:
    from rather.config.run_config import DPOConfig

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


def check_installed(trackers: Sequence[str]) -> None:
    """Raise a ConfigError if a tracker is missing, before the run has cost anything."""
    if missing := [name for name in trackers if not is_installed(name)]:
        text = "track_with: {0} is not installed; run pip install 'rather[{0}]', or remove it."
        raise ConfigError([text.format(name) for name in missing])


def is_installed(package: str) -> bool:
    """Return whether it is a real package; W&B leaves a folder `wandb` that looks like one."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


class TrackedRun:
    """A run as its trackers see it: names, settings, and what they received before a resume.

    Tracker ids are in the run folder, not in the checkpoint: changing trackers keeps the run.
    """

    def __init__(self, config: DPOConfig) -> None:
        self.options, self.start_step = config.tracker_kwargs, 0
        self.trackers, self.unit = config.trackers, config.unit
        self.keeps_ledger = config.pair_ledger
        self.project = self.options.project or "rather"
        self.name = self.options.name or config.exp_name
        self.folder, self.run_dir = config.tracker_dir.absolute(), config.run_dir
        self.settings = public_values(config)
        self.database = Path(config.logging_dir).expanduser().absolute() / "mlflow.db"
        self.ids: dict[str, Any] = {}

    def begin(self, start_step: int) -> None:
        """Continue after so many steps; a new run has no ids."""
        for name, setting in ENVIRONMENT.items():  # before a tracker's package is imported
            os.environ.setdefault(name, setting)
        self.start_step = start_step
        self.settings.pop(RESUMED, None)
        if start_step:
            self.settings[RESUMED] = start_step
        else:
            (self.run_dir / TRACKER_IDS).unlink(missing_ok=True)
        self.ids = read_object(self.run_dir / TRACKER_IDS)

    def keep_id(self, tracker: str, run_id: str | None = None) -> str:
        """Store the id of this run, by default the known one or a new one, and return it."""
        self.ids[tracker] = run_id or self.ids.get(tracker) or secrets.token_hex(8)
        text = json.dumps(self.ids, indent=1) + "\n"
        write_own(self.run_dir / TRACKER_IDS, text)
        return str(self.ids[tracker])

    def records(self, first: int) -> Iterator[Record]:
        """Return the records from step `first` to the checkpoint.

        A tracker that writes in the background may have lost them in a kill.
        """
        earlier = read_records(self.run_dir / "metrics.jsonl") if self.start_step else ()
        return (record for record in earlier if record["step"] >= first)


class Tracker:
    """A destination of metrics. It may raise any exception: its caller switches it off.

    By default it is a package's run with `log` and `finish`.
    """

    _run: Any

    def log(self, step: int, metrics: Record) -> None:
        self._run.log(_values(metrics), step=step)

    def log_again(self, records: Iterator[Record]) -> None:
        for record in records:
            self.log(int(record["step"]), record)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish()


class TensorBoard(Tracker):
    """Writes scalars; what an earlier, killed run wrote after the checkpoint is dropped."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # importing it takes seconds

        purge = run.start_step + 1 if run.start_step else 0
        self._writer = SummaryWriter(str(run.folder), purge_step=purge)

    def log(self, step: int, metrics: Record) -> None:
        for name, number in _values(metrics).items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()  # otherwise a kill loses the last two minutes

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases. If its server does not answer, the run is kept in local files."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        start = partial(
            wandb.init, id=run.keep_id("wandb"), resume="allow", reinit="create_new",
            dir=str(run.folder), project=run.project, name=run.name, tags=run.options.tags,
            notes=run.options.notes, config=run.settings, allow_val_change=True,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, **WANDB_TIMEOUTS
            ),
        )  # fmt: skip
        mode: Any = run.options.mode or os.environ.get("WANDB_MODE", "online")
        try:
            if mode == "online" and not wandb.login(prompt=False, verify=False):
                raise PermissionError("no key: run `wandb login` or set WANDB_API_KEY")
            self._run = start(mode=mode)
            if mode == "online":
                log.info("W&B shows the run at %s", self._run.url)
        except Exception as error:
            text = "W&B is not available (%s): the run is kept in %s/wandb; `wandb sync` sends it."
            log.warning(text, error, run.folder)
            wandb.teardown()  # otherwise its service still holds the id
            self._run = start(mode="offline")
        # It writes in the background, and each offline start has a file of its own.
        self.log_again(run.records(self._run.step))

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio(Tracker):
    """trackio: a local SQLite file, or the Space that TRACKIO_SPACE_ID names."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        known_id, project, name = run.ids.get("trackio"), run.project, run.name
        with redirect_stdout(StringIO()):  # it prints a greeting
            resume = "allow" if known_id else "never"
            self._run = trackio.init(
                project=project, name=name, config=run.settings, resume=resume, embed=False
            )
        last_step = partial(SQLiteStorage.get_max_step_for_run, project, name)
        # It looks runs up by name, so it may have found another one.
        if known_id and self._run.id != known_id and last_step(known_id) is not None:
            raise RuntimeError(
                f"project {project} has a newer run {name}; set tracker_kwargs.name to another name"
            )
        run.keep_id("trackio", self._run.id)
        if not known_id:
            return
        if not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")):
            last = last_step(self._run.id)
            self.log_again(run.records(0 if last is None else last + 1))  # it writes twice a second
        self._run.log({RESUMED: run.start_step}, step=run.start_step)

    def close(self, *, failed: bool = False) -> None:
        with redirect_stdout(StringIO()):
            self._run.finish()


class MLflow(Tracker):
    """MLflow: an SQLite file next to the logs, or the server that tracker_kwargs.uri names."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = run.options.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            run.database.parent.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{run.database}"
        self._client = client = MlflowClient(uri)
        if known_id := run.ids.get("mlflow"):
            client.update_run(known_id, "RUNNING")
            client.set_tag(known_id, RESUMED, str(run.start_step))
            self._id = known_id
            return
        existing = client.get_experiment_by_name(run.project)
        experiment = existing.experiment_id if existing else client.create_experiment(run.project)
        notes = {"mlflow.note.content": run.options.notes} if run.options.notes else {}
        tags = dict.fromkeys(run.options.tags, "") | notes
        created = client.create_run(experiment, run_name=run.name, tags=tags)
        self._id = run.keep_id("mlflow", created.info.run_id)
        settings = flatten(run.settings).items()
        params = [Param(_mlflow_name(name), str(setting)) for name, setting in settings]
        client.log_batch(self._id, params=params)

    def log(self, step: int, metrics: Record) -> None:
        from mlflow.entities import Metric

        now, values = int(time.time() * 1000), _values(metrics).items()
        points = [Metric(_mlflow_name(name), float(number), now, step) for name, number in values]
        self._client.log_batch(self._id, metrics=points)

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class SwanLab(Tracker):
    """SwanLab."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=run.project, name=run.name, description=run.options.notes,
            tags=run.options.tags, config=run.settings, mode=run.options.mode,
            log_dir=str(run.folder / "swanlog"), id=run.keep_id("swanlab"), resume="allow",
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
    return {name: number for name, number in metrics.items() if name != "step"}


def _mlflow_name(name: str) -> str:
    """Replace the characters that MLflow does not accept."""
    return re.sub(r"[^\w\-. /:]", "_", name)
