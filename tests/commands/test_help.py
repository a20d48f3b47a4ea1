"""The command line itself: groups, the version, hints for what users type first."""

from __future__ import annotations

import pytest

from tests.commands.conftest import exits, rather


def test_commands_are_grouped_and_train_is_the_first() -> None:
    text = rather("--help").stdout
    places = [text.index(word) for word in ("Train", " train ", "Prepare", " data ", " board ")]
    assert places == sorted(places)
    assert text.index(" train ") < text.index(" sweep ")


def test_the_version() -> None:
    from rather import __version__

    assert rather("--version").stdout == f"rather {__version__}\n"


@pytest.mark.parametrize(
    ("name", "instead"), [("compare-losses", "rather sweep"), ("compare", "rather board output")]
)
def test_a_removed_command_says_what_to_use(name: str, instead: str) -> None:
    done = exits(2, name, "output/a", "output/b")
    assert "it was removed" in done
    assert instead in done


@pytest.mark.parametrize("name", ["-h", "--help"])
def test_both_names_of_help(name: str) -> None:
    assert "Usage: rather plan" in rather("plan", name).stdout
