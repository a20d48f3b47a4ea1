"""Stages of a round: each has a digest of its inputs, and is repeated only if that changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from rather.files import JsonObject, own, read_json, replace_own, text_sha
from rather.tracking.json_lines import strict_json

STAGES = "stages.json"


class RoundStages:
    """The stages of one round, in the file stages.json of its folder.

    A stage is noted before it begins and after it has ended. So after a kill the same inputs
    continue what has begun, and other inputs begin again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / STAGES
        try:
            stored = read_json(self.file, own)
        except (OSError, ValueError):
            stored = {}
        self.known: JsonObject = stored if isinstance(stored, dict) else {}

    def is_done(self, name: str, inputs: JsonObject, output: Path) -> bool:
        """Return whether a stage has ended with these inputs, and its output is still there."""
        return self.known.get(name) == [_digest(inputs), "done"] and output.exists()

    def run(
        self, name: str, inputs: JsonObject, output: Path, work: Callable[[bool], object]
    ) -> None:
        """Do the work of a stage unless it is done; `work` is told whether it begins again."""
        if self.is_done(name, inputs, output):
            return
        digest = _digest(inputs)
        begins_again = self.known.get(name, [None])[0] != digest
        if begins_again:
            remove(output)
        self._note(name, digest, "begun")
        work(begins_again)
        self._note(name, digest, "done")

    def _note(self, name: str, digest: str, state: str) -> None:
        self.known[name] = [digest, state]
        replace_own(self.file, strict_json(self.known, indent=1) + "\n")


def remove(output: Path) -> None:
    """Delete the output of a stage, and what is next to it."""
    if output.is_dir() and not output.is_symlink():
        shutil.rmtree(output)
    for suffix in ("", ".part", ".meta.json"):
        if not output.is_dir():
            output.with_name(output.name + suffix).unlink(missing_ok=True)


def _digest(inputs: JsonObject) -> str:
    return text_sha(strict_json(inputs))
