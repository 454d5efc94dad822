"""Reading files of a home, whatever another program has put in their place."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file, cut to `limit` bytes; a pipe or a device is never waited for.

    Raises:
        OSError: It cannot be read, or is not a regular file.
    """
    # To open a pipe that nobody writes to would block without O_NONBLOCK; regular files ignore the flag.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read(limit)
