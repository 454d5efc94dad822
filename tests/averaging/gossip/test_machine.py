"""The machine that forms pairs: one exchange at a time, an answer to every proposal, one pair of two that cross."""

from __future__ import annotations

from random import Random

import pytest

from equipoise.averaging.gossip.machine import BUSY_SECONDS, LISTEN_SECONDS, PAIR, REFUSED_SECONDS, Pairing
from equipoise.averaging.manifest import NONCE_BYTES, Join, Manifest
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.messages import GroupFormed, JoinRefused, JoinRequest, Whereabouts
from equipoise.averaging.options import Needs
from equipoise.averaging.outcome import Exchanging, Gathering, Idle, NoPeers
from fakes.matchmaking import OTHER_SPEC, RUN, SPEC, asks, join, ready, seen, sent, signer, verify


def pairing(name: str, *others: str, seed: int = 0) -> Pairing:
    one = Pairing(Context(RUN, SPEC, name, Needs(16), signer(name), verify), "random", Random(seed))
    one.handle(events.Woke(), 0.0)
    one.handle(seen(*others), 0.0)
    for other in others:
        one.handle(events.MessageReceived(other, Whereabouts(RUN, 0)), 0.0)
    return one


def formed(actions: list[events.Action]) -> list[Manifest]:
    return [action.manifest for action in actions if isinstance(action, events.Form)]


def declined(actions: list[events.Action]) -> list[str]:
    assert not formed(actions)
    return [action.peer for action in actions if isinstance(action, events.Decline)]


def pair(coordinator: str, *joins: Join) -> events.MessageReceived:
    return events.MessageReceived(coordinator, GroupFormed(RUN, Manifest.of(coordinator, list(joins)), 0.0))


def test_a_free_peer_proposes_to_one_other_and_begins_when_the_pair_is_made() -> None:
    one = pairing("alice", "bob", "carol", "dave")
    ((partner, request),) = sent(one.handle(ready(), 1.0), JoinRequest)
    assert isinstance(one.state, Gathering)
    (manifest,) = formed(one.handle(pair(partner, request.join, join(partner)), 1.1))
    assert manifest.peers == tuple(sorted(("alice", partner)))
    assert one.state == Exchanging(PAIR, 0)
    one.handle(events.RoundEnded(0), 2.0)
    assert (one.state, one.round) == (Idle(3), 1)


def test_a_free_partner_makes_the_pair_at_once() -> None:
    one = pairing("bob", "alice")
    ((_, request),) = sent(one.handle(ready(), 1.0), JoinRequest)
    one.handle(events.MessageReceived("alice", JoinRefused(RUN, request.join.ticket, "", wait=9.0)), 1.1)
    actions = one.handle(asks("alice", 7), 1.2)
    ((to, message),) = sent(actions, GroupFormed)
    assert to == "alice"
    assert formed(actions) == [message.manifest]
    assert message.manifest.round == 7, "the number is that of the peer that proposed"
    assert one.round == 1, "each peer counts its own exchanges"


@pytest.mark.parametrize(("name", "other"), [("alice", "bob"), ("bob", "alice")])
def test_two_that_propose_to_each_other_make_one_pair(name: str, other: str) -> None:
    one = pairing(name, other)
    one.handle(ready(), 1.0)
    actions = one.handle(asks(other), 1.1)
    if name < other:
        assert len(formed(actions)) == len(sent(actions, GroupFormed)) == 1
    else:
        assert [message.wait for _, message in sent(actions, JoinRefused)] == [BUSY_SECONDS]
        assert one.ready


def test_a_busy_peer_says_for_how_long() -> None:
    one = pairing("alice", "bob", "carol")
    ((_, refusal),) = sent(one.handle(asks("bob"), 1.0), JoinRefused)
    assert refusal.wait == BUSY_SECONDS
    ((partner, request),) = sent(one.handle(ready(), 2.0), JoinRequest)
    third = ({"bob", "carol"} - {partner}).pop()
    assert sent(one.handle(asks(third), 2.1), JoinRefused), "it waits for another's answer"
    one.handle(pair(partner, request.join, join(partner)), 2.2)
    ((_, refusal),) = sent(one.handle(asks(third), 2.3), JoinRefused)
    assert refusal.wait, "it is in an exchange"


def test_a_declined_peer_listens_and_then_asks_another() -> None:
    one = pairing("alice", "bob", "carol")
    ((first, request),) = sent(one.handle(ready(), 1.0), JoinRequest)
    refusal = JoinRefused(RUN, request.join.ticket, "", wait=9.0)
    assert not sent(one.handle(events.MessageReceived(first, refusal), 1.0), JoinRequest)
    assert one.deadline <= 1.0 + 1.5 * LISTEN_SECONDS
    ((second, _),) = sent(one.handle(events.Woke(), one.deadline), JoinRequest)
    assert second != first


def test_a_silent_partner_is_left_and_not_asked_for_a_while() -> None:
    one = pairing("alice", "bob", "carol")
    ((first, _),) = sent(one.handle(ready(), 1.0), JoinRequest)
    asked: list[str] = []
    while one.deadline < REFUSED_SECONDS:
        speaks = events.MessageReceived(first, Whereabouts(RUN, 0))  # But not of the proposal.
        for event in (events.Woke(), speaks):
            asked += [to for to, _ in sent(one.handle(event, one.deadline), JoinRequest)]
    assert asked
    assert first not in asked


