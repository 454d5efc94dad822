"""The process that has taken a home, and its end."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil

from equipoise.peer.errors import DaemonLost, EquipoiseError, NoDaemon
from equipoise.peer.home import PID_FILE, wait_until_free

TERM_SECONDS = 5.0
"""What a daemon that does not answer has to end by itself after SIGTERM."""

KILL_SECONDS = 5.0
"""What the system needs to free a large process after SIGKILL."""


def find_holder(home: Path) -> psutil.Process | None:
    """The process whose lock holds `home`; None if no daemon runs there, or that process cannot be told for sure.

    The number in the pid file counts only while the file is locked and that process has it open, so no process that got
    the number of a daemon that has ended is ever taken for it; psutil checks the same again before it sends a signal.
    """
    if wait_until_free(home, 0.0):
        return None
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        file = home / PID_FILE
        process = psutil.Process(int(file.read_text()))
        if any(file.samefile(opened.path) for opened in process.open_files()):
            return process
    return None


def end_by_force(home: Path) -> int:
    """End the daemon on `home` by SIGTERM, and by SIGKILL if it lingers; return its pid.

    Raises:
        NoDaemon: None runs there.
        EquipoiseError: Its process cannot be told, belongs to another user, or does not end.
    """
    process = find_holder(home)
    if process is None:
        if wait_until_free(home, 0.0):
            raise NoDaemon(f"no daemon is running on {home}")
        raise EquipoiseError(
            f"cannot tell which process runs on {home}",
            f"see which one has {home / PID_FILE} open, and end it",
        )
    try:
        process.terminate()
        process.resume()  # A stopped process takes no other signal than this and SIGKILL.
        if not wait_until_free(home, TERM_SECONDS):
            process.kill()
    except psutil.NoSuchProcess:
        return process.pid
    except psutil.AccessDenied:
        raise EquipoiseError(
            f"may not end process {process.pid} on {home}", "it belongs to another user"
        ) from None
    if not wait_until_free(home, KILL_SECONDS):
        raise EquipoiseError(
            f"process {process.pid} on {home} has not ended {KILL_SECONDS:g} s after {signal.SIGKILL.name}",
            "the system keeps it, as while a disk does not answer; look at the system's log",
        )
    return process.pid


def silence(home: Path, seconds: float) -> DaemonLost:
    """The error that says which daemon has not answered for so long, whether it is stopped, and what to do."""
    process = find_holder(home)
    pid = f" (pid {process.pid})" if process else ""
    line = f"the daemon{pid} on {home} has not answered for {seconds:g} s"
    end = f"end it with: equipoise stop --force --home {home}"
    with contextlib.suppress(psutil.NoSuchProcess):
        if process and process.status() == psutil.STATUS_STOPPED:
            return DaemonLost(
                f"{line}: it is stopped", f"have it go on with: kill -CONT {process.pid}, or {end}"
            )
    return DaemonLost(line, f"wait if this machine is busy, or {end}")
