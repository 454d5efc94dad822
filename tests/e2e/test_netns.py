"""The networks that other tests rely on do what they say."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from e2e.netns import Host, Network, available

pytestmark = [pytest.mark.netns, pytest.mark.skipif(available() != "", reason=available() or "available")]

LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("up", flush=True)
    while True:
        channel, (host, port) = server.accept()
        with channel:
            channel.sendall(f"{host:16}{port:6}".encode())
            channel.sendall(bytes(int(sys.argv[2])))
"""

DIAL = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as channel:
    seen = channel.makefile("rb").read()
print(seen[:16].decode().strip(), len(seen) - 22)
"""

MAPPED = """
import socket, sys
for host in sys.argv[1:]:
    with socket.socket() as channel:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        channel.bind(("", 7001))
        channel.connect((host, 7000))
        print(channel.makefile("rb").read()[16:22].decode())
"""


class Listener:
    """A process on `host` that tells each client where it comes from, and sends `size` bytes."""

    def __init__(self, host: Host, size: int = 0) -> None:
        command = host.command([sys.executable, "-c", LISTEN, host.address, str(size)])
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def __enter__(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"up\n"

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


def dial(source: Host, address: str, seconds: float = 10.0) -> str:
    """What a connection from `source` is told; `lost` if none comes about."""
    command = source.command([sys.executable, "-c", DIAL, address, str(seconds)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else "lost"


def test_a_host_behind_a_nat_dials_out_and_cannot_be_dialled() -> None:
    with Network(hosts=3, nat=[1, 2]) as network:
        public, inside, neighbour = network.hosts
        assert inside.behind_nat
        assert not public.behind_nat
        with Listener(public), Listener(inside):
            assert dial(inside, public.address) == f"{inside.public} 0"
            assert dial(public, inside.public, 0.5) == dial(public, inside.address, 0.5) == "lost"
            assert dial(neighbour, inside.public, 0.5) == "lost"
            network.forward(inside, 7000)
            assert dial(neighbour, inside.public) == f"{neighbour.public} 0"


@pytest.mark.parametrize("kind", ["nat", "symmetric"])
def test_a_nat_keeps_ports_or_draws_one_for_every_connection(kind: str) -> None:
    with Network(hosts=3, **{kind: [2]}) as network:
        first, second, inside = network.hosts
        with Listener(first), Listener(second):
            command = inside.command([sys.executable, "-c", MAPPED, first.address, second.address])
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    # Two ports out of tens of thousands are the same by chance once in a thousand years of tests.
    assert (set(done.stdout.split()) == {"7001"}) == (kind == "nat")


@pytest.mark.parametrize(("nat", "shaped"), [([], 0), ([], 1), ([1], 0), ([1], 1)])
def test_a_shaped_link_carries_its_rate_up_and_down(nat: list[int], shaped: int) -> None:
    size = 5_000_000
    with Network(hosts=2, nat=nat) as network:
        public, other = network.hosts
        network.shape(network.hosts[shaped], 50)
        with Listener(public, size):
            began = time.monotonic()
            assert dial(other, public.address) == f"{other.public} {size}"
            seconds = time.monotonic() - began
            network.unshape(network.hosts[shaped])
            assert dial(other, public.address) == f"{other.public} {size}"
        print(f"{size * 8 / seconds / 1e6:.0f} Mbit/s of 50, python's start included")
        assert seconds > size * 8 / 50e6 * 0.9


def test_everything_is_gone_afterwards_also_after_an_error() -> None:
    network = Network(hosts=2, nat=[1])

    def fail() -> None:
        with network:
            assert all(host.namespace in _namespaces() for host in network.hosts)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not any(host.namespace in _namespaces() for host in network.hosts)


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
