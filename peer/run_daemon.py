"""A daemon in the foreground, until a signal or a client ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import uvloop

from equipoise.peer.config import Loaded
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.home import Home

if TYPE_CHECKING:
    from equipoise.peer.daemon import Daemon

Result = TypeVar("Result")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_daemon(loaded: Loaded) -> int:
    """Run a daemon until it is asked to stop; its addresses and states go to standard output.

    Returns:
        The exit status.

    Raises:
        EquipoiseError: It cannot start, or has met no other peer though it was told whom to join.
    """
    home = Home.take(Path(loaded.config.home))  # Before libraries load: who connects meanwhile waits.
    daemon = load_daemon(loaded, sys.stdout, home)
    failure = run_loop(serve(daemon, lambda number: daemon.request_stop(f"signal {number.name}")))
    if failure is not None:
        raise failure
    return 0


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Run the program's main coroutine."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def say(stream: TextIO, line: str) -> None:
    """Print a line, unless its reader has gone."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=stream, flush=True)


def load_daemon(loaded: Loaded, stream: TextIO, home: Home) -> Daemon:
    """Import what the daemon of this process is made of, which takes a second, and make it."""
    import torch

    from equipoise.dht.hivemind_stub import bare_packages
    from equipoise.peer.daemon import Daemon

    # Parts fit in cache, where one thread is fastest; more of them would wait for cores that training needs.
    torch.set_num_threads(1)
    bare_packages()
    return Daemon(loaded, partial(say, stream), home=home)


async def serve(daemon: Daemon, asked: Callable[[signal.Signals], None]) -> EquipoiseError | None:
    """Serve until a client, or what is `asked` at a signal, stops it; returns why it has met no other peer, if so.

    Raises:
        EquipoiseError: It cannot start.
    """
    with on_signals(asked, forced=lambda number: os._exit(128 + number)):
        await daemon.start()
        # Nothing that torch and hivemind brought along is ever freed: not to look at it again saves a pause of 0.1 s.
        gc.freeze()
        try:
            await daemon.serve()
            return daemon.failure()
        finally:
            await daemon.stop()


@contextlib.contextmanager
def on_signals(
    asked: Callable[[signal.Signals], None], forced: Callable[[signal.Signals], None]
) -> Iterator[None]:
    """Call `asked` at the first signal that ends programs, and `forced` at every later one."""
    loop = asyncio.get_running_loop()
    seen: list[signal.Signals] = []

    def received(number: signal.Signals) -> None:
        seen.append(number)
        (asked if len(seen) == 1 else forced)(number)

    # What is ignored, as SIGHUP under nohup, stays so.
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in heeded:
        loop.add_signal_handler(number, received, number)
    try:
        yield
    finally:
        for number in heeded:
            loop.remove_signal_handler(number)
