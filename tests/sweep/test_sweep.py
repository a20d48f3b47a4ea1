"""`rather sweep`: one pass of the reference, the best run, going on, refusing changes, surviving failures."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from rather.cli import app
from rather.commands.sweep import fill, runs
from rather.commands.sweep.children import Children, last_words
from rather.commands.sweep.runs import Outcome, Sweep
from rather.commands.terminal import settings
from rather.config.load import dump_yaml
from rather.config.schema import DPOConfig
from rather.pipeline.pipeline import DPOPipeline
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
        cache = {"actor_train__data_args__cache_dir": str(shared / "data")}
        config = make_config(shared, **own, **cache, **changes)
        file = tmp_path / "dpo.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        return file

    return write


def sweep(*args: object) -> Result:
    return CliRunner().invoke(
        app, ["sweep", *map(str, args)], env={"COLUMNS": "160", "NO_COLOR": "1"}
    )


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())["reference"]
    return found


def test_three_betas_take_one_pass_of_the_reference(yaml_file: Writer, tmp_path: Path) -> None:
    """As many forwards as one run alone takes, all of them in the first; then the same command has nothing to do."""
    file = yaml_file()
    done = sweep(file, BETAS, "--json")
    assert done.exit_code == 0, done.output
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
    page = (folder / "sweep.html").read_text()
    assert all(name in page for name in names)
    assert "eval/rewards/accuracies by beta" in page
    assert "http" not in page[: page.index("plotly.js")].replace("http-equiv", "")

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    again = sweep(file, BETAS)
    assert again.exit_code == 0, again.output
    assert "3 of 3 runs are finished already" in again.output
    assert "best by eval/rewards/accuracies" in again.stdout
    assert "within the noise of so few held-out pairs" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == before

    (folder / "sweep.json").write_text((folder / "sweep.json").read_text()[:100])
    torn = sweep(file, BETAS)
    assert torn.exit_code == 2
    assert (
        "delete this file and start the same command again: finished runs are kept" in torn.output
    )
    (folder / "sweep.json").unlink()
    assert sweep(file, BETAS).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == before

    more = sweep(file, BETAS + ",0.2")
    assert more.exit_code == 0, more.output
    assert report(folder / "beta-0.2")["forwards"] == 0

    planned = Sweep.planned(
        file, ["beta=1,2", "exp_name=other", f"output_dir={tmp_path / 'else where'}"]
    )
    assert planned.folder == tmp_path / "else where" / "other-sweep"
    assert [point.config.run_dir for point in planned.points] == [
        planned.folder / "beta-1",
        planned.folder / "beta-2",
    ]

    changed = sweep(file, BETAS, "max_steps=4")
    assert changed.exit_code == 2
    assert "holds a sweep with other settings" in changed.output
    assert "config.max_steps: 3 then, 4 now" in changed.output
    assert "--overwrite" in changed.output


def test_one_that_fails_does_not_stop_the_others(yaml_file: Writer, tmp_path: Path) -> None:
    """A learning rate that breaks the weights: its exit code is that of the sweep, and the best is another."""
    file = yaml_file(on_nonfinite="stop")
    rates = "actor_train.training_args.learning_rate=1e30,1e-3"
    done = sweep(file, rates)
    assert done.exit_code == 6, done.output
    state = json.loads((tmp_path / "out" / "run-sweep" / "sweep.json").read_text())["runs"]
    assert [run["state"] for run in state.values()] == ["failed", "finished"]
    assert state["learning_rate-1e30"]["exit_code"] == 6
    assert "learning_rate-1e30: failed with exit code 6" in done.output
    assert "best by eval/rewards/accuracies: learning_rate-1e-3" in done.stdout


def test_it_goes_on_where_it_was_asked_to_end(
    yaml_file: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in one run is its own; a signal to another ends the sweep, and the next start does what is left."""
    asked: list[str] = []
    answers = {"beta-0.05": Outcome("stopped", 143, "asked to end")}

    def train(config: DPOConfig) -> Outcome:
        asked.append(config.exp_name)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        outcome = answers.get(config.exp_name, Outcome("finished"))
        if outcome.state == "finished":
            (config.run_dir / ".finished").write_text("3\n")
        return outcome

    monkeypatch.setattr(runs, "train_here", train)
    file = yaml_file()
    first = sweep(file, BETAS)
    assert first.exit_code == 143
    assert asked == ["beta-0.01", "beta-0.05"]
    assert "waiting" in first.stdout
    answers.clear()
    assert sweep(file, BETAS).exit_code == 0
    assert asked == ["beta-0.01", "beta-0.05", "beta-0.05", "beta-0.1"]
    asked.clear()
    assert sweep(file, BETAS, "--overwrite").exit_code == 0
    assert asked == ["beta-0.01", "beta-0.05", "beta-0.1"]


