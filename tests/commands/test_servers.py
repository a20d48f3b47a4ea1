"""`rather generate --server`: answers of servers that fail, stall, die and lie."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rather.commands import openai_client
from rather.commands.generate import AnswerRequest
from rather.commands.generate_by_server import ServerOptions, generate_by_server
from rather.commands.journal import Journal
from rather.commands.openai_client import Server
from rather.config.run_config import DPOConfig
from rather.errors import ServerError
from rather.model.generate import Decoding
from tests.commands.conftest import rather, told
from tests.commands.fake_server import Behaviour, Reply, serving
from tests.commands.test_chat import TEMPLATE
from tests.commands.test_generate import Killed, in_fork, rows_of, write


@pytest.fixture(scope="module")
def model(run: DPOConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model without a template: no process that renders has to start."""
    folder = tmp_path_factory.mktemp("servers") / "model"
    shutil.copytree(run.run_dir / "model", folder)
    return folder


@pytest.fixture(autouse=True)
def impatient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" not in request.node.name:
        monkeypatch.setattr(openai_client, "FIRST_WAIT", 0.01)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", *({"prompt": f"w{i} w5", "id": i} for i in range(6)))


def completion(text: str, prompt_tokens: int, **more: Any) -> Reply:
    choice = {"text": text, "finish_reason": "stop", **more}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(text.split())}
    return 200, {"choices": [choice], "usage": usage}


def honest(path: str, body: dict[str, Any]) -> Reply:
    """A server that takes and returns ids, as vLLM does; the text follows from prompt and seed."""
    if path != "/v1/completions":
        return 404, {"error": "no such path"}
    prompt = body["prompt"]
    seed = body["seed"] if body["temperature"] else 0
    ids = [(sum(prompt) + seed) % 20 + 3, seed % 7 + 3]
    words = " ".join(f"w{token - 3}" for token in ids)
    return completion(words, len(prompt), token_ids=[*ids, 2])


def options(*more: Any) -> list[Any]:
    return ["--answers", 3, "--max-new-tokens", 8, "--concurrency", 4, *more]


def test_one_request_per_answer_with_ids_and_a_hidden_key(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-never-shown")
    out = tmp_path / "out.jsonl"
    with serving(honest, ["served"]) as server:
        done = rather(
            "generate", model, prompts, "--out", out, "--server", server.url, *options("--json")
        )
    assert done.exit_code == 0, done.output
    meta = json.loads(done.stdout)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = rows_of(out)
    for row in rows:
        assert len(set(row["responses"])) > 1
        assert row["ended"] == [True] * 3
        decoded = [tokenizer.decode(ids) for ids in row["response_ids"]]
        assert decoded == row["responses"], "without the end token"
    assert [row["id"] for row in rows] == list(range(6))
    assert len(server.requests) == 18, "the requests that check the server are used"
    assert all("n" not in body and body["model"] == "served" for _, _, body in server.requests)
    assert all(head["Authorization"] == "Bearer sk-never-shown" for _, head, _ in server.requests)
    written = done.output + out.read_text() + Path(f"{out}.meta.json").read_text()
    assert "sk-never-shown" not in written
    assert meta["requests"] == {"answers": 18, "repeated": 0, "way": "ids"}
    assert meta["tokens"]["spent"] == 18 * (len(rows[0]["prompt_ids"]) + 2)


def text_only(path: str, body: dict[str, Any]) -> Reply:
    """A server that takes text and says no ids, and cuts every answer."""
    if not isinstance(body.get("prompt"), str) or "logprobs" in body:
        return 422, {"error": "prompt must be text, without logprobs"}
    return completion(f"w{body['seed'] % 30}", len(body["prompt"].split()), finish_reason="length")


def another_template(path: str, body: dict[str, Any]) -> Reply:
    reply = honest(path, body)
    assert reply is not None
    if reply[0] == 200:
        reply[1]["usage"]["prompt_tokens"] += 7
    return reply


def miscounts_ids_and_counts_no_text(path: str, body: dict[str, Any]) -> Reply:
    if isinstance(body.get("prompt"), list):
        return another_template(path, body)
    return 200, {"choices": [{"text": "w1", "finish_reason": "stop"}]}


def same_samples(path: str, body: dict[str, Any]) -> Reply:
    """A server that accepts a temperature and answers greedily, as `transformers serve` does."""
    return honest(path, {**body, "seed": 0})


def test_a_server_without_ids_and_cut_answers(model: Path, prompts: Path, tmp_path: Path) -> None:
    with serving(text_only) as server:
        meta = told(
            "generate",
            model,
            prompts,
            "--out",
            tmp_path / "o.jsonl",
            "--server",
            server.url,
            *options(),
        )
    assert meta["requests"]["way"] == "text"
    assert meta["tokens"]["answers"] is None
    for row in rows_of(tmp_path / "o.jsonl"):
        assert row["response_ids"] is None
        assert row["ended"] == [False] * 3


def test_chat_messages_where_a_server_has_nothing_else(
    run: DPOConfig, prompts: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(run.run_dir / "model", tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)

    def chat(path: str, body: dict[str, Any]) -> Reply:
        if path != "/v1/chat/completions":
            return 404, {"error": "no such path"}
        words = " ".join(turn["content"] for turn in body["messages"]).split()
        message = {"role": "assistant", "content": f"w{body['seed'] % 30}"}
        usage = {"prompt_tokens": len(words) + 3 + ("w9" in words), "completion_tokens": 1}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}

    with serving(chat) as server:
        words = ("--server", server.url, *options("--system", "w9"))
        meta = told("generate", folder, prompts, "--out", tmp_path / "o.jsonl", *words)
    assert meta["requests"]["way"] == "messages"
    assert server.requests[-1][2]["messages"][0] == {"role": "system", "content": "w9"}


@pytest.mark.parametrize(
    ("behaviour", "code", "message"),
    [
        (another_template, 5, "runs another model or template"),
        (miscounts_ids_and_counts_no_text, 5, "sent as text is missing; the"),
        (same_samples, 2, "does not sample"),
        (lambda path, body: (500, {"error": "broken"}), 5, "HTTP 500"),
        (lambda path, body: (429, {"error": "slow down"}), 5, "HTTP 429"),
        (lambda path, body: (200, {"choices": []}), 5, "(its keys: choices). 0 of "),
        (lambda path, body: None, 5, "the connection broke"),
    ],
)
def test_what_is_wrong_with_a_server_is_named(
    model: Path, prompts: Path, tmp_path: Path, behaviour: Behaviour, code: int, message: str
) -> None:
    with serving(behaviour) as server:
        done = rather(
            "generate",
            model,
            prompts,
            "--out",
            tmp_path / "o.jsonl",
            "--server",
            server.url,
            *options(),
        )
    assert done.exit_code == code, done.output
    assert message in done.output
    assert not (tmp_path / "o.jsonl").exists()


def test_waits_grow_though_the_server_names_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    with serving(lambda path, body: (429, {"error": "slow down"})) as served:
        server = Server(served.url, 5)
        monkeypatch.setattr(server.stopped, "wait", lambda seconds: waits.append(seconds))
        with pytest.raises(ServerError, match=r"HTTP 429.* after 6 tries"):
            server.post("completions", {})
    assert waits == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.16])


