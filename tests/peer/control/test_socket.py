"""The ends of the control socket."""

from __future__ import annotations

import os
import socket

from equipoise.peer.control.messages import LENGTH
from equipoise.peer.control.socket import FrameSocket
from equipoise.peer.daemon.server import _watching


async def test_received_descriptors_are_not_inherited_by_children() -> None:
    near, far = socket.socketpair()
    end = FrameSocket(near)
    memory = os.memfd_create("test")
    try:
        socket.send_fds(far, [LENGTH.pack(1), b"x"], [memory])
        assert await end.frames() == [b"x"]
        received = end.take_descriptor()
        assert not os.get_inheritable(received)
        assert os.fstat(received).st_ino == os.fstat(memory).st_ino
        os.close(received)
    finally:
        end.close()
        far.close()
        os.close(memory)


async def test_an_interpreter_built_for_an_old_system_serves_clients_too(monkeypatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with _watching(os.getpid(), lambda: None):
        pass
