"""`rather sweep`: one reference pass, the best run, resuming, refused changes, failed runs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from rather.commands.terminal import settings
from rather.config.load import dump_yaml
from rather.config.run_config import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
from rather.tools import sweep as sweep_runs
from rather.tools.sweep import SweepRun, plan_sweep, run_children
from tests.commands.conftest import exits, rather, succeed
from tests.tiny import make_config

Writer = Callable[..., Path]
BETAS = "beta=0.01,0.05,0.1"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    make_config(folder)
    return folder


@pytest.fixture
def yaml_file(shared: Path, tmp_path: Path) -> Writer:
    """A YAML whose runs lie in a folder of their own; the tokenised pairs are shared."""

    def write(**changes: Any) -> Path:
        own = {
            "output_dir": str(tmp_path / "out"),
            "logging_dir": str(tmp_path / "logs"),
            "max_steps": 3,
        }
        cached = str(shared / "output" / ".cache" / "data")
        cache = {f"{role}__data_args__cache_dir": cached for role in ("actor_train", "validation")}
        config = make_config(shared, **{**own, **cache, **changes})
        file = tmp_path / "dpo.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        return file

    return write


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())["reference"]
    return found


def test_three_betas_take_one_pass_of_the_reference(yaml_file: Writer, tmp_path: Path) -> None:
    """The first run computes as many forwards as a single run; the same command then does nothing."""
    file = yaml_file()
    done = succeed("sweep", file, BETAS, "--json")
    found, folder = json.loads(done.stdout), tmp_path / "out" / "run-sweep"
    names = ["beta-0.01", "beta-0.05", "beta-0.1"]
    reports = [report(folder / name) for name in names]
    alone = settings(file, [f"output_dir={tmp_path / 'alone'}"])
    DPOPipeline(alone).run()
    expected = report(alone.run_dir)
    assert expected["forwards"] > 1
    assert [each["forwards"] for each in reports] == [expected["forwards"], 0, 0]
    assert [each["pairs_computed"] for each in reports] == [expected["pairs_computed"], 0, 0]
    assert {each["cache"] for each in reports} == {reports[0]["cache"]}
    assert [
        yaml.safe_load((folder / name / "config.yaml").read_text())["beta"] for name in names
    ] == [0.01, 0.05, 0.1]
    assert [run["state"] for run in found["runs"]] == ["finished"] * 3
    assert [run["reference_forwards"] for run in found["runs"]] == [expected["forwards"], 0, 0]
    assert found["metric"] == "eval/rewards/accuracies"
    values = {run["name"]: run["value"] for run in found["runs"]}
    assert values[found["best"]] == max(values.values())

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    again = succeed("sweep", file, BETAS)
    assert again.output.count("finished at step 3") == 3
    assert "Best by eval/rewards/accuracies" in again.stdout
    assert f"rather board {folder}" in again.stdout
    assert "Not significantly worse with so few held-out pairs" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == before

    succeed("sweep", file, BETAS + ",0.2")
    assert report(folder / "beta-0.2")["forwards"] == 0

    planned = plan_sweep(
        file, ["beta=1,2", "exp_name=other", f"output_dir={tmp_path / 'else where'}"]
    )
    assert planned.folder == tmp_path / "else where" / "other-sweep"
    assert [run.config.run_dir for run in planned.runs] == [
        planned.folder / "beta-1",
        planned.folder / "beta-2",
    ]


def test_one_that_fails_does_not_stop_the_others(yaml_file: Writer, tmp_path: Path) -> None:
    """The sweep exits with the code of the failed run, and another run is the best."""
    file = yaml_file(on_nonfinite="stop")
    rates = "actor_train.training_args.learning_rate=1e30,1e-3"
    done = rather("sweep", file, rates)
    assert done.exit_code == 6, done.output
    state = json.loads((tmp_path / "out" / "run-sweep" / "sweep.json").read_text())["runs"]
    assert [run["state"] for run in state.values()] == ["failed", "finished"]
    assert state["learning_rate-1e30"]["exit_code"] == 6
    assert "learning_rate-1e30: failed with exit code 6" in done.output
    assert "Best by eval/rewards/accuracies: learning_rate-1e-3" in done.stdout


def test_a_stopped_sweep_is_resumed(yaml_file: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to one run ends the sweep; the next start trains all runs, which resume."""
    trained: list[str] = []
    codes = {"beta-0.05": 143}

    def train(config: DPOConfig) -> tuple[int, str]:
        trained.append(config.exp_name)
        return codes.get(config.exp_name, 0), ""

    monkeypatch.setattr(sweep_runs, "train_here", train)
    file = yaml_file()
    first = rather("sweep", file, BETAS)
    assert first.exit_code == 143
    assert trained == ["beta-0.01", "beta-0.05"]
    assert "waiting" in first.stdout
    assert "run the same command again to resume" in first.output
    codes.clear()
    trained.clear()
    succeed("sweep", file, BETAS)
    assert trained == ["beta-0.01", "beta-0.05", "beta-0.1"]


