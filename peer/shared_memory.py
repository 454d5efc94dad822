"""Memory that a training script shares with its daemon, behind one descriptor.

A run has a `Region`: two encoded vectors, and messages. A state travels as bytes: a script writes an offered image
once, and the daemon only reads it. A fetched image is written by the daemon, into memory that gets its pages once its
size is known.

The memory is anonymous: it lives as long as a process has it mapped or holds the descriptor, so nothing is left behind
when a process dies. It is a memfd that cannot be resized, if the interpreter knows those: shrunk memory would end the
daemon by SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from equipoise.peer.errors import Refused

SEALED = hasattr(os, "memfd_create")
"""Whether memory can be sealed against resizing. Interpreters that were built for old systems cannot, on any Linux."""

MESSAGE_BYTES = 1024 * 1024 * 1024
"""Bytes set aside for messages each way, which take memory once they are used: four times as much as may wait."""

GRAIN_BYTES = 64 * 1024
"""Bytes of whose multiples memory is set aside for messages."""


class SharedMemory:
    """Shared memory of `capacity` bytes; its descriptor is closed with it.

    A mapping goes when the last view of it goes; nothing may unmap it earlier.

    Attributes:
        fd: The descriptor, until `close`.
        capacity: Bytes that may be mapped.
    """

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd = fd
        self.capacity = capacity

    def __del__(self) -> None:
        self.close()  # Needed after an error, or if the script never asks for the result of a download.

    @classmethod
    def reserve(cls, capacity: int) -> SharedMemory:
        """Set aside room for `capacity` bytes; it takes no memory before `allocate`.

        Raises:
            Refused: There cannot be so much.
        """
        if SEALED:
            fd = os.memfd_create("equipoise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            fd, path = tempfile.mkstemp(prefix="equipoise-")
            Path(path).unlink()
        memory = cls(fd, capacity)
        try:
            os.ftruncate(memory.fd, capacity)
            if SEALED:
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, seals)
        except (OSError, OverflowError, ValueError) as error:
            raise Refused(f"cannot set {capacity / 1e6:.1f} MB of shared memory aside: {error}") from error
        return memory

    @classmethod
    def attach(cls, fd: int, capacity: int) -> SharedMemory:
        """Check and take over memory that a client made.

        Raises:
            Refused: It has another size, or could be shrunk, which would end this process by SIGBUS.
        """
        memory = cls(fd, capacity)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != capacity or capacity < 1:
                raise Refused(f"expected {capacity} bytes of shared memory, got {found.st_size}")
            if SEALED and not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise Refused("expected shared memory that is sealed against shrinking")
        except OSError as error:
            raise Refused(f"the shared memory cannot be used: {error}") from error
        return memory

    def allocate(self, size: int, start: int = 0) -> None:
        """Make the kernel provide `size` bytes from `start` on: to run out of memory later would end the process.

        Raises:
            Refused: The machine has not enough memory.
        """
        available = psutil.virtual_memory().available
        if size > available:
            told = f"cannot get {size / 1e6:.1f} MB of shared memory: {available / 1e6:.1f} MB are available"
            raise Refused(told, "free memory")
        try:
            os.posix_fallocate(self.fd, start, size)
        except OSError as error:
            raise Refused(f"cannot get {size / 1e6:.1f} MB of shared memory: {error}") from error

    def view(self, size: int, writable: bool) -> memoryview:
        """The first `size` bytes, u8 [size].

        Raises:
            Refused: They cannot be mapped.
        """
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        try:
            return memoryview(mmap.mmap(self.fd, size, access=access))
        except (OSError, ValueError) as error:
            raise Refused(f"the shared memory cannot be mapped: {error}") from error

    def close(self) -> None:
        """Close the descriptor; mappings stay. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Piece(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory of one message, u8 [bytes], which is given back once its last view is gone; as in `buffer_pool`.

    Attributes:
        at: Where it begins.
    """

    at = 0
    _provide: Callable[[int, int], None] | None = None
    _give: Callable[[int], None] | None = None

    def room(self, start: int, size: int) -> memoryview:
        """Return these bytes of it, u8 [size], once the kernel has provided them; raises Refused if it cannot."""
        if self._provide is not None:
            self._provide(self.at + start, size)
        return self.data[start : start + size]

    def __del__(self) -> None:
        if self._give is not None:
            self._give(self.at)


class Arena:
    """Memory for messages one way, of which the first free piece is taken: the same pages serve again and again.

    (Measured: 130 ms of a core for 64 MB, to provide, map and free pages; to copy 64 MB takes 10.)

    One process takes pieces, and tells the other one where they begin.
    """

    def __init__(self, memory: SharedMemory, mapped: memoryview, start: int) -> None:
        self._memory, self._start = memory, start
        self._mapped = mapped[start : start + MESSAGE_BYTES]
        self._ends: dict[int, int] = {}
        self._given: deque[int] = deque()
        self._provided = bytearray(MESSAGE_BYTES // GRAIN_BYTES)

    def take(self, size: int) -> Piece:
        """Set a piece aside; its content is undefined. Raises Refused if no piece is free that is so long."""
        while self._given:  # Filled by whichever thread drops a piece.
            del self._ends[self._given.popleft()]
        at, whole = 0, -(-size // GRAIN_BYTES) * GRAIN_BYTES
        for start, end in sorted(self._ends.items()):
            if start - at >= whole:
                break
            at = end
        if at + whole > MESSAGE_BYTES:
            told = f"messages that were not read take {sum(end - at for at, end in self._ends.items()) / 1e6:.1f} MB"
            raise Refused(
                f"{told}: there is no room for one of {size / 1e6:.1f} MB", "let receivers read first"
            )
        self._ends[at] = at + whole
        return self.piece(at, size, self._given.append)

    def piece(self, at: int, size: int, give: Callable[[int], None] | None = None) -> Piece:
        """A piece that was set aside at this end or the other; raises Refused if there cannot be such a one."""
        if not 0 <= at <= at + size <= len(self._mapped):
            raise Refused(f"expected a message within {len(self._mapped)} bytes, got {size} bytes at {at}")
        piece = Piece(size, np.uint8, self._mapped[at : at + size])
        piece.at, piece._provide, piece._give = at, self._provide, give
        return piece

    def release(self) -> None:
        """Set nothing aside any more; pieces stay as long as their views."""
        self._mapped = memoryview(b"")

    def _provide(self, start: int, size: int) -> None:
        first, end = start // GRAIN_BYTES, -(-(start + size) // GRAIN_BYTES)
        if not all(self._provided[first:end]):
            self._memory.allocate((end - first) * GRAIN_BYTES, self._start + first * GRAIN_BYTES)
            self._provided[first:end] = b"\1" * (end - first)


class Region:
    """Two encoded vectors of `size` bytes in shared memory, first the contribution, then the mean; and messages.

    Attributes:
        contribution: u8 [size], written by the client before a round.
        mean: u8 [size], written by the daemon during a round and valid if its outcome is ok.
        size: Bytes of each vector.
        sent: Messages of the script, which takes pieces for them.
        received: Messages for the script; its daemon takes pieces for them.
        memory: The memory of all.
    """

    def __init__(self, memory: SharedMemory, size: int) -> None:
        mapped = memory.view(memory.capacity, writable=True)
        self.memory = memory
        self.size = size
        self.contribution, self.mean = mapped[:size], mapped[size : 2 * size]
        self.sent = Arena(memory, mapped, memory.capacity - 2 * MESSAGE_BYTES)
        self.received = Arena(memory, mapped, memory.capacity - MESSAGE_BYTES)

    @classmethod
    def create(cls, size: int) -> Region:
        """Make new memory for two vectors of `size` bytes.

        Raises:
            Refused: The machine has not enough memory.
        """
        memory = SharedMemory.reserve(_capacity(size))
        memory.allocate(2 * size)
        return cls(memory, size)

    @classmethod
    def attach(cls, fd: int, size: int) -> Region:
        """Check and map memory that a client made; takes over `fd`.

        Raises:
            Refused: It has another size, can be resized, or cannot be mapped.
        """
        return cls(SharedMemory.attach(fd, _capacity(size)), size)

    def release(self) -> None:
        """Let the memory go once the last view of it is gone, whatever still holds this object; idempotent."""
        self.contribution = self.mean = memoryview(b"")
        self.sent.release()
        self.received.release()
        self.memory.close()


def _capacity(size: int) -> int:
    return -(-2 * size // GRAIN_BYTES) * GRAIN_BYTES + 2 * MESSAGE_BYTES
