"""A connected control socket in the daemon: frames in, with the descriptors beside them, and frames out."""

from __future__ import annotations

import array
import asyncio
import os
import socket

from equipoise.peer.control.messages import LENGTH, MAX_FRAME_BYTES
from equipoise.peer.errors import ControlError, Refused

MAX_DESCRIPTORS = 16
"""Most descriptors of a client that wait for the requests that they came with."""

READ_BYTES = 64 * 1024

SEND_SECONDS = 5.0
"""A client that reads nothing for so long while its socket's buffer is full is stopped or gone."""

_ROOM = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)


class FrameDecoder:
    """Cuts a stream of bytes into frames; holds at most one frame and one read."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the frames that are complete.

        Raises:
            ControlError: A length exceeds `MAX_FRAME_BYTES`.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise ControlError(f"expected a frame of at most {MAX_FRAME_BYTES} bytes, got one of {size}")
            if len(self._buffer) < LENGTH.size + size:
                break
            frames.append(bytes(self._buffer[LENGTH.size : LENGTH.size + size]))
            del self._buffer[: LENGTH.size + size]
        return frames


class FrameSocket:
    """Owns a connected non-blocking unix socket and every descriptor received through it."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._decoder = FrameDecoder()
        self._descriptors: list[int] = []
        self._sending = asyncio.Lock()
        self._ready = asyncio.Event()
        self._watched = False

    async def frames(self) -> list[bytes]:
        """The next complete frames, at least one.

        Raises:
            EOFError: The other end has closed the connection.
            ConnectionError: It broke.
            ControlError: The other end sends too much.
        """
        while True:
            try:
                # `socket.recv_fds` passes no flags on: scripts' own children would inherit the descriptors.
                data, found, flags, _ = self._socket.recvmsg(READ_BYTES, _ROOM, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                self._ready.clear()
                self._watch(True)
                await self._ready.wait()
                continue
            for *_, content in found:
                self._descriptors += array.array("i", content[: len(content) - len(content) % 4])
            if flags & socket.MSG_CTRUNC or len(self._descriptors) > MAX_DESCRIPTORS:
                told = f"expected at most {MAX_DESCRIPTORS} descriptors that wait for JoinRun, got more"
                raise ControlError(told)
            if not data:
                raise EOFError
            if frames := self._decoder.feed(data):
                return frames

    def take_descriptor(self) -> int:
        """Return the oldest descriptor received and not yet taken.

        Raises:
            Refused: No descriptor waits.
        """
        if not self._descriptors:
            raise Refused("expected a descriptor of shared memory beside JoinRun, got none")
        return self._descriptors.pop(0)

    async def send(self, frame: bytes) -> None:
        """Send one frame.

        Raises:
            OSError: The connection broke.
            TimeoutError: The other end does not read.
        """
        async with self._sending, asyncio.timeout(SEND_SECONDS):
            await asyncio.get_running_loop().sock_sendall(self._socket, frame)

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took; idempotent."""
        self._watch(False)
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _watch(self, wanted: bool) -> None:
        """The socket stays watched from one wait to the next: to register it each time costs as much as reading."""
        if wanted == self._watched:
            return
        self._watched = wanted
        loop = asyncio.get_running_loop()
        if wanted:
            loop.add_reader(self._socket, self._on_readable)
        else:
            loop.remove_reader(self._socket)

    def _on_readable(self) -> None:
        if self._ready.is_set():
            self._watch(False)  # Nobody waits: this would be called at every turn of the loop.
        self._ready.set()
