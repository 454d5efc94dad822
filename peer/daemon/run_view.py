"""What people see of a run that this daemon takes part in: its status, and its peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from equipoise.averaging.ledger import Given
from equipoise.averaging.outcome import NoPeers
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.strategy import Federated
from equipoise.dht.sanitize import printable
from equipoise.limits import Candidate
from equipoise.peer.status import Exchanges, PeerRow, RunStatus

if TYPE_CHECKING:
    from equipoise.averaging.aio.run_driver import RunDriver
    from equipoise.dht.swarm import Swarm
    from equipoise.peer.daemon.session import Session

JUST_JOINED = "it has just been joined"


def run_status(session: Session) -> RunStatus:
    """The run's part of the daemon's status."""
    drivers = session.drivers
    spec, run_driver = drivers.specs[drivers.purpose], drivers.in_use.get(drivers.purpose)
    transfers = [] if session.leaving else [one.transfer.standing for one in drivers.in_use.values()]
    shown = RunStatus(
        name=session.name,
        purpose=drivers.purpose,
        spec=spec.hash,
        codec=spec.options.codec,
        group_size=spec.options.group_size,
        values=spec.schema.size,
        state=NoPeers(JUST_JOINED),
        reason=JUST_JOINED,
        transfer="; ".join(filter(None, transfers)),
        told={topic: line for topic, line in session.told.items() if line},
        strategy=spec.options.strategy,
    )
    if run_driver is None:
        return shown
    drawn, contributed = _draw(session, run_driver)
    gathering = run_driver.gathering
    return msgspec.structs.replace(
        shown,
        state=run_driver.search.state,
        accumulated=run_driver.search.announcer.accumulated,
        reason=run_driver.search.reason if gathering is None else gathering.reason,
        round=run_driver.round,
        rounds_ok=run_driver.counts.ok,
        rounds_failed=run_driver.counts.failed,
        last=run_driver.counts.last[-1] if run_driver.counts.last else None,
        exchanges=_exchanges(run_driver) if spec.strategy.pairs else None,
        drawn=drawn,
        contributed=contributed,
        advice=run_driver.advice,
    )


async def peer_rows(session: Session, swarm: Swarm) -> list[PeerRow]:
    """All known peers of the purposes in use."""
    rows = []
    for purpose, run_driver in list(session.drivers.in_use.items()):
        spec = session.drivers.specs[purpose]
        directory = swarm.directory
        known = [*await directory.peers(spec.name), *directory.banned(spec.name)]
        given = session.ledger.of
        rows += [_row(spec, run_driver, swarm, found, given(found.peer)) for found in known if not found.left]
    return rows


def _row(spec: RunSpec, run_driver: RunDriver, swarm: Swarm, found: Candidate, given: Given) -> PeerRow:
    reach = swarm.reach(found.peer)
    return PeerRow(
        run=spec.name,
        peer=found.peer,
        me=found.peer == swarm.peer,
        ready=found.ready,
        round=found.round,
        dialable=found.dialable,
        bandwidth=found.bandwidth,
        accumulated=found.accumulated,
        same_spec=found.spec == spec.hash,
        reach=reach.state,
        why=reach.reason,
        differs=run_driver.search.comparison.difference(found.peer),
        name=printable(found.name),
        tags=found.tags,
        role=swarm.gate.admission.role(found.peer),
        banned=swarm.gate.bans(found.peer),
        faults=run_driver.search.machine.context.deeds.told(found.peer),
        given=given,
    )


def _draw(session: Session, run_driver: RunDriver) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The peers that train in the next round of a federated run, and those that have contributed to it."""
    gathering = run_driver.gathering
    if gathering is not None and gathering.drawn:
        return gathering.drawn, gathering.contributed
    strategy = session.drivers.specs[session.drivers.purpose].strategy
    if session.held is not None and isinstance(strategy, Federated):
        return run_driver.search.draw(session.held).peers, ()
    return (), ()


def _exchanges(run_driver: RunDriver) -> Exchanges:
    """The exchanges of a gossip run, in figures."""
    apart = [one.apart for one in run_driver.counts.last if one.apart is not None]
    return Exchanges(
        partners=run_driver.search.membership.count,
        ok=run_driver.counts.ok,
        failed=run_driver.counts.failed,
        in_doubt=run_driver.counts.in_doubt,
        spread=sum(apart) / len(apart) if apart else None,
    )
