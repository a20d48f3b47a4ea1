"""The registry of data formats.

A format is one decorated function, in a file of this folder or in a file that `--import` names:

    from rather.data.formats import data_format

    @data_format("question", "good", "bad")
    def good_and_bad(row):
        return row["question"], (row["good"], row["bad"])

Its name is the value for `data_args.format`. The columns are those that a row must have; with
`format: auto` a row is read by the format that was registered last among those whose columns it
has. The function returns the prompt and (chosen, rejected), or the prompt and `Ranked` answers.
Prompts and answers are text or lists of messages. It may raise `DropReason`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rather.config.plugins import Registry

Row = Mapping[str, Any]


class Ranked(NamedTuple):
    """Answers to one prompt; a smaller rank is a better answer."""

    answers: list[Any]
    ranks: list[float]


Reader = Callable[[Row], tuple[Any, tuple[Any, Any] | Ranked]]


@dataclass(frozen=True)
class DataFormat:
    """A known form of rows: the columns it needs, those it may have, and how it is read."""

    read: Reader
    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()

    def fits(self, given: set[str]) -> bool:
        """Return whether rows with these columns are of this format."""
        return given.issuperset(self.needs) and (
            not self.one_of or not given.isdisjoint(self.one_of)
        )


FORMATS: Registry[DataFormat] = Registry("data format", "rather.data.formats")


def data_format(
    *needs: str, may: tuple[str, ...] = (), one_of: tuple[str, ...] = ()
) -> Callable[[Reader], Reader]:
    """Register a function that reads rows with these columns. Its name becomes the format's."""

    def register(read: Reader) -> Reader:
        FORMATS.add(read.__name__, DataFormat(read, needs, may, one_of), read.__module__)
        return read

    return register