def test_the_folder_of_a_run_with_other_settings_is_not_taken_for_it(
    yaml_file: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As starting anew leaves it, where it ends before that run: then the sweep's own settings are the new ones."""

    def ended(config: DPOConfig) -> Outcome:
        return Outcome("stopped", 143)

    monkeypatch.setattr(runs, "train_here", ended)
    rate = "actor_train.training_args.learning_rate"
    old = Sweep.planned(yaml_file(), ["beta=1,2", f"{rate}=1e-4"]).points[1].config
    old.run_dir.mkdir(parents=True)
    (old.run_dir / "config.yaml").write_text(dump_yaml(old))
    assert sweep(yaml_file(), "beta=1,2", f"{rate}=1e-4").exit_code == 143
    assert sweep(yaml_file(), "beta=1,2", f"{rate}=1e-3", "--overwrite").exit_code == 143
    refused = sweep(yaml_file(), "beta=1,2", f"{rate}=1e-3")
    assert refused.exit_code == 2
    assert f"beta-2.{rate}: 0.0001 then, 0.001 now" in refused.output


def test_a_bug_in_a_run_is_a_failure_of_that_run(
    yaml_file: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, config: DPOConfig) -> None:
            raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(runs, "DPOPipeline", Broken)
    outcome = runs.train_here(settings(yaml_file(), []))
    assert outcome == Outcome("failed", 1, "ZeroDivisionError: by nothing")


def test_without_held_out_pairs_none_is_the_best(
    yaml_file: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "train_here", lambda config: Outcome("finished"))
    file = yaml_file(validation__data_args__file_name=None)
    done = sweep(file, "beta=1,2")
    assert done.exit_code == 0, done.output
    assert (
        "no pairs are held out (validation.data_args), so no run can be called the best"
        in done.stdout
    )
    refused = sweep(file, "beta=1,2", "--by", "eval/loss")
    assert refused.exit_code == 2
    assert "no pairs are held out" in refused.output


def test_a_metric_that_is_none(yaml_file: Writer) -> None:
    done = sweep(yaml_file(), "beta=1,2", "--by", "eval/accuracy")
    assert done.exit_code == 2
    assert "there is no such metric" in done.output
    without_a_best = sweep(yaml_file(), "beta=1,2", "--by", "eval/kl")
    assert "there is no such metric with a best value" in without_a_best.output
    bad = sweep(yaml_file(), "beta=0.1,-1")
    assert bad.exit_code == 2
    assert "beta" in bad.output


def test_pairs_that_have_changed_are_no_part_of_the_sweep(
    yaml_file: Writer, tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "train_here", lambda config: Outcome("finished"))
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text((shared / "pairs.jsonl").read_text())
    file = yaml_file(actor_train__data_args__file_name=str(pairs))
    assert sweep(file, "beta=1,2").exit_code == 0
    pairs.write_text((shared / "pairs.jsonl").read_text().replace("w1 ", "w2 "))
    assert "sha256" in sweep(file, "beta=1,2").output


@pytest.mark.parametrize("damaged", ["{", "[]", '{"runs": {}}'])
def test_its_state_is_damaged(
    yaml_file: Writer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damaged: str
) -> None:
    monkeypatch.setattr(runs, "train_here", lambda config: Outcome("finished"))
    assert sweep(yaml_file(), "beta=1,2").exit_code == 0
    (state,) = (tmp_path / "out").glob(f"*-sweep/{runs.STATE}")
    state.write_text(damaged)
    done = sweep(yaml_file(), "beta=1,2")
    assert done.exit_code == 2
    assert "cannot be read" in done.output
    assert "delete this file" in done.output


# --- side by side ---


def test_groups_of_devices(yaml_file: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runs.torch.cuda, "device_count", lambda: 5)
    config = settings(yaml_file(), [])
    assert runs.device_groups([config]) == [["0"], ["1"], ["2"], ["3"], ["4"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3")
    two = settings(yaml_file(), ["actor_train.device_mapping=[0]", "reference.device_mapping=[1]"])
    assert runs.device_groups([two]) == [["7", "6"], ["5", "4"]]
    assert runs.device_groups([config, two]) == [["7", "6"], ["5", "4"]], (
        "as many as the largest run takes"
    )
    assert runs.device_groups([]) == [["7", "6", "5", "4", "3"]]
    odd = settings(yaml_file(), ["actor_train.device_mapping=[1]", "reference.device_mapping=[1]"])
    assert runs.device_groups([odd]) == [["7", "6", "5", "4", "3"]]


def test_runs_side_by_side_share_the_pass_before_them(
    yaml_file: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The children's work in this process, in turn: which devices each gets, and that none asks the reference."""
    seen: list[tuple[str, str]] = []
    turn = threading.Lock()

    def child(_self: Any, arguments: Sequence[str], devices: Sequence[str], console: Path) -> int:
        _, module, *rest = arguments
        with turn:
            console.parent.mkdir(parents=True, exist_ok=True)
            seen.append((module, ",".join(devices)))
            if module == "rather.commands.sweep.fill":
                found = fill.fill(settings(Path(rest[0]), rest[1:]))
                console.write_text(
                    f"some words\n{fill.REPORT}{json.dumps(found)}\na library's last warning\n"
                )
                return 0
            assert rest[0] == "train"
            return runs.train_here(settings(Path(rest[1]), rest[2:])).exit_code

    monkeypatch.setattr(runs, "device_groups", lambda _configs: [["4"], ["5"]])
    monkeypatch.setattr(runs.Children, "run", child)
    done = sweep(yaml_file(), "beta=0.01,0.05", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert seen[0] == ("rather.commands.sweep.fill", "4")
    assert {device for _, device in seen[1:]} <= {"4", "5"}
    assert found["reference"]["forwards"] > 1
    assert [run["reference_forwards"] for run in found["runs"]] == [0, 0]


def test_children_get_their_devices_and_their_last_words_are_told(tmp_path: Path) -> None:
    children, console = Children(), tmp_path / "logs" / "console.log"
    code = "import os, sys; print('rather: of', os.environ['CUDA_VISIBLE_DEVICES']); print('more'); sys.exit(6)"
    assert children.run(["-c", code], ["2", "3"], console) == 6
    assert last_words(console) == f"of 2,3 ({console})"
    assert runs._outcome(6, console).error.startswith("of 2,3")
    assert not children.alive


def test_none_starts_once_the_sweep_is_ending(tmp_path: Path) -> None:
    children, console = Children(), tmp_path / "console.log"
    with pytest.raises(KeyboardInterrupt), ThreadPoolExecutor(1) as pool, children.ended_with(pool):
        raise KeyboardInterrupt
    assert children.run(["-c", "print('late')"], ["0"], console) == 143
    assert not console.exists()


def test_a_signal_is_passed_on_to_the_children(tmp_path: Path) -> None:
    """The sweep ends with the code of the signal, and waits for a child that takes its time to save."""
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
    parent = f"""
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from rather.errors import Ended
from rather.commands.sweep.children import Children
try:
    with Children() as children, ThreadPoolExecutor(1) as pool, children.ended_with(pool):
        console = Path({str(tmp_path / "console.log")!r})
        list(pool.map(lambda code: children.run(["-c", code], ["0"], console), [{child!r}]))
except Ended as error:
    raise SystemExit(error.exit_code)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment)
    assert ready.read_text() == "ready"  # opened by both ends: waits for the child
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert saved.read_text() == "saved"


def test_the_children_of_a_sweep_that_is_killed_are_asked_to_end(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    child = f"""
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # it may come before this process waits for it
pipe = os.open({str(told)!r}, os.O_WRONLY)
os.write(pipe, f"{{os.getpid()}}\\n".encode())
signal.sigwait([signal.SIGTERM])
os.write(pipe, b"saved\\n")
"""
    parent = f"""
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from rather.commands.sweep.children import Children
with Children() as children, ThreadPoolExecutor(1) as pool, children.ended_with(pool):
    list(pool.map(lambda code: children.run(["-c", code], ["0"], Path({str(tmp_path / "console")!r})), [{child!r}]))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", parent], env=environment)
    with told.open() as pipe:
        number = int(pipe.readline())
        process.kill()
        process.wait()
        try:
            assert select.select([pipe], [], [], 60)[0], "the child goes on without the sweep"
            assert pipe.read() == "saved\n"
        finally:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def test_its_state_is_on_the_disk_before_it_replaces_the_old_one(
    yaml_file: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, done = Sweep.planned(yaml_file(), ["beta=1,2"]), []
    sync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append(f"fsync {Path(f'/proc/self/fd/{handle}').readlink().name}")
        sync(handle)

    def replaced(path: Path, target: Path) -> None:
        done.append(f"replace {path.name}")
        replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    planned.save()
    assert done == [f"{what} .sweep.json-{os.getpid()}" for what in ("fsync", "replace")]
    assert list(planned.folder.iterdir()) == [planned.folder / "sweep.json"]


def test_two_sweeps_of_one_name_do_not_meet(yaml_file: Writer) -> None:
    from rather.run_folder import control

    file = yaml_file()
    planned = Sweep.planned(file, ["beta=1,2"])
    with control.lock(planned.folder):
        done = sweep(file, "beta=1,2")
    assert done.exit_code == 2
    assert "is in use by process" in done.output
