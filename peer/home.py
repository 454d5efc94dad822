"""The home of a daemon: a directory of one user, one instance at a time, and the control socket in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil

from equipoise.peer.errors import DaemonLost, EquipoiseError, HomeBusy, HomeError, NoDaemon, unusable

PID_FILE = "daemon.pid"
SOCKET_FILE = "control.sock"
LOG_FILE = "daemon.log"
CHECKPOINTS = "checkpoints"
"""Directory of a directory for each run."""
OWN_FILES = (
    "daemon.",
    "control.",
    "config.toml",
    "identity.key",
    "rounds.",
    "swarm.json",
    "swarms",
    "banned.json",
    CHECKPOINTS,
)

BACKLOG = 128
"""Most clients that connect at once: all processes of a machine with many accelerators wait for one daemon."""

MIN_FREE_BYTES = 1024 * 1024
"""Least space on the disk of a home before the daemon warns: about as much as the files of an hour with errors."""

POLL_SECONDS = 0.05
"""Time between two attempts to lock a file; file locks have no timeout of their own."""

STOP_SECONDS = 30.0
"""Time for a daemon to stop: it finishes or fails its open rounds first, and bounds each step of its stop."""

TERM_SECONDS = 5.0
"""Time for a daemon that does not answer to end by itself after SIGTERM."""

KILL_SECONDS = 5.0
"""Time for the system to free a large process after SIGKILL."""


class Home:
    """A locked home: only one exists per directory, in all processes, until `release`.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def take(cls, path: Path) -> Self:
        """Make the directory (0700) if need be and lock it.

        Raises:
            HomeBusy: A daemon runs there; its pid is in the message.
            HomeError: It cannot be made, belongs to another user, or is open to others.
        """
        _prepare(path)
        try:
            return cls(path, _lock(path))
        except OSError as error:
            raise unusable(f"write {path / PID_FILE}", error) from None

    def listen(self) -> socket.socket:
        """Bind the control socket, 0600 whatever the umask, over a stale one if need be.

        Raises:
            HomeError: Something else is in its place.
        """
        path = self.path / SOCKET_FILE
        if path.is_symlink() or (path.exists() and not path.is_socket()):
            kind = "a symbolic link" if path.is_symlink() else "not a socket"
            raise HomeError(f"{path} is {kind}", "a daemon never makes that; look at it and remove it")
        path.unlink(missing_ok=True)
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Linux creates the file with the socket's own mode, so no moment is left in which others may connect.
            os.fchmod(control.fileno(), 0o600)
            _with_short_path(self.path, control.bind)
            path.chmod(0o600)
            control.listen(BACKLOG)
        except OSError as error:
            control.close()
            raise unusable(f"listen on {path}", error) from error
        control.setblocking(False)
        return control

    def trouble(self) -> str:
        """Why files cannot be written here, as far as the disk tells; empty if they can."""
        try:
            disk = psutil.disk_usage(str(self.path))
        except OSError as error:
            return str(unusable(f"use {self.path} any more", error))
        if disk.free >= MIN_FREE_BYTES or not disk.total:
            return ""
        full = "is full: rounds go on, but the log and the history cannot be kept; free some space"
        return f"the disk of {self.path} {full}"

    def release(self) -> None:
        """Remove the socket and unlock; idempotent. The pid file stays: without it, two could lock a file each."""
        if self._lock < 0:
            return
        (self.path / SOCKET_FILE).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1