def test_of_two_partners_that_accept_the_first_counts() -> None:
    one = pairing("alice", "bob", "carol")
    ((first, request),) = sent(one.handle(ready(), 1.0), JoinRequest)
    one.handle(events.MessageReceived(first, JoinRefused(RUN, request.join.ticket, "", wait=9.0)), 1.1)
    ((second, _),) = sent(one.handle(events.Woke(), one.deadline), JoinRequest)
    late, in_time = pair(first, request.join, join(first)), pair(second, request.join, join(second))
    assert len(formed(one.handle(in_time, 2.0))) == 1
    assert declined(one.handle(late, 2.1)) == [first], "a peer is in one exchange at a time"
    one.handle(events.RoundEnded(0), 3.0)
    one.handle(ready(nonce=b"m" * NONCE_BYTES), 3.1)
    assert declined(one.handle(late, 3.2)) == [first], "the join is of an exchange that is over"
    assert one.ready


def test_a_partner_that_accepts_a_peer_that_has_withdrawn_is_told_so() -> None:
    one = pairing("alice", "bob")
    ((_, request),) = sent(one.handle(ready(), 1.0), JoinRequest)
    one.handle(events.Withdrew(), 1.1)
    assert declined(one.handle(pair("bob", request.join, join("bob")), 1.2)) == ["bob"]


def test_a_pair_that_is_forged_is_not_begun() -> None:
    one = pairing("alice", "bob")
    ((_, request),) = sent(one.handle(ready(), 1.0), JoinRequest)
    other = join("carol", nonce=b"x" * NONCE_BYTES)
    assert not formed(one.handle(pair("bob", other, join("bob")), 1.1))
    stolen = Manifest.of("bob", [request.join, join("bob", spec=OTHER_SPEC)])
    assert not formed(one.handle(events.MessageReceived("bob", GroupFormed(RUN, stolen, 0.0)), 1.1))
    assert one.ready


def test_a_join_that_is_forged_or_of_another_spec_is_refused() -> None:
    one = pairing("alice", "bob")
    one.handle(ready(), 1.0)
    one.handle(events.PeerLost("bob"), 1.0)
    for request in (
        asks("bob", spec=OTHER_SPEC),
        events.MessageReceived("bob", JoinRequest(RUN, join("carol"))),
    ):
        actions = one.handle(request, 1.1)
        assert not formed(actions)
        assert len(sent(actions, JoinRefused)) == 1


def test_two_that_cannot_be_dialled_are_no_pair() -> None:
    one = pairing("alice", "bob")
    one.handle(seen("bob", dialable=False), 0.5)
    assert not sent(one.handle(ready(dialable=False), 1.0), JoinRequest)
    actions = one.handle(asks("bob", dialable=False), 1.1)
    assert [message.wait for _, message in sent(actions, JoinRefused)] == [0.0]
    assert one.ready


def test_an_exchange_is_never_announced() -> None:
    one = Pairing(Context(RUN, SPEC, "alice", Needs(16), signer("alice"), verify), "random", Random(0))
    assert one.state == NoPeers()
    actions = one.handle(events.Woke(), 0.0)
    actions += one.handle(seen("bob"), 0.0)
    actions += one.handle(events.MessageReceived("bob", Whereabouts(RUN, 0)), 0.0)
    actions += one.handle(ready(), 1.0)
    actions += one.handle(events.Withdrew(), 2.0)
    assert not any(isinstance(action, events.Announce) for action in actions)


def test_a_join_stated_anew_is_proposed_in_place_of_the_first() -> None:
    one = pairing("alice", "bob")
    ((_, request),) = sent(one.handle(ready(), 1.0), JoinRequest)
    ((_, anew),) = sent(one.handle(ready(nonce=b"m" * NONCE_BYTES), 1.1), JoinRequest)
    assert declined(one.handle(pair("bob", request.join, join("bob")), 1.2)) == ["bob"]
    assert len(formed(one.handle(pair("bob", anew.join, join("bob")), 1.3))) == 1


def test_the_partner_of_a_failed_exchange_comes_last_longer_each_time() -> None:
    one = pairing("alice", "bob", "carol")

    def exchange(partner: str, ok: bool, now: float) -> None:
        one.handle(ready(), now)
        one._asked = None
        assert formed(one.handle(asks(partner), now))
        one.handle(events.RoundEnded(one._exchanging.round if one._exchanging else 0, ok), now)

    def asked(now: float) -> set[str]:
        found = set()
        for seed in range(8):
            one._chance = Random(seed)
            for other in ("bob", "carol"):  # They answer.
                one.handle(events.MessageReceived(other, Whereabouts(RUN, 0)), now)
            found |= {peer for peer, _ in sent(one.handle(ready(), now), JoinRequest)}
        one.handle(events.Withdrew(), now)
        return found

    assert asked(1.0) == {"bob", "carol"}
    exchange("bob", False, 2.0)
    assert asked(3.0) == asked(61.0) == {"carol"}
    one.handle(ready(), 61.5)
    one._asked = None
    ((_, refusal),) = sent(one.handle(asks("bob"), 61.5), JoinRefused)
    assert (refusal.detail, refusal.wait) == ("the last exchange with it failed", REFUSED_SECONDS)
    assert asked(62.0) == {"bob", "carol"}
    exchange("bob", False, 63.0)
    assert asked(182.0) == {"carol"}, "twice as long"
    exchange("carol", False, 182.5)
    assert asked(182.6) == {"bob", "carol"}, "nobody else is left"
    exchange("bob", True, 182.7)
    assert asked(182.8) == {"bob"}, "an exchange ends it"
