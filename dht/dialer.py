"""Reach peers without poisoning p2pd's dial backoff.

A failed dial makes libp2p refuse to dial that address again for 5 s, then 6, 9, 14, ... up to 5 minutes, whatever
has come alive meanwhile. So every address is first tried by a plain TCP connection of our own, which also tells
precisely why it fails, and p2pd dials only what answers. Where an address is a stranger's word, `dialpolicy` decides
whether it is tried at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

from equipoise.dht.address import Address, block_of, is_relayed, well_formed
from equipoise.dht.dialpolicy import DialPolicy
from equipoise.dht.p2pd_client import P2pdClient, P2pdClientError
from equipoise.dht.sanitize import printable
from equipoise.dht.state import AddressState
from equipoise.limits import LruDict
from equipoise.tasks import end

PROBE_SECONDS = 2.0
"""Longest TCP handshake: it takes one round trip; a packet lost once is sent again after 1 s."""
CONNECT_SECONDS = 4.0
"""Longest connect of libp2p, with security and multiplexer: about five round trips."""
MAX_KNOWN_PEERS = 1024
GREETING = b"\x13/multistream/1.0.0\n"
"""First bytes of libp2p's listeners; on a stranger's word p2pd dials nothing else."""
FRESH_SECONDS, MAX_FRESH_SECONDS = 0.05, 0.5
"""Time for which the list of connections is not asked for again: for a peer that it does not have, and for one that it
has. Each costs p2pd milliseconds. If the connection broke since, p2pd dials without a probe."""


class Unreached(ConnectionError):
    """A peer cannot be reached; `state` is the kind of cause."""

    def __init__(self, state: AddressState, reason: str) -> None:
        super().__init__(reason)
        self.state = state


class Dialer:
    """Knows addresses of peers, and which of them are connected.

    Attributes:
        connected: PeerIDs that were connected when last asked.
        paths: Multiaddrs at the other ends of p2pd's connections when last asked, by PeerID.
        failures: Why peers could not be reached when last tried, by PeerID.
    """

    def __init__(self, link: P2pdClient, own: str, policy: DialPolicy) -> None:
        self._link = link
        self._own = own
        self._policy = policy
        self._tries_ended = asyncio.Event()
        self._known: LruDict[str, tuple[Address, ...]] = LruDict(MAX_KNOWN_PEERS)
        self.connected: frozenset[str] = frozenset()
        self._asked = float("-inf")
        self._asking = asyncio.Lock()
        self.paths: dict[str, tuple[str, ...]] = {}
        self.failures: LruDict[str, str] = LruDict(MAX_KNOWN_PEERS)
        self._causes: LruDict[str, Unreached] = LruDict(MAX_KNOWN_PEERS)

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember where `peer` says it listens; malformed addresses and other peers' are ignored."""
        mine = tuple(address for address in well_formed(addresses) if address.peer == peer)
        if mine:
            self._known[peer] = mine

    def hear(self, peer: str, addresses: Sequence[str]) -> None:
        """Take others' word for where `peer` listens, unless it is known already."""
        if peer not in self._known:
            self.learn(peer, addresses)

    def addresses_of(self, peer: str) -> tuple[str, ...]:
        """Return the known addresses of `peer`, in the form that `--join` takes."""
        return tuple(address.text for address in self._known.get(peer, ()))

    async def host_of(self, peer: str) -> str:
        """Return the block of addresses that a peer is connected from; empty if it is not connected."""
        async with self._asking:
            if peer not in self.paths and time.monotonic() - self._asked > FRESH_SECONDS:
                await self.refresh()
        return next((block_of(path.split("/")[2]) for path in self.paths.get(peer, ())), "")

    async def refresh(self) -> frozenset[str]:
        """Ask p2pd which peers are connected; raises P2pdClientError if p2pd does not answer."""
        self.paths = await self._link.connections()
        self.connected = frozenset(self.paths) - {self._own}
        self._asked = now = time.monotonic()
        for peer, paths in self.paths.items():
            for host in direct_hosts(paths):
                self._policy.meet(peer, host, now)
        return self.connected

    def lose_all(self) -> None:
        """Count no peer as connected: p2pd has ended, and its connections with it."""
        self.connected, self._asked, self.paths = frozenset(), float("-inf"), {}

    async def reach(self, peer: str) -> None:
        """See to it that p2pd is connected to `peer`; raises Unreached, or P2pdClientError if p2pd is silent."""
        if self._link.gate.bans(peer):
            raise Unreached("not admitted", f"this daemon has banned {peer}")
        async with self._asking:
            fresh = MAX_FRESH_SECONDS if peer in self.connected else FRESH_SECONDS
            if time.monotonic() - self._asked > fresh:
                await self.refresh()
        try:
            if peer not in self.connected:
                await self._connect_any(peer)
        except Unreached as error:
            self.failures[peer] = str(error)
            raise
        self.failures.pop(peer, None)

    async def _connect_any(self, peer: str) -> None:
        known = self._known.get(peer, ())
        # A peer for which this one relays is connected to it, or cannot be reached through it.
        dialled = [one for one in known if f"/p2p/{self._own}/" not in one.text]
        attempts = [asyncio.create_task(self._try(address)) for address in dialled]
        failures: list[Unreached] = []
        try:
            for attempt in asyncio.as_completed(attempts):
                try:
                    return await attempt
                except Unreached as error:
                    failures.append(error)
        finally:
            await end(attempts)
        why = "it waits for others to dial it" if known else "no address of it is known"
        raise failures[0] if failures else Unreached("failed", why)

    async def _try(self, address: Address) -> None:
        """Connect where somebody told that a peer listens, if the policy allows; raises Unreached, and why, if not."""
        place, failure = (address.host, address.port), "it was broken off"
        while address.first not in self.connected:
            refusal = self._policy.begin(address.first, place, time.monotonic())
            if refusal is None:
                break
            if not refusal.passing:
                raise Unreached("failed", refusal.reason)
            await self._tries_ended.wait()
        else:
            return await self.connect(address, None)  # No host is dialled, not even the relay's.
        try:
            await self.connect(await self._resolved(address), GREETING)
        except Unreached as error:
            failure = str(error)
            if address.relayed:
                await self.refresh()  # The circuit may have failed although the relay is where it should be.
            raise
        finally:
            # Connected, maybe by another address of it that was tried at once: then nothing speaks against this one.
            there = address.first in self.connected
            self._policy.end(address.first, place, time.monotonic(), "" if there else failure)
            self._tries_ended.set()
            self._tries_ended = asyncio.Event()

    async def _resolved(self, address: Address) -> Address:
        """Return `address` with an IP address in place of a name, so that what is checked is what is dialled."""
        if address.text.startswith("/ip"):
            return address
        async with told(address.host, address.port):
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        for family, *_, where in found:
            host = str(where[0])
            if self._policy.permits(host):
                version, rest = 6 if family == socket.AF_INET6 else 4, address.text.split("/", 3)[3]
                return replace(address, text=f"/ip{version}/{host}/{rest}", host=host)
        raise Unreached("failed", f"host name {address.host} stands for addresses of another private network")

    async def connect(self, address: Address, greeting: bytes | None = b"") -> None:
        """Connect to the peer at `address`; raises Unreached if it is not there.

        First a plain connection is tried, on which the listener must say `greeting`; with None it is left out. The
        default, no greeting, is for addresses that a person has given.
        """
        if greeting is not None:
            await probe(address.host, address.port, greeting)
        if address.relayed and self._link.gate.swarm:
            await self._introduce(address)
        try:
            await self._link.connect(address.peer, address.encode_transport(), CONNECT_SECONDS)
        except P2pdClientError as error:
            raise self._cause(address, str(error)) from error
        self._causes.pop(address.text, None)
        self.connected |= {address.peer}

    async def _introduce(self, address: Address) -> None:
        """Present this peer to the relay of `address`, which p2pd itself asks; raises Unreached."""
        self.hear(address.first, [address.text.partition("/p2p-circuit")[0]])
        try:
            await self._link.gate.present(address.first)
        except ConnectionError as error:
            raise Unreached("failed", str(error)) from error

    def _cause(self, address: Address, message: str) -> Unreached:
        """Return why libp2p cannot connect; while it only pauses after a failure, why that attempt failed."""
        known = self._causes.get(address.text)
        if known is None or "dial backoff" not in message:
            known = self._causes[address.text] = _classify(address, message)
        return Unreached(known.state, str(known))


