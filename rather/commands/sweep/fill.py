"""The reference's one pass before runs that go side by side: all its log-probs into the cache that they share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rather.commands.terminal import guarded, settings
from rather.config import plugins
from rather.config.schema import DPOConfig
from rather.data.batch import TokenPair
from rather.pipeline.pipeline import DPOPipeline
from rather.pipeline.steps import EVALUATION_CHUNK, PreparedSteps

REPORT = "sweep reference: "  # begins the line that tells the cost; libraries may print after it


def fill(config: DPOConfig) -> dict[str, Any] | None:
    """What it cost, as a run reports it; None where the run asks no reference. The micro-batches are the run's own."""
    with closing(DPOPipeline(config)) as pipeline:
        known = pipeline.reference_logps
        if known is None:
            return None
        pipeline.initialize()
        with closing(known):
            for pairs in _groups(pipeline):
                pipeline.reference_stream.columns(pipeline.packing.to_evaluate(pairs))
                known.keep()
            return known.report()


def _groups(pipeline: DPOPipeline) -> Iterator[Sequence[TokenPair]]:
    """The pairs of each step, then those of the evaluation, as the run will ask for them."""
    source = pipeline.source
    assert isinstance(source, PreparedSteps)
    for done in range(source.total_steps):
        yield source.pairs_after(done)
    for held in pipeline.data.evals.values():
        for first in range(0, len(held), EVALUATION_CHUNK):
            yield held.take(range(first, min(first + EVALUATION_CHUNK, len(held))))


def main(arguments: Sequence[str]) -> int:
    """For a process of its own, on devices of its own: the YAML and its overrides; one line is the report."""

    def work() -> int:
        prefix = "--import="
        plugins.request(
            Path(each.removeprefix(prefix)) for each in arguments if each.startswith(prefix)
        )
        file, *overrides = [each for each in arguments if not each.startswith(prefix)]
        print(REPORT + json.dumps(fill(settings(Path(file), overrides))))
        return 0

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
