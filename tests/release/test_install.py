"""A user's first hour without the repository: install, demo, train, export, serve.

`rather` comes from a local index, everything else from wherever pip is configured to look. With `-s` the
test prints the seconds of each step.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.house.source import ROOT
from tests.release.tool import release

UNREACHABLE = ("Could not find a version", "Connection", "Temporary failure", "No matching")
QUESTION = "Where do you keep the cheese?"
# What a user of transformers writes: the expected answer of the server.
GREEDY = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, question = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
turns = [{"role": "user", "content": question}]
asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**asked, max_new_tokens=40, do_sample=False)[0, asked["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""


class Machine:
    """A folder with a virtual environment that cannot see the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        python = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"}
        kept = {name: value for name, value in os.environ.items() if name not in python}
        self.environment = {
            **kept,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        began = time.monotonic()
        path = shutil.which(command[0], path=self.environment["PATH"])
        done = subprocess.run(
            [path or command[0], *command[1:]],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        print(
            f"{time.monotonic() - began:6.1f} s  {Path(command[0]).name} {' '.join(command[1:3])}"
        )
        return done

    def must_run(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def sample(self, model: str, url: str) -> subprocess.CompletedProcess[str]:
        """Ask the server for different answers to a question, as `rather rounds` does."""
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text(json.dumps({"prompt": QUESTION}) + "\n", encoding="utf-8")
        return self.run(
            *("rather", "generate", model, str(prompts), "--out", "answers.jsonl"),
            *("--server", url, "--served-name", model),
            *("--answers", "3", "--max-new-tokens", "8"),
        )

    @contextmanager
    def serve(self, model: str) -> Iterator[httpx.Client]:
        """Start `transformers serve`, and yield a client once it listens."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            self.bin / "transformers",
            "serve",
            model,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        log = (self.folder / "server.log").open("w")
        server = subprocess.Popen(
            [*map(str, command), "--device", "cpu"],
            cwd=self.folder,
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        # Connections are tried again after 0, 0.5, 1, 2, 4, ... seconds.
        transport = httpx.HTTPTransport(retries=9)
        address = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(base_url=address, transport=transport, timeout=120) as client:
                client.get("/health").raise_for_status()
                yield client
        finally:
            server.terminate()
            server.wait(30)
            log.close()


def local_index(folder: Path) -> Path:
    """Build the wheel into an index of one project."""
    wheel, _ = release.build_and_check(ROOT, folder / "rather")
    link = f'<a href="{wheel.name}">{wheel.name}</a>'
    (folder / "rather" / "index.html").write_text(
        f"<!DOCTYPE html><html><body>{link}</body></html>"
    )
    return folder


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    index = local_index(machine.folder / "index")
    machine.must_run(sys.executable, "-m", "venv", "venv")
    constraints = Path(shutil.copy(ROOT / "constraints.txt", machine.folder))
    done = machine.run(
        *("python", "-m", "pip", "install", "--no-compile", "--extra-index-url", index.as_uri()),
        *("-c", constraints.name, f"rather=={release.read_version(ROOT)}", "transformers[serving]"),
    )
    if done.returncode and any(text in done.stderr for text in UNREACHABLE):
        pytest.skip(f"pip cannot get the dependencies here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return machine


@pytest.mark.wide
def test_install_demo_train_export_serve(machine: Machine) -> None:
    installed = machine.must_run("python", "-c", "import rather; print(rather.__file__)")
    assert Path(installed.strip()).is_relative_to(machine.folder / "venv")
    assert machine.must_run("rather", "--version") == f"rather {release.read_version(ROOT)}\n"
    assert "kind answers (preferred)" in machine.must_run("rather", "demo", "--out", "demo")
    machine.must_run("rather", "train", "demo/dpo.yaml", "exp_name=mine", "max_steps=8")
    machine.must_run("rather", "export", "demo/output/mine", "exported")
    expected = machine.must_run("python", "-c", GREEDY, "exported", QUESTION).strip()
    with machine.serve("exported") as client:
        turns = [{"role": "user", "content": QUESTION}]
        greedy = {"temperature": 0.0, "max_tokens": 40}
        body = {"model": "exported", "messages": turns, "stream": False, **greedy}
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        sampled = machine.sample("exported", str(client.base_url))
    assert answer["choices"][0]["message"]["content"].strip() == expected
    # `transformers serve` answers greedily whatever the temperature is.
    assert sampled.returncode != 0
    assert "the server does not sample" in sampled.stderr, sampled.stdout + sampled.stderr
    assert "cheese" in expected
