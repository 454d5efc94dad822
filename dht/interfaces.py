"""The addresses of this machine's network interfaces."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil

NETWORK_BITS = {4: 16, 6: 64}
"""Bits that addresses of one private network have in common, by version of IP."""
OVERLAYS = ipaddress.ip_network("100.64.0.0/10")
"""Overlay networks spread their machines over all of this block (RFC 6598)."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def behind_router(hosts: Iterable[str]) -> bool:
    """Whether a peer that listens at `hosts` (IP addresses) is reached by IPv4 on private networks only.

    A router may then forward a port from a public address.
    """
    found: list[Address] = []
    for one in (ipaddress.ip_address(host) for host in hosts if ":" not in host):
        found += own_addresses() if one.is_unspecified else [one]
    beyond = [one for one in found if one.version == 4 and not one.is_loopback and not one.is_link_local]
    return bool(beyond) and not any(one.is_global for one in beyond)


def private_networks() -> list[Network]:
    """Return the private networks that this machine is in."""
    private = [one for one in own_addresses() if not one.is_global and not one.is_loopback]
    return [OVERLAYS if one in OVERLAYS else network_of(one) for one in private]


def network_of(own: Address) -> Network:
    """Return the private network that `own` is taken to be in: a company or a cloud routes between its subnets."""
    return ipaddress.ip_network((own, NETWORK_BITS[own.version]), strict=False)


def own_addresses() -> list[Address]:
    """Return the IP addresses of all interfaces."""
    return [
        ipaddress.ip_address(address.address.partition("%")[0])
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
