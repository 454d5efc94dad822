"""Wrong starts: one line each, with its cause and the next step, and the exit status that peer/README.md documents.

What needs no daemon runs in this process; what needs libp2p is marked slow. Texts are compared whole.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from e2e.swarm import CLI, ChildProcess, DaemonProcess, Swarm, eventually
from equipoise.dht.address import EXAMPLE
from equipoise.dht.identity import IDENTITY_FILE
from equipoise.dht.state import PROTOCOL_VERSION
from equipoise.peer.cli import program

LOCAL = ["--listen", "/ip4/127.0.0.1/tcp/0"]

STRANGER = EXAMPLE.rpartition("/")[2]

OTHER_VERSION = """
import sys
from equipoise.dht import state
state.PROTOCOL_VERSION = 10**6
from equipoise.peer.cli.program import run
sys.exit(run(sys.argv[1:]))
"""

ANOTHER_USER = """
import os, sys
import equipoise.peer.daemon.run_daemon  # What another user may not be able to read.
from equipoise.peer.cli.program import run
os.geteuid() or os.setuid(12345)
sys.exit(run(sys.argv[1:]))
"""

FULL_DISK = (
    """mount -t tmpfs -o size=4k,mode=700 none "$0" && head -c 4096 /dev/zero > "$0/filler" && exec "$@" """
)

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount, and cut off a network")


@dataclass
class Place:
    """Where a start goes wrong, and what its golden text is made of."""

    home: Path
    swarm: Swarm
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    port: int = 0

    def here(self, *words: str) -> tuple[int, str]:
        """Run `equipoise WORDS --home HOME` in this process; its exit status and what it said."""
        status = program.run([*words, "--home", str(self.home)])
        return status, self.capsys.readouterr().err

    def process(self, *words: str, command: tuple[str, ...] = CLI) -> ChildProcess:
        """Start `equipoise daemon WORDS --home HOME` as a process."""
        process = ChildProcess(
            [*command, "daemon", *words, "--home", str(self.home)],
            self.swarm.folder / "wrong",
            self.swarm.env,
        )
        self.swarm.processes.append(process)
        process.spawn()
        return process

    def ended(self, process: ChildProcess) -> tuple[int, str]:
        """The exit status of a process, and what it said."""
        return process.wait(), process.errors

    def joining(self, address: str, command: tuple[str, ...] = CLI) -> tuple[int, str]:
        """Have a daemon try to join `address` until it has said why it cannot, and stop it."""
        process = self.process("--join", address, *LOCAL, command=command)
        eventually(lambda: "; trying again" in process.output or not process.running, "why it is alone", 60.0)
        process.stop()
        return self.ended(process)


def typo_in_an_address(place: Place) -> tuple[int, str]:
    return place.here("daemon", "--join", "192.0.2.7:31337")


def torch_without_cuda(place: Place) -> tuple[int, str]:
    place.monkeypatch.setattr("torch.version.cuda", None)
    place.monkeypatch.setattr("torch.version.hip", None)
    place.monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    return place.here("daemon", "--device", "cuda:1")


def port_in_use(place: Place) -> tuple[int, str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place.port = taken.getsockname()[1]
        return place.ended(place.process("--listen", f"/ip4/127.0.0.1/tcp/{place.port}"))


def home_unwritable(place: Place) -> tuple[int, str]:
    # Not in pytest's folder, into which another user cannot even look.
    with tempfile.TemporaryDirectory(prefix="equipoise-test-") as folder:
        Path(folder).chmod(0o555)
        place.home = Path(folder) / "home"
        return place.ended(place.process(command=(sys.executable, "-c", ANOTHER_USER)))


def disk_full(place: Place) -> tuple[int, str]:
    return place.ended(place.process(command=("unshare", "-m", "sh", "-c", FULL_DISK, str(place.home), *CLI)))


def no_network(place: Place) -> tuple[int, str]:
    return place.joining(EXAMPLE, ("unshare", "-n", *CLI))


def dns(place: Place) -> tuple[int, str]:
    return place.joining(f"/dns4/no-such-host.invalid/tcp/31337/p2p/{STRANGER}")


def wrong_identity(place: Place) -> tuple[int, str]:
    there = place.swarm.daemon("there", args=LOCAL)
    return place.joining(there.address.rpartition("/")[0] + f"/{STRANGER}")


def other_version(place: Place) -> tuple[int, str]:
    there = place.swarm.daemon("there", args=LOCAL)
    return place.joining(there.address, (sys.executable, "-c", OTHER_VERSION))


def cloned_identity(place: Place) -> tuple[int, str]:
    there = place.swarm.daemon("there", args=LOCAL)
    shutil.copy(there.home / IDENTITY_FILE, place.home)
    process = place.process("--join", there.address, *LOCAL)
    eventually(lambda: "warning: " in process.output or not process.running, "the warning", 60.0)
    (warning,) = [line for line in process.output.splitlines() if line.startswith("warning: ")]
    status = process.stop()
    return status, f"{warning}\n{process.errors}"


Wrong = Callable[[Place], tuple[int, str]]

GOLDEN: list[tuple[Wrong, int, str]] = [
    (
        typo_in_an_address,
        2,
        "flag --join: malformed address '192.0.2.7:31337': expected it to start with /, as in "
        f"/ip4/192.0.2.7/tcp/31337/p2p/PEERID; for example {EXAMPLE}",
    ),
    (
        torch_without_cuda,
        5,
        "flag --device: expected a device of this machine, got 'cuda:1': torch {torch} is built without CUDA; "
        "install torch for CUDA, or give cpu",
    ),
    (
        port_in_use,
        1,
        "cannot listen on /ip4/127.0.0.1/tcp/{port}: Address already in use; choose another with --listen",
    ),
    (
        home_unwritable,
        5,
        "cannot use {home} as a home: permission denied; "
        "give a --home that you may write, or correct its permissions",
    ),
    (
        disk_full,
        1,
        "cannot write {home}/daemon.pid: no space left on device; free some space there, or give another --home",
    ),
    (
        no_network,
        6,
        "ended without having met another peer: no network route to 192.0.2.7 port 31337 (Network is unreachable); "
        "connect this machine to a network",
    ),
    (
        dns,
        6,
        "ended without having met another peer: host name no-such-host.invalid is not found ({gai}); "
        "correct the host name, or give an IP address",
    ),
    (
        wrong_identity,
        6,
        "ended without having met another peer: {there} answers at 127.0.0.1 port {port}, expected {stranger}; "
        "copy the address that the daemon there prints now",
    ),
    (
        other_version,
        7,
        "ended without having met another peer: connected, but its equipoise is older (protocol version {version}, "
        "this machine version 1000000): have it upgraded with pip install --upgrade equipoise",
    ),
    (
        cloned_identity,
        0,  # It goes on: one of the two may be meant to.
        "--join /ip4/127.0.0.1/tcp/{port}/p2p/{there} names this daemon's own identity, but not one of its addresses: "
        "if another machine runs there, it has a copy of this home; start one of the two with another --home",
    ),
]

MARKS = {
    disk_full: (root,),
    no_network: (root, pytest.mark.slow),
    dns: (pytest.mark.slow,),
    wrong_identity: (pytest.mark.slow,),
    other_version: (pytest.mark.slow,),
    cloned_identity: (pytest.mark.slow,),
}


@pytest.mark.parametrize(
    ("start", "status", "golden"),
    [pytest.param(*row, id=row[0].__name__, marks=MARKS.get(row[0], ())) for row in GOLDEN],
)
def test_a_wrong_start_is_one_line_with_cause_and_next_step(
    swarm: Swarm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    start: Wrong,
    status: int,
    golden: str,
) -> None:
    home = swarm.folder / "home"
    home.mkdir(mode=0o700)
    place = Place(home, swarm, monkeypatch, capsys)

    ended, said = start(place)

    daemons = [process for process in swarm.processes if isinstance(process, DaemonProcess)]
    there = daemons[0].address.split("/") if daemons else None
    known = {
        "home": place.home,
        "gai": no_such_host(),
        "stranger": STRANGER,
        "port": there[4] if there else place.port,
        "there": there[6] if there else "",
        "version": PROTOCOL_VERSION,
        "torch": torch.__version__,
    }
    assert said == f"{'error' if status else 'warning'}: {golden.format(**known)}\n"
    assert ended == status


def no_such_host() -> str:
    """What this system says of a host name that does not exist."""
    with pytest.raises(socket.gaierror) as caught:
        socket.getaddrinfo("no-such-host.invalid", 1)
    return str(caught.value.strerror)


def test_errors_are_json_where_json_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = f"start one with: equipoise daemon --home {tmp_path}"
    for words, said in [
        (
            ("status", "--home", str(tmp_path)),
            {
                "kind": "NoDaemon",
                "message": f"no daemon is running on {tmp_path}; {start}",
                "hint": start,
                "exit_status": 3,
            },
        ),
        (
            ("rounds", "--limit", "no"),
            {"kind": "UsageError", "hint": "see `equipoise rounds --help`", "exit_status": 2},
        ),
    ]:
        status = program.run([*words, "--json"])
        printed = capsys.readouterr()
        error = json.loads(printed.err)["error"]
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert {key: error[key] for key in said} == said
        assert status == said["exit_status"]


def test_without_a_command_it_says_how_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EQUIPOISE_HOME", str(tmp_path))

    assert program.run([]) == 0

    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"no daemon is running on {tmp_path} (environment EQUIPOISE_HOME); to start:"
    assert [line.split()[:2] for line in lines] == [
        ["equipoise", verb] for verb in ("demo", "daemon", "launch")
    ]
