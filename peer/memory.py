"""Shared memory between a training script and its daemon: two flat fp32 vectors behind one descriptor.

The layout is [contribution f32 D][result f32 D]. The memory is anonymous: it lives as long as someone has it mapped or
holds the descriptor, so nothing is left behind whoever dies first. On Linux it is a memfd sealed against resizing:
a client that could shrink it would end the daemon by SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import tempfile
from pathlib import Path

import psutil
import torch

from equipoise.peer.errors import Refused

VALUE_BYTES = 4

SEALED = hasattr(os, "memfd_create")
"""Whether memory can be sealed against resizing: on Linux."""


class Region:
    """Two vectors of `values` fp32 values in shared memory.

    The mapping goes when the last tensor that aliases it goes; nothing may unmap it earlier.

    Attributes:
        contribution: f32 [values], written by the client before a round.
        result: f32 [values], written by the daemon during a round and valid if its outcome is ok.
        fd: The descriptor, until `close_fd`.
    """

    def __init__(self, fd: int, values: int) -> None:
        self.fd = fd
        self.values = values
        mapping = mmap.mmap(fd, _size(values))
        # frombuffer keeps the mapping alive but does not lock it: it must never be closed by hand.
        self.contribution = torch.frombuffer(mapping, dtype=torch.float32, count=values)
        self.result = torch.frombuffer(
            mapping, dtype=torch.float32, count=values, offset=values * VALUE_BYTES
        )

    @classmethod
    def create(cls, values: int) -> Region:
        """Make new memory for two vectors of `values` values.

        Raises:
            Refused: The machine has not enough memory.
        """
        available = psutil.virtual_memory().available
        if (
            _size(values) > available
        ):  # The kernel would hand out what it has not, and end some process later.
            raise Refused(
                f"cannot get {_size(values) / 1e6:.1f} MB of shared memory: {available / 1e6:.1f} MB are available",
                "average fewer values, or free memory",
            )
        fd = anonymous_file()
        try:
            os.ftruncate(fd, _size(values))
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(
                    fd, 0, _size(values)
                )  # Else running out of memory would be a SIGBUS, later.
            seal(fd)
            return cls(fd, values)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise Refused(
                f"cannot get {_size(values) / 1e6:.1f} MB of shared memory: {error}",
                "average fewer values, or free memory",
            ) from error

    @classmethod
    def attach(cls, fd: int, values: int) -> Region:
        """Map memory that a client made, having checked that it is what it should be; owns `fd` from now on.

        Raises:
            Refused: It has another size, can be resized, or cannot be mapped.
        """
        try:
            _validate(fd, values)
            return cls(fd, values)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise Refused(f"the shared memory cannot be used: {error}") from error
        except Refused:
            os.close(fd)
            raise

    def close_fd(self) -> None:
        """Close the descriptor; what is mapped stays. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _size(values: int) -> int:
    return 2 * values * VALUE_BYTES


def seal(fd: int) -> None:
    """Fix the size of an anonymous file for ever, where that can be done."""
    if SEALED:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def anonymous_file() -> int:
    """A descriptor of memory that goes with its last holder."""
    if SEALED:
        return os.memfd_create("equipoise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fd, path = tempfile.mkstemp(prefix="equipoise-")
    Path(path).unlink()
    return fd


def _validate(fd: int, values: int) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != _size(values):
        raise Refused(f"expected {_size(values)} bytes of shared memory, got {found.st_size}")
    if SEALED and not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise Refused("expected shared memory that is sealed against shrinking")
