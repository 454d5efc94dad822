"""Many followers, their rounds and downloads, and faults from a seed: equal ids are equal states, and all end alike."""

from __future__ import annotations

import random
import zlib

import pytest

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.replication import events
from equipoise.averaging.replication.events import (
    Check,
    Checked,
    Commit,
    DownloadFailed,
    Due,
    FetchMean,
    FetchSnapshot,
    Heal,
    MeanFetched,
    SnapshotFetched,
    StepAlone,
    SteppedAlone,
)
from equipoise.averaging.replication.follower import ATTENDANCE, Follower
from equipoise.averaging.replication.lineage import beginning
from equipoise.averaging.replication.log import HELD_MEANS, MAX_MISSED
from equipoise.averaging.state import StateId, group_state
from fakes import rounds


def mixed(*parts: object) -> int:
    """A number that depends on all of them, and is the same in every process."""
    return zlib.crc32(repr(parts).encode())


class Peer:
    """A follower, and what a driver would do for it, with a number in place of parameters."""

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value
        self.machine = Follower(name, beginning(str(value)), 0.0, patience=3.0)
        self.wanted: int | None = None
        self.missed: StateId | None = None

    def tell(self, event: events.Event, now: float, image: int = 0) -> None:
        for action in self.machine.handle(event, now):
            match action:
                case Commit(entry):
                    assert isinstance(entry.values, int)
                    self.value = mixed(self.value, entry.values)
                case FetchSnapshot(at_least):
                    self.wanted, self.missed = at_least, None
                case FetchMean(after):
                    self.wanted, self.missed = None, after
                case Heal():
                    self.value = image
                case Check():
                    self.tell(Checked(str(self.value)), now)
                case StepAlone():
                    self.value = mixed(self.value, self.name)
                    self.tell(SteppedAlone(str(self.value)), now)


@pytest.mark.parametrize("seed", range(60))
def test_equal_ids_are_equal_states_and_in_the_end_all_are_in_step(seed: int) -> None:
    """Peers that begin alike or not, miss rounds, get snapshots late, are replaced by newcomers; then the faults
    stop."""
    chance = random.Random(seed)
    peers = [Peer(f"p{at}", chance.choice([0, 0, at])) for at in range(chance.randint(2, 5))]
    kept: dict[StateId, int] = {}
    for now in range(140):
        calm = now > 90
        if not calm and chance.random() < 0.05:
            gone = chance.randrange(len(peers))
            peers[gone] = Peer(f"{peers[gone].name}'", chance.choice([0, now]))
        group = [peer for peer in peers if calm or chance.random() < 0.8]
        _round(group, now, chance, calm, kept)
        for peer in peers:
            _recover(peer, now, chance, calm, kept)
            _fetch(peer, peers, now, chance, calm)
        known: dict[StateId, int] = {}
        for peer in peers:
            assert known.setdefault(peer.machine.state, peer.value) == peer.value
            assert len(peer.machine.log.held) <= HELD_MEANS + MAX_MISSED
    assert all(peer.machine.follows for peer in peers), [peer.machine.reason for peer in peers]
    if len({peer.machine.state for peer in peers}) > 1:
        # Two islands keep their states as long as two are left that have trained with each other (`trust`).
        for peer in peers:
            island = {one.name for one in peers if one.machine.state == peer.machine.state}
            assert island & set(peer.machine.known.names), f"{peer.name} has trained with none of its island"


def _round(group: list[Peer], now: int, chance: random.Random, calm: bool, kept: dict[StateId, int]) -> None:
    weights = {p.name: 8.0 if p.machine.follows else p.machine.attendance() for p in group}
    contributors = {name: weight for name, weight in weights.items() if weight > 0}
    if len(contributors) < 2:
        for peer in group:
            peer.tell(rounds.failed("too few"), now)
            peer.tell(Due(company=chance.random() < 0.5 or calm), now)
        return
    states = {peer.name: peer.machine.claim for peer in group if peer.machine.claim is not None}
    members = sorted(peer.name for peer in group)
    mean = mixed(now, *members)
    before = group_state(states.values())
    if before is not None and any(weight > ATTENDANCE for weight in weights.values()):
        kept[before] = mean
    for peer in group:
        event: events.Event = rounds.succeeded(states, str(mean), contributors, members, values=mean)
        if not calm and chance.random() < 0.1:
            event = rounds.failed("it was cut off", formed=chance.random() < 0.8)
        peer.tell(event, now)


def _recover(peer: Peer, now: int, chance: random.Random, calm: bool, kept: dict[StateId, int]) -> None:
    """What it missed comes now and then, and now and then what somebody has made up."""
    while (after := peer.missed) is not None:
        if peer.machine.behind and chance.random() < (0.2 if calm else 0.5):
            return
        peer.missed = None
        found = kept.get(after, 0)
        if not calm and chance.random() < 0.1:
            found = mixed("lie", now)
        given = {peer.name: 8.0} if chance.random() < 0.5 else {}
        outcome = Outcome(ok=True, reason="", states={"x": after}, digest=str(found), contributors=given)
        event: events.Event = MeanFetched(outcome, found)
        if not found or (not calm and chance.random() < 0.1):
            event = DownloadFailed("nobody keeps it")
        peer.tell(event, now)


def _fetch(peer: Peer, peers: list[Peer], now: int, chance: random.Random, calm: bool) -> None:
    if peer.wanted is None or chance.random() < (0.2 if calm else 0.5):
        return
    donors = [
        one
        for one in peers
        if one is not peer and one.machine.claim is not None and one.machine.state.epoch >= peer.wanted
    ]
    if donors and (calm or chance.random() < 0.8):
        donor = chance.choice(donors)
        image = donor.machine.state, donor.value
        peer.wanted = None
        peer.tell(SnapshotFetched(image[0]), now, image[1])
    elif chance.random() < 0.3:
        peer.wanted = None
        peer.tell(DownloadFailed("nobody has it"), now)
