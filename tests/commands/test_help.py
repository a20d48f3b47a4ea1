"""The command line itself: groups, the version, hints for what users type first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.conftest import rather


def test_commands_are_grouped_and_train_is_the_first() -> None:
    text = rather("--help").stdout
    places = [text.index(word) for word in ("Train", " train ", "Prepare", " data ", " board ")]
    assert places == sorted(places)
    assert text.index(" train ") < text.index(" sweep ")


def test_the_version() -> None:
    from rather import __version__

    assert rather("--version").stdout == f"rather {__version__}\n"


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        (("--beta", "0.2"), "write beta=0.2"),
        (("--beta=0.2",), "write beta=0.2"),
        (("--learning-rate", "1e-6"), "write actor_train.training_args.learning_rate=1e-6"),
    ],
)
def test_a_config_key_as_an_option_gets_a_hint(option: tuple[str, ...], hint: str) -> None:
    done = rather("train", "dpo.yaml", *option)
    assert done.exit_code == 2
    assert hint in done.output


def test_a_removed_command_says_what_to_use() -> None:
    done = rather("compare-losses", "dpo.yaml")
    assert done.exit_code == 2
    assert "it was removed" in done.output
    assert "rather sweep" in done.output


@pytest.mark.parametrize("name", ["-h", "--help"])
def test_both_names_of_help(name: str) -> None:
    assert "Usage: rather plan" in rather("plan", name).stdout


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "dpo.yaml").write_text("beta: 0.1\n")
    done = rather("chat", tmp_path / "dpo.yaml", "--prompt", "hello")
    assert done.exit_code == 2
    assert "dpo.yaml: is a file; give the folder of a model" in done.output


def test_an_unknown_model_fails_at_once() -> None:
    done = rather("chat", "nosuch", "--prompt", "hello")
    assert done.exit_code == 2
    assert "nosuch: neither a local folder nor a model that the hub provides" in done.output
