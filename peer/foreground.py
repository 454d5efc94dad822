"""A daemon in the foreground, alone or beside a training script, until a signal or the script ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import uvloop

from equipoise.peer.config import HOME_ENV, RESUME_ENV, Loaded
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.home import Home

if TYPE_CHECKING:
    from equipoise.peer.daemon import Daemon

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

END_SECONDS = 5.0
"""What a script has to clean up in, where its daemon cannot start."""


def run_daemon(loaded: Loaded) -> int:
    """Run a daemon until it is asked to stop; its addresses and states go to standard output.

    Returns:
        The exit status.

    Raises:
        EquipoiseError: It cannot start, or has met no other peer though it was told whom to join.
    """
    home = Home.take(Path(loaded.config.home))  # Before libraries load: who connects meanwhile waits.
    return _run(_serve(_load(loaded, sys.stdout, home)))


def launch(loaded: Loaded, command: Sequence[str], resume: bool = False) -> int:
    """Run a daemon and `command` beside it, with `$EQUIPOISE_HOME` set; stop the daemon when the command ends.

    The command is started first, so that both load their libraries at the same time; its `connect` waits for the daemon
    that has taken the home.

    Args:
        loaded: The daemon's configuration.
        command: What to run.
        resume: Whether the script is told, by `$EQUIPOISE_RESUME`, to start from its newest checkpoint.

    Returns:
        The command's exit status; 128 and the number of the signal that ended it.

    Raises:
        EquipoiseError: The daemon or the command cannot start.
    """
    environment = {**os.environ, HOME_ENV: loaded.config.home}
    if resume:
        environment[RESUME_ENV] = "1"
    return _run(_launch(loaded, command, environment))


def _run(main: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def _print(stream: TextIO, line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # Whoever reads it may have gone; the log has it too.
        print(line, file=stream, flush=True)


def _load(loaded: Loaded, stream: TextIO, home: Home) -> Daemon:
    """Import what the daemon of this process is made of, which takes a second, and make it."""
    import torch

    from equipoise.dht.lean import bare_packages
    from equipoise.peer.daemon import Daemon

    # Parts fit in cache, where one thread is fastest; more of them would wait for cores that training needs.
    torch.set_num_threads(1)
    bare_packages()
    return Daemon(loaded, partial(_print, stream), home=home)


async def _serve(daemon: Daemon) -> int:
    def asked(number: signal.Signals) -> None:
        daemon.request_stop(f"signal {number.name}")

    with _signals(asked, forced=_exit):
        await _start(daemon)
        try:
            await daemon.serve()
            failure = daemon.failure()
        finally:
            await daemon.stop()
    if failure is not None:
        raise failure
    return 0


async def _start(daemon: Daemon) -> None:
    await daemon.start()
    # Nothing that torch and hivemind brought along is ever freed: not to look at it again saves a pause of 0.1 s.
    gc.freeze()


async def _launch(loaded: Loaded, command: Sequence[str], environment: Mapping[str, str]) -> int:
    home = Home.take(Path(loaded.config.home))
    try:
        child = await asyncio.create_subprocess_exec(*command, env=environment)
    except OSError as error:
        home.release()
        raise EquipoiseError(
            f"cannot run {command[0]!r}: {error.strerror}", "check the command after --"
        ) from error
    ended = asyncio.create_task(child.wait())
    serving = asyncio.create_task(_serve_beside(loaded, home))
    with _signals(partial(_forward, child), forced=partial(_kill, child)):
        await asyncio.wait({ended, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and serving.exception():
            await _end(child)
        status = await ended
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    return status if status >= 0 else 128 - status


async def _serve_beside(loaded: Loaded, home: Home) -> None:
    """Run the daemon of a script until that has ended, or somebody stops it."""
    try:
        await asyncio.to_thread(importlib.import_module, "torch")  # Signals reach the script meanwhile.
        daemon = _load(loaded, sys.stderr, home)
    except BaseException:
        home.release()
        raise
    await _start(daemon)
    try:
        await daemon.serve()
    finally:
        await daemon.stop()


async def _end(child: asyncio.subprocess.Process) -> None:
    """End a script whose daemon could not start."""
    _send(child, signal.SIGTERM)
    try:
        await asyncio.wait_for(child.wait(), END_SECONDS)
    except TimeoutError:
        _send(child, signal.SIGKILL)


def _exit(number: signal.Signals) -> NoReturn:
    os._exit(128 + number)


def _forward(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    # Ctrl-C reaches every process of the terminal's foreground group; twice would interrupt the script's clean-up.
    if number == signal.SIGINT and _in_foreground():
        return
    _send(child, number)


def _kill(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    _send(child, signal.SIGKILL)


def _send(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _signals(
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
