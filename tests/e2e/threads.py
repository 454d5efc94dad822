"""Training scripts in threads of a test's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


def begin(work: Callable[..., T], *args: Any) -> Future[T]:
    """Run a script in a daemon thread; the future has what it returns or raises.

    The threads of an executor are joined when the process ends, so that one script that hangs would keep pytest for
    ever.
    """
    end: Future[T] = Future()

    def run() -> None:
        try:
            end.set_result(work(*args))
        except BaseException as error:
            end.set_exception(error)

    threading.Thread(target=run, name="script", daemon=True).start()
    return end


def together(work: Callable[..., T], *columns: Iterable[Any]) -> list[T]:
    """Run a script for each row of `columns`, all at once; returns what they return, in order.

    Raises:
        BaseException: The first error of any script, at once: the other scripts may wait for that one.
    """
    ends = [begin(work, *row) for row in zip(*columns, strict=True)]
    settle(ends)
    return [end.result() for end in ends]


def settle(ends: Iterable[Future[Any]], seconds: float | None = None) -> None:
    """Wait for the ends of scripts.

    Raises:
        BaseException: The first error of any script, at once.
        TimeoutError: A script has not ended within `seconds`.
    """
    done, left = wait(ends, seconds, FIRST_EXCEPTION)
    for end in done:
        end.result()
    if left:
        raise TimeoutError(f"{len(left)} scripts have not ended within {seconds:g} s")