def test_a_run_folder_with_other_settings_is_refused(
    yaml_file: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a folder remains if `--overwrite` is interrupted before it gets to that run."""
    monkeypatch.setattr(sweep_runs, "train_here", lambda config: (143, ""))
    rate = "actor_train.training_args.learning_rate"
    old = plan_sweep(yaml_file(), ["beta=1,2", f"{rate}=1e-4"]).runs[1].config
    old.run_dir.mkdir(parents=True)
    (old.run_dir / "config.yaml").write_text(dump_yaml(old))
    exits(143, "sweep", yaml_file(), "beta=1,2", f"{rate}=1e-4")
    exits(143, "sweep", yaml_file(), "beta=1,2", f"{rate}=1e-3", "--overwrite")
    refused = exits(2, "sweep", yaml_file(), "beta=1,2", f"{rate}=1e-3")
    assert "contains a sweep with other settings" in refused
    assert f"beta-2.{rate}: 0.0001 before, 0.001 now" in refused
    assert "--overwrite" in refused


def test_a_bug_in_a_run_is_a_failure_of_that_run(
    yaml_file: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(sweep_runs, "train_run", broken)
    found = sweep_runs.train_here(settings(yaml_file(), []))
    assert found == (1, "ZeroDivisionError: by nothing")


def test_without_held_out_pairs_no_run_is_the_best(
    yaml_file: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_runs, "train_here", lambda config: (0, ""))
    file = yaml_file(validation__data_args__file_name=None)
    done = succeed("sweep", file, "beta=1,2")
    assert "No best run: no pairs are held out (validation.data_args)." in done.stdout
    assert "no pairs are held out" in exits(2, "sweep", file, "beta=1,2", "--by", "eval/loss")


def test_unknown_metrics_and_values_are_refused(yaml_file: Writer) -> None:
    for metric in ("eval/accuracy", "eval/kl"):
        assert "not a metric with a best value" in exits(
            2, "sweep", yaml_file(), "beta=1,2", "--by", metric
        )
    assert "beta" in exits(2, "sweep", yaml_file(), "beta=0.1,-1")


def test_finished_runs_on_other_pairs_are_refused(
    yaml_file: Writer, tmp_path: Path, shared: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text((shared / "pairs.jsonl").read_text())
    file = yaml_file(actor_train__data_args__file_name=str(pairs), max_steps=1)
    succeed("sweep", file, "beta=1,2")
    pairs.write_text((shared / "pairs.jsonl").read_text().replace("w1 ", "w2 "))
    assert "failed with exit code 4" in exits(4, "sweep", file, "beta=1,2")


# --- side by side ---


def test_groups_of_devices(yaml_file: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_runs.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep_runs.torch.cuda, "device_count", lambda: 5)
    config = settings(yaml_file(), [])
    groups = sweep_runs.device_groups
    assert groups([config] * 2) == [["0"], ["1"], ["2"], ["3"], ["4"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3")
    everything = [["7", "6", "5", "4", "3"]]
    two = settings(yaml_file(), ["actor_train.device_mapping=[0]", "reference.device_mapping=[1]"])
    assert groups([two, two]) == [["7", "6"], ["5", "4"]]
    assert groups([config, two]) == [["7", "6"], ["5", "4"]], "as many as the largest run takes"
    assert groups([config]) == everything
    odd = settings(yaml_file(), ["actor_train.device_mapping=[1]", "reference.device_mapping=[1]"])
    assert groups([odd, odd]) == everything


def test_runs_side_by_side_share_one_pass_of_the_reference(
    yaml_file: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of the children, in this process: no run computes the reference."""
    modules: list[str] = []

    def children(
        jobs: Sequence[tuple[SweepRun, Sequence[str]]], groups: Sequence[Sequence[str]]
    ) -> Iterator[tuple[SweepRun, int]]:
        assert set(map(tuple, groups)) <= {("4",), ("5",)}
        for run, (_, module, *rest) in jobs:
            run.console.parent.mkdir(parents=True, exist_ok=True)
            modules.append(module)
            code = 0
            if module == "rather.tools.sweep":
                with pytest.raises(typer.Exit):
                    sweep_runs.fill_cache(Path(rest[0]), rest[1:])
            else:
                assert rest[0] == "train"
                code, _ = sweep_runs.train_here(settings(Path(rest[1]), rest[2:]))
            run.console.touch()
            yield run, code

    monkeypatch.setattr(sweep_runs, "device_groups", lambda _configs: [["4"], ["5"]])
    monkeypatch.setattr(sweep_runs, "run_children", children)
    done = succeed("sweep", yaml_file(), "beta=0.01,0.05", "--json")
    found = json.loads(done.stdout)
    assert modules == ["rather.tools.sweep", "rather", "rather"]
    assert [run["reference_forwards"] for run in found["runs"]] == [0, 0]


def test_children_get_devices_of_their_own(tmp_path: Path) -> None:
    """Two processes at a time; each sees its devices, and the next one gets those that are free."""
    code = (
        "import os, sys; print('rather: of', os.environ['CUDA_VISIBLE_DEVICES']); print('more'); "
        "sys.exit(int(sys.argv[1]))"
    )
    runs: list[Any] = [SimpleNamespace(console=tmp_path / "logs" / f"{n}.log") for n in (6, 0, 7)]
    jobs = [(run, ["-c", code, run.console.stem]) for run in runs]
    codes = {run.console.stem: code for run, code in run_children(jobs, [["2", "3"], ["4"]])}
    assert codes == {"6": 6, "0": 0, "7": 7}
    messages = [sweep_runs.last_message(run.console) for run in runs]
    assert messages[:2] == [f"of 2,3 ({runs[0].console})", f"of 4 ({runs[1].console})"]
    assert messages[2].startswith(("of 2,3 (", "of 4 ("))


def test_a_signal_is_passed_on_to_the_children(tmp_path: Path) -> None:
    """The sweep exits with the code of the signal, after a child that takes its time to save."""
    ready, saved = tmp_path / "ready", tmp_path / "saved"
    os.mkfifo(ready)
    child = f"""
import pathlib, signal, sys
def end(*_):
    pathlib.Path({str(saved)!r}).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
pathlib.Path({str(ready)!r}).write_text("ready")
signal.pause()
"""
    process = start_sweep(child, tmp_path)
    assert ready.read_text() == "ready"  # opened by both ends: waits for the child
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert saved.read_text() == "saved"


def start_sweep(child: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that runs this program as the child of a sweep."""
    parent = f"""
from pathlib import Path
from types import SimpleNamespace
from rather.errors import Ended
from rather.tools.sweep import run_children
from rather.run_folder.control import StopRequest
try:
    with StopRequest(patience=None):
        run = SimpleNamespace(console=Path({str(folder / "console")!r}))
        list(run_children([(run, ["-c", {child!r}])], [["0"]]))
except Ended as error:
    raise SystemExit(error.exit_code)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen([sys.executable, "-c", parent], env=environment)


def test_the_children_of_a_killed_sweep_are_asked_to_end(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = f"""
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it may come before sigwait
pipe = os.open({str(fifo)!r}, os.O_WRONLY)
os.write(pipe, f"{{os.getpid()}}\\n".encode())
signal.sigwait([signal.SIGTERM])
os.write(pipe, b"saved\\n")
"""
    process = start_sweep(child, tmp_path)
    with fifo.open() as pipe:
        number = int(pipe.readline())
        process.kill()
        process.wait()
        try:
            assert select.select([pipe], [], [], 60)[0], "the child continues without the sweep"
            assert pipe.read() == "saved\n"
        finally:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def test_a_sweep_in_use_is_refused(yaml_file: Writer) -> None:
    from rather.run_folder import control

    file = yaml_file()
    planned = plan_sweep(file, ["beta=1,2"])
    with control.lock(planned.folder):
        assert "is in use by process" in exits(2, "sweep", file, "beta=1,2")
