"""Run `rather train` several times with one import of torch; a script for
`tests.same.before_after`.

    python -P tests/same/run_jobs.py jobs.json

It imports whichever `rather` PYTHONPATH points to and nothing from the tests, so that it can run an
older version of the package. Each job gets new processes, forked from this one: one process, or as
many ranks as the job asks for, each with the environment that torchrun would give it. Exit codes
and seconds are printed as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    import torch
    import transformers  # noqa: F401  imported once, before the forks

    from rather import DPOPipeline  # noqa: F401

    # Its value is read at import, so it must be imported by each rank, with the rank's environment.
    assert "rather.cli" not in sys.modules
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([run(job) for job in jobs]))


def run(job: dict[str, Any]) -> tuple[list[int], float]:
    """Run one job; return the exit code of each of its processes, and the seconds it took."""
    import torch.distributed as dist

    started = time.monotonic()
    common: dict[str, str] = {}
    if job["ranks"] > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "TORCHELASTIC_RUN_ID": "before_after",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(job["ranks"]),
            "LOCAL_WORLD_SIZE": str(job["ranks"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
        }
    fork = multiprocessing.get_context("fork")
    children = []
    for rank in range(job["ranks"]):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if common else {}
        children.append(fork.Process(target=train, args=(job, {**common, **own})))
        children[-1].start()
    for child in children:
        child.join()
    return [child.exitcode or 0 for child in children], time.monotonic() - started


def train(job: dict[str, Any], environment: dict[str, str]) -> None:
    """Be `rather train <arguments>` in this process, with all output in the job's log file."""
    os.environ.update(environment)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["rather", "train", *job["arguments"]]
    runpy.run_module("rather", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
