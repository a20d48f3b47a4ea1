"""The server: who gets an answer, what it contains, and that no request and no folder can break
it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from array import array
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from rather.config.run_config import DPOConfig
from rather.run_folder import control
from rather.tools.board import runs as board_runs
from rather.tools.board.serve import ROUTES, Board
from rather.tools.report.folder import MetricColumn, MetricsReader
from rather.tracking.json_lines import JsonLines
from tests.board.conftest import FINDING, INCIDENT, add_line, asked, get, rows
from tests.commands.conftest import exits
from tests.house.source import ROOT

Serve = Callable[[Path], Board]


def write_run(folder: Path, lines: int = 3, **config: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"pretrain": "base", "pref_loss": "sigmoid", "beta": 0.1, **config}
    (folder / "config.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
    )
    rest = '"rewards/accuracies": 0.5, "logps/chosen": -7.5, "grad_norm": 1.25, "lr": 1e-06'
    numbers = ((step, 1 / step, step / 7) for step in range(1, lines + 1))
    records = (
        f'{{"step": {at}, "loss": {loss}, "rewards/margins": {margin}, {rest}}}\n'
        for at, loss, margin in numbers
    )
    (folder / "metrics.jsonl").write_text("".join(records))
    return folder


# --- who is answered ---


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_is_answered_without_the_token(board: Board, path: str) -> None:
    for headers in (
        {"Accept": "*/*"},
        {"Authorization": "Bearer wrong"},
        {"Cookie": f"{board.cookie}=wrong"},
    ):
        answer, body = get(board, path, **headers)
        assert answer.status == 403
        assert b"`rather board` printed" in body
    assert get(board, f"{path}?token=wrong", Accept="*/*")[0].status == 403
    assert board.token.encode() not in body


def test_the_token_of_the_address_becomes_a_cookie(board: Board) -> None:
    answer, body = get(board, f"/?token={board.token}", Accept="text/html")
    assert answer.status == 200
    cookie = answer.getheader("Set-Cookie") or ""
    assert cookie == f"{board.cookie}={board.token}; HttpOnly; SameSite=Strict; Path=/"
    assert board.token.encode() not in body
    assert get(board, "/api/runs", Cookie=f"other=1; {board.cookie}={board.token}")[0].status == 200
    assert get(board, "/api/runs")[0].getheader("Set-Cookie") is None
    assert board.address == f"http://127.0.0.1:{board.server_port}/?token={board.token}"
    assert board.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("other", ['a={"b":1}', "a b=1", "flag", "COOKIE=wrong"])
def test_cookies_of_other_programs_on_this_host_do_no_harm(
    serve: Serve, tmp_path: Path, other: str
) -> None:
    board = serve(tmp_path)
    cookies = f"{other.replace('COOKIE', board.cookie)}; {board.cookie}={board.token}"
    assert get(board, "/api/runs", Cookie=cookies)[0].status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 421), ("evil.example:{port}", 421), ("127.0.0.1", 421), ("127.0.0.1:1", 421),
     ("localhost.evil:{port}", 421), ("localhost:{port}", 200)],
)  # fmt: skip
def test_a_foreign_host_is_refused(board: Board, host: str, status: int) -> None:
    """DNS rebinding: the page of a stranger, whose name leads here, and even with the token."""
    headers = {
        "Host": host.format(port=board.server_port),
        "Authorization": f"Bearer {board.token}",
    }
    assert get(board, "/api/runs", **headers)[0].status == status


@pytest.mark.parametrize(
    ("request_lines", "status"),
    [
        ("GET /?token={token} HTTP/1.1\r\n", 421),
        ("GET /?token={token} HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n", 421),
        ("GET http://[ HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n", 404),
    ],
    ids=["no host", "two hosts", "an invalid address"],
)
def test_strange_requests_are_refused(board: Board, request_lines: str, status: int) -> None:
    with socket.create_connection(("127.0.0.1", board.server_port), timeout=30) as connection:
        host = f"127.0.0.1:{board.server_port}"
        connection.sendall(f"{request_lines}\r\n".format(host=host, token=board.token).encode())
        assert f" {status} ".encode() in connection.recv(1 << 16).split(b"\r\n")[0]


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_only_get(board: Board, method: str) -> None:
    answer, _ = get(board, "/api/runs", method=method, Authorization=f"Bearer {board.token}")
    assert answer.status == 405
    assert answer.getheader("Allow") == "GET"


@pytest.mark.parametrize(
    "path",
    ["/../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/board.js/../serve.py", "/board.css",
     "/serve.py", "/report?run=../first", "/api/run?run=first", "/api/run?run=%2Fetc", "/api/run",
     "/api/pair?run=.&index=1", "http://127.0.0.1:{port}/api/runs"],
)  # fmt: skip
def test_no_path_of_a_request_names_a_file(board: Board, path: str) -> None:
    answer, body = get(board, path.format(port=board.server_port))
    assert answer.status == 404
    assert b"root:" not in body


def test_strange_queries_are_refused(board: Board) -> None:
    first = rows(board)["first"]["id"]
    assert get(board, f"/api/pair?run={first}&index=-1")[0].status == 400
    assert get(board, f"/api/pair?run={first}&index=9e9")[0].status == 400
    assert get(board, "/api/runs?" + "&".join(f"a{i}=1" for i in range(200)))[0].status == 400


def test_security_headers(board: Board) -> None:
    answer, body = get(board, "/")
    policy = answer.getheader("Content-Security-Policy") or ""
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "'unsafe-eval'" not in policy
    assert "script-src 'self' 'sha256-" in policy
    assert answer.getheader("Referrer-Policy") == "no-referrer"
    assert answer.getheader("Cache-Control") == "no-store"
    assert b"https://" not in body
    script = get(board, "/board.js")[0]
    assert "immutable" in (script.getheader("Cache-Control") or "")
    report, text = get(board, f"/report?run={rows(board)['first']['id']}")
    assert b"<title>first</title>" in text
    assert (report.getheader("Content-Security-Policy") or "").startswith(
        "sandbox allow-scripts; default-src 'none'"
    )


# --- what is answered ---


def test_the_list_shows_what_the_runs_did(board: Board, trained: dict[str, DPOConfig]) -> None:
    found = rows(board)
    assert set(found) == {"first", "second"}
    last = [
        json.loads(line)
        for line in (trained["second"].run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    train, held_out = ([r for r in last if key in r][-1] for key in ("loss", "eval/loss"))
    row = found["second"]
    assert (row["state"], row["step"], row["total"], row["loss_type"]) == ("ended", 5, 5, "sigmoid")
    assert row["loss"] == train["loss"]
    assert row["accuracy"] == train["rewards/accuracies"]
    assert row["held_out"] == held_out["eval/rewards/accuracies"]
    assert row["model"] == trained["second"].pretrain
    assert row["seconds"] > 0
    assert (found["first"]["health"], found["first"]["incidents"], found["first"]["report"]) == (
        1,
        1,
        True,
    )


def test_a_run_and_its_differences(board: Board) -> None:
    found = rows(board)
    details = asked(board, f"/api/run?run={found['first']['id']}")
    assert details["health"]["lines"] == [FINDING]
    assert details["incidents"]["lines"] == [INCIDENT]
    assert details["config"]["actor_train.training_args.per_device_train_batch_size"] == 8
    assert details["problems"] == []
    differ = asked(
        board, f"/api/differences?run={found['first']['id']}&run={found['second']['id']}"
    )["differences"]
    assert ["beta", [None, "0.3"]] in differ
    assert {key for key, _ in differ} == {"exp_name", "beta"}


def test_a_folder_that_cannot_be_shown_gets_an_error_reply(
    serve: Serve,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is in a folder, the board itself keeps working; dates are texts."""
    run = write_run(tmp_path / "run")
    with (run / "config.yaml").open("a") as file:
        file.write("since: 2030-01-02\n")
    board = serve(tmp_path)
    row = rows(board)["run"]
    assert asked(board, f"/api/run?run={row['id']}")["config"]["since"] == "2030-01-02"
    (run / "incidents.jsonl").write_text('{"a": ' + "[" * 700 + "]" * 700 + "}\n")
    assert rows(board)["run"]["incidents"] == 0
    problems = asked(board, f"/api/run?run={row['id']}")["problems"]
    assert problems == ["incidents.jsonl: 1 damaged lines are left out"]

    def fails(_: Path) -> None:
        raise RecursionError

    monkeypatch.setattr(board.runs, "details", fails)
    answer, body = get(board, f"/api/run?run={row['id']}")
    assert answer.status == 500
    assert b"RecursionError" in body
    assert "could not be answered" in caplog.text


