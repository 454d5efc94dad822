"""A daemon in the foreground until a signal or a client ends it, alone or beside a training script.

`equipoise launch` runs both, each as a process of its own. It starts the daemon again where that ends before the
script, which goes on meanwhile and connects by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import msgspec
import uvloop

from equipoise.dht.hivemind_stub import bare_packages
from equipoise.dht.sanitize import escaped
from equipoise.peer.config import HOME_ENV, RESUME_ENV, Loaded
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.home import STOP_SECONDS, Home

if TYPE_CHECKING:
    from equipoise.peer.daemon.daemon import Daemon

Result = TypeVar("Result")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

END_SECONDS = 5.0
"""Time for a script to clean up, where its daemon cannot start."""

FIRST_PAUSE = 1.0
"""Seconds until a daemon that has ended is started again; the pause doubles after each end in a row."""

MAX_PAUSE = 60.0
"""Longest pause. A daemon that has served for so long has not ended in a row with the one before."""

MAX_RESTARTS = 10
"""Most restarts in a row; then the script goes on without."""

CODE = "from equipoise.peer.daemon.run_daemon import serve_launched; serve_launched()"


def run_daemon(loaded: Loaded) -> None:
    """Run a daemon until it is asked to stop; its addresses and states go to standard output.

    Raises:
        EquipoiseError: It cannot start, or has met no other peer though it was told whom to join.
    """
    home = Home.take(Path(loaded.config.home))  # Before libraries load: who connects meanwhile waits.
    daemon = load_daemon(loaded, sys.stdout, home)
    failure = run_loop(serve(daemon, lambda number: daemon.request_stop(f"signal {number.name}")))
    if failure is not None:
        raise failure


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """Run the program's main coroutine."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def say(stream: TextIO, line: str) -> None:
    """Print a line, unless its reader has gone."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=stream, flush=True)


def load_daemon(loaded: Loaded, stream: TextIO, home: Home) -> Daemon:
    """Import what the daemon of this process is made of, which takes half a second, and make it."""
    # Parts fit in cache, where one thread is fastest; more of them would wait for cores that training needs. torch and
    # numpy read this when they are imported, and libp2p's process does not.
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.disable()  # Until it serves: what is imported is no garbage, and to look for it takes a tenth of the time.

    from equipoise.peer.daemon.daemon import Daemon

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
        gc.enable()
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


def launch(loaded: Loaded, command: Sequence[str], resume: bool = False) -> int:
    """Run a daemon and `command` beside it, with `$EQUIPOISE_HOME` set; stop the daemon when the command ends.

    The command is started once the daemon has the home, so both load their libraries at the same time. Its `connect`
    waits for the daemon. `resume` tells it, by `$EQUIPOISE_RESUME`, to start from its newest checkpoint.

    Returns:
        The command's exit status, or 128 and the number of the signal that ended it; the daemon's if it cannot start.

    Raises:
        EquipoiseError: The command cannot start.
    """
    resuming = {RESUME_ENV: "1"} if resume else {}
    return run_loop(_launch(loaded, command, {**os.environ, HOME_ENV: loaded.config.home, **resuming}))


def serve_launched() -> None:
    """Run a launched daemon until it is asked to stop, or the launch has gone; exits.

    It reads its configuration from standard input, which stays open as long as the launch lives. It prints one line
    once it has the home, and from then on writes to standard error only.
    """
    loaded = msgspec.json.decode(sys.stdin.buffer.readline(), type=Loaded)
    try:
        home = Home.take(Path(loaded.config.home))
        say(sys.stdout, "has the home")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        run_loop(_serve(load_daemon(loaded, sys.stderr, home)))
    except EquipoiseError as error:
        say(sys.stderr, f"error: {escaped(str(error))}")
        sys.exit(error.exit_status)


async def _serve(daemon: Daemon) -> None:
    def heard() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            loop.remove_reader(sys.stdin.fileno())
            daemon.request_stop("its launch has ended")

    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), heard)
    await serve(daemon, lambda _: daemon.request_stop("its script has ended"))


class DaemonKeeper:
    """Keeps a daemon running on a home for as long as the script runs."""

    _process: asyncio.subprocess.Process

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    async def start(self) -> int:
        """Start a daemon; returns 0 once it has the home, else its exit status: it has said why it cannot have it."""
        # In a session of its own, since Ctrl-C would reach it before the script is through.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", CODE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        given, printed = self._process.stdin, self._process.stdout
        assert given is not None, "a pipe"
        assert printed is not None, "a pipe"
        given.write(msgspec.json.encode(self._loaded) + b"\n")
        return 0 if await printed.readline() else await self._process.wait()

    async def keep(self) -> int:
        """Start the daemon again whenever it ends; returns its exit status when it shall not be."""
        pause, restarts = FIRST_PAUSE, 0
        while True:
            began = time.monotonic()
            status = await self._process.wait()
            if time.monotonic() - began >= MAX_PAUSE:
                pause, restarts = FIRST_PAUSE, 0
            elif status > 0 and restarts == 0:
                return status  # It could not start, and has said why. The script need not find out itself.
            if status == 0:
                _say("the daemon was stopped; the script goes on without")
                return status
            if restarts == MAX_RESTARTS:
                _say(f"the daemon has ended {restarts} times in a row; the script goes on without")
                return 0
            by = (
                f"was ended by {signal.Signals(-status).name}"
                if status < 0
                else f"ended with status {status}"
            )
            _say(f"the daemon (process {self._process.pid}) {by}; it is started again in {pause:g} s")
            await asyncio.sleep(pause)
            pause, restarts = min(2 * pause, MAX_PAUSE), restarts + 1
            await self.start()

    async def stop(self) -> None:
        """Stop the daemon."""
        if self._process.returncode is None:
            await _end(self._process, STOP_SECONDS)


async def _launch(loaded: Loaded, command: Sequence[str], environment: Mapping[str, str]) -> int:
    keeper = DaemonKeeper(loaded)
    if (refused := await keeper.start()) > 0:
        return refused
    starting = asyncio.create_task(asyncio.create_subprocess_exec(*command, env=environment))

    def send(
        how: Callable[[asyncio.subprocess.Process, signal.Signals], None], number: signal.Signals
    ) -> None:
        """Reach the script, also with a signal that comes while it is being started."""
        starting.add_done_callback(lambda done: None if done.exception() else how(done.result(), number))

    with on_signals(partial(send, _forward), forced=lambda _: send(_send, signal.SIGKILL)):
        try:
            script = await starting
        except OSError as error:
            await keeper.stop()
            hint = "check the command after --"
            raise EquipoiseError(f"cannot run {command[0]!r}: {error.strerror}", hint) from error
        ended = asyncio.create_task(script.wait())
        keeping = asyncio.create_task(keeper.keep())
        await asyncio.wait({ended, keeping}, return_when=asyncio.FIRST_COMPLETED)
        failed = keeping.result() if keeping.done() else 0
        if failed:
            await _end(script, END_SECONDS)
        status = await ended
    keeping.cancel()
    await asyncio.wait({keeping})
    await keeper.stop()
    return failed or (status if status >= 0 else 128 - status)


def _say(line: str) -> None:
    say(sys.stderr, f"launch: {line}")


async def _end(child: asyncio.subprocess.Process, seconds: float) -> None:
    """End a process by SIGTERM, and by SIGKILL if it takes longer."""
    _send(child, signal.SIGTERM)
    try:
        await asyncio.wait_for(child.wait(), seconds)
    except TimeoutError:
        _send(child, signal.SIGKILL)
        await child.wait()


def _forward(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    # Ctrl-C reaches every process of the terminal's foreground group; twice would interrupt the script's clean-up.
    with contextlib.suppress(OSError, ValueError):
        if number == signal.SIGINT and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
            return
    _send(child, number)


def _send(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)
