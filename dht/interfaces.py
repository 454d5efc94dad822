"""The addresses of this machine's network interfaces."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

import psutil


def behind_router(hosts: Iterable[str]) -> bool:
    """Whether who listens at `hosts` (IP addresses) is reached by IPv4 on private networks only.

    A router may then forward a port from a public address.
    """
    found: list[ipaddress.IPv4Address] = []
    for host in hosts:
        if ":" not in host:
            one = ipaddress.IPv4Address(host)
            found += own_addresses() if one.is_unspecified else [one]
    beyond = [one for one in found if not one.is_loopback and not one.is_link_local]
    return bool(beyond) and not any(one.is_global for one in beyond)


def own_addresses() -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses of all interfaces."""
    return [
        ipaddress.IPv4Address(address.address)
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
