"""Small real networks on one machine: hosts in network namespaces, their links shaped, cut, or behind a NAT.

    with Network(hosts=4, nat=[2, 3]) as network:
        command = network.hosts[0].command(["python", ...])     # runs it on that host
        network.shape(network.hosts[0], 200)

Every host has one cable to a switch (a bridge in a namespace of its own); one behind a NAT has a router of its own in
between, which masquerades, keeping ports where they are free, and silently drops what nobody inside asked for; one of
`symmetric` gives every connection a port drawn by chance. Only the namespaces are named outside,
after this process; what is in them goes with them. Needs root, iproute2 and nftables. The kernel here has no `netem`:
there is no artificial latency, and loss only as a cut.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

COMMAND_SECONDS = 20.0
"""`ip` answers within milliseconds; a busy kernel takes longer to tear namespaces down."""
MAX_HOSTS = 64
PUBLIC = "44.128.0"
"""libp2p dials, announces and relays for addresses that it takes for public ones only, hence none of the private or
documentation ranges: this is a part of the radio amateurs' network that was set aside for tests."""
QUEUE_SECONDS = 0.05
"""A shaped link drops what would wait longer, as routers do; TCP needs about a round trip of it to fill the link."""
MIN_QUEUE = 64 * 1024
"""Bytes that wait at a slow link nevertheless: routers have room for some forty packets. With room for four, as 50 ms
are at 1 Mbit/s, one of three connections that share the link carries nothing for seconds."""
BURST_SECONDS = 0.002
MIN_BURST = 16 * 1024
"""What may pass at full speed after a pause: enough for the timer's grain, little beside what tests send."""

_OURS = re.compile(r"eq(\d+)-")

_serials = itertools.count()


def available() -> str:
    """Return why networks cannot be made here, or an empty text if they can."""
    missing = [program for program in ("ip", "tc", "nft") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found: install iproute2 and nftables"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"eq{os.getpid()}-probe{next(_serials)}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "delete", name)
    except NetworkError as error:
        return f"no network namespaces here: {error}"
    return ""


class NetworkError(Exception):
    """A command that should have built a part of the network failed; the message is its own."""


@dataclass(frozen=True)
class Host:
    """One machine of a network.

    Attributes:
        namespace: Name of its network namespace.
        address: Its only address; a private one behind a NAT.
        public: The address that others see: its router's behind a NAT.
        port: Name of the switch's port that its traffic passes.
        gateway: Namespace at the other end of its cable: the switch's, or its router's.
        socket: Name of the device at that end.
    """

    namespace: str
    address: str
    public: str
    port: str
    gateway: str
    socket: str

    @property
    def behind_nat(self) -> bool:
        """Whether others cannot dial it."""
        return self.address != self.public

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs `arguments` on this host, as the very process that is started."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


