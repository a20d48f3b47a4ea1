"""A call that did not end: which rank holds the others up, told from what each of them does."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rather.cluster.deadlines import Limit
from rather.cluster.stack_snapshot import Look
from rather.errors import HangError

log = logging.getLogger(__name__)

ANSWER = 3.0  # seconds in which a process that still runs says what it does


@dataclass(frozen=True)
class Rank:
    """One of those that were waited for. Without a look it did not say what it does."""

    name: str
    look: Look | None


def hang_error(
    late: Sequence[Rank], others: Sequence[Rank], limit: Limit, log_dir: Path
) -> HangError:
    """Names the guilty of those that are late, once all stacks are written down."""
    guilty, why = judged(late)
    text = f"{guilty.name}: no answer within {limit.seconds:.0f} s (timeouts.{limit.key}): {why}."
    file = _written([*late, *others], text, log_dir)
    return HangError(f"{text} {f'The stacks of all ranks are in {file}.' if file else ''}".strip())


def judged(ranks: Sequence[Rank]) -> tuple[Rank, str]:
    """Who does not answer; else who waits for nobody while others wait; else who stands where fewest stand."""
    for rank in ranks:
        if rank.look is None:
            return (
                rank,
                "its process does not answer at all: it is stopped, or stuck outside Python",
            )
    looks = {rank: rank.look for rank in ranks if rank.look}
    waiting = {rank: look for rank, look in looks.items() if look.collective}
    apart = [rank for rank in ranks if rank not in waiting]
    if waiting and apart:
        return (
            apart[0],
            f"it is in {looks[apart[0]].where}, and others wait for it in {_where(list(waiting.values()))}",
        )
    stand = Counter(look.where for look in looks.values())
    usual, _ = stand.most_common(1)[0]  # of equally many, where the first rank stands
    unusual = sorted(
        (rank for rank in ranks if looks[rank].where != usual),
        key=lambda rank: stand[looks[rank].where],
    )
    if unusual:
        return unusual[0], f"it is in {looks[unusual[0]].where}, others in {usual}"
    all_of = "" if len(ranks) == 1 else f", and so are all {len(ranks)} ranks"
    return ranks[-1], f"it is in {usual}{all_of}"


def _where(looks: Sequence[Look]) -> str:
    return Counter(look.where for look in looks).most_common(1)[0][0]


def _written(ranks: Sequence[Rank], text: str, log_dir: Path) -> Path | None:
    file = log_dir / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    parts = [text, *(_report(rank) for rank in ranks)]
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        file.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        log.error(
            "%s: %s; the stacks of all ranks:\n%s",
            file,
            error.strerror or error,
            "\n\n".join(parts),
        )
        return None
    return file


def _report(rank: Rank) -> str:
    if rank.look is None:
        return f"== {rank.name}: no answer"
    return f"== {rank.name}: {rank.look.call} for {rank.look.seconds:.0f} s\n{rank.look.stacks}"
