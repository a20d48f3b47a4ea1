"""How far long work has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Advance = Callable[[float, str], None]  # how much is done, and a word about it


@contextmanager
def bar(console: Console, what: str, total: float) -> Iterator[Advance]:
    """A bar on a terminal, a line every ten seconds elsewhere."""
    started = spoken = monotonic()
    shown = Progress(
        TextColumn(what), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = shown.add_task(what, total=max(1, total), told="")

    def advance(done: float, told: str) -> None:
        nonlocal spoken
        shown.update(task, completed=done, told=told)
        if not console.is_terminal and monotonic() - spoken >= 10:
            spoken = monotonic()
            share = done / max(1, total)
            console.print(f"{what}: {told}, {share:.0%}, {spoken - started:.0f} s", highlight=False)

    with shown:
        yield advance
