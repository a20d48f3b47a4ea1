"""`rather generate --server`: answers of servers that fail, stall, die and lie."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import Result

from rather.commands.generate import AnswerRequest
from rather.commands.generate_by_server import ServerOptions, generate_by_server
from rather.errors import ServerError
from rather.judges import openai_client
from rather.judges.openai_client import Server
from rather.model.generate import Decoding
from tests.commands.conftest import rather, rows_of
from tests.commands.fake_server import (
    Behaviour,
    Reply,
    completion,
    failing,
    honest,
    serving,
)
from tests.commands.kills import killed_at, killed_in_fork

REQUESTS = 21  # three answers to each of seven prompts
Ask = Callable[..., Result]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "FIRST_WAIT", 0.01)


@pytest.fixture
def ask(model: Path, prompts: Path, tmp_path: Path) -> Ask:
    """Asks a server for three answers to each prompt, which are written to out.jsonl."""

    def ask(url: str, *words: object, of: Path = model, out: str = "out.jsonl") -> Result:
        sizes = ("--answers", 3, "--max-new-tokens", 8, "--concurrency", 4)
        where = ("--out", tmp_path / out, "--server", url)
        return rather("generate", of, prompts, *where, *sizes, *words)

    return ask


def test_one_request_per_answer_with_ids_and_a_hidden_key(
    ask: Ask, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-never-shown")
    with serving(honest, ["served"]) as server:
        done = ask(server.url, "--json")
    assert done.exit_code == 0, done.output
    meta = json.loads(done.stdout)
    tokenizer = AutoTokenizer.from_pretrained(model)
    out = tmp_path / "out.jsonl"
    rows = rows_of(out)
    for row in rows:
        assert len(set(row["responses"])) > 1
        assert row["ended"] == [True] * 3
        decoded = [tokenizer.decode(ids) for ids in row["response_ids"]]
        assert decoded == row["responses"], "without the end token"
    assert [row["id"] for row in rows] == list(range(7))
    assert len(server.requests) == REQUESTS, "the requests that check the server are used"
    assert all("n" not in body and body["model"] == "served" for _, _, body in server.requests)
    assert all(head["Authorization"] == "Bearer sk-never-shown" for _, head, _ in server.requests)
    written = done.output + out.read_text() + Path(f"{out}.meta.json").read_text()
    assert "sk-never-shown" not in written
    assert meta["requests"] == {"answers": REQUESTS, "repeated": 0, "way": "ids"}
    assert meta["tokens"]["spent"] == sum(3 * (len(row["prompt_ids"]) + 2) for row in rows)


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


def adds_bos(path: str, body: dict[str, Any]) -> Reply:
    """A server that begins every text with a BOS and returns ids by log-probs, as mlx-lm does."""
    if not isinstance(body.get("prompt"), str):
        return 422, {"error": "prompt must be text"}
    token = body["seed"] % 20 + 3
    ids = {"content": [{"id": token}]}
    return completion(f"w{token - 3}", len(body["prompt"].split()) + 1, logprobs=ids)


def test_a_server_without_ids_and_cut_answers(ask: Ask, tmp_path: Path) -> None:
    with serving(text_only) as server:
        meta = json.loads(ask(server.url, "--json").stdout)
    assert meta["requests"]["way"] == "text"
    assert meta["tokens"]["answers"] is None
    for row in rows_of(tmp_path / "out.jsonl"):
        assert row["response_ids"] is None
        assert row["ended"] == [False] * 3


def test_a_server_that_adds_a_bos_gets_texts_without_one(
    ask: Ask, model: Path, tmp_path: Path
) -> None:
    with serving(adds_bos) as server:
        meta = json.loads(ask(server.url, "--json").stdout)
    assert meta["requests"]["way"] == "text with logprobs without BOS"
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in rows_of(tmp_path / "out.jsonl"):
        assert [tokenizer.decode(ids) for ids in row["response_ids"]] == row["responses"]


def test_chat_messages_where_a_server_has_nothing_else(ask: Ask, chat_model: Path) -> None:
    def chat(path: str, body: dict[str, Any]) -> Reply:
        if path != "/v1/chat/completions":
            return 404, {"error": "no such path"}
        words = " ".join(turn["content"] for turn in body["messages"]).split()
        message = {"role": "assistant", "content": f"w{body['seed'] % 30}"}
        usage = {"prompt_tokens": len(words) + 3 + ("w9" in words), "completion_tokens": 1}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}

    with serving(chat) as server:
        done = ask(server.url, "--system", "w9", "--json", of=chat_model)
    assert json.loads(done.stdout)["requests"]["way"] == "messages"
    assert server.requests[-1][2]["messages"][0] == {"role": "system", "content": "w9"}


@pytest.mark.parametrize(
    ("behaviour", "code", "message"),
    [
        (another_template, 5, "runs another model or template"),
        (miscounts_ids_and_counts_no_text, 5, "sent as text is missing; the"),
        (same_samples, 2, "does not sample"),
        (failing(500), 5, "HTTP 500"),
        (failing(429), 5, "HTTP 429"),
        (lambda path, body: (200, {"choices": []}), 5, "(its keys: choices). 0 of "),
        (lambda path, body: None, 5, "the connection broke"),
    ],
)
def test_what_is_wrong_with_a_server_is_named(
    ask: Ask, tmp_path: Path, behaviour: Behaviour, code: int, message: str
) -> None:
    with serving(behaviour) as server:
        done = ask(server.url)
    assert done.exit_code == code, done.output
    assert message in done.output
    assert not (tmp_path / "out.jsonl").exists()


def test_waits_grow_though_the_server_names_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    with serving(failing(429)) as served:
        server = Server(served.url, 5)
        monkeypatch.setattr(server.stopped, "wait", lambda seconds: waits.append(seconds))
        with pytest.raises(ServerError, match=r"HTTP 429.* after 6 tries"):
            server.post("completions", {})
    assert waits == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.16])


def test_faults_are_repeated_and_a_stall_is_named(ask: Ask, tmp_path: Path) -> None:
    seen: set[str] = set()
    stall = threading.Event()

    def faulty(path: str, body: dict[str, Any]) -> Reply:
        key = json.dumps(body)
        if key in seen or len(seen) < 2:
            seen.add(key)
            return honest(path, body)
        seen.add(key)
        return None if len(seen) % 2 else (429, {"error": "slow down"})

    for name, behaviour in (("faulty", faulty), ("honest", honest)):
        with serving(behaviour) as server:
            assert ask(server.url, out=f"{name}.jsonl").exit_code == 0
    assert rows_of(tmp_path / "faulty.jsonl") == rows_of(tmp_path / "honest.jsonl")

    def stalls(path: str, body: dict[str, Any]) -> Reply:
        stall.wait(20)
        return None

    with serving(stalls) as server:
        done = ask(server.url, "--timeout", 0.1)
        stall.set()
    assert done.exit_code == 5
    assert "no answer within 0.1 s, after 6 tries" in done.output
    assert "no connection" in ask(server.url).output


def asked(model: Path, prompts: Path, out: Path, url: str) -> dict[str, Any]:
    request = AnswerRequest(3, Decoding(8, 1.0))
    return generate_by_server(str(model), prompts, out, request, ServerOptions(url, "m", 4))


def test_a_kill_repeats_at_most_what_was_in_flight(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    with serving(honest) as server:
        whole = asked(model, prompts, tmp_path / "whole.jsonl", server.url)
        assert len(server.requests) == REQUESTS
        for line in (1, 3, 8, 21, None):
            server.requests.clear()
            work = (asked, model, prompts, out := tmp_path / f"{line}.jsonl", server.url)
            if line is None:
                assert killed_in_fork(14, 0.0, *work) == signal.SIGKILL
            else:
                killed_at(line, 0.0, *work)
            meta = asked(*work[1:])
            assert rows_of(out) == rows_of(tmp_path / "whole.jsonl")
            assert len(server.requests) - REQUESTS <= meta["requests"]["repeated"] <= 4
            assert meta["tokens"] == whole["tokens"]


def test_tokens_are_limited_and_forecast(ask: Ask) -> None:
    with serving(honest) as server:
        assert f"answers: {REQUESTS}" in ask(server.url, "--dry-run").output
        refused = ask(server.url, "--max-tokens-spent", 5)
        assert "--max-tokens-spent must be at least" in refused.output
        assert server.requests == []
        limited = ask(server.url, "--max-tokens-spent", 60)
        assert limited.exit_code == 2
        assert "reached with" in limited.output
        assert sum(len(body["prompt"]) + 2 for _, _, body in server.requests) <= 60
        assert ask(server.url).exit_code == 0
        assert len(server.requests) == REQUESTS
