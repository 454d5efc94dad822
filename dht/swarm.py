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
from equipoise.dht.interfaces import Rank, ranks_of_own_addresses, told
from equipoise.dht.limits import Caps
from equipoise.dht.membership import Membership, ban, bans, revoked_by
from equipoise.dht.options import SwarmOptions
from equipoise.dht.p2pd import DIRECT_PORT, LIBP2P_PORT, P2pdOptions, claim, has_family, make_runtime_dir
from equipoise.dht.p2pd_client import P2pdClient, P2pdClientError
from equipoise.dht.peer_cache import PeerCache
from equipoise.dht.protocol import RecordProtocol
from equipoise.dht.punch.puncher import Puncher
from equipoise.dht.records import MAX_ADDRESSES, MAX_NAME_CHARACTERS, Readiness
from equipoise.dht.sanitize import printable
from equipoise.dht.state import ReachStatus, State, SwarmStatus
from equipoise.dht.supervisor import Supervisor
from equipoise.dht.transport import Libp2pTransport
from equipoise.tasks import TaskSet

DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
"""Every address of this machine, at the usual port if it is free; without a family that the machine does not have."""
HOUSEKEEPING_SECONDS = 5.0
"""Time after which good peers are written down with their addresses again."""
WAYS_BACK = 4
"""Most peers that are written down as soon as they are met; further ones wait for housekeeping."""

_log = logging.getLogger(__name__)


