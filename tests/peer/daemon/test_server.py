"""Clients that say nothing, and too many of them, in front of a daemon with a swarm in memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from e2e.swarm import eventually
from equipoise.averaging.options import RunOptions
from equipoise.averaging.schema import Schema, TensorSpec
from equipoise.compression.choice import Choice
from equipoise.peer import connect, connecting
from equipoise.peer.cli import program
from equipoise.peer.config import load
from equipoise.peer.control.client import open_link
from equipoise.peer.control.messages import (
    CONTROL_VERSION,
    LENGTH,
    AskStatus,
    Hello,
    JoinRun,
    StopDaemon,
    encode,
)
from equipoise.peer.daemon import service, session
from equipoise.peer.daemon.server import MAX_CONNECTIONS
from equipoise.peer.embedded import DaemonThread
from equipoise.peer.errors import Refused, Unwelcome
from equipoise.peer.home import connect_socket
from equipoise.peer.shared_memory import Region, SharedMemory
from fakes.daemon import FakeNetwork


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    FakeNetwork().install(monkeypatch)
    daemon = DaemonThread(load({"home": tmp_path}, {}))
    yield tmp_path
    daemon.stop()


@pytest.fixture
def sockets(home: Path) -> Iterator[list[socket.socket]]:
    """As many connections as the daemon serves at once."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect_socket(home, 10.0)) for _ in range(MAX_CONNECTIONS)]


def test_silent_clients_are_in_nobodys_way(home: Path, sockets: list[socket.socket]) -> None:
    with connect(home):
        assert sockets[0].recv(1) == b"", "the daemon has closed the connection"


def test_a_script_counts_once_and_what_only_asks_does_not_count(home: Path) -> None:
    with connect(home) as asking:
        assert asking.status().clients == 0, "as `equipoise status` on a daemon without a script"
        with connect(home), connect(home):
            assert asking.status().clients == 1, "two connections of one kernel"
        asking.join("digits", [torch.zeros(2)])
        assert asking.status().clients == 1, "it is in a run"


def test_nothing_is_left_of_scripts_that_have_gone(home: Path) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:equipoise")

    def serve() -> None:
        with connect(home) as script:
            assert not script.join("digits", [torch.zeros(10_000)]).average(timeout=0.05)
        with connect(home) as asking:
            eventually(lambda: not asking.status().runs, "the end of its run")

    serve()
    files, regions = held()
    for _ in range(3):
        serve()
    eventually(lambda: held()[0] <= files and held()[1] <= regions, "the end of what the scripts held")


def test_closing_a_client_does_not_wait_for_the_end_of_the_daemon(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr("equipoise.peer.control.client._has_ended", looks.append)

    connect(home).close()

    assert looks == []


def test_a_round_that_is_asked_for_while_the_daemon_stops_fails_with_that_reason(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves, goes_on, leave = threading.Event(), threading.Event(), session.Session.leave

    async def held(left: session.Session, reason: str) -> None:
        leaves.set()
        await asyncio.to_thread(goes_on.wait)
        await leave(left, reason)

    monkeypatch.setattr(session.Session, "leave", held)
    with connect(home) as peer, connect(home) as other:
        run = peer.join("digits", [torch.zeros(2)])
        other._link.ask(StopDaemon())
        assert leaves.wait(60)
        pending = run.average(wait=False)
        peer.status()  # The daemon has answered what was asked before, or leaves it unanswered.
        goes_on.set()
        assert "it was stopped (asked by " in pending.result().reason


def test_too_many_clients_are_told_so(home: Path, sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.sendall(encode(1, Hello(CONTROL_VERSION, "test")))
        assert one.recv(4096)

    for _ in range(20):
        with pytest.raises(Unwelcome, match=f"it has {MAX_CONNECTIONS} clients already"):
            connect(home)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"\x91" * 100_000 + b"\xc0", b"expected a numbered message"),
        (b"\x81\xa4type\xa1\xff", b"expected a request that the daemon understands"),
    ],
    ids=["deep", "not text"],
)
def test_what_cannot_be_understood_is_answered(home: Path, body: bytes, told: bytes) -> None:
    frame = b"\x92\x07" + body
    with connect_socket(home, 10.0) as control:
        control.sendall(encode(1, Hello(CONTROL_VERSION, "test")))
        assert b"peer_id" in control.recv(4096)
        control.sendall(LENGTH.pack(len(frame)) + frame)
        assert told in control.recv(4096)
        control.sendall(encode(2, AskStatus()))
        assert b"uptime" in control.recv(65536)


@pytest.mark.parametrize(
    ("beyond", "short", "said"),
    [
        (2, 0, "expected 2147549184 bytes of shared memory, got 2147549186"),
        (-2, 0, "expected 2147549184 bytes of shared memory, got 2147549182"),
        (0, 1, "expected shared memory of 4000 bytes for run 'refused', it holds 3999"),
    ],
)
def test_memory_that_no_round_can_use_is_refused_in_one_line(
    home: Path, beyond: int, short: int, said: str
) -> None:
    schema, size = Schema((TensorSpec("w", (1000,), "float32"),)), 4000 - short
    memory = SharedMemory.reserve(Region.create(size).memory.capacity + beyond)
    request = JoinRun("refused", RunOptions(codec="fp32"), schema, Schema(()), size)
    with contextlib.closing(open_link(home)) as link:
        with pytest.raises(Refused, match=said) as refused:
            link.ask(request, fds=[memory.fd])
        assert "\n" not in str(refused.value)
        assert link.ask(AskStatus()).runs == ()


def test_without_a_command_it_says_what_runs_here(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EQUIPOISE_HOME", str(home))

    assert program.run([]) == 0

    first, where, _ = capsys.readouterr().out.splitlines()
    assert first.endswith(": searching: as the test says")
    assert where == f"home: {home} (environment EQUIPOISE_HOME)"


def test_slow_work_stands_between_no_request_and_its_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, calls = threading.Event(), list[str]()

    def load() -> Choice:
        calls.append("loads")
        loaded.wait(60)
        return Choice("torch", None, "as the test says")

    monkeypatch.setattr(service, "kernels", load)
    monkeypatch.setattr(service, "are_worth", lambda size: size > 1)
    monkeypatch.setattr(connecting, "JOIN_SECONDS", 0.2)
    tensors = [torch.zeros(2)], [torch.zeros(1)]
    with connect(home) as one, connect(home) as other, concurrent.futures.ThreadPoolExecutor(1) as pool:
        joining = pool.submit(one.join, "large", tensors[0])
        eventually(lambda: service.LOADS in caplog.messages, "the line")
        assert [run.name for run in other.status().runs] == []
        other.join("small", tensors[1])
        with pytest.raises(TimeoutError):
            joining.result(0.5)  # Longer than a daemon may be silent.

        loaded.set()
        joining.result()
        other.join("second", tensors[0])

        assert calls == ["loads"]
        assert caplog.messages.count(service.LOADS) == 1
        assert not one.lost
