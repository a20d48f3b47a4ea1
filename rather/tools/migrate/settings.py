"""The settings of another trainer, as they were read from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rather.files import JsonObject


@dataclass(frozen=True)
class SourceSettings:
    """Nested values, and what a command line says: words, program, devices, overrides of a file."""

    name: str
    values: JsonObject
    words: tuple[str, ...] = ()
    devices: int | None = None  # 0: only known when the launcher runs
    file: Path | None = None
    program: str = ""
    flags: JsonObject = field(default_factory=dict)
    folder: Path = Path()
    script: Path | None = None  # the program's file, if it is here
    # Keys whose values only a run has, and where: those that decide a training, and others.
    unknown: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
