"""A client's end of the control socket; blocking calls, from any thread."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import math
import os
import select
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import psutil

from equipoise.peer.control import messages
from equipoise.peer.control.messages import Answer, Request, Welcome
from equipoise.peer.control.socket import READ_BYTES, FrameDecoder
from equipoise.peer.errors import ControlError, DaemonLost, EquipoiseError, Refused, Unwelcome
from equipoise.peer.home import connect_socket, silence

SEND_SECONDS = 5
"""Time for a daemon to read while the socket's buffer is full; a loop that is busy reads later."""

ANSWER_SECONDS = 10.0
"""Time for an answer that waits for nothing, as to a greeting: milliseconds; on a machine that swaps, seconds."""

ASKING_SECONDS = 5.0
"""Time for a daemon to start that a person asks: it takes two seconds, where nothing else needs the processor."""

START_SECONDS = 300.0
"""Time for a script's daemon to start, which has the home and has not ended: on busy machines and slow disks libraries
take long to load."""

END_SECONDS = 0.5
"""Time for a process that was killed to be gone, once its socket is closed; it takes milliseconds."""

LOOK_SECONDS = 0.02
"""Time between two looks whether it is gone."""

log = logging.getLogger(__name__)


class Connection(ABC):
    """The needs of runs: answers of their daemon, and the time that passes meanwhile.

    `Link` is the real one. In `equipoise.peer.simulation`, daemon and time are simulated.

    Attributes:
        welcome: The daemon's answer to the greeting.
        lost: Why the daemon is lost, once it is.
    """

    welcome: Welcome
    lost: EquipoiseError | None = None

    @abstractmethod
    def start(self, request: Request[Answer], fds: Sequence[int] = ()) -> Future[Answer]:
        """Send a request; its answer, Refused or DaemonLost arrives in the future.

        Raises:
            ControlError: The request is too large to be sent.
            Refused: This process is a fork of the one that connected.
        """

    def ask(
        self, request: Request[Answer], timeout: float = ANSWER_SECONDS, fds: Sequence[int] = ()
    ) -> Answer:
        """Send a request, with these descriptors beside it, and wait for its answer.

        Raises:
            Refused: The daemon refused it; says why.
            DaemonLost: The daemon went away, or was silent; see `wait`.
        """
        return self.wait(self.start(request, fds), timeout)

    @abstractmethod
    def wait(self, reply: Future[Answer], timeout: float = ANSWER_SECONDS) -> Answer:
        """Wait for the answer to a request that was sent; errors as of `ask`.

        A daemon is lost if, after `timeout` seconds, it has said nothing for half of them. A daemon that works on the
        request and answers a ping is waited for, however long that takes.
        """

    @abstractmethod
    def settled(self, reply: Future[Any], timeout: float = 0.0) -> bool:
        """Wait for a reply, at most `timeout` seconds, and leave it there; returns whether it has come."""

    def clock(self) -> float:
        """Seconds on a steady clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    @abstractmethod
    def watch(self, watcher: Callable[[EquipoiseError], None] | None) -> None:
        """Have `watcher`, if any, called from any thread when the daemon is lost: at once if it is lost already."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; the daemon then leaves what was joined through it. Idempotent."""