class Network:
    """A switch and its hosts, from `__enter__` to `__exit__`."""

    def __init__(
        self,
        hosts: int,
        nat: Collection[int] = (),
        symmetric: Collection[int] = (),
        neighbours: Mapping[int, int] | None = None,
        lan: str = PUBLIC,
    ) -> None:
        """`neighbours` of hosts behind a NAT share its router: an index of `nat` for each. Others are in `lan`:
        three bytes of IPv4 addresses, or a prefix of IPv6 ones, as `fd00:7`."""
        neighbours = neighbours or {}
        nat = {*nat, *symmetric, *neighbours}
        if not 1 <= hosts <= MAX_HOSTS or not set(nat) <= set(range(hosts)):
            raise ValueError(f"expected 1 to {MAX_HOSTS} hosts and their indices, got {hosts} and {nat}")
        self._prefix = f"eq{os.getpid()}-{next(_serials)}"
        self._count = hosts
        self._lan = lan
        self._nat = frozenset(nat)
        self._symmetric = frozenset(symmetric)
        self._neighbours = dict(neighbours)
        self._namespaces: list[str] = []
        self._lost: set[tuple[str, str]] = set()
        self.hosts: tuple[Host, ...] = ()

    def __enter__(self) -> Network:
        _sweep()
        try:
            self._switch = self._namespace("switch")
            _ip(self._switch, "link", "add", "bridge", "type", "bridge")
            _ip(self._switch, "link", "set", "bridge", "up")
            self.hosts = tuple(
                self._host_behind_nat(index) if index in self._nat else self._host(index)
                for index in range(self._count)
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything; processes that still run in it lose their network."""
        while self._namespaces:
            with contextlib.suppress(NetworkError):
                _run("ip", "netns", "delete", self._namespaces.pop())

    def bridge(self, host: Host, count: int) -> None:
        """Give `host` the bridges of so many container networks: 172.17.0.1 and on, the same on all hosts."""
        for index in range(count):
            name = f"br-{index:012x}"
            _ip(host.namespace, "link", "add", name, "type", "bridge")
            _configure(host.namespace, name, f"172.{17 + index}.0.1")

    def shape(self, host: Host, up: float, down: float | None = None) -> None:
        """Let the cable of `host` carry at most `up` and `down` Mbit/s; `down` is `up` unless said, and may be inf."""
        for (namespace, device), mbit in zip(
            self._ends(host), (up, up if down is None else down), strict=True
        ):
            if mbit == math.inf:
                continue
            rate = mbit * 1e6 / 8
            burst = max(MIN_BURST, int(rate * BURST_SECONDS))
            queue = max(MIN_QUEUE, int(rate * QUEUE_SECONDS))
            _run(
                *("ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, "root"),
                *("tbf", "rate", f"{mbit:g}mbit", "burst", str(burst), "limit", str(queue + burst)),
            )

    def sent(self, host: Host) -> int:
        """Bytes that the shaped cable of `host` has carried up so far, the headers of each packet included."""
        namespace, device = self._ends(host)[0]
        told = _run(
            "ip", "netns", "exec", namespace, "tc", "-s", "-j", "qdisc", "show", "dev", device, "root"
        )
        return int(json.loads(told)[0]["bytes"])

    def unshape(self, host: Host) -> None:
        """Let the cable of `host` carry what it can again."""
        for namespace, device in self._ends(host):
            with contextlib.suppress(NetworkError):
                _run("ip", "netns", "exec", namespace, "tc", "qdisc", "delete", "dev", device, "root")

    def forward(self, host: Host, port: int) -> None:
        """Have the router of `host`, which is behind a NAT, pass connections to its TCP `port` on to the host."""
        _nft(host.gateway, _FORWARD_RULES.format(port=port, address=host.address))

    def cut(self, host: Host) -> None:
        """Lose every packet from and to `host`, silently: its own device stays up, and nobody is told."""
        self._lose({(host.port, "*"), ("*", host.port)})

    def drop_one_way(self, source: Host, target: Host | None = None) -> None:
        """Lose what `source` sends, to `target` or to anyone; what it is sent arrives."""
        self._lose({(source.port, target.port if target is not None else "*")})

    def heal(self, *hosts: Host) -> None:
        """Take back every cut and drop that names one of `hosts`; all of them if none is given."""
        healed = {host.port for host in hosts}
        self._lost = {pair for pair in self._lost if healed and not healed & set(pair)}
        self._lose(set())

    def _lose(self, pairs: set[tuple[str, str]]) -> None:
        self._lost |= pairs
        rules = "\n".join(
            " ".join(
                f'{side} "{port}"'
                for side, port in zip(("iifname", "oifname"), pair, strict=True)
                if port != "*"
            )
            + " drop"
            for pair in sorted(self._lost)
        )
        # One transaction: the old rules hold until the new ones do.
        _nft(
            self._switch,
            f"table bridge cuts {{\n}}\ndelete table bridge cuts\ntable bridge cuts {{\nchain through {{\n"
            f"type filter hook forward priority 0; policy accept;\n{rules}\n}}\n}}\n",
        )

    def _ends(self, host: Host) -> tuple[tuple[str, str], tuple[str, str]]:
        return (host.namespace, "eth0"), (host.gateway, host.socket)

    def _host(self, index: int) -> Host:
        address, port = f"{self._lan}{'::' if ':' in self._lan else '.'}{index + 1}", f"port{index}"
        namespace = self._namespace(f"host{index}")
        self._plug(port, namespace, address)
        return Host(namespace, address, address, port, self._switch, port)

    def _host_behind_nat(self, index: int) -> Host:
        home = self._neighbours.get(index, index)
        public, port, network = f"{PUBLIC}.{home + 1}", f"port{home}", f"192.168.{home + 1}"
        router = f"{self._prefix}-router{home}" if home != index else self._router(index, public, network)
        namespace, socket, address = (
            self._namespace(f"host{index}"),
            f"inside{index}",
            f"{network}.{index + 2}",
        )
        _ip(router, "link", "add", socket, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip(router, "link", "set", socket, "master", "inside", "up")
        _configure(namespace, "eth0", address)
        _ip(namespace, "route", "add", "default", "via", f"{network}.1")
        return Host(namespace, address, public, port, router, socket)

    def _router(self, index: int, public: str, network: str) -> str:
        router = self._namespace(f"router{index}")
        self._plug(f"port{index}", router, public)
        _ip(router, "link", "add", "inside", "type", "bridge")
        _configure(router, "inside", f"{network}.1")
        _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        ports = "random,fully-random" if index in self._symmetric else ""
        _nft(router, _NAT_RULES.format(ports=ports))
        return router

    def _plug(self, port: str, namespace: str, address: str) -> None:
        _ip(self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip(self._switch, "link", "set", port, "master", "bridge", "up")
        _configure(namespace, "eth0", address)

    def _namespace(self, name: str) -> str:
        full = f"{self._prefix}-{name}"
        _run("ip", "netns", "add", full)
        self._namespaces.append(full)
        _ip(full, "link", "set", "lo", "up")
        return full


_NAT_RULES = """
table ip nat {{
 chain leaving {{
  type nat hook postrouting priority 100;
  oifname "eth0" masquerade {ports}
 }}
}}
table ip guard {{
 chain through {{
  type filter hook forward priority 0; policy drop;
  ct state established,related accept
  iifname "inside" accept
 }}
 chain arriving {{
  type filter hook input priority 0; policy accept;
  iifname "eth0" ct state new drop
 }}
}}
"""

_FORWARD_RULES = """
table ip nat {{
 chain arriving {{
  type nat hook prerouting priority -100;
  iifname "eth0" tcp dport {port} dnat to {address}
 }}
}}
insert rule ip guard through ct status dnat accept
"""


def _sweep() -> None:
    """Remove what processes left that were killed within a network."""
    for name in _run("ip", "netns", "list").split():
        found = _OURS.match(name)
        if found and not Path(f"/proc/{found[1]}").exists():
            with contextlib.suppress(NetworkError):  # Another process sweeps too.
                _run("ip", "netns", "delete", name)


def _configure(namespace: str, device: str, address: str) -> None:
    # Without `nodad` nothing can be bound to an IPv6 address for a second or two.
    words = [f"{address}/64", "nodad"] if ":" in address else [f"{address}/24"]
    _ip(namespace, "address", "add", *words, "dev", device)
    _ip(namespace, "link", "set", device, "up")


def _ip(namespace: str, *arguments: str) -> None:
    _run("ip", "-n", namespace, *arguments)


def _nft(namespace: str, rules: str) -> None:
    _run("ip", "netns", "exec", namespace, "nft", "-f", "-", given=rules)


def _run(*command: str, given: str = "") -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
