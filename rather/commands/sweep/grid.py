"""The grid: `beta=0.01,0.05` is a key with several values, and every combination of such keys is a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from rather.errors import ConfigError

PLACES = ("exp_name", "output_dir", "logging_dir")  # of the sweep; those of its runs follow
SHARED = ("reference.cache.path", "actor_train.data_args.cache_dir", "system_envs")  # by all runs
OPEN, CLOSE = "[{(", ")}]"


@dataclass(frozen=True)
class Grid:
    """Overrides that all runs share, and keys with the values that they take in turn."""

    fixed: tuple[str, ...]
    axes: Mapping[str, tuple[str, ...]]

    @property
    def of_runs(self) -> list[str]:
        """What is fixed, without the places."""
        return [text for text in self.fixed if key_of(text) not in PLACES]

    def points(self) -> dict[str, dict[str, str]]:
        """Name of each run -> its values, the last key changing fastest."""
        short = [key.rpartition(".")[2] for key in self.axes]
        labels = short if len(set(short)) == len(short) else list(self.axes)
        found: dict[str, dict[str, str]] = {}
        for values in product(*self.axes.values()):
            name = "_".join(f"{label}-{value}" for label, value in zip(labels, values, strict=True))
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100]
            while name in found:
                name += "x"  # two values that a folder's name cannot tell apart
            found[name] = dict(zip(self.axes, values, strict=True))
        return found


def read_grid(overrides: Sequence[str]) -> Grid:
    """Several values stand between commas; a list as one value is written [0,1]."""
    fixed, axes = [], {}
    for text in overrides:
        key, value = key_of(text), text.partition("=")[2]
        values = tuple(part.strip() for part in split(value))
        if key == "overwrite":
            raise ConfigError("overwrite (command line): to start a sweep anew, type --overwrite")
        if len(values) < 2:
            fixed.append(text)
            continue
        if key in PLACES:
            raise ConfigError(
                f"{key} (command line): the runs of a sweep get places of their own; give it one value"
            )
        if key.startswith(SHARED):
            raise ConfigError(
                f"{key} (command line): the runs of a sweep share it; give it one value"
            )
        if "" in values or len(set(values)) < len(values):
            raise ConfigError(
                f"{text} (command line): each value stands once, with a comma between two of them"
            )
        axes[key] = values
    if not axes:
        raise ConfigError(
            "nothing to sweep over: give a key several values, such as beta=0.01,0.05,0.1"
        )
    return Grid(tuple(fixed), axes)


def key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def split(text: str) -> list[str]:
    """At commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter in OPEN) - (letter in CLOSE) if not quote else 0
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
