"""Images in shared memory between a training script and its daemon: a state as bytes, behind one descriptor.

What a script offers it writes once and the daemon only reads. What it fetches the daemon writes into memory that the
script has set aside; the kernel gives pages to it once its size is known. Anonymous and sealed, as `memory.Region` is.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

import psutil

from equipoise.peer.errors import Refused
from equipoise.peer.memory import SEALED, anonymous_file, seal


class SharedImage:
    """Shared memory for an image of at most `capacity` bytes.

    A mapping goes when the last view of it goes; nothing may unmap it earlier.

    Attributes:
        fd: The descriptor, until `close`.
        capacity: Bytes that may be mapped.
    """

    def __init__(self, fd: int, capacity: int) -> None:
        self.fd = fd
        self.capacity = capacity

    def __del__(self) -> None:
        self.close()  # Of a download that was cancelled nobody may ask the result.

    @classmethod
    def reserve(cls, capacity: int) -> SharedImage:
        """Set aside room for `capacity` bytes; it takes no memory before `allocate`.

        Raises:
            Refused: There cannot be so much.
        """
        fd = anonymous_file()
        try:
            os.ftruncate(fd, capacity)
            seal(fd)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise Refused(f"cannot set {capacity / 1e6:.1f} MB of shared memory aside: {error}") from error
        return cls(fd, capacity)

    @classmethod
    def attach(cls, fd: int, capacity: int) -> SharedImage:
        """Take over memory that a client made, having checked that it is what it should be.

        Raises:
            Refused: It has another size, or could be shrunk, which would end this process by SIGBUS.
        """
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != capacity or capacity < 1:
                raise Refused(f"expected {capacity} bytes of shared memory, got {found.st_size}")
            if SEALED and not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise Refused("expected shared memory that is sealed against shrinking")
        except OSError as error:
            os.close(fd)
            raise Refused(f"the shared memory cannot be used: {error}") from error
        except Refused:
            os.close(fd)
            raise
        return cls(fd, capacity)

    def allocate(self, size: int) -> None:
        """Have the kernel provide the first `size` bytes now: to run out of memory later would end the process.

        Raises:
            Refused: The machine has not enough.
        """
        available = psutil.virtual_memory().available
        if size > available:
            raise Refused(
                f"cannot get {size / 1e6:.1f} MB of shared memory: {available / 1e6:.1f} MB are available",
                "free memory",
            )
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, size)
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
        """Close the descriptor; what is mapped stays. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def shared_copy(image: memoryview) -> SharedImage:
    """Copy bytes, u8 [bytes], to shared memory.

    Raises:
        ValueError: There are none.
        Refused: The machine has not enough memory.
    """
    if not image:
        raise ValueError("expected an image of 1 byte or more, got none")
    shared = SharedImage.reserve(len(image))
    try:
        shared.allocate(len(image))
        shared.view(len(image), writable=True)[:] = image
    except BaseException:
        shared.close()
        raise
    return shared
