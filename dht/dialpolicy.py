"""The places that a stranger's word may have this peer dial, and how often; the networks that this machine is in.

Records, credentials and answers to look-ups tell where peers listen, and identities are free: a peer with many can
name a third party's machine in all of them. So what is counted is places, whatever the PeerID. A peer that was met at
a host, with the key of its PeerID, stands for that host itself, and strangers that name it do not hinder the two.

Addresses that a person gave (`--join`) are no business of this module. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from equipoise.dht.limits import Failure
from equipoise.limits import LruDict, backoff

Place = tuple[str, int]
"""IP address or name, and TCP port."""

WINDOW_SECONDS = 60.0
MAX_NEW_HOSTS = 20
"""Most hosts tried in a minute at which nobody is found. A host where the peer is found does not count: a large swarm
is met as fast as it answers."""
MAX_TRIES_PER_HOST = 10
"""Most tries in a minute at one host, over all of its ports, that find nobody: each may take two connections."""
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 60.0
"""Pause between two tries of one place that find nobody; each is twice as long as the one before. So a peer that comes
back is dialled again after at most as long as it was away."""
MET_SECONDS = 3600.0
"""Longest time that a peer that was met at a host stands for it."""
MAX_MET = 4096
MAX_PLACES = 4096
"""Most places whose failures are kept; more than `MAX_NEW_HOSTS` and `MAX_TRIES_PER_HOST` allow in ten minutes."""

NETWORK_BITS = {4: 16, 6: 64}
"""Bits that addresses of one private network have in common, by version of IP."""
OVERLAYS = ipaddress.ip_network("100.64.0.0/10")
"""Overlay networks spread their machines over all of this block (RFC 6598)."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class Refusal:
    """The reason why a place is not dialled now; `passing` if it may be once other tries under way have ended."""

    reason: str
    passing: bool = False


class DialPolicy:
    """Decides before each try, and is told how it ended. Sans IO."""

    def __init__(self, networks: Callable[[], Iterable[Network]]) -> None:
        """`networks` tells the private networks that this machine is in."""
        self._networks = networks
        self._met: LruDict[tuple[str, str], float] = LruDict(MAX_MET)
        self._failures: LruDict[tuple[str, Place], Failure] = LruDict(MAX_PLACES)
        # When tries at a host on strangers' words have failed of late, and such tries under way.
        self._failed: dict[str, list[float]] = {}
        self._trying: dict[Place, str] = {}

    def meet(self, peer: str, host: str, now: float) -> None:
        """Note that `peer` is at the IP address `host`: a connection with it, from either side, shows it."""
        self._met[peer, host] = now

    def begin(self, peer: str, place: Place, now: float) -> Refusal | None:
        """Begin to try whether `peer` is at `place`; None if that is fine, and then `end` is due.

        A name is resolved after this, and what it stands for goes through `permits`.
        """
        host = place[0]
        known = self._knows(peer, host, now)
        failure = self._failures.get((peer if known else "", place))
        if failure is not None and now < failure.retry:
            return Refusal(failure.reason)
        if known:
            return None
        if not self.permits(host):
            return Refusal(f"{host} is a private address of another network than this machine's")
        if place in self._trying:
            return Refusal(f"{host} port {place[1]} is being tried for another peer", passing=True)
        refusal = self._crowded(host, now)
        if refusal is None:
            self._trying[place] = peer
        return refusal

    def end(self, peer: str, place: Place, now: float, failure: str = "") -> None:
        """Note how a try ended; with why, if the peer was not found there."""
        if self._trying.get(place) == peer:
            del self._trying[place]
            if failure:
                self._failed.setdefault(place[0], []).append(now)
        if failure:
            key = (peer if self._knows(peer, place[0], now) else "", place)
            before = self._failures.get(key)
            pause = backoff(before.pause if before else 0.0, FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
            self._failures[key] = Failure(failure, now + pause, pause)
        else:
            self._failures.pop((peer, place), None)
            self._failures.pop(("", place), None)

    def permits(self, host: str) -> bool:
        """Tell whether an IP address may be dialled at all on a stranger's word; names may, until they are resolved."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return True
        address = getattr(address, "ipv4_mapped", None) or address
        odd = address.is_reserved and not address.is_loopback
        if odd or address.is_multicast or address.is_unspecified:
            return False
        if address.is_global or address.is_loopback:
            return True
        return any(address in network for network in self._networks())

    def _knows(self, peer: str, host: str, now: float) -> bool:
        return now - self._met.get((peer, host), float("-inf")) < MET_SECONDS

    def _crowded(self, host: str, now: float) -> Refusal | None:
        recent = {
            name: [at for at in failed if now - at < WINDOW_SECONDS] for name, failed in self._failed.items()
        }
        self._failed = {name: failed for name, failed in recent.items() if failed}
        pending = Counter(name for name, _ in self._trying)
        tried = self._failed.keys() | pending.keys()
        if host not in tried and len(tried) >= MAX_NEW_HOSTS:
            why = f"nobody was found at {MAX_NEW_HOSTS} hosts within a minute; {host} is tried later"
            return Refusal(why, bool(pending))
        failed = len(self._failed.get(host, ()))
        if failed + pending[host] >= MAX_TRIES_PER_HOST:
            why = f"nobody was found at {host} at {failed} tries within a minute"
            return Refusal(why, pending[host] > 0)
        return None


def behind_router(hosts: Iterable[str]) -> bool:
    """Tell whether a peer that listens at `hosts` (IP addresses) is reached by IPv4 on private networks only.

    A router may then forward a port from a public address.
    """
    found: list[Address] = []
    for one in (ipaddress.ip_address(host) for host in hosts if ":" not in host):
        found += own_addresses() if one.is_unspecified else [one]
    beyond = [one for one in found if one.version == 4 and not one.is_loopback and not one.is_link_local]
    return bool(beyond) and not any(one.is_global for one in beyond)


def private_networks() -> list[Network]:
    """Return the private networks that this machine is in: a company or a cloud routes between its subnets."""
    private = [one for one in own_addresses() if not one.is_global and not one.is_loopback]
    return [
        OVERLAYS if one in OVERLAYS else ipaddress.ip_network((one, NETWORK_BITS[one.version]), strict=False)
        for one in private
    ]


def own_addresses() -> list[Address]:
    """Return the IP addresses of all interfaces."""
    return [
        ipaddress.ip_address(address.address.partition("%")[0])
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