def test_versions_change_with_their_files(serve: Serve, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    board = serve(tmp_path)
    versions = [(rows(board)["run"]["version"], rows(board)["run"]["story"])]

    def changed() -> tuple[bool, bool]:
        row = rows(board)["run"]
        versions.append((row["version"], row["story"]))
        return versions[-1][0] != versions[-2][0], versions[-1][1] != versions[-2][1]

    assert changed() == (False, False)
    add_line(run / "metrics.jsonl", {"step": 4, "loss": 1.0})
    assert changed() == (True, False)
    add_line(run / "health.jsonl", FINDING)
    assert changed() == (True, True)
    (run / ".finished").write_text("4\n")
    assert changed() == (True, True)


@pytest.mark.defect("U22")
def test_times_come_from_the_records_of_a_run(serve: Serve, tmp_path: Path) -> None:
    """A folder that was copied has other dates, and a report may be of the start before."""
    run = write_run(tmp_path / "run")
    start = {"time": "2030-01-01T00:00:00+00:00", "step": 0, "total_steps": 9}
    add_line(run / "starts.jsonl", start)
    (run / "report.json").write_text('{"seconds": 5000.0, "steps": 3}')
    for name in ("config.yaml", "report.json", "metrics.jsonl"):
        os.utime(run / name, (100, 100))
    board = serve(tmp_path)
    row = rows(board)["run"]
    began = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    assert (row["began"], row["seconds"], row["changed"]) == (began, 5000, began + 5000)
    later = "2030-01-03T00:00:00+00:00"
    add_line(run / "starts.jsonl", {**start, "time": later, "step": 3})
    row = rows(board)["run"]
    assert (row["seconds"], row["changed"]) == (None, began + 2 * 86400)


@pytest.mark.defect("U22")
def test_differences_are_differences() -> None:
    """Missing and null are the same, and so are two spellings of a number."""
    configs: list[dict[str, Any]] = [
        {"a": None, "rate": "1e-4", "size": 5, "name": "01", "list": [1]},
        {"b": None, "rate": 0.0001, "size": 5.0, "name": "1", "list": [1, 2]},
    ]
    assert board_runs.differences(configs) == [("name", ["01", "1"]), ("list", ["[1]", "[1, 2]"])]


@pytest.mark.defect("U22")
def test_findings_are_shown_by_harm(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "health.jsonl").unlink(missing_ok=True)
    written = [
        ("data/length_bias", "serious"), ("chosen_falling", "warning"), ("odd", "?"),
        ("learning_rate_too_high", "serious"), ("model_wrecked", "serious"),
        ("run_failed", "serious"),
    ]  # fmt: skip
    for name, severity in written:
        add_line(run / "health.jsonl", {**FINDING, "name": name, "severity": severity})
    add_line(run / "health.jsonl", {"another": "version"})
    lines = board_runs.RunList(tmp_path).details(run)["health"]["lines"]
    assert [line.get("name") for line in lines] == [
        "run_failed", "model_wrecked", "learning_rate_too_high", "data/length_bias",
        "chosen_falling", "odd", None,
    ]  # fmt: skip


def test_a_config_without_a_loss(serve: Serve, tmp_path: Path) -> None:
    (write_run(tmp_path / "run") / "config.yaml").write_text("pretrain: base\n")
    assert rows(serve(tmp_path))["run"]["loss_type"] == ""


def test_states(serve: Serve, tmp_path: Path) -> None:
    for name in ("running", "stopped", "failed", "ended", "deep/er"):
        write_run(tmp_path / name)
    (tmp_path / "deep" / ".lock").touch()  # of a sweep
    (tmp_path / "ended" / ".finished").write_text("3\n")
    (tmp_path / "stopped" / "LATEST").write_text("checkpoint-3\n")
    (tmp_path / "failed" / "LATEST").write_text("checkpoint-2\n")
    (tmp_path / "no run").mkdir()
    board = serve(tmp_path)
    with control.lock(tmp_path / "running"):
        found = rows(board)
        assert found.pop("deep/er")["state"] == "failed"
        assert {name: row["state"] for name, row in found.items()} == {name: name for name in found}
    assert rows(board)["running"]["state"] == "failed"


@pytest.mark.defect("X19")
def test_a_killed_run_of_another_machine_is_not_running(serve: Serve, tmp_path: Path) -> None:
    """Its lock is not seen here, which says nothing; the last line that it wrote does."""
    run = write_run(tmp_path / "far")
    (run / ".lock").write_text("process 7 on elsewhere\n")
    for file in run.iterdir():
        os.utime(file, (1.7e9, 1.7e9))
    board = serve(tmp_path)
    assert rows(board)["far"]["state"] == "unknown since 2023-11-14 22:13 UTC"
    with control.lock(run):
        assert rows(board)["far"]["state"] == "running"


def test_a_folder_that_is_a_run(serve: Serve, tmp_path: Path) -> None:
    board = serve(write_run(tmp_path / "alone"))
    (row,) = rows(board).values()
    assert (row["name"], row["report"]) == ("alone", False)
    assert get(board, f"/report?run={row['id']}")[0].status == 404


def damage(folder: Path) -> None:
    """One run for each way to be broken."""
    for name, content in {
        "binary": b"\xff\xfe\x00" * 99,
        "no yaml": b"a: [",
        "list": b"- a\n",
        "bomb": BOMB,
        "nested": b"pretrain: " + b"[" * 5000,
        "digits": b"pretrain: " + b"9" * 5000,
    }.items():
        (write_run(folder / name) / "config.yaml").write_bytes(content)
    (write_run(folder / "garbage") / "metrics.jsonl").write_bytes(b"\x00\xff{]\n[1]\n")
    (write_run(folder / "folder") / "metrics.jsonl").unlink()
    (folder / "folder" / "metrics.jsonl").mkdir()
    (write_run(folder / "strange") / "metrics.jsonl").write_text(
        '{"step": "x", "loss": {}}\n{"loss": 1e999}\n{"step": 1, "loss": null, "a": [1], "b": '
        + "9" * 400
        + "}\n"
    )
    (write_run(folder / "deep") / "incidents.jsonl").write_text("[" * 100_000 + "\n{\n")
    (folder / "empty").mkdir()
    (folder / "empty" / ".lock").touch()
    for name in ("config.yaml", "metrics.jsonl", "incidents.jsonl", ".lock", "LATEST"):
        (write_run(folder / f"pipe {name}") / name).unlink(missing_ok=True)
        os.mkfifo(folder / f"pipe {name}" / name)


BOMB = b"pretrain: [&a0 [x, x]%s]\n" % b"".join(
    b", &a%d [*a%d, *a%d]" % (i, i - 1, i - 1) for i in range(1, 40)
)


def test_damaged_folders_are_shown_as_such(serve: Serve, tmp_path: Path) -> None:
    damage(tmp_path)
    write_run(tmp_path / "good")
    board = serve(tmp_path)
    found = rows(board)
    named = {"binary": "cannot be read as text", "no yaml": "is not YAML", "list": "contains no settings", "bomb": "aliases",
             "nested": "nested too deeply", "digits": "a number of more than 4,300 digits",
             "pipe config.yaml": "cannot be read as text", "pipe metrics.jsonl": "is not a regular file",
             "garbage": "2 of its last lines are damaged", "folder": "cannot be read"}  # fmt: skip
    for name, problem in named.items():
        assert found[name]["state"] == "damaged", name
        assert problem in found[name]["problem"]
    assert found["good"]["problem"] == ""
    assert found["empty"]["state"] == "failed"
    for name, row in found.items():
        curves = asked(board, f"/api/curves?run={row['id']}&metric=loss")[row["id"]]
        details = asked(board, f"/api/run?run={row['id']}")
        asked(board, f"/api/differences?run={row['id']}&run={found['good']['id']}")
        assert get(board, f"/api/pair?run={row['id']}&index=0")[0].status == 200
        assert curves["damaged"] == {"garbage": 2, "strange": 2}.get(name, 0)
        assert bool(details["problems"]) == (
            name in {"binary", "no yaml", "list", "bomb", "deep", "nested", "digits"}
            or name in {"pipe config.yaml", "pipe incidents.jsonl"}
        ), name


def test_a_linked_report_and_a_gigantic_file_are_not_read(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "runs" / "run")
    (tmp_path / "mine.html").write_text("mine")
    (run / "report.html").symlink_to(tmp_path / "mine.html")
    (run / "incidents.jsonl").write_text('{"kind": "spike"}\n' * 3)
    board = serve(tmp_path / "runs")
    row = rows(board)["run"]
    assert row["incidents"] == 3
    assert get(board, f"/report?run={row['id']}")[0].status == 404
    monkeypatch.setattr(board_runs, "MOST_EVENTS", 20)
    details = asked(board, f"/api/run?run={row['id']}")
    assert details["incidents"]["lines"] == []
    assert "incidents.jsonl: 1 damaged lines are left out" in details["problems"]


# --- while a run writes ---


def test_only_new_whole_lines_are_read(tmp_path: Path) -> None:
    file = write_run(tmp_path / "run") / "metrics.jsonl"
    curves, lines = MetricsReader(file), JsonLines(file)
    assert [list(curves.update()["loss"].steps), len(list(lines.new()))] == [[1, 2, 3], 3]
    for text, steps, new in (('{"step": 4, "lo', [1, 2, 3], 0), ('ss": 0.125}\n', [1, 2, 3, 4], 1)):
        with file.open("a") as out:
            out.write(text)
        assert [list(curves.update()["loss"].steps), len(list(lines.new()))] == [steps, new]
    assert curves.columns["loss"].values[-1] == 0.125
    assert curves.file.damaged == 0


def test_a_file_that_was_cut_back_is_read_again(tmp_path: Path) -> None:
    """Cut and longer again before the next look: by its size alone nobody would know."""
    file = write_run(tmp_path / "run", lines=9) / "metrics.jsonl"
    curves = MetricsReader(file)
    curves.update()
    kept = file.read_bytes().split(b"\n")[:4]
    again = [
        json.dumps({"step": step, "loss": 7.0, "note": "x" * 99}).encode() for step in range(5, 20)
    ]
    file.write_bytes(b"\n".join([*kept, *again]) + b"\n")
    curves.update()
    assert list(curves.columns["loss"].steps) == list(range(1, 20))
    assert list(curves.columns["loss"].values[4:]) == [7.0] * 15
    file.unlink()
    assert curves.file.was_cut()
    curves.update()
    assert not curves.columns


def test_many_runs_and_a_long_curve(serve: Serve, tmp_path: Path) -> None:
    for number in range(29):
        write_run(tmp_path / f"run-{number}", lines=2, beta=number)
    long = write_run(tmp_path / "long", lines=10_000)
    board = serve(tmp_path)
    found = rows(board)
    assert len(found) == 30
    assert found["long"]["step"] == 10_000
    path = f"/api/curves?run={found['long']['id']}&metric=loss&metric=rewards/margins"
    steps, values = asked(board, path)[found["long"]["id"]]["lines"]["loss"]["loss"]
    assert len(steps) <= board_runs.POINTS
    assert (steps[0], steps[-1], values[0]) == (1, 10_000, 1.0)
    add_line(long / "metrics.jsonl", {"step": 10_001, "loss": 99.0})
    assert rows(board)["long"]["version"] != found["long"]["version"]
    assert asked(board, path)[found["long"]["id"]]["lines"]["loss"]["loss"][1][-1] == 99.0


def test_the_least_recently_used_curves_are_dropped(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_runs, "MOST_KEPT", 100)
    for name in ("a", "b", "c"):
        write_run(tmp_path / name, lines=10)
    board = serve(tmp_path)
    for row in rows(board).values():
        asked(board, f"/api/curves?run={row['id']}&metric=loss")
    assert sum(curves.points for curves in board.runs._curves.values()) <= 120


def test_points_are_counted_while_another_thread_adds_a_metric(tmp_path: Path) -> None:
    curves = MetricsReader(tmp_path / "metrics.jsonl")

    class Adds(array):  # type: ignore[type-arg]
        def __len__(self) -> int:
            curves.columns[f"metric {len(curves.columns)}"] = MetricColumn(
                array("q", [1]), array("d", [1.0])
            )
            return 1

    curves.columns["loss"] = MetricColumn(Adds("q"), array("d"))
    assert curves.points == 1


# --- the command ---


def test_the_server_needs_no_torch() -> None:
    probe = (
        "import sys, rather.tools.board.serve; print(*{'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not done.stdout.split()


def test_command(board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def look(address: str) -> None:
        """What a browser finds, and who else may."""
        page = Path(unquote(urlsplit(address).path))
        assert (address, urlsplit(address).query) == (page.as_uri(), "")
        assert [stat.S_IMODE(path.stat().st_mode) for path in (page, page.parent)] == [0o600, 0o700]
        assert re.search(r"url=http://127\.0\.0\.1:\d+/\?token=[\w-]{43}\"", page.read_text())
        opened.append(page)

    monkeypatch.setattr("rather.tools.commands.webbrowser.open", look)
    monkeypatch.setattr("rather.tools.commands.has_display", lambda: True)
    monkeypatch.setattr(
        Board, "serve_forever", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    write_run(tmp_path / "run")
    assert ": 1 run at http://127.0.0.1:" in exits(0, "board", tmp_path, "--no-browser")
    assert not opened
    exits(0, "board", tmp_path)
    (page,) = opened
    assert not page.parent.exists()
    taken = exits(2, "board", tmp_path, "--port", board.server_port)
    assert "omit it for a free one" in taken
    assert "not a folder" in exits(2, "board", tmp_path / "nowhere")
