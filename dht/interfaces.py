"""This machine's own addresses by what they are worth to others: routed ones first, those of virtual bridges last.

A machine with containers has a bridge for each network of theirs, and other machines have the same addresses on
theirs. Only a few addresses fit into a record.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from equipoise.dht.address import is_relayed

ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation, to which the usual route leads: nothing is sent there."""

_VIRTUAL = re.compile(
    r"(docker|br-|virbr|veth|vnet|cni|flannel|cali|kube|lxc|lxd|podman|vmnet|vboxnet|hassio|weave)"
)
"""Names that programs for containers and virtual machines give to interfaces."""
_BRIDGES = Path("/sys/class/net")


class Rank(enum.IntEnum):
    """What an address is worth; the best is the least."""

    ROUTED = 0
    OTHER = 1
    VIRTUAL = 2
    LINK_LOCAL = 3


def ranks_of_own_addresses() -> dict[str, Rank]:
    """Return the rank of each IP address of this machine."""
    routed = {_source(place) for place in ELSEWHERE}
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        virtual = _VIRTUAL.match(name) or (_BRIDGES / name / "bridge").exists()
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                host = one.address.partition("%")[0]
                rank = Rank.VIRTUAL if virtual else Rank.OTHER
                if ipaddress.ip_address(host).is_link_local:
                    rank = Rank.LINK_LOCAL
                found[host] = Rank.ROUTED if host in routed else rank
    return found


def told(addresses: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the first `most` multiaddrs, best first; of both versions of IP if there are two."""
    first = tuple(addresses[:most])
    versions = {_version(one) for one in first}
    other = [one for one in addresses[most:] if _version(one) not in versions and not is_relayed(one)]
    return (*first[:-1], other[0]) if other else first


def _version(address: str) -> str:
    return address.split("/")[1]


def _source(place: str) -> str:
    """Return the address from which this machine would send to `place`; empty without a route."""
    family = socket.AF_INET6 if ":" in place else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((place, 9))
        host: str = probe.getsockname()[0]
        return host
    return ""
