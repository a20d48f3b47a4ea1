"""The trackers of `track_with`: TensorBoard, W&B, trackio, MLflow and SwanLab.

Each takes the same records under the same names, and continues its own run when ours is resumed. A tracker of this
list may raise whatever it likes: who calls it forgives. Keys come from the environment or the tracker's own login.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rather.config.masking import public_values
from rather.errors import ConfigError
from rather.tracking.metrics_file import Record
from rather.tracking.past import Past

if TYPE_CHECKING:
    from rather.config.schema import DPOConfig

log = logging.getLogger(__name__)

NOTHING_ELSE = {  # no reports about errors and use, and no minutes of waiting for a server that does not answer
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
WANDB_WAITS = {
    "init_timeout": 30,
    "finish_timeout": 300,
}  # seconds; it would wait for ever at the end
PROJECT = "rather"
RESUMED = "resumed_after_step"  # marks a resumed run, where a tracker cannot take back the steps that come again


class Tracker(Protocol):
    """Somewhere metrics go."""

    def log(self, step: int, metrics: Record) -> None: ...

    def close(self, *, failed: bool = False) -> None: ...


def check_installed(config: DPOConfig) -> None:
    """A tracker that was asked for and is not there ends the run before anything costs."""
    missing = [name for name in config.trackers if not _is_installed(name)]
    if missing:
        how = "is not installed; type pip install"
        raise ConfigError(
            [f"track_with: {name} {how} 'rather[{name}]', or take it out." for name in missing]
        )


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    return (
        spec is not None and spec.origin is not None
    )  # a folder `wandb` beside the run looks like a package, too


class TensorBoard:
    """Scalars by their metric names. What an earlier, killed run wrote from `purge_step` on is dropped."""

    def __init__(self, log_dir: Path, purge_step: int) -> None:
        from torch.utils.tensorboard import (
            SummaryWriter,  # takes seconds, and is not always asked for
        )

        self._writer = SummaryWriter(str(log_dir), purge_step=purge_step)

    def log(self, step: int, metrics: Record) -> None:
        for name, value in _values(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # else a kill takes the last two minutes along

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases. Where its server refuses or does not answer, the run is kept here instead."""

    def __init__(self, config: DPOConfig, past: Past) -> None:
        _send_nothing_else()
        import wandb

        given, known = config.tracker_kwargs, past.run_id("wandb")
        options = {
            "id": known or secrets.token_hex(4),
            "resume": "allow",
            "reinit": "create_new",
            "dir": str(_folder(config)),
            "project": given.project or PROJECT,
            "name": given.name or config.exp_name,
            "tags": given.tags,
            "notes": given.notes,
            "config": public_values(config) | ({RESUMED: past.start_step} if known else {}),
            "allow_val_change": True,
            "settings": wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, **WANDB_WAITS
            ),
        }
        past.keep_run_id("wandb", options["id"])
        self._run = self._begun(
            wandb, given.mode or os.environ.get("WANDB_MODE", "online"), options
        )
        for record in past.records(
            self._run.step
        ):  # written behind; and offline each start has a file of its own
            self.log(int(record["step"]), record)

    @staticmethod
    def _begun(wandb: Any, mode: str, options: dict[str, Any]) -> Any:
        if mode != "online":
            return wandb.init(mode=mode, **options)
        try:
            if not wandb.login(prompt=False, verify=False):
                raise PermissionError("no key: run `wandb login` or set WANDB_API_KEY")
            run = wandb.init(mode=mode, **options)
            log.info("W&B shows the run at %s", run.url)
            return run
        except Exception as error:
            place = f"{options['dir']}/wandb"
            log.warning(
                "W&B takes nothing now (%s): the run is kept in %s; `wandb sync` sends it.",
                error,
                place,
            )
            wandb.teardown()  # else its service still holds the id
            return wandb.init(mode="offline", **options)

    def log(self, step: int, metrics: Record) -> None:
        self._run.log(_values(metrics), step=step)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio: a local SQLite file, or the Space that TRACKIO_SPACE_ID names."""

    def __init__(self, config: DPOConfig, past: Past) -> None:
        _send_nothing_else()
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        given, known = config.tracker_kwargs, past.run_id("trackio")
        name, project = given.name or config.exp_name, given.project or PROJECT
        with redirect_stdout(StringIO()):  # its greetings would stand in the middle of ours
            resume = "allow" if known else "never"
            self._run = trackio.init(
                project=project, name=name, config=public_values(config), resume=resume, embed=False
            )
        last_of = partial(SQLiteStorage.get_max_step_for_run, project, name)
        if (
            known and self._run.id != known and last_of(known) is not None
        ):  # it finds runs by their names
            raise RuntimeError(
                f"project {project} has a newer run {name}; set tracker_kwargs.name to tell them apart"
            )
        past.keep_run_id("trackio", self._run.id)
        if known and not (
            os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        ):
            last = last_of(self._run.id)
            for record in past.records(0 if last is None else last + 1):  # it writes twice a second
                self.log(int(record["step"]), record)
        if known:
            self._run.log({RESUMED: past.start_step}, step=past.start_step)

    def log(self, step: int, metrics: Record) -> None:
        self._run.log(_values(metrics), step=step)

    def close(self, *, failed: bool = False) -> None:
        with redirect_stdout(StringIO()):
            self._run.finish()


class MLflow:
    """A run of MLflow: an SQLite file beside the logs, or the server that tracker_kwargs.uri names."""

    def __init__(self, config: DPOConfig, past: Past) -> None:
        _send_nothing_else()
        from mlflow import MlflowClient

        given, known = config.tracker_kwargs, past.run_id("mlflow")
        self._client = MlflowClient(
            given.uri or os.environ.get("MLFLOW_TRACKING_URI") or _own_database(config)
        )
        if known:
            self._client.update_run(known, "RUNNING")
            self._client.set_tag(known, RESUMED, str(past.start_step))
            self._id = known
            return
        tags = dict.fromkeys(given.tags, "") | (
            {"mlflow.note.content": given.notes} if given.notes else {}
        )
        experiment = self._experiment(given.project or PROJECT)
        self._id = self._client.create_run(
            experiment, run_name=given.name or config.exp_name, tags=tags
        ).info.run_id
        past.keep_run_id("mlflow", self._id)
        self._send_settings(dict(_flat(public_values(config))))

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _send_settings(self, settings: dict[str, str]) -> None:
        from mlflow.entities import Param

        params = [Param(_plain(name), value) for name, value in settings.items()]
        for start in range(0, len(params), 100):  # a batch takes no more
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, step: int, metrics: Record) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [
            Metric(_plain(name), float(value), now, step)
            for name, value in _values(metrics).items()
        ]
        self._client.log_batch(self._id, metrics=values)

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class SwanLab:
    """A run of SwanLab."""

    def __init__(self, config: DPOConfig, past: Past) -> None:
        _send_nothing_else()
        import swanlab

        given, known = config.tracker_kwargs, past.run_id("swanlab")
        run_id = known or secrets.token_hex(8)
        past.keep_run_id("swanlab", run_id)
        self._run = swanlab.init(
            project=given.project or PROJECT,
            name=given.name or config.exp_name,
            description=given.notes,
            tags=given.tags,
            config=public_values(config) | ({RESUMED: past.start_step} if known else {}),
            mode=given.mode,
            log_dir=str(_folder(config) / "swanlog"),
            id=run_id,
            resume="allow",
        )

    def log(self, step: int, metrics: Record) -> None:
        self._run.log(_values(metrics), step=step)

    def close(self, *, failed: bool = False) -> None:
        if failed:
            self._run.finish("crashed", "the run ended with an error")
        else:
            self._run.finish()


TRACKERS: Mapping[str, Callable[[DPOConfig, Past], Tracker]] = {
    "tensorboard": lambda config, past: TensorBoard(
        config.tracker_dir, past.start_step + 1 if past.start_step else 0
    ),
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}


def _send_nothing_else() -> None:
    """Before a package is imported; what the user has set stays."""
    for name, value in NOTHING_ELSE.items():
        os.environ.setdefault(name, value)


def _values(metrics: Record) -> dict[str, float | int]:
    return {name: value for name, value in metrics.items() if name != "step"}


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", str(value)


def _plain(name: str) -> str:
    """With the characters that MLflow takes."""
    return re.sub(r"[^\w\-. /:]", "_", name)


def _folder(config: DPOConfig) -> Path:
    config.tracker_dir.mkdir(parents=True, exist_ok=True)
    return config.tracker_dir.absolute()


def _own_database(config: DPOConfig) -> str:
    folder = Path(config.logging_dir).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"