def wait_until_free(path: Path, seconds: float) -> bool:
    """Wait until no daemon runs on `path`; returns whether that came true in time."""
    deadline = time.monotonic() + seconds
    while not _is_free(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


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
        hint = f"see which one has {home / PID_FILE} open, and end it"
        raise EquipoiseError(f"cannot tell which process runs on {home}", hint)
    told = f"process {process.pid} on {home}"
    try:
        process.terminate()
        process.resume()  # A stopped process takes no other signal than this and SIGKILL.
        if not wait_until_free(home, TERM_SECONDS):
            process.kill()
    except psutil.NoSuchProcess:
        return process.pid
    except psutil.AccessDenied:
        raise EquipoiseError(f"may not end {told}", "it belongs to another user") from None
    if not wait_until_free(home, KILL_SECONDS):
        hint = "the system keeps it, as while a disk does not answer; look at the system's log"
        raise EquipoiseError(f"{told} has not ended {KILL_SECONDS:g} s after SIGKILL", hint)
    return process.pid


def silence(home: Path, seconds: float) -> DaemonLost:
    """The error that says which daemon has not answered for so long, whether it is stopped, and what to do."""
    process = find_holder(home)
    pid = f" (pid {process.pid})" if process else ""
    line = f"the daemon{pid} on {home} has not answered for {seconds:g} s"
    end = f"end it with: equipoise stop --force --home {home}"
    with contextlib.suppress(psutil.NoSuchProcess):
        if process and process.status() == psutil.STATUS_STOPPED:
            hint = f"have it go on with: kill -CONT {process.pid}, or {end}"
            return DaemonLost(f"{line}: it is stopped", hint)
    return DaemonLost(line, f"wait if this machine is busy, or {end}")


def connect_socket(home: Path, timeout: float, patience: float = 0.0) -> socket.socket:
    """Connect to the control socket of the daemon on `home`, which must accept within `timeout` seconds.

    A daemon that has taken the home, but is just starting, is waited for with `patience`, in seconds.

    Raises:
        NoDaemon: None runs there, or another file or another user's socket is there.
        DaemonLost: It does not accept.
    """
    deadline = time.monotonic() + patience
    try:
        while (control := _connect(home, timeout)) is None:
            if _is_free(home):
                hint = f"start one with: equipoise daemon --home {home}"
                raise NoDaemon(f"no daemon is running on {home}", hint)
            if time.monotonic() > deadline:
                raise NoDaemon(
                    f"the daemon on {home} is starting, or stopping",
                    f"try again, see {home / LOG_FILE}, or end it with: equipoise stop --force --home {home}",
                )
            time.sleep(POLL_SECONDS)
    except PermissionError:
        hint = "it belongs to another user; give your own --home"
        raise NoDaemon(f"may not open {home / SOCKET_FILE}", hint) from None
    _, uid = peer_credentials(control)
    if uid not in (0, os.geteuid()):
        control.close()
        told = f"the daemon behind {home / SOCKET_FILE} belongs to uid {uid}, not to you"
        raise NoDaemon(told, "give your own --home")
    return control


def _connect(home: Path, timeout: float) -> socket.socket | None:
    """Connect to the control socket of `home`; None if nobody listens there."""
    path = home / SOCKET_FILE
    with contextlib.ExitStack() as undo:
        control = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        control.settimeout(timeout)
        try:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                hint = f"remove it and start one with: equipoise daemon --home {home}"
                raise NoDaemon(f"{path} is not a socket", hint)
            _with_short_path(home, control.connect)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return None
        except (TimeoutError, BlockingIOError):
            hint = f"end it with: equipoise stop --force --home {home}"
            raise DaemonLost(f"the daemon on {home} does not accept connections", hint) from None
        undo.pop_all()
        return control


def peer_credentials(control: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a unix socket."""
    pid, uid, _ = struct.unpack("=iii", control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _prepare(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise unusable(f"use {path} as a home", error) from error
    if found.st_uid != os.geteuid():
        raise HomeError(f"{path} belongs to uid {found.st_uid}, not to you", "give a --home of your own")
    mode = stat.S_IMODE(found.st_mode)
    if not mode & 0o077:
        return
    # Someone who says --home / or --home ~ by mistake should not find the directory's mode changed.
    if any(not file.name.startswith(OWN_FILES) for file in path.iterdir()):
        hint = f"give a directory of its own, or: chmod 700 {path}"
        raise HomeError(f"{path} is open to other users (mode {mode:o}) and holds other things", hint)
    path.chmod(0o700)


def _lock(path: Path) -> int:
    """Lock the pid file and write our pid into it; `OSError` if it cannot be written."""
    patient = True
    file = path / PID_FILE
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink == 0:  # A start that failed has removed it meanwhile.
                os.close(lock)
                continue
            _write_pid(file, lock)
            return lock
        except BlockingIOError:
            pid = os.read(lock, 32).decode(errors="replace").strip()
            os.close(lock)
            if not patient:
                told = f"a daemon (pid {pid or 'unknown'}) is already running on {path}"
                hint = "run the script without launch, end the daemon with `equipoise stop`, or give another --home"
                if pid == str(os.getpid()):
                    hint = "close() this script's other Peer first, or give another home"
                raise HomeBusy(told, hint) from None
            patient = False
            # It may be a client that looks whether a daemon is there, which takes microseconds.
            time.sleep(POLL_SECONDS)
        except OSError:
            os.close(lock)
            raise


def _write_pid(file: Path, lock: int) -> None:
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        # The disk is full, say: nobody should find an empty file, and nobody else can have the lock.
        file.unlink(missing_ok=True)
        raise


def _is_free(path: Path) -> bool:
    try:
        lock = os.open(path / PID_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        raise
    except OSError:  # It is not there, or nothing that a daemon has made.
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # Shared by all who only look.
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _with_short_path(home: Path, use: Callable[[str], None]) -> None:
    """Call `use` (bind or connect) with a short path of the control socket in `home`: a socket's path has 107 bytes."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        use(f"/proc/self/fd/{folder}/{SOCKET_FILE}")
    finally:
        os.close(folder)
