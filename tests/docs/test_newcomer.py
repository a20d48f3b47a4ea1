"""The newcomer's path: "Five minutes" of the README as it stands there, from the clone to `from_pretrained`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import site
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rather.tools.demo import manner_of
from tests.commands.conftest import json_of
from tests.docs.test_snippets import BLOCK
from tests.house.source import ROOT

BOARD = "rather board output"
NOT_CLONED = (
    ".git",
    ".venv",
    "site",
    "output",
    "rather-demo",
    "__pycache__",
    "*.egg-info",
    ".*_cache",
)


README = (ROOT / "README.md").read_text(encoding="utf-8")
NEEDS_GPUS = re.compile(r"^.*device_mapping=0-7.*\n", re.MULTILINE)


def section(title: str = "Five minutes") -> list[tuple[str, str]]:
    """The blocks of a section: language and text."""
    return BLOCK.findall(README.split(f"\n## {title}\n")[1].split("\n## ")[0])


def run_block(folder: Path, kind: str, text: str) -> str:
    """Run a block as a reader would, in a shell with the environment, and return what it printed."""
    script = text if kind == "bash" else f"python - <<'PYTHON'\n{text}PYTHON\n"
    if "make demo" not in script:
        script = f"source .venv/bin/activate\n{script}"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def clone(folder: Path) -> Path:
    """A copy of this tree, also of what is not committed, with an environment that a first `make` would have made.

    It is a real one whose packages are those of the environment that runs this test: only the download is left out.
    """
    copy = folder / "rather"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_CLONED))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", copy / ".venv"], check=True)
    packages = next((copy / ".venv" / "lib").glob("python*/site-packages"))
    (packages / "present.pth").write_text("\n".join([str(copy), *site.getsitepackages()]) + "\n")
    command = copy / ".venv" / "bin" / "rather"
    command.write_text(f"#!{copy}/.venv/bin/python\nfrom rather.cli import main\nmain()\n")
    command.chmod(0o755)
    torch = next(
        line
        for line in (copy / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    (copy / ".venv" / ".installed").write_text(f"{copy}\n{torch}\n")
    return copy


def environment() -> dict[str, str]:
    """Nothing of this test's own Python and make, and no network."""
    own = {
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "DISPLAY",
        "MAKEFLAGS",
        "MAKEOVERRIDES",
        "MAKELEVEL",
        "MFLAGS",
        "ARGS",
    }
    kept = {name: value for name, value in os.environ.items() if name not in own}
    proxies = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    )
    return {**kept, **proxies, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder after all blocks, the board left out, and what each block printed."""
    folder = clone(tmp_path_factory.mktemp("newcomer"))
    said = [
        run_block(folder, kind, text.replace(BOARD, f": {BOARD}"))
        for kind, text in section()
        if kind in ("bash", "python")
    ]
    return folder, said


def test_the_walkthrough_is_complete() -> None:
    text = "\n".join(block for _, block in section())
    order = [
        "make demo",
        "pairs.jsonl",
        "rather data",
        "rather plan",
        "rather train",
        BOARD,
        "from_pretrained",
    ]
    places = [text.index(step) for step in order]
    assert places == sorted(places)


@pytest.mark.slow
def test_the_demo_was_run_and_nothing_was_installed_again(path: tuple[Path, list[str]]) -> None:
    folder, said = path
    assert "Downloading" not in said[0]
    assert "Next, try:" in said[0]
    assert (folder / "rather-demo" / "base" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_demo_aligns_its_model_and_keeps_what_it_knows(path: tuple[Path, list[str]]) -> None:
    folder, said = path
    out = folder / "rather-demo"
    result = json_of(out / "answers.json")
    before, after = result["before"], result["after"]
    assert 0.35 < before["preferred"] < 0.65
    assert after["preferred"] > 0.9
    assert after["eval/rewards/accuracies"] > 0.9
    assert after["on_topic"] > max(0.9, before["on_topic"] - 0.05)
    assert f"{after['preferred']:.1%}" in said[0]
    model = out / "output" / "demo" / "model"
    assert [found for found in out.rglob("model") if found.is_dir()] == [model]
    assert "rather-demo/output/demo/model" in said[0]
    AutoModelForCausalLM.from_pretrained(model)
    AutoTokenizer.from_pretrained(model)


@pytest.mark.slow
def test_own_pairs_are_shown_planned_and_trained(path: tuple[Path, list[str]]) -> None:
    folder, said = path
    printed = "\n".join(said)
    assert "The tea is near the window" in printed
    assert "[[" in printed, "scored tokens are marked"
    assert (folder / "output" / "my-first-run" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_answers_are_those_of_the_readme(path: tuple[Path, list[str]]) -> None:
    """To the word on most machines; their manner on all."""
    _, said = path
    shown = next(text for kind, text in section() if kind == "text").splitlines()
    answers = said[-1].strip().splitlines()[-2:]
    assert (
        [manner_of(line) for line in shown]
        == ["grumpy", "kind"]
        == [manner_of(line) for line in answers]
    )
    assert all("cheese" in line and "window" in line for line in answers)


@pytest.mark.slow
def test_the_commands_of_your_own_model_run_in_this_order(path: tuple[Path, list[str]]) -> None:
    """The first block of the README writes the YAML and the run that "With your model" uses."""
    folder, _ = path
    first = BLOCK.findall(README)[0]
    for kind, text in [first, *section("With your model")]:
        if kind in ("bash", "python"):
            run_block(folder, kind, NEEDS_GPUS.sub("", text.replace("make demo", ": demo")))
    assert {"dpo", "softer", "from-python"} <= {run.name for run in (folder / "output").iterdir()}
    shown = next(text for kind, text in section("With your model") if kind == "yaml")
    written = (folder / "dpo.yaml").read_text(encoding="utf-8")
    memory = re.compile(r"weights are trained, .* of memory")
    assert memory.sub("", written) == memory.sub("", shown)


@pytest.mark.slow
def test_the_board_shows_the_run(path: tuple[Path, list[str]]) -> None:
    folder, _ = path
    command = [folder / ".venv" / "bin" / "rather", *BOARD.split()[1:]]
    board = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        # SIGINT is ignored in a script's background jobs, such as these tests, and in children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert board.stdout
        address = re.search(r"http://127\.0\.0\.1:\S+", board.stdout.readline())
        assert address
        with urlopen(address[0], timeout=60) as answer:
            assert "<html" in answer.read().decode()
        board.send_signal(signal.SIGINT)
        assert board.wait(timeout=60) == 0
    finally:
        board.kill()
