"""A private directory for unix sockets: 0700, with a path short enough for them, gone when the daemon is."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 103
"""sun_path holds 108 bytes with the final zero on Linux, 104 on macOS."""

_NAME = re.compile(r"eqp-(\d+)-\w+")


def make_runtime_dir() -> Path:
    """Make a fresh directory in $XDG_RUNTIME_DIR or the system's temporary one, and sweep those of dead daemons.

    Raises:
        OSError: It cannot be made, or its path is too long for a unix socket.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not base.is_dir() or not os.access(base, os.W_OK) or len(bytes(base)) > MAX_SOCKET_PATH_BYTES - 48:
        base = Path("/tmp")
    _sweep(base)
    made = Path(tempfile.mkdtemp(prefix=f"eqp-{os.getpid()}-", dir=base))
    if len(bytes(made / "streams.sock")) > MAX_SOCKET_PATH_BYTES:
        made.rmdir()
        raise OSError(f"expected a runtime directory with a short path, got {made}; set XDG_RUNTIME_DIR")
    return made


def remove_runtime_dir(path: Path) -> None:
    """Remove a directory made by `make_runtime_dir`, with what is in it."""
    shutil.rmtree(path, ignore_errors=True)


def _sweep(base: Path) -> None:
    for entry in base.glob("eqp-*"):
        match = _NAME.fullmatch(entry.name)
        with contextlib.suppress(OSError):
            if match and entry.lstat().st_uid == os.geteuid() and not _alive(int(match[1])):
                remove_runtime_dir(entry)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
