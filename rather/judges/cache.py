"""Results of judges in the user's own cache folder."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from rather.errors import RatherError
from rather.files import append_whole, make_folder, own, parse_json, real_path, text_sha
from rather.reference.logprob_cache import refuse_foreign
from rather.tracking.json_lines import strict_json

log = logging.getLogger(__name__)


class VerdictCache(dict[str, Any]):
    """Results of a judge by a digest of the question, in the user's own cache folder.

    Files that others made, such as one next to the answers, decide nothing. Several commands may
    append at a time: each line is one write to the end of the file. A file that cannot be used
    costs a warning, and the results are kept for this command.
    """

    def __init__(self, judge: Any, kind: type) -> None:
        self.file: BinaryIO | None = None
        try:
            self.file = verdict_file(judge)
            lines = self.file.read().splitlines()
        except (RatherError, OSError) as error:
            self._close(error)
            return
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # of a line that was cut off
                entry = parse_json(line)
                if isinstance(entry["result"], kind):
                    self[entry["key"]] = entry["result"]

    def add(self, key: str, result: Any) -> None:
        self[key] = result
        if (file := self.file) is None:
            return
        # The first line end closes a line that a kill or a full disk has cut off.
        line = f"\n{strict_json({'key': key, 'result': result})}\n"
        try:
            append_whole(file.fileno(), line.encode())
        except OSError as error:
            self._close(error)

    def _close(self, error: Exception) -> None:
        self.file = None
        warn_uncached(str(error))


def verdict_file(judge: Any) -> BinaryIO:
    """Open the file of a judge in the user's own cache folder, at its beginning."""
    home = real_path(Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")))
    for folder in (home / "rather", home / "rather" / "verdicts"):
        make_folder(folder, "XDG_CACHE_HOME", 0o700)
        refuse_foreign(folder, "XDG_CACHE_HOME")
    name = f"{text_sha(strict_json(judge))}.jsonl"
    file = open(folder / name, "a+b", buffering=0, opener=own)  # noqa: SIM115
    file.seek(0)
    return file


@cache
def warn_uncached(problem: str) -> None:
    """Log once that results are not cached."""
    log.warning("The judge's results are not cached: %s", problem)