class Swarm:
    """One member of a swarm.

    Attributes:
        identity: Its key, kept in the home.
        peer: Its PeerID.
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
        self._options = options or SwarmOptions()
        self._home = home
        self.membership = membership
        self._join = [multiaddr.parse_address(text) for text in dict.fromkeys(self._options.join)]
        if membership is not None:
            self._join += multiaddr.well_formed(membership.invitation.addresses)
        usual = filter(has_family, map(multiaddr.parse_listen, DEFAULT_LISTEN))
        named = map(multiaddr.parse_listen, self._options.listen)
        self._listen = () if self._options.client_mode else tuple(named) or tuple(usual)
        for text in self._options.announce:
            multiaddr.parse_announce(text)
        self.identity = load_or_create(home)
        self.peer = self.identity.peer
        self._memory = PeerCache(home)
        self._runtime = make_runtime_dir()
        self._build()
        self._ports = contextlib.ExitStack()
        self._moved: list[str] = []
        self._supervisor = Supervisor(self._link, self._dialer, self._on_launched, self._on_addresses)
        self._tasks = TaskSet()
        self._ranks: dict[str, Rank] = {}

    def _build(self) -> None:
        options, peer, dialable = self._options, self.peer, bool(self._listen)
        member = self.membership
        token, news = (
            (None, None) if member is None else (member.token(self._home, time.time()), member.revocations)
        )
        gate = self.gate = Gate(Admission(token, news, bans(self._home)))
        gate.on_expelled, gate.keep = self._part, self._keep
        link = self._link = P2pdClient(self._runtime / "p2pd.sock", gate)
        policy = DialPolicy(private_networks)
        dialer = self._dialer = Dialer(link, peer, policy)
        gate.reach, gate.host = dialer.reach, dialer.host_of
        protocol = self._protocol = RecordProtocol(peer, dialable, link, dialer)
        hosts = dict.fromkeys(one.host for one in self._listen)
        listen = [multiaddr.ListenAddress(host, host, 0) for host in hosts]
        if listen and options.direct_listen:
            listen = [multiaddr.parse_listen(text) for text in options.direct_listen]
        direct = DirectTransport(self.identity, listen, options.channel, policy, gate)
        self.direct = direct
        hidden = "" if dialable else "it was started in client mode"
        relay = options.relay_bandwidth if options.relay else None
        reach = self._reach = Reach(link, protocol, direct, hidden, relay)
        reach.on_change = self._on_reach
        reach.listening = lambda: self._listening
        protocol.tell(relays=options.relay)
        self.transport = Libp2pTransport(peer, lambda: reach.dialable, link, dialer)
        direct.channels.caps = self.transport.channels.caps = Caps(options.upload, options.download)
        first = self._memory.first_sequence
        self.directory = RunDirectory(self.identity, options, protocol, reach, direct, first)
        protocol.on_peer = self._on_peer
        others = [address for address in self._join if address.peer != peer]
        self._bootstrap = Bootstrap(others, self._remembered, link, protocol)
        if member is not None:
            self._bootstrap.machine.way_in = "invite others with: equipoise swarm invite"
        self._puncher = Puncher(link, dialer, direct, reach)

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
        best = sorted(far, key=lambda text: (text not in reached, self._ranks.get(text.split("/")[2], 0)))
        return [f"{address}/p2p/{self.peer}" for address in best or addresses]

    def name(self, peer: str) -> str:
        """Return the name of `peer`, by its own word, fit for a terminal; empty if it has not told one."""
        if peer == self.peer:
            return self._options.name
        said = self._protocol.intake.store.newest(peer)
        return "" if said is None else printable(said.name, MAX_NAME_CHARACTERS)

    @property
    def named(self) -> frozenset[str]:
        """PeerIDs of the peers that this daemon's user named: by `--join`, or by an invitation."""
        return frozenset(address.peer for address in self._join) - {self.peer}

    def role(self, peer: str) -> str:
        """Return the role of this member or of another one; all are trainers in an open swarm."""
        return self.gate.admission.role(peer)

    def standing(self, peer: str) -> str:
        """Return what `peer` may do in rounds: its role, or `banned`."""
        return "banned" if self.gate.bans(peer) else self.role(peer)

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
        said = self._protocol.intake.store.newest(peer)
        connected = peer in self._dialer.connected
        failure = self._dialer.failures.get(peer)
        if failure is not None and not connected:
            return ReachStatus("unreachable", failure)
        if said is None:
            return ReachStatus("unknown", "no record of this peer yet")
        return self._reach_by_libp2p(peer, said, self._dialer.paths.get(peer, ()) if connected else ())

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
            listen = self._take_ports()
            self._link.listener.listen()
            self._tasks.keep(self._reach.run)
            self._tasks.keep(self._puncher.run)
            await self._supervisor.start(self._p2pd_options(listen))
        except BaseException:
            await self.stop()
            raise
        for work in (self._bootstrap.run, self._bootstrap.contacts.run, self._keep_house):
            self._tasks.keep(work)

    def _take_ports(self) -> tuple[multiaddr.ListenAddress, ...]:
        """Take the ports that this member had before, else the usual ones, else free ones; keep what is taken."""
        options, (kept, kept_direct) = self._options, self._memory.ports
        usual, usual_direct = (0, 0) if options.listen else (LIBP2P_PORT, DIRECT_PORT)
        wished, wished_direct = kept or usual, kept_direct or usual_direct
        self.direct.start(wished_direct)
        direct = 0 if options.direct_listen else self.direct.port
        listen = claim(self._listen, wished, self._ports)
        drawn = next((one.port for one, asked in zip(listen, self._listen, strict=True) if not asked.port), 0)
        self._moved = [
            f"port {before} is used by another program; this daemon listens on port {now} from now on"
            for before, now in ((kept, drawn), (kept_direct, direct))
            if before and now and before != now
        ]
        self._memory.ports = drawn or kept, direct or kept_direct
        self._memory.save()
        return listen

    def _p2pd_options(self, listen: tuple[multiaddr.ListenAddress, ...]) -> P2pdOptions:
        upnp = self._options.upnp
        return P2pdOptions(
            identity=self.identity.path,
            control=self._runtime / "p2pd.sock",
            listen=listen,
            announce=tuple(self._options.announce),
            map_ports=behind_router(one.host for one in listen) if upnp is None else upnp,
        )

    async def stop(self) -> None:
        """Say farewell in every run, close every channel, end p2pd; idempotent."""
        await self._tasks.stop()
        self._memory.save()
        await self.directory.stop()
        await self.direct.stop()
        self.transport.channels.close()
        await self._link.listener.stop()
        await self._supervisor.stop()
        await self.gate.tasks.stop()
        await self._protocol.traversals.join()
        self._ports.close()
        shutil.rmtree(self._runtime, ignore_errors=True)

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
            warnings=(*self._moved, *self._twins(), *self._ended()),
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
        self.gate.adopt(self.membership.revoke(self._home, ids).encode())
        return ids

    def ban(self, peer: str, reason: str | None) -> None:
        """Have this daemon alone part from a peer and refuse it, or lift that if the reason is None; raises Refused."""
        self.gate.admission.banned = ban(self._home, peer, reason)
        if reason is not None:
            self.gate.expel(peer)

    def _keep(self, news: Revocations) -> None:
        if self.membership is not None:
            self.membership.revocations = news
            self.membership.save(self._home)

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
            for address in self._join
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
        self._tell_addresses()
        self._protocol.tell(serves=not self._reach.hidden)
        self.directory.renew()
        # Others pass on where this member is: they should not go on telling what is no longer so.
        self._bootstrap.contacts.doubt()

    def _tell_addresses(self) -> None:
        self._ranks = ranks_of_own_addresses()
        self._bootstrap.machine.dialable = bool(self.addresses)
        self._protocol.tell(addresses=told(self.addresses, MAX_ADDRESSES))
        listening = [] if self._reach.hidden else told(self._listening, MAX_ADDRESSES)
        hosts = [address.split("/")[2] for address in listening if not multiaddr.is_relayed(address)]
        self.direct.tell(hosts, forwarded=bool(self._options.announce))

    def _on_launched(self) -> None:
        self._tell_addresses()
        self._reach.doubt()
        # The connections of a p2pd that was restarted are gone: the peers met before are tried again at once.
        self._bootstrap.network_changed()
        self.directory.renew()

    def _on_addresses(self) -> None:
        _log.info("this machine's addresses are %s", ", ".join(self._supervisor.addresses) or "none")
        self._reach.doubt()
        self._bootstrap.network_changed()
        self._on_reach()

    def _remembered(self) -> list[str]:
        for peer, addresses in self._memory.peers.items():
            self._dialer.hear(peer, addresses)
        return [peer for peer in reversed(self._memory.peers) if peer != self.peer]

    def _on_peer(self, met: str) -> None:
        known, addresses = self._memory.peers, self._dialer.addresses_of(met)
        is_news = known.get(met) != addresses
        self._memory.remember(met, addresses)
        if is_news and len(known) <= WAYS_BACK:
            self._memory.save()  # A daemon that is killed in the next moment returns by it.
        self.directory.meet(met)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            for peer in sorted(self._bootstrap.contacts.alive.intersection(self._protocol.peers)):
                self._memory.remember(peer, self._dialer.addresses_of(peer))
            self._memory.save()
            self.gate.expel()
