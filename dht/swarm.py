"""A peer's membership in a swarm: what a program composes, starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from humanfriendly.text import pluralize

from equipoise.dht import address as multiaddr
from equipoise.dht.admission import Admission, Refused, Revocations
from equipoise.dht.autonat import Reach
from equipoise.dht.bootstrap import Bootstrap
from equipoise.dht.dialer import Dialer
from equipoise.dht.dialpolicy import DialPolicy, behind_router, private_networks
from equipoise.dht.direct.transport import DirectTransport
from equipoise.dht.directory import RunDirectory
from equipoise.dht.gate import Gate
from equipoise.dht.identity import load_or_create
from equipoise.dht.interfaces import ranks_of_own_addresses, told
from equipoise.dht.limits import Caps
from equipoise.dht.membership import Membership, ban, bans, revoked_by
from equipoise.dht.options import SwarmOptions
from equipoise.dht.p2pd import DIRECT_PORT, LIBP2P_PORT, P2pdOptions, has_family, make_runtime_dir
from equipoise.dht.p2pd_client import P2pdClient, P2pdClientError
from equipoise.dht.peer_cache import PeerCache
from equipoise.dht.protocol import RecordProtocol
from equipoise.dht.punch.puncher import Puncher
from equipoise.dht.records import MAX_ADDRESSES, Readiness
from equipoise.dht.sanitize import printable
from equipoise.dht.state import ReachStatus, State, SwarmStatus
from equipoise.dht.supervisor import Supervisor
from equipoise.dht.transport import Libp2pTransport
from equipoise.tasks import TaskSet

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
"""Every address of this machine, at the usual port if it is free; without a family that the machine does not have."""
HOUSEKEEPING_SECONDS = 5.0
"""Time after which good peers are written down with their addresses again."""

_log = logging.getLogger(__name__)


class Swarm:
    """One member of a swarm.

    Attributes:
        identity: Its key, kept in the home.
        peer: Its PeerID.
        membership: Its membership in a private swarm, which the home keeps; None in the open one.
        gate: Admits others.
        transport: Channels to other members (`averaging.ports.Transport`).
        directory: The members of each run (`averaging.ports.Directory`).
        direct: Direct channels to members of a group (`averaging.ports.DirectTransport`).
    """

    def __init__(
        self, home: Path, options: SwarmOptions | None = None, membership: Membership | None = None
    ) -> None:
        """Check everything that can be checked without a network; with a `membership` the swarm is a private one.

        Raises AddressError if an address is malformed, IdentityError if the identity file in `home` cannot be used,
        OSError without a directory for sockets, Refused if the membership has ended or the bans cannot be read.
        """
        options = self._options = options or SwarmOptions()
        join = [multiaddr.parse_address(text) for text in dict.fromkeys(options.join)]
        if membership is not None:
            join += multiaddr.well_formed(membership.invitation.addresses)
        usual = filter(has_family, map(multiaddr.parse_listen, DEFAULT_LISTEN))
        named = map(multiaddr.parse_listen, options.listen)
        listen = () if options.client_mode else tuple(named) or tuple(usual)
        for text in options.announce:
            multiaddr.parse_announce(text)
        self.identity = load_or_create(home)
        self.peer = self.identity.peer
        self.membership, memory = membership, PeerCache(home)
        token = None if membership is None else membership.token(home, time.time())
        news = None if membership is None else membership.revocations
        self.gate = Gate(Admission(token, news, bans(home)))
        self._link = P2pdClient(make_runtime_dir() / "p2pd.sock", self.gate)
        self._build(listen, memory.first_sequence)
        self._bootstrap = Bootstrap(join, memory, self._link, self._protocol)
        if membership is not None:
            self._bootstrap.machine.way_in = "invite others with: equipoise swarm invite"
        self._protocol.on_peer = self._on_peer
        self._supervisor = self._supervise(listen)
        self._tasks = TaskSet()

    def _build(self, listen: tuple[multiaddr.ListenAddress, ...], first_sequence: int) -> None:
        options, peer, gate, link = self._options, self.peer, self.gate, self._link
        policy = DialPolicy(private_networks)
        dialer = Dialer(link, peer, policy)
        gate.on_expelled, gate.keep = self._part, self._keep
        gate.reach, gate.host = dialer.reach, dialer.host_of
        protocol = self._protocol = RecordProtocol(peer, bool(listen), link, dialer)
        protocol.tell(relays=options.relay)
        hosts = dict.fromkeys(one.host for one in listen)
        direct_listen = [multiaddr.ListenAddress(host, host, 0) for host in hosts]
        if listen and options.direct_listen:
            direct_listen = [multiaddr.parse_listen(text) for text in options.direct_listen]
        direct = self.direct = DirectTransport(self.identity, direct_listen, options.channel, policy, gate)
        hidden = "" if listen else "it was started in client mode"
        relay = options.relay_bandwidth if options.relay else None
        reach = self._reach = Reach(link, protocol, direct, hidden, relay)
        reach.on_change = self._on_reach
        reach.listening = lambda: self._listening
        self.transport = Libp2pTransport(peer, lambda: reach.dialable, link, dialer)
        direct.channels.caps = self.transport.channels.caps = Caps(options.upload, options.download)
        self.directory = RunDirectory(self.identity, options, protocol, reach, direct, first_sequence)
        self._puncher = Puncher(link, dialer, direct, reach)

    def _supervise(self, listen: tuple[multiaddr.ListenAddress, ...]) -> Supervisor:
        upnp, link = self._options.upnp, self._link
        options = P2pdOptions(
            identity=self.identity.path,
            control=link.control,
            listen=listen,
            announce=tuple(self._options.announce),
            map_ports=behind_router(one.host for one in listen) if upnp is None else upnp,
        )
        return Supervisor(link, self._protocol.dialer, options, self._on_addresses)

    @property
    def addresses(self) -> list[str]:
        """Addresses at which others reach this member, in the form that `--join` takes, the best first."""
        listening = self._listening
        relayed = [held.address for held in self._reach.relays.held.values()]
        reached = [f"{address}/p2p/{self.peer}" for address in self._reach.reached_at]
        return [*relayed, *(one for one in reached if one not in listening), *listening]

    @property
    def _listening(self) -> list[str]:
        # On another machine a loopback address is that machine: it is told only where there is no other.
        addresses = self._supervisor.addresses
        far = [text for text in addresses if not multiaddr.is_loopback(text.split("/")[2])]
        reached = self._reach.reached_at
        best = sorted(far, key=lambda text: text not in reached)
        return [f"{address}/p2p/{self.peer}" for address in best or addresses]

    @property
    def named(self) -> frozenset[str]:
        """PeerIDs of the peers that this daemon's user named: by `--join`, or by an invitation."""
        return frozenset(address.peer for address in self._bootstrap.given) - {self.peer}

    def reach(self, peer: str) -> ReachStatus:
        """Return how this member reaches `peer`: by an open channel, the result of a try, or the peer's own word."""
        if peer == self.peer:
            return self._reach.status()
        if self.gate.bans(peer):
            return ReachStatus("unreachable", f"banned here: {self.gate.admission.banned[peer]}".rstrip(": "))
        if channels := self.direct.channels.having(peer):
            punched = any(channel.punched for channel in channels)
            return ReachStatus(
                "direct", "hole punched through both NATs" if punched else "a direct channel is open"
            )
        said, dialer = self._protocol.intake.store.newest(peer), self._protocol.dialer
        connected = peer in dialer.connected
        failure = dialer.failures.get(peer)
        if failure is not None and not connected:
            return ReachStatus("unreachable", failure)
        if said is None:
            return ReachStatus("unknown", "no record of this peer yet")
        return self._reach_by_libp2p(peer, said, dialer.paths.get(peer, ()) if connected else ())

    def _reach_by_libp2p(self, peer: str, said: Readiness, paths: Sequence[str]) -> ReachStatus:
        """Return how `peer` is reached without a direct channel; `paths` are those of libp2p's open connections."""
        state, why = said.reach, []
        if paths:
            state = "relayed" if all(map(multiaddr.is_relayed, paths)) else "direct"
        if punching := self._puncher.schedule.failure(peer):
            why.append(f"punching failed because {punching}")
        if blocked := self.direct.failure(peer):
            state = state if paths else "unknown"
            by = "by libp2p only" if paths else "libp2p has no connection to it"
            why.append(f"{by}: cannot open a direct channel: {blocked}")
        elif state != said.reach:
            why.append("a libp2p connection is open")
        return ReachStatus(state, printable("; ".join((*why, said.why))))

    async def start(self) -> None:
        """Start libp2p and begin to look for the swarm, without waiting for peers; raises P2pdError as `P2pd.start`."""
        try:
            self._link.listener.listen()
            self._tasks.keep(self._reach.run)
            self._tasks.keep(self._puncher.run)
            await self._start_listening()
        except BaseException:
            await self.stop()
            raise
        for work in (self._bootstrap.run, self._bootstrap.contacts.run, self._keep_house):
            self._tasks.keep(work)

    async def _start_listening(self) -> None:
        """Take the ports that this member had before, else the usual ones, else free ones; keep those it has chosen."""
        options, memory, asked = self._options, self._bootstrap.memory, self._supervisor.options.listen
        usual, usual_direct = (0, 0) if options.listen else (LIBP2P_PORT, DIRECT_PORT)
        kept, kept_direct = memory.ports
        self.direct.start(kept_direct or usual_direct)
        await self._supervisor.start(kept or usual)
        held = self._supervisor.options.listen
        drawn = next((one.port for one, given in zip(held, asked, strict=True) if not given.port), 0)
        memory.choose(drawn, 0 if options.direct_listen else self.direct.port)

    async def stop(self) -> None:
        """Say farewell in every run, close every channel, end p2pd; idempotent."""
        await self._tasks.stop()
        self._bootstrap.memory.save()
        await self.directory.stop()
        await self.direct.stop()
        self.transport.channels.close()
        await self._link.listener.stop()
        await self._supervisor.stop()
        await self.gate.tasks.stop()
        await self._protocol.traversals.join()
        shutil.rmtree(self._link.control.parent, ignore_errors=True)

    def status(self) -> SwarmStatus:
        """Return a snapshot, without waiting."""
        state, reason = self._standing()
        joining, now = self._bootstrap.machine, time.monotonic()
        return SwarmStatus(
            state=state,
            reason=reason,
            peer=self.peer,
            addresses=tuple(self.addresses),
            dialable=self.transport.dialable,
            bootstrap=joining.status(now),
            returning=joining.returning(now),
            connected=tuple(sorted(self._bootstrap.contacts.alive)),
            p2pd_pid=self._supervisor.pid,
            p2pd_restarts=self._supervisor.restarts,
            direct=self.direct.status(),
            reach=self._reach.status(),
            warnings=(*self._bootstrap.memory.moved, *self._twins(), *self._ended()),
            **self._private(),
        )

    def _private(self) -> dict[str, Any]:
        """The part of the status that only a private swarm has."""
        token, member = self.gate.admission.token, self.membership
        if token is None or member is None:
            return {}
        told = {
            "name": member.invitation.name,
            "key": token.swarm.hex(),
            "role": token.role,
            "until": token.end,
        }
        return told | {"members": tuple(sorted(one.peer for one in self.gate.admission.members(time.time())))}

    def _ended(self) -> list[str]:
        """Return why this member is one no longer, if so."""
        try:
            if (token := self.gate.admission.token) is not None:
                token.check(time.time(), self.gate.admission.revocations.ids)
        except Refused as error:
            return [f"this daemon is out of its swarm: {error}"]
        return []

    def revoke(self, target: str) -> list[str]:
        """Revoke a PeerID or an invitation, here and at all members; return what the list names for it.

        Raises Refused if this home has not the key of its swarm.
        """
        if self.membership is None:
            raise Refused("this daemon is in no private swarm; start it with --swarm NAME")
        ids = revoked_by(target, self.gate.admission.members(time.time()))
        self.gate.adopt(self.membership.revoke(self.identity.path.parent, ids).encode())
        return ids

    def ban(self, peer: str, reason: str | None) -> None:
        """Have this daemon alone part from a peer and refuse it, or lift that if the reason is None; raises Refused."""
        self.gate.admission.banned = ban(self.identity.path.parent, peer, reason)
        if reason is not None:
            self.gate.expel(peer)

    def _keep(self, news: Revocations) -> None:
        if self.membership is not None:
            self.membership.revocations = news
            self.membership.save(self.identity.path.parent)

    def _standing(self) -> tuple[State, str]:
        if self._supervisor.reason:
            return "offline", self._supervisor.reason
        count = len(self._bootstrap.contacts.alive)
        if not count:
            no_network, why = self._bootstrap.machine.why_alone()
            return "offline" if no_network else "searching", why
        met = f"{pluralize(count, 'other peer')} in the swarm"
        waiting = sorted(run for run, state in self.directory.runs.items() if state == "ready")
        if waiting:
            return "ready", f"waits for a group in {', '.join(waiting)}; {met}"
        return "joined", met

    def _twins(self) -> list[str]:
        """Return warnings of other daemons that have this one's identity."""
        ports = {text.split("/")[4] for text in self._listening}
        found = [
            f"--join {address.text} names this daemon's own identity, but not one of its addresses: if another machine "
            "runs there, it has a copy of this home; start one of the two with another --home"
            for address in self._bootstrap.given
            if address.peer == self.peer and ports and address.text not in self.addresses
            if not (multiaddr.is_loopback(address.host) and str(address.port) in ports)
        ]
        if self._protocol.doubled_until > time.monotonic():
            found.append(
                "a peer says that another daemon runs with this one's identity: if there is a copy of this home, "
                "stop one of the two daemons, and start it with another --home"
            )
        return found

    def _part(self, peers: list[str]) -> None:
        """End everything with peers that are members no longer."""
        for peer in peers:
            for channel in (*self.direct.channels.having(peer), *self.transport.channels.having(peer)):
                channel.close("it was expelled from the swarm")
            self._protocol.lose(peer)
            if not self.gate.bans(peer):  # The record of a banned one is shown, and offered to no run.
                self._protocol.intake.store.bury(peer, time.monotonic())
            self._tasks.spawn(self._hang_up(peer))

    async def _hang_up(self, peer: str) -> None:
        with contextlib.suppress(P2pdClientError):
            await self._link.disconnect(peer)

    def _on_reach(self) -> None:
        ranks = ranks_of_own_addresses()
        self._supervisor.addresses.sort(key=lambda text: ranks.get(text.split("/")[2], 0))
        self._bootstrap.machine.dialable = bool(self.addresses)
        self._protocol.tell(addresses=told(self.addresses, MAX_ADDRESSES), serves=not self._reach.hidden)
        listening = [] if self._reach.hidden else told(self._listening, MAX_ADDRESSES)
        hosts = [address.split("/")[2] for address in listening if not multiaddr.is_relayed(address)]
        self.direct.tell(hosts, forwarded=bool(self._options.announce))
        self.directory.renew()
        # Others pass on where this member is: they should not go on telling what is no longer so.
        self._bootstrap.contacts.doubt()

    def _on_addresses(self) -> None:
        _log.info("this machine's addresses are %s", ", ".join(self._supervisor.addresses) or "none")
        self._reach.doubt()
        # The connections of a p2pd that was restarted are gone: the peers met before are tried again at once.
        self._bootstrap.network_changed()
        self._on_reach()

    def _on_peer(self, met: str) -> None:
        self._bootstrap.memory.remember(met, self._protocol.dialer.addresses_of(met))
        self.directory.meet(met)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            for peer in sorted(self._bootstrap.contacts.alive.intersection(self._protocol.peers)):
                self._bootstrap.memory.remember(peer, self._protocol.dialer.addresses_of(peer))
            self._bootstrap.memory.save()
            self.gate.expel()
