"""Start a child process that works for this one: with the same modules, but without its secrets.

It is started with `subprocess` rather than `multiprocessing`, so that it neither runs the user's
main module again nor inherits threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from rather.config.redaction import looks_secret

# The child finds the same modules as its parent, wherever either was started. Ctrl-C is the
# parent's to answer.
_START = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = json.loads(sys.argv[1]); from importlib import import_module; "
    "import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))"
)


def start_child(module: str, handles: Sequence[int], **environment: str) -> subprocess.Popen[bytes]:
    """Run `main` of a module with these handles of open files, which the child inherits."""
    public = {name: text for name, text in os.environ.items() if not looks_secret(name)}
    return subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path), module, *map(str, handles)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what a library prints is not output of the command
        pass_fds=handles,
        env=public | environment,
    )
