"""Every shell, Python and YAML block of README and docs is executed, in a workspace of tiny models and pairs.

What cannot be executed here is listed in INSTEAD with the reason, and checked another way.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from rather.config import plugins
from rather.config.load import config_from_dict, load_config
from rather.data.formats import FORMATS
from rather.judges.judge import JUDGES
from rather.losses.losses import LOSSES
from rather.losses.objective import from_config
from rather.losses.own import METRICS
from rather.pipeline.callbacks import CALLBACKS
from rather.tools.rounds.settings import RoundsKeys
from tests.docs.workspace import make_base, make_runs, named, run, write_files
from tests.house.source import ROOT, text_files, where

README = ROOT / "README.md"
PAGES = [file for file in text_files() if file.suffix == ".md"]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELLS = ("bash", "sh", "console")
WRITES = ("--out", "--save", "--html")


class Block(NamedTuple):
    page: Path
    kind: str
    text: str

    def commands(self) -> list[str]:
        """Its lines without comments, continued ones joined, a text for a file (<<'END') with its command."""
        found: list[str] = []
        lines = iter(self.text.replace("\\\n", " ").splitlines())
        for line in lines:
            if marker := re.search(r"<<'(\w+)'", line):
                found.append("\n".join([line, *_up_to(marker[1], lines)]))
            elif command := re.sub(r"(^|\s)#.*", "", line).strip():
                found.append(command)
        return found


def _up_to(marker: str, lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield line
        if line == marker:
            return


def blocks(*kinds: str) -> list[Block]:
    found = [
        Block(page, *match)
        for page in PAGES
        for match in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]
    return [block for block in found if block.kind in kinds]


# --- what is not executed, why, and what is done instead ---


def load(words: list[str]) -> None:
    """The config with its overrides, as strictly as a run would."""
    overrides = [word for word in words[3:] if "=" in word and not word.startswith("-")]
    from_config(load_config(Path(words[2]), overrides))


def load_after_torchrun(words: list[str]) -> None:
    load(words[words.index("-m") + 1 :])


def load_example(words: list[str]) -> None:
    folder, name = (words[words.index(option) + 1] for option in ("--config_path", "--config_name"))
    load_config(Path(folder) / f"{name}.yaml", [word for word in words[6:] if "=" in word])


def dry_make(words: list[str]) -> None:
    done = subprocess.run(
        ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def options(words: list[str]) -> None:
    import typer

    from rather.cli import app

    command = typer.main.get_group(app).commands[words[1]]
    command.make_context(words[1], words[2:])


def script(words: list[str]) -> None:
    file = ROOT / words[1]
    compile(file.read_text(encoding="utf-8"), str(file), "exec")


def extra(words: list[str]) -> None:
    """The extra exists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = re.fullmatch(r"rather\[(\w+)\]", words[2])
    assert asked
    assert asked[1] in project["optional-dependencies"]


def shell(words: list[str]) -> None:
    subprocess.run(["bash", "-n", str(ROOT / words[0])], check=True)


def nothing(words: list[str]) -> None:
    pass


INSTEAD: dict[str, tuple[str, Callable[[list[str]], None]]] = {
    r"rather train .*device_mapping=\d-": ("starts a process a device: tests/cluster does", load),
    r"torchrun ": (
        "starts a process a device: tests/cluster/test_torchrun.py does",
        load_after_torchrun,
    ),
    r"python examples/start_dpo_pipeline.py ": (
        "a model of 3B: tests/cluster/test_example.py runs it",
        load_example,
    ),
    r"rather tune": ("trains 20 runs: tests/pairs/test_tune.py tunes", load),
    r"rather demo": ("half a minute: tests/docs/test_newcomer.py runs it", options),
    r"rather board": (
        "serves until it is interrupted: tests/docs/test_newcomer.py runs it",
        options,
    ),
    r"make ": ("installs, or takes minutes: tests/docs/test_newcomer.py runs the demo", dry_make),
    r"pip install ": ("needs a package index", extra),
    r"\.ci/run": ("runs this test", shell),
    r"source \.venv/bin/activate": ("the environment of the tests is the one", nothing),
    r"rather --install-completion": (
        "changes the shell's files: tests/docs/test_completion.py does",
        nothing,
    ),
    r"python bench/": ("takes minutes", script),
    r"rather (generate|judge) ": ("tests/commands/test_generate.py and test_judge.py do", options),
    r"rather rounds ": ("minutes: tests/rounds runs them", options),
    r"vllm serve ": ("a server of its own environment", nothing),
}
# Commands that end otherwise than with 0 here, and why.
ENDS = {
    r"rather (stop|save-now) ": (2, "no run is going on"),
}


