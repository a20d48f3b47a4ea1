"""mlx-lm, a server that Rather did not write, on an exported folder.

The development packages contain it (its build for CPUs), so nothing here is skipped on Linux.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.config.run_config import DPOConfig
from tests.commands.conftest import json_of, rows_of, succeed, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the extra dev has it on Linux")
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def exported(run: DPOConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mlx") / "exported"
    succeed("export", run.run_dir, folder)
    return folder


@pytest.fixture(scope="module")
def address(exported: Path) -> Iterator[str]:
    """The server, as soon as it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(exported), "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr
        said: list[str] = []
        while "Starting httpd" not in "".join(said[-1:]):  # it listens since the line before
            said.append(server.stderr.readline())
            assert said[-1], "".join(said)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def test_mlx_writes_the_greedy_text_of_the_exported_folder(exported: Path, address: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    texts = set()
    for prompt in ("w1 w5", "w9", "w30 w2 w7"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            written = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        text = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        body = {"model": str(exported), "prompt": prompt, "temperature": 0}
        reply = httpx.post(
            f"{address}/v1/completions", json={**body, "max_tokens": NEW_TOKENS}, timeout=60
        )
        assert reply.json()["choices"][0]["text"] == text
        texts.add(text)
    assert len(texts) > 1, "the texts depend on the prompts"


def test_generate_asks_it(exported: Path, address: str, tmp_path: Path) -> None:
    """Samples differ, ids come back, and `n` is not needed."""
    prompts = write(tmp_path / "p.jsonl", *({"prompt": f"w{i} w5", "id": i} for i in range(4)))
    words = ("--server", address, "--served-name", exported, "--timeout", 60)
    sizes = ("--answers", 3, "--max-new-tokens", 8, "--concurrency", 4)
    succeed("generate", exported, prompts, "--out", tmp_path / "o.jsonl", *words, *sizes)
    meta = json_of(tmp_path / "o.jsonl.meta.json")
    assert meta["requests"]["way"] == "text with logprobs without BOS"
    rows = rows_of(tmp_path / "o.jsonl")
    assert any(len(set(row["responses"])) > 1 for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for row in rows:
        if row["response_ids"]:
            decoded = [
                tokenizer.decode(ids, skip_special_tokens=True) for ids in row["response_ids"]
            ]
            assert decoded == row["responses"]
