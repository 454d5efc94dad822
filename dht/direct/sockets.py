"""Options of the TCP sockets that carry direct channels, and what the kernel tells of them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import socket
import struct
import sys
import termios

USER_TIMEOUT_MS = 3000
"""Bytes that nobody acknowledges for so long end the connection (RFC 5482): a dead machine is not waited for."""
UNSENT_BYTES = 256 * 1024
"""The kernel takes more only once less than this waits to be sent: a control frame never queues behind megabytes."""

WITHIN_HOST = b"reno"
"""The congestion control between two processes of one machine, which every Linux has. BBR, where it is the system's
default, paces what it sends: a timer for every few packets, twice the processor time per byte, and nothing to spare.
What was opened under BBR is paced for ever, whatever it is given later: every connection is opened under this one."""

_NAME_BYTES = 16
"""TCP_CA_NAME_MAX."""
_INFO_BYTES = 128
_INT = struct.Struct("=i")
_ACKNOWLEDGED = struct.Struct("=120xQ")
"""tcp_info.tcpi_bytes_acked (RFC 4898, tcpEStatsAppHCThruOctetsAcked), in Linux since 4.1."""


def prepare(unopened: socket.socket) -> None:
    """Set what a socket that is to connect or to listen wants, where the system has it."""
    _control_congestion(unopened, WITHIN_HOST)


def tune(connection: socket.socket) -> None:
    """Set what an open connection wants, where the system has it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_USER_TIMEOUT", USER_TIMEOUT_MS), ("TCP_NOTSENT_LOWAT", UNSENT_BYTES)):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if not _within_host(connection):
        _control_congestion(connection, _usual_congestion_control(connection.family))


def _control_congestion(connection: socket.socket, how: bytes) -> None:
    if how and hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, how)


@functools.cache
def _usual_congestion_control(family: int) -> bytes:
    """The system's choice, which a new socket has; empty where it cannot be told."""
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as fresh:
            return fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0")
    return b""


def _within_host(connection: socket.socket) -> bool:
    try:
        return bool(connection.getpeername()[0] == connection.getsockname()[0])
    except OSError:  # It has closed already.
        return False


def acknowledged(connection: socket.socket) -> int | None:
    """Return how many bytes the other end's kernel has acknowledged; None where that cannot be told."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:  # Not TCP.
        return None
    if len(info) < _INFO_BYTES:
        return None
    count: int = _ACKNOWLEDGED.unpack(info)[0]
    return count


def waiting(connection: socket.socket) -> int:
    """Return how many bytes have come in and wait to be read."""
    count = bytearray(_INT.size)
    fcntl.ioctl(connection, termios.FIONREAD, count)
    return int(_INT.unpack(count)[0])


def wake_at(connection: socket.socket, count: int) -> None:
    """Let the connection become readable only once `count` bytes wait, or it has ended, or its window is full.

    Linux alone reads fewer when asked to nevertheless; elsewhere nothing is changed.
    """
    if sys.platform == "linux":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