def test_faults_are_repeated_and_a_stall_is_named(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    seen: set[str] = set()
    stall = threading.Event()

    def faulty(path: str, body: dict[str, Any]) -> Reply:
        key = json.dumps(body)
        if key in seen or len(seen) < 2:
            seen.add(key)
            return honest(path, body)
        seen.add(key)
        return None if len(seen) % 2 else (429, {"error": "slow down"})

    with serving(faulty) as server:
        told(
            "generate",
            model,
            prompts,
            "--out",
            tmp_path / "a.jsonl",
            "--server",
            server.url,
            *options(),
        )
    with serving(honest) as server:
        told(
            "generate",
            model,
            prompts,
            "--out",
            tmp_path / "b.jsonl",
            "--server",
            server.url,
            *options(),
        )
    assert rows_of(tmp_path / "a.jsonl") == rows_of(tmp_path / "b.jsonl")

    def stalls(path: str, body: dict[str, Any]) -> Reply:
        stall.wait(20)
        return None

    with serving(stalls) as server:
        words = ("--server", server.url, *options("--timeout", 0.1))
        done = rather("generate", model, prompts, "--out", tmp_path / "c.jsonl", *words)
        stall.set()
    assert done.exit_code == 5
    assert "no answer within 0.1 s, after 6 tries" in done.output
    nobody = rather(
        "generate",
        model,
        prompts,
        "--out",
        tmp_path / "d.jsonl",
        "--server",
        server.url,
        *options(),
    )
    assert "no connection" in nobody.output


def asked(model: Path, prompts: Path, out: Path, url: str) -> dict[str, Any]:
    request = AnswerRequest(3, Decoding(8, 1.0))
    return generate_by_server(str(model), prompts, out, request, ServerOptions(url, "m", 4))


def dying(lines: int, die: Callable[[], None]) -> Callable[..., None]:
    append, count = Journal.append, [0]

    def append_or_die(journal: Journal, entry: Any) -> None:
        append(journal, entry)
        count[0] += 1
        if count[0] > lines:
            die()

    return append_or_die


def killed(model: Path, prompts: Path, out: Path, url: str) -> None:
    Journal.append = dying(14, lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[method-assign]
    asked(model, prompts, out, url)


def test_a_kill_repeats_at_most_what_was_in_flight(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise Killed

    with serving(honest) as server:
        whole = asked(model, prompts, tmp_path / "whole.jsonl", server.url)
        assert len(server.requests) == 18
        for number, lines in enumerate((1, 3, 8, 21, None)):
            server.requests.clear()
            out = tmp_path / f"{number}.jsonl"
            if lines is None:
                assert in_fork(killed, model, prompts, out, server.url) == signal.SIGKILL
            else:
                with monkeypatch.context() as patch:
                    patch.setattr(Journal, "append", dying(lines, die))
                    with pytest.raises(Killed):
                        asked(model, prompts, out, server.url)
            meta = asked(model, prompts, out, server.url)
            assert rows_of(out) == rows_of(tmp_path / "whole.jsonl")
            assert len(server.requests) - 18 <= meta["requests"]["repeated"] <= 4
            assert meta["tokens"] == whole["tokens"]


def test_tokens_are_limited_and_forecast(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with serving(honest) as server:
        words = ("generate", model, prompts, "--out", out, "--server", server.url, *options())
        dry = rather(*words, "--dry-run")
        assert "answers: 18" in dry.output
        refused = rather(*words, "--max-tokens-spent", 5)
        assert "--max-tokens-spent must be at least" in refused.output
        assert server.requests == []
        limited = rather(*words, "--max-tokens-spent", 60)
        assert limited.exit_code == 2
        assert "reached with" in limited.output
        assert sum(len(body["prompt"]) + 2 for _, _, body in server.requests) <= 60
        assert rather(*words).exit_code == 0
        assert len(server.requests) == 18
    alone = rather("generate", model, prompts, "--out", out, "--concurrency", 2)
    assert "need --server" in alone.output
