"""Registries of losses and data formats. `--import my_loss.py` adds to them.

Only the command line names such files. A YAML, an override or a run folder cannot, because it may
be untrusted.
"""

from __future__ import annotations

import difflib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from rather.errors import LIMITS, ConfigError

Entry = TypeVar("Entry")
REGISTRIES: list[Registry[Any]] = []


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean ...?' if a known word is similar, else the known words."""
    words = list(known)
    for similar in difflib.get_close_matches(word, words, n=1):
        return f"; did you mean '{similar}'?"
    return f"; known: {', '.join(words)}"


class Registry(Mapping[str, Entry]):
    """Entries of one kind by name. Each module of `package` adds its own when it is imported.

    Reading the registry imports all modules of the package, so that a new file there is found
    without being listed.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._entries: dict[str, Entry] = {}
        self._modules: dict[str, str] = {}  # name -> the module that added it
        self._is_complete = False
        REGISTRIES.append(self)

    def add(self, name: str, entry: Entry, module: str) -> None:
        """Add an entry; a name that another module has taken is an error."""
        if self._modules.setdefault(name, module) != module:
            text = f"a {self.kind} named '{name}' is already defined in {self._modules[name]}"
            raise ConfigError(f"{text}; choose another name.")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> Entry:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, Entry]:
        if not self._is_complete:
            self._is_complete = True
            folders = import_module(self.package).__path__
            for module in iter_modules(folders, f"{self.package}."):
                import_module(module.name)
        return self._entries

    def find(self, name: str, key: str) -> Entry:
        """Return the entry with this name, or raise a ConfigError about the config key."""
        if name not in self:
            hint = did_you_mean(name, self)
            limits = f"; {LIMITS}" if self.kind == "loss" and "known:" in hint else ""
            raise ConfigError(f"{key}: unknown {self.kind} '{name}'{hint}{limits}")
        return self[name]

    def names_from(self, module: str) -> list[str]:
        """Return the names that a module added."""
        return [name for name, owner in self._modules.items() if owner == module]

    def is_own(self, name: str) -> bool:
        """Return whether a user added the entry: by `--import`, or in a script."""
        return self._modules[name].partition(".")[0] != "rather"

    def refuse_from_scripts(self, names: Iterable[str]) -> None:
        """Refuse a user's entry that ranks in other processes could not import."""
        travels = {file.name for file in _loaded}
        for name in names:
            if self.is_own(name) and self._modules[name] not in travels:
                raise ConfigError(
                    f"{self.kind} {name}: it is defined in {self._modules[name]}, and on Ray the "
                    "ranks run in other processes. Put it into a file that --import names."
                )

    def source_of(self, name: str) -> str | None:
        """Return the source text of the user's file that added an entry; None for Rather's own."""
        owner = self._modules.get(name)
        return next((file.source for file in _loaded if file.name == owner), None)


class ImportedFile(NamedTuple):
    """A user's file: the name of its module, and its text."""

    name: str
    source: str


_requested: list[Path] = []
_loaded: list[ImportedFile] = []


def request(paths: Iterable[Path] | None) -> None:
    """Remember the files that the command line names; `load_requested` runs them."""
    _requested[:] = [path.expanduser().absolute() for path in paths or ()]


def arguments() -> list[str]:
    """Return the command-line arguments that make another process import the same files."""
    return [f"--import={path}" for path in _requested]


def load_requested() -> None:
    """Run the requested files. A loss imports torch, so the environment must be set before."""
    load(_requested)


def load(paths: Iterable[Path]) -> None:
    """Run each file once, as a module of its own."""
    for path in paths:
        _run(_read(path, "rather_import_", "--import"), str(path))


def _read(path: Path, prefix: str, option: str) -> ImportedFile:
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{option} {path}: cannot be read: {reason}.") from None
    return ImportedFile(prefix + re.sub(r"\W", "_", path.stem), source)


def loaded(kind: str | None = None) -> list[ImportedFile]:
    """Return the files that have run, or those that added a loss or a data format ('loss', 'data
    format')."""
    registries = [registry for registry in REGISTRIES if kind in (None, registry.kind)]
    return [
        file for file in _loaded if any(registry.names_from(file.name) for registry in registries)
    ]


def load_sources(files: Iterable[Iterable[str]]) -> None:
    """Run files that `loaded` returned in another process; they need not exist on this machine."""
    for name, source in files:
        _run(ImportedFile(name, source), f"<{name}>")


def load_function(path: Path, name: str, option: str) -> Any:
    """Run a file that the user names, and return one of its functions or classes."""
    return function_of(read_function_file(path, option), path, name, option)


def read_function_file(path: Path, option: str) -> ImportedFile:
    """Read a file of which the user names a function; `function_of` runs it."""
    return _read(path.expanduser(), "rather_rule_", option)


def function_of(file: ImportedFile, path: Path, name: str, option: str) -> Any:
    """Run a file that was read, and return one of its functions or classes."""
    function = getattr(_execute(file, str(path), option), name, None)
    if not callable(function):
        raise ConfigError(
            f"{option} {path}:{name}: the file has no function or class of this name."
        )
    return function


def _execute(file: ImportedFile, path: str, option: str) -> ModuleType:
    module = sys.modules[file.name] = ModuleType(file.name)
    module.__file__ = path
    try:
        # The one place that executes a file: the command line or the user's own YAML names it.
        exec(compile(file.source, path, "exec"), module.__dict__)  # nosec B102
    except SyntaxError as error:
        raise ConfigError(f"{option} {path}:{error.lineno}: {error.msg}.") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = [frame.lineno for frame in frames if frame.filename == path][-1]
        text = f"{option} {path}:{line}: {type(error).__name__}: {error}"
        raise ConfigError(" ".join(text.split())) from error
    return module


def _run(file: ImportedFile, path: str) -> None:
    if file in _loaded:
        return
    if file.name in [loaded_file.name for loaded_file in _loaded]:
        raise ConfigError(f"--import {path}: another imported file has the same name; rename one.")
    _execute(file, path, "--import")
    if not any(registry.names_from(file.name) for registry in REGISTRIES):
        raise ConfigError(
            f"--import {path}: it registers nothing. Decorate a function with @loss() or @metric "
            "from rather.losses or @data_format(...) from rather.data.formats, or a class with "
            "@callback from rather.pipeline.callbacks or @judge(...) from rather.judges.judge."
        )
    _loaded.append(file)
