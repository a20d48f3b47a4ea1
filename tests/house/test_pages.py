"""What README and docs say exists: commands, options, links, files, exit codes, example configs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

import rather.errors
from tests.house.source import ROOT, python_files, text_files, where

PAGES = [file for file in text_files() if file.suffix == ".md"]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
EXAMPLES.remove(ROOT / "examples" / "rounds" / "rounds.yaml")  # tests/rounds reads it


def commands() -> Mapping[str, object]:
    from rather.cli import app

    return typer.main.get_group(app).commands


def code_lines(page: Path) -> list[str]:
    """The lines of the shell blocks of a page, continued lines joined, comments cut."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [
        line.removeprefix("$ ").split(" #")[0].strip()
        for line in joined.splitlines()
        if line.strip()
    ]


def options(command: TyperCommand) -> set[str]:
    named = [
        name for parameter in command.params for name in parameter.opts + parameter.secondary_opts
    ]
    return {*named, "--help"}


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_commands_and_options_exist(page: Path) -> None:
    known = commands()
    for line in code_lines(page):
        words = shlex.split(line)
        if words[0] != "rather" or words[1].startswith("-"):
            continue
        assert words[1] in known, f"{where(page)}: no command '{words[1]}' in: {line}"
        command = known[words[1]]
        if isinstance(command, TyperGroup):
            assert words[2] in command.commands, (
                f"{where(page)}: no command '{words[2]}' in: {line}"
            )
            command = command.commands[words[2]]
        assert isinstance(command, TyperCommand)
        flags = {word.split("=")[0] for word in words if word.startswith("--")}
        assert flags <= options(command), (
            f"{where(page)}: {flags - options(command)} unknown in: {line}"
        )


def test_make_targets_and_scripts_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        lines = code_lines(page)
        written = {name for line in lines for name in re.findall(r"^cat > (\S+)", line)}
        for line in lines:
            words = shlex.split(line)
            if words[0] == "make":
                targets = [word for word in words[1:] if "=" not in word]
                assert all(f"\n{target}:" in makefile for target in targets), (
                    f"{where(page)}: {line}"
                )
            scripts = {
                word for word in words if word.endswith((".py", ".sh")) and not word.startswith("/")
            }
            for script in scripts - written:
                assert (ROOT / script).is_file(), f"{where(page)}: {line}"


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{where(page)}: {target} leads nowhere"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{where(page)}: {target}: no such heading"


def test_commands_page_names_every_exit_code() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    errors = [value for value in vars(rather.errors).values() if isinstance(value, type)]
    for error in errors:
        if issubclass(error, rather.errors.RatherError):
            assert f"| {error.exit_code} |" in page, f"exit code of {error.__name__}"


@pytest.mark.parametrize("file", EXAMPLES, ids=where)
def test_example_configs_load(file: Path) -> None:
    from rather.config.load import load_config

    config = load_config(file, check_paths=False)  # models and pairs are the user's to bring
    assert config.exp_name


def test_there_are_examples() -> None:
    names = {where(file) for file in EXAMPLES}
    assert "examples/qwen2.5-3B-dpo_megatron/dpo_config.yaml" in names
    assert any(name.startswith("examples/quickstart/") for name in names)


def test_data_page_names_every_shape_and_every_reason() -> None:
    from rather.data.formats import FORMATS
    from rather.data.report import MEANINGS

    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    missing = [name for name in (*FORMATS, *MEANINGS) if f"`{name}`" not in page]
    assert not missing, f"docs/data.md does not name {missing}"


def test_every_reason_has_a_meaning() -> None:
    """A reason that is counted but has no meaning would break the table that should explain it."""
    from rather.data.report import MEANINGS

    source = "\n".join(file.read_text(encoding="utf-8") for file in python_files("rather/data"))
    searched = {"DropReason": "identical_text", "_note": "control_characters"}
    reasons: set[str] = set()
    for call, known in searched.items():
        found = set(re.findall(rf'\b{call}\(\s*"([a-z_]+)"', source))
        assert known in found, f"{call} is not what counts a reason any more"
        reasons |= found
    assert reasons <= set(MEANINGS), reasons - set(MEANINGS)


def test_metrics_page_names_every_metric() -> None:
    from rather.losses.metrics import PER_PAIR

    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert not [name for name in PER_PAIR if f"`{name}`" not in page]
