"""p2pd lives as long as its daemon, whatever ends the daemon."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from equipoise.dht.address import ListenAddress
from equipoise.dht.identity import load_or_create
from equipoise.dht.p2pd import ListenError, P2pd, P2pdError, P2pdOptions, check_free, make_runtime_dir

DAEMON = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from equipoise.dht import p2pd
    from equipoise.dht.identity import load_or_create

    async def main():
        home = Path(sys.argv[1])
        identity = load_or_create(home)
        process = (await p2pd.P2pd.start(p2pd.P2pdOptions(identity.path, Path(sys.argv[2]), ()))).process
        print(process.pid, flush=True)
        await asyncio.Event().wait()

    if sys.argv[3] == "thread":
        import threading
        thread = threading.Thread(target=asyncio.run, args=(main(),))
        thread.start()
        thread.join()
    else:
        asyncio.run(main())
    """
)


@pytest.fixture
def runtime():
    path = make_runtime_dir()
    yield path
    shutil.rmtree(path)


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.parametrize("where", ["main", "thread"])
def test_p2pd_is_gone_soon_after_its_daemon_is_killed(tmp_path: Path, runtime: Path, where: str) -> None:
    arguments = [sys.executable, "-c", DAEMON, str(tmp_path), str(runtime / "c"), where]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        processes = family(int(daemon.stdout.readline()))
        assert any(process.name() == "p2pd" for process in processes)
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


async def test_stop_collects_a_p2pd_that_hangs(tmp_path: Path, runtime: Path) -> None:
    running = await P2pd.start(P2pdOptions(load_or_create(tmp_path).path, runtime / "c", ()))
    processes = family(running.process.pid)
    for process in processes:
        process.suspend()
    await running.stop()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


async def test_the_end_of_p2pd_is_told_with_the_reason(tmp_path: Path, runtime: Path) -> None:
    p2pd = await P2pd.start(P2pdOptions(load_or_create(tmp_path).path, runtime / "c", ()))
    os.kill(p2pd.process.pid, signal.SIGKILL)
    assert await asyncio.wait_for(p2pd.wait(), 10) == "killed by SIGKILL"
    await p2pd.stop()


async def test_a_failed_start_is_one_clear_line(tmp_path: Path, runtime: Path) -> None:
    garbage = tmp_path / "identity"
    garbage.write_bytes(b"garbage")
    with pytest.raises(P2pdError, match="p2pd does not start: exit status") as caught:
        await P2pd.start(P2pdOptions(garbage, runtime / "c", ()))
    assert "\n" not in str(caught.value)


async def test_output_is_bounded_and_escaped() -> None:
    printed = asyncio.StreamReader()
    for number in range(1000):
        printed.feed_data(f"{number}\x1b[31m{'x' * 10_000}\n".encode())
    printed.feed_eof()
    p2pd = P2pd(Mock(stdout=printed))
    await p2pd._reader
    assert p2pd.last.startswith("999")
    assert p2pd.last.isprintable()
    assert len(p2pd.last) <= 300


def test_runtime_directories_of_the_dead_are_swept(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = runtime / "b"
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    dead = base / f"eqp-{process.pid}-abc"
    alive = base / f"eqp-{os.getpid()}-abc"
    dead.mkdir()
    alive.mkdir()
    made = make_runtime_dir()
    assert made.parent == base
    assert not dead.exists()
    assert alive.exists()
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("host", "hint"),
    [
        ("192.0.2.7", "give an address of this machine with --listen"),
        ("127.0.0.1", "choose another with --listen"),
    ],
)
def test_an_address_that_cannot_be_listened_on_says_what_to_give(host: str, hint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"cannot listen on /ip4/{host}/tcp/{port}: .*; {hint}"):
            check_free(ListenAddress(f"/ip4/{host}/tcp/{port}", host, port))
