"""A progress bar for long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import Progress, TextColumn

Advance = Callable[[float, str], None]  # how much is done, and a word about it


@contextmanager
def bar(console: Console, what: str, total: float) -> Iterator[Advance]:
    """Show a bar on a terminal, and print a line every ten seconds elsewhere."""
    started = printed = monotonic()
    total = max(1, total)
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[detail]}"))
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = shown.add_task(what, total=total, detail="")

    def advance(done: float, detail: str) -> None:
        nonlocal printed
        shown.update(task, completed=done, detail=detail)
        if not console.is_terminal and monotonic() - printed >= 10:
            printed = monotonic()
            seconds = f"{printed - started:.0f} s"
            console.print(f"{what}: {detail}, {done / total:.0%}, {seconds}", highlight=False)

    with shown:
        yield advance
