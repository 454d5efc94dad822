"""Ctrl-C in a script: what must be whole is whole, and what was begun is undone."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put a SIGINT off to the end of the block: tensors are written whole, or not at all."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


def frees_its_run(init: Callable[P, Result]) -> Callable[P, Result]:
    """Have a loop's constructor that fails, or is interrupted, leave its run as it was: free for another loop."""

    @functools.wraps(init)
    def wrapped(*args: P.args, **options: P.kwargs) -> Result:
        run: Any = options.get("run", args[1] if args[1:] else None)  # args[0] is the loop.
        with run.core.loop.undone_on_failure() if run is not None else contextlib.nullcontext():
            return init(*args, **options)  # Without a run, Python says that it is missing.

    return wrapped
