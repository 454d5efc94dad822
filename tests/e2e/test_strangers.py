"""What strangers cost: three real daemons average while others tell them of peers that there are not.

The strangers leave the processor to the daemons (`strangers.yield_processor`): a real stranger computes on a machine
of its own. So on a busy machine they attack slowly. What is shown, and judged by eye on a quiet machine, are rounds
before and during the attack, and the processor seconds that daemons and p2pd have used for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from e2e.fleet import Fleet, normal
from e2e.swarm import ChildProcess, Swarm, eventually

pytestmark = pytest.mark.slow

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]
TESTS = Path(__file__).resolve().parents[1]
MEMBERS = 3
SECONDS = float(os.environ.get("STRANGERS_SECONDS", "10"))
MAX_CONNECTIONS = 60
"""From three daemons, in a minute."""


class ThirdParty:
    """Listens, and counts who comes."""

    def __init__(self) -> None:
        self.connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self.connections += 1
                connection.close()

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def third_party() -> Iterator[ThirdParty]:
    party = ThirdParty()
    yield party
    party.close()


def rounds(fleet: Fleet, seconds: float) -> int:
    """Rounds of all members in so long a time; each must be exact."""
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        outcomes = [pending.result() for pending in fleet.start([1.0] * MEMBERS, timeout=30.0)]
        fleet.check(dict(enumerate(outcomes)), 1e-6)
        for value, tensor in zip(fleet.values, fleet.tensors, strict=True):
            value.copy_(tensor)
        count += 1
    return count


def stranger(swarm: Swarm, way: str, port: int, count: int, addresses: list[str]) -> ChildProcess:
    home = swarm.folder / f"stranger{len(swarm.processes)}"
    code = "from e2e.strangers import main; main()"
    return swarm.script(
        code, way, str(home), "fleet", str(port), str(count), *addresses, env={"PYTHONPATH": str(TESTS)}
    )


def let_loose(strangers: list[ChildProcess]) -> None:
    """Have them begin together, when all are connected."""
    for process in strangers:
        eventually(lambda process=process: "connected" in process.output, "the stranger", 60.0)
    for process in strangers:
        process.signal(signal.SIGUSR1)


def processor_seconds(daemons: Sequence[ChildProcess]) -> float:
    """Processor seconds that `daemons` and their p2pd have used so far."""
    own = [process for daemon in daemons for process in (psutil.Process(daemon.pid), *daemon.descendants())]
    return float(sum(process.cpu_times().user + process.cpu_times().system for process in own))


@pytest.mark.parametrize(
    ("way", "strangers", "count"),
    [
        ("name", 1, 60),
        ("name", 1, 4000),
        ("number", 1, 1),
        ("number", 1, 2),
        ("number", 1, 20),
        ("forge", 4, 400),
    ],
)
def test_strangers_are_cheap(
    swarm: Swarm, third_party: ThirdParty, way: str, strangers: int, count: int
) -> None:
    """Three daemons rarely dial the third party; with `-s`, shows rounds before, during and after."""
    daemons = swarm.daemons(MEMBERS, args=LISTEN)
    with Fleet(daemons, normal(MEMBERS, 10_000), codec="fp32") as fleet:
        rounds(fleet, 3.0)
        usage = processor_seconds(daemons)
        before, used = rounds(fleet, SECONDS), processor_seconds(daemons) - usage
        addresses = [daemon.address for daemon in daemons]
        attackers = [stranger(swarm, way, third_party.port, count, addresses) for _ in range(strangers)]
        let_loose(attackers)
        third_party.connections = 0
        usage = processor_seconds(daemons)
        during, used_then = rounds(fleet, SECONDS), processor_seconds(daemons) - usage
        for attacker in attackers:
            attacker.kill()
        after = rounds(fleet, SECONDS)
        print(
            f"{way} {count}: in {SECONDS:g} s {before} rounds for {used:.1f} processor seconds, "
            f"then {during} for {used_then:.1f}, then {after}; {third_party.connections} dials"
        )
        assert third_party.connections <= MAX_CONNECTIONS