def instead(command: str) -> Callable[[list[str]], None] | None:
    return next((way for pattern, (_, way) in INSTEAD.items() if re.match(pattern, command)), None)


# --- the workspace ---


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    make_base(folder / "base")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_runs(folder)
    return folder


@pytest.fixture(autouse=True)
def only_own_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers is gone after its test: a callback would stop the runs of the next."""
    registries = (LOSSES, FORMATS, METRICS, CALLBACKS, JUDGES)
    assert len(registries) == len(plugins.REGISTRIES)
    for registry in registries:
        len(registry)  # reading it imports all of its modules
        for name in ("_entries", "_modules"):
            monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    for name in ("_requested", "_loaded"):
        monkeypatch.setattr(plugins, name, list(getattr(plugins, name)))


@pytest.fixture
def fresh(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "workspace"
    shutil.copytree(workspace, folder)
    monkeypatch.chdir(folder)
    return folder


def lay_out(page: Path) -> None:
    """Make what only this page needs: a changed file in a git repository, a Megatron checkpoint."""
    if page.stem == "CONTRIBUTING":
        for command in ("init -q", "add dpo.yaml", "config user.name A", "config user.email a@b.c"):
            subprocess.run(["git", *command.split()], check=True)
    if page.stem == "engines":
        assert run("export", "output/dpo", "megatron", "--format", "megatron")[0] == 0


def make_room(words: list[str]) -> None:
    """What a command is to write is not there yet."""
    targets = [words[i + 1] for i, word in enumerate(words[:-1]) if word in WRITES]
    targets += words[-1:] if words[1:3] == ["recipes", "copy"] else []
    for target in map(Path, targets):
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)


def execute(command: str) -> None:
    words = shlex.split(command)
    if way := instead(command):
        way(words)
    elif words[0] == "rather":
        make_room(words)
        wanted = next(
            (code for pattern, (code, _) in ENDS.items() if re.match(pattern, command)), 0
        )
        code, said = run(*words[1:], stdin="")
        assert code == wanted, f"{command}: exit code {code}\n{said}"
    else:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-ec", command],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stderr}"


def name(block: Block) -> str:
    return f"{where(block.page)}:{block.page.read_text(encoding='utf-8').partition(block.text)[0].count(chr(10)) + 1}"


COMMANDS = blocks(*SHELLS)


@pytest.mark.parametrize("block", [block for block in COMMANDS if block.page != README], ids=name)
def test_commands_run(block: Block, fresh: Path) -> None:
    lay_out(block.page)
    for command in block.commands():
        execute(named(command))


def test_commands_of_the_readme_run_in_their_order(fresh: Path) -> None:
    """Its blocks use the YAML files and runs of earlier ones; its dpo.yaml is for more pairs."""
    shutil.rmtree("output")
    for block in blocks(*SHELLS, "yaml"):
        if block.page == README and block.kind == "yaml":
            Path("dpo.yaml").write_text(named(block.text))
        elif block.page == README:
            for command in block.commands():
                execute(named(command))


PYTHON = sorted({block.page for block in blocks("python")})


@pytest.mark.parametrize("page", PYTHON, ids=where)
def test_python_runs(page: Path, fresh: Path) -> None:
    """The blocks of a page in their order, in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("python"):
        if block.page == page:
            exec(compile(named(block.text), name(block), "exec"), names)


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(values[key], more[key])
        for key in values.keys() & more.keys()
        if isinstance(more[key], dict)
    }
    return {**values, **more, **both}


@pytest.mark.parametrize("block", blocks("yaml"), ids=name)
def test_settings_are_accepted(
    block: Block, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a model and pairs, where the block does not name some itself."""
    monkeypatch.chdir(workspace)
    values = yaml.safe_load(named(block.text))
    if "rounds" in values:
        RoundsKeys.model_validate(values.pop("rounds"))
    least = {"pretrain": "base", "actor_train": {"data_args": {"file_name": "pairs.jsonl"}}}
    from_config(config_from_dict(merged(least, values)))


def test_the_list_of_what_is_not_executed_has_no_dead_entry() -> None:
    commands = [named(command) for block in COMMANDS for command in block.commands()]
    for pattern in (*INSTEAD, *ENDS):
        assert any(re.match(pattern, command) for command in commands), pattern


def test_no_command_hides_in_a_block_without_a_language() -> None:
    for page in (page for page in PAGES if page.name != "mistakes.md"):  # test_mistakes.py runs it
        for text in re.findall(
            r"^```(?:text)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            assert not re.search(r"^(\$ )?(rather [a-z]|make |python )", text, re.MULTILINE), (
                f"{where(page)}:\n{text}"
            )
