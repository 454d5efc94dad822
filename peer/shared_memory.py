"""Memory that a training script shares with its daemon, behind one descriptor.

A run has a `Region`: two encoded vectors. A state travels as bytes: a script writes an offered image once, and the
daemon only reads it. A fetched image is written by the daemon, into memory that gets its pages once its size is known.

The memory is anonymous: it lives as long as a process has it mapped or holds the descriptor, so nothing is left behind
when a process dies. It is a memfd that cannot be resized, if the interpreter knows those: shrunk memory would end the
daemon by SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import tempfile
from collections import deque
from pathlib import Path

import psutil

from equipoise.peer.errors import Refused

SEALED = hasattr(os, "memfd_create")
"""Whether memory can be sealed against resizing. Interpreters that were built for old systems cannot, on any Linux."""

MAX_IDLE_BYTES = 256 * 1024 * 1024
"""Most bytes that a pool keeps for the next messages."""

GRAIN_BYTES = 64 * 1024
"""Bytes of whose multiples a pool makes memory."""


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


class Region:
    """Two encoded vectors of `size` bytes in shared memory: first the contribution, then the mean.

    Attributes:
        contribution: u8 [size], written by the client before a round.
        mean: u8 [size], written by the daemon during a round and valid if its outcome is ok.
        size: Bytes of each vector.
        memory: The memory of both vectors.
    """

    def __init__(self, memory: SharedMemory) -> None:
        mapped = memory.view(memory.capacity, writable=True)
        self.memory = memory
        self.size = memory.capacity // 2
        self.contribution, self.mean = mapped[: self.size], mapped[self.size :]

    @classmethod
    def create(cls, size: int) -> Region:
        """Make new memory for two vectors of `size` bytes.

        Raises:
            Refused: The machine has not enough memory.
        """
        memory = SharedMemory.reserve(2 * size)
        memory.allocate(memory.capacity)
        return cls(memory)

    @classmethod
    def attach(cls, fd: int, size: int) -> Region:
        """Check and map memory that a client made; takes over `fd` and closes it.

        Raises:
            Refused: It has another size, can be resized, or cannot be mapped.
        """
        with contextlib.closing(SharedMemory.attach(fd, 2 * size)) as memory:
            return cls(memory)


class MappedMemory:
    """Shared memory that is mapped whole, writable; fresh pages are provided as they are needed.

    Attributes:
        memory: The memory.
        view: u8 [capacity].
    """

    def __init__(self, capacity: int) -> None:
        self.memory = SharedMemory.reserve(capacity)
        self.view = self.memory.view(capacity, writable=True)
        self._provided = 0

    def room(self, start: int, size: int) -> memoryview:
        """Return these bytes of it, u8 [size], once the kernel has provided them; raises Refused if it cannot."""
        if start + size > self._provided:
            self.memory.allocate(start + size - self._provided, self._provided)
            self._provided = start + size
        return self.view[start : start + size]


class MemoryPool:
    """Lends shared memory again and again: fresh pages cost more time than all else that happens to their bytes.

    (Measured: 80 ms of a core for 64 MB, to provide, map and free them; to copy 64 MB takes 15.)
    """

    def __init__(self) -> None:
        self._idle: deque[MappedMemory] = deque()

    def take(self, size: int) -> MappedMemory:
        """Return memory of at least `size` bytes, and at most an eighth more; its content is undefined."""
        for mapped in self._idle:
            if size <= mapped.memory.capacity <= size + size // 8 + GRAIN_BYTES:
                self._idle.remove(mapped)
                return mapped
        return MappedMemory(-(-size // GRAIN_BYTES) * GRAIN_BYTES)

    def give(self, mapped: MappedMemory) -> None:
        """Take memory back that nobody uses any more."""
        self._idle.append(mapped)
        while sum(one.memory.capacity for one in self._idle) > MAX_IDLE_BYTES:
            self._idle.popleft()