def direct_hosts(paths: Iterable[str]) -> list[str]:
    """Return the IP addresses at the other ends of p2pd's connections, those through relays left out."""
    return list(dict.fromkeys(path.split("/")[2] for path in paths if not is_relayed(path)))


async def probe(host: str, port: int, greeting: bytes = b"") -> None:
    """Open a connection, on which the listener must say `greeting` first; raises Unreached, and why, if none does."""
    async with told(host, port):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            said = await reader.readexactly(len(greeting))
        finally:
            writer.close()
    if said != greeting:
        raise Unreached("wrong peer", f"what answers at {host} port {port} is not a libp2p peer")


@contextlib.asynccontextmanager
async def told(host: str, port: int) -> AsyncIterator[None]:
    """Bound what is done by `PROBE_SECONDS`, and say in words why it fails."""
    where = f"{host} port {port}"
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            yield
    except TimeoutError:
        raise Unreached("timeout", f"nobody answers at {where} within {PROBE_SECONDS:.0f} s") from None
    except asyncio.IncompleteReadError:
        raise Unreached("failed", f"what answers at {where} hangs up") from None
    except ConnectionRefusedError:
        raise Unreached("refused", f"nobody listens at {where} (connection refused)") from None
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no name that can be looked up"
        raise Unreached("unresolved", f"host name {host} is not found ({why})") from None
    except OSError as error:
        if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN):
            raise Unreached("no network", f"no network route to {where} ({error.strerror})") from None
        raise Unreached("failed", f"cannot connect to {where}: {error.strerror or error}") from None


def _classify(address: Address, message: str) -> Unreached:
    where = f"{address.host} port {address.port}"
    if "peer id mismatch" in message:
        [other, *_] = message.partition("remote key matches ")[2].split() or ["another peer"]
        return Unreached("wrong peer", f"{printable(other, 64)} answers at {where}, expected {address.peer}")
    if "dial backoff" in message:
        return Unreached("failed", f"libp2p pauses after failed attempts at {where}")
    if "negotiate security protocol" in message:
        return Unreached("failed", f"what answers at {where} is not a libp2p peer")
    if "no answer within" in message:
        late = f"{where} accepts connections but does not speak within {CONNECT_SECONDS:.0f} s"
        return Unreached("timeout", late)
    return Unreached("failed", f"cannot connect to {where}: {printable(message)}")
