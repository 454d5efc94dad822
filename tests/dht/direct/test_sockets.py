"""Options of direct connections, as the kernel has them."""

from __future__ import annotations

import socket
import sys

import pytest

from equipoise.dht.direct.sockets import WITHIN_HOST, prepare, tune

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason=f"{sys.platform} has no choice of it"
)


def _congestion_control(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def _connected(host: str) -> tuple[socket.socket, socket.socket]:
    """A connection from `host` to 127.0.0.1, both ends as the transport opens them, before they are tuned."""
    with socket.socket() as listening, socket.socket() as dialling:
        prepare(listening)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        prepare(dialling)
        dialling.bind((host, 0))
        dialling.connect(listening.getsockname())
        accepted = listening.accept()[0]
        return accepted, dialling.dup()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_both_ends_are_opened_without_pacing(host: str) -> None:
    for end in _connected(host):
        with end:
            assert _congestion_control(end) == WITHIN_HOST


def test_within_a_host_it_stays_so() -> None:
    for end in _connected("127.0.0.1"):
        with end:
            tune(end)
            assert _congestion_control(end) == WITHIN_HOST


def test_between_hosts_the_system_chooses() -> None:
    with socket.socket() as fresh:
        usual = _congestion_control(fresh)
    for end in _connected("127.0.0.2"):
        with end:
            tune(end)
            assert _congestion_control(end) == usual
