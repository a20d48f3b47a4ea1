"""Work that is ready before it is asked for: an iterator that runs ahead in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class _Ended:
    """What the thread says last: that there is no more, or why."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def ahead(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """The same items, at most `depth` of them made before they are taken.

    An exception of the thread is raised where its item was expected. The thread ends when the iterator is exhausted
    or closed.
    """
    ready: SimpleQueue[T | _Ended] = SimpleQueue()
    room, closed = threading.Semaphore(depth), threading.Event()

    def work() -> None:
        ended = _Ended()
        try:
            source = iter(items)
            while room.acquire() and not closed.is_set():
                ready.put(next(source))
        except StopIteration:
            pass
        except BaseException as error:  # told to the one who takes the items
            ended = _Ended(error)
        ready.put(ended)

    thread = threading.Thread(target=work, name="ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _Ended):
            room.release()
            yield item
        if item.error:
            raise item.error
    finally:
        closed.set()
        room.release()
        thread.join()