class Link(Connection):
    """Numbers requests, and hands each reply to the caller that waits for it."""

    def __init__(self, connected: socket.socket, home: Path | None = None) -> None:
        """`home` is the daemon's; None where it runs in this process, and goes with it."""
        self._socket = connected
        self._home = home
        self._daemon = f"the daemon on {home}" if home else "the daemon"
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Request[Any], Future[Any], float]] = {}
        self._heard = time.monotonic()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._watcher: Callable[[EquipoiseError], None] | None = None
        self._process = os.getpid()
        # Sends are bounded one by one with SO_SNDTIMEO, since a socket's own timeout would also bound the reader.
        connected.settimeout(None)
        limit = struct.pack("ll", SEND_SECONDS, 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._reader = threading.Thread(target=self._read, name="equipoise-link", daemon=True)

    @classmethod
    def open(
        cls, connected: socket.socket, home: Path | None = None, timeout: float = ANSWER_SECONDS
    ) -> Link:
        """Greet the daemon at the other end of a connected socket, which is taken over.

        Raises:
            Unwelcome: It speaks another version, or has too many clients.
            DaemonLost: It does not answer.
        """
        link = cls(connected, home)
        link._reader.start()
        try:
            name = Path(sys.argv[0] if sys.argv else "python").name[:64] or "python"
            link.welcome = link.ask(messages.Hello(messages.CONTROL_VERSION, name), timeout)
        except Refused as error:
            link.close()
            raise Unwelcome(str(error)) from None
        except BaseException:
            link.close()
            raise
        return link

    def start(self, request: Request[Answer], fds: Sequence[int] = ()) -> Future[Answer]:
        """See `Connection.start`."""
        if os.getpid() != self._process:
            raise Refused(f"this connection belongs to process {self._process}", "connect again after a fork")
        reply: Future[Answer] = Future()
        number = next(self._numbers)
        frame = messages.encode(number, request)
        with self._lock:
            if self.lost is not None:
                # Each time that an error is raised, its traceback grows by the frames of the caller.
                reply.set_exception(self.lost.with_traceback(None))
                return reply
            self._waiting[number] = request, reply, time.monotonic()
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [frame], fds) if fds else 0
                self._socket.sendall(memoryview(frame)[sent:])
        except (BrokenPipeError, ConnectionResetError):
            pass  # The daemon has closed the connection, and the reader finds what it said last: it may be why.
        except BlockingIOError:
            self._lose(self._silent(SEND_SECONDS))
        except OSError as error:
            self._lose(DaemonLost(f"{self._daemon} does not take requests: {error.strerror or error}"))
        return reply

    def wait(self, reply: Future[Answer], timeout: float = ANSWER_SECONDS) -> Answer:
        """See `Connection.wait`."""
        silence = timeout / 2
        if not self.settled(reply, timeout - silence):
            heard = -math.inf
            while heard < self._heard or self._is_readable():
                heard = self._heard
                self.start(messages.Ping())
                if self.settled(reply, silence):
                    return reply.result()
            with self._lock:
                asked = [at for _, other, at in self._waiting.values() if other is reply]
            since = max((time.monotonic() - max(at, heard) for at in asked), default=timeout)
            self._lose(self._silent(round(since, 1)))
        return reply.result()  # It has one now, or gets one from the reader at this moment.

    def settled(self, reply: Future[Any], timeout: float = 0.0) -> bool:
        """See `Connection.settled`."""
        return reply.done() or (timeout > 0 and bool(concurrent.futures.wait([reply], timeout).done))

    def watch(self, watcher: Callable[[EquipoiseError], None] | None) -> None:
        """See `Connection.watch`."""
        with self._lock:
            self._watcher, lost = watcher, self.lost
        if watcher is not None and lost is not None:
            watcher(lost)

    def close(self) -> None:
        """See `Connection.close`."""
        self.watch(None)
        self._lose(DaemonLost("the connection was closed", "connect again"))
        if os.getpid() == self._process and self._reader.is_alive():
            self._reader.join(END_SECONDS)

    def _read(self) -> None:
        decoder = FrameDecoder()
        try:
            with contextlib.suppress(ConnectionResetError):  # A process was killed with requests unread.
                while data := self._socket.recv(READ_BYTES):
                    self._heard = time.monotonic()
                    for frame in decoder.feed(data):
                        self._deliver(*messages.decode_reply(frame))
            if self.lost is None:  # Else this process has closed it, or the daemon has said why it does.
                self._lose(self._how_it_ended())
        except ControlError as error:
            self._lose(DaemonLost(f"the answer of {self._daemon} cannot be understood: {error}"))
        except OSError as error:
            self._lose(DaemonLost(f"the connection to {self._daemon} broke: {error.strerror or error}"))
        finally:
            self._socket.close()

    def _deliver(self, number: int, failure: str | None, content: msgspec.Raw) -> None:
        if number == 0 and failure is None:
            log.warning("%s", messages.decode_line(content))
            return
        if number == 0:
            error = self._ended(f"closed the connection: {failure}")
            self._lose(error if hasattr(self, "welcome") else Refused(failure or ""))
            return
        with self._lock:
            if number not in self._waiting:
                return
            request, reply, _ = self._waiting[number]
            answer = None if failure is not None else messages.decode_answer(request, content)
            del self._waiting[number]
        reply.set_result(answer) if failure is None else reply.set_exception(Refused(failure))

    def _is_readable(self) -> bool:
        """Whether the daemon has said something that the reader has not read: another thread may hold the GIL."""
        look = select.poll()
        try:
            look.register(self._socket, select.POLLIN)
            return bool(look.poll(0))
        except (OSError, ValueError):  # The reader has closed it, and every request has its answer.
            return False

    def _ended(self, how: str) -> DaemonLost:
        """The error of a daemon that has to be started again."""
        hint = f"start it with: equipoise daemon --home {self._home}" if self._home else ""
        return DaemonLost(f"{self._daemon} {how}", hint)

    def _silent(self, seconds: float) -> DaemonLost:
        """The error of a daemon that is there, and has not answered or read for so long."""
        if self._home is None:
            return DaemonLost(f"{self._daemon} has not answered for {seconds:g} s")
        return silence(self._home, seconds)

    def _how_it_ended(self) -> DaemonLost:
        """The error of a daemon that has closed the socket and said nothing."""
        if not hasattr(self, "welcome"):
            return DaemonLost(f"{self._daemon} closed the connection")
        pid, deadline = self.welcome.pid, time.monotonic() + END_SECONDS
        while not _has_ended(pid):
            if time.monotonic() >= deadline:
                return DaemonLost(f"{self._daemon} (process {pid}) has dropped this script and goes on")
            time.sleep(LOOK_SECONDS)
        return self._ended(f"(process {pid}) has ended without a word: it was killed, or has crashed")

    def _lose(self, error: EquipoiseError) -> None:
        with self._lock:
            first = self.lost is None
            lost = self.lost = self.lost or error
            waiting, self._waiting = self._waiting, {}
            watcher = self._watcher
        for _, reply, _ in waiting.values():
            reply.set_exception(lost)
        if first and watcher is not None:
            watcher(lost)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # Wakes the reader, which closes it.
        except OSError:
            return


def open_link(home: Path, timeout: float = ANSWER_SECONDS, patience: float = ASKING_SECONDS) -> Link:
    """Connect to the daemon on `home`; where one is just starting, wait for it with some patience, in seconds.

    Raises:
        NoDaemon: None runs there.
        ControlError: It speaks another version.
        DaemonLost: It does not answer.
    """
    return Link.open(connect_socket(home, timeout, patience), home, timeout)


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:  # It may not be looked at; so it is there.
        return False
