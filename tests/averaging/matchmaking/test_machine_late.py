"""Late contributions: what is bound to a state counts in the round that it was made for, or never."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from equipoise.averaging.manifest import NONCE_BYTES, Manifest
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.closing import ClosePolicy
from equipoise.averaging.matchmaking.coordinator import Coordinator
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.state import StateId
from equipoise.averaging.timing import BEHIND_SECONDS, INITIAL_WAIT, INVITE_SECONDS, KEEPALIVE
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from fakes.matchmaking import RUN, asks, elapse, formed, join, machine, meet, ready, roles, seen, sent, tells

BEFORE = StateId(3, "b" * 64)
AFTER = StateId(4, "a" * 64)
EARLIER = StateId(2, "e" * 64)
STRANGE = StateId(2**40, "5" * 64)


def late(actions: list[events.Action]) -> list[events.Late]:
    return [each for each in actions if isinstance(each, events.Late)]


def closed_without(
    absent: str, coordinator: str, *members: str, weight: float = 1.0, strangers: Sequence[str] = ()
) -> tuple[Matchmaking, float]:
    """A coordinator that has closed round 0 of `BEFORE` without one peer, with strangers of `STRANGE`; and when."""
    one = machine(coordinator, absent, *members, *strangers)
    one.handle(ready(weight, state=BEFORE), 1.0)
    for member in (*members, *strangers):
        state = STRANGE if member in strangers else BEFORE
        one.handle(asks(member, weight=weight, state=state), 1.0)
    elapse(one, 1.0, 1.0 + INVITE_SECONDS)
    one.handle(events.MessageReceived(absent, wire.Whereabouts(RUN, 0)), 1.0 + INVITE_SECONDS)
    assert sent(elapse(one, 1.0 + INVITE_SECONDS, 1.0 + INITIAL_WAIT), wire.GroupFormed)
    return one, 1.0 + INITIAL_WAIT


def test_a_contribution_that_comes_too_late_is_told_by_how_many_seconds() -> None:
    coordinator, second, [absent] = roles(3)
    one, closed_at = closed_without(absent, coordinator, second)
    [(_, refusal)] = sent(one.handle(asks(absent, state=BEFORE), closed_at + 1.5), wire.JoinRefused)
    assert refusal.late == pytest.approx(1.5)
    assert refusal.round == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"state": AFTER},
        {"state": None},
        {"state": BEFORE, "weight": ATTENDANCE_LIMIT},
        {"state": BEFORE, "weight": 0.0},
    ],
    ids=["of the state after the round", "without a state", "attendance", "an observer"],
)
def test_what_the_closed_round_would_not_have_counted_is_not_late(fields: dict[str, object]) -> None:
    coordinator, second, [absent] = roles(3)
    one, closed_at = closed_without(absent, coordinator, second)
    [(_, refusal)] = sent(one.handle(asks(absent, **fields), closed_at + 1.5), wire.JoinRefused)
    assert (refusal.late, refusal.round) == (0.0, 1)


def test_nothing_is_late_for_a_round_that_only_introduced_its_members() -> None:
    coordinator, second, [absent] = roles(3)
    one, closed_at = closed_without(absent, coordinator, second, weight=ATTENDANCE_LIMIT)
    [(_, refusal)] = sent(one.handle(asks(absent, state=BEFORE), closed_at + 1.5), wire.JoinRefused)
    assert (refusal.late, refusal.round) == (0.0, 1)


def joining(
    weight: float = 1.0, state: StateId | None = BEFORE
) -> tuple[Matchmaking, str, str, wire.JoinRequest]:
    """A machine in a run of three that has asked the coordinator; the second in line; its request."""
    coordinator, second, [name] = roles(3, round=7)
    one = machine(name, coordinator, second, round=7)
    one.context.next_round.floor = 7
    one.context.membership.shared((coordinator, second))
    [(_, request)] = sent(one.handle(ready(weight, state=state), 1.0), wire.JoinRequest)
    return one, coordinator, second, request


def test_a_late_contribution_ends_the_search_and_does_not_slip_into_the_next_round() -> None:
    one, coordinator, _, request = joining()
    refusal = wire.JoinRefused(RUN, request.join.ticket, "the group of round 7 has closed", 8, late=1.25)
    actions = one.handle(events.MessageReceived(coordinator, refusal), 1.1)
    [told] = late(actions)
    assert told.seconds == 1.25
    assert "the group of round 7 has closed" in told.reason
    assert not sent(actions, wire.JoinRequest)
    assert not one.ready
    again = one.handle(ready(state=AFTER, nonce=b"m" * NONCE_BYTES), 2.0)
    assert [request.join.round for _, request in sent(again, wire.JoinRequest)] == [8]


def test_attendance_goes_on_to_the_next_round_whatever_the_coordinator_says() -> None:
    one, coordinator, _, request = joining(weight=ATTENDANCE_LIMIT)
    refusal = wire.JoinRefused(RUN, request.join.ticket, "closed", 8, late=1.25)
    actions = one.handle(events.MessageReceived(coordinator, refusal), 1.1)
    assert not late(actions)
    assert one.ready
    assert one.round == 8


@pytest.mark.parametrize("liar", ["second", "stranger"])
def test_only_the_coordinator_that_was_asked_can_say_late(liar: str) -> None:
    one, _, second, request = joining()
    refusal = wire.JoinRefused(RUN, request.join.ticket, "closed", 8, late=1.25)
    actions = one.handle(events.MessageReceived(second if liar == "second" else liar, refusal), 1.1)
    assert not late(actions)
    assert one.ready
    assert one.round == 7


def test_a_peer_that_coordinated_the_round_itself_is_late_for_it() -> None:
    coordinator, second, [third] = roles(3)
    one = machine(coordinator, second, third)
    for name in (second, third):
        one.handle(asks(name, state=BEFORE), 1.0)
    one.context.membership.hear(coordinator, 1.0)
    assert sent(elapse(one, 1.0, 1.0 + INITIAL_WAIT), wire.GroupFormed)
    actions = one.handle(ready(state=BEFORE), 6.0)
    [told] = late(actions)
    assert told.seconds == pytest.approx(5.0 - INITIAL_WAIT)
    assert one.round == 1
    assert not late(one.handle(ready(state=AFTER, nonce=b"m" * NONCE_BYTES), 6.1))


@pytest.mark.parametrize("round", [8, 9, 50])
def test_word_that_the_others_are_ahead_makes_it_late_only_once_its_coordinator_had_time_to_say_so(
    round: int,
) -> None:
    one, coordinator, second, request = joining()
    accepted = wire.JoinAccepted(RUN, request.join.ticket, KEEPALIVE, 1, 3, short=True)
    one.handle(seen(coordinator, second, round=round), 1.2)
    now, actions = 1.2, list[events.Action]()
    while not late(actions) and now < 9.0:
        assert not sent(actions, wire.JoinRequest), "its manifest may be on the way"
        now += KEEPALIVE
        actions = one.handle(events.MessageReceived(coordinator, accepted), now)
    assert 1.2 + BEHIND_SECONDS <= now <= 1.2 + BEHIND_SECONDS + 2 * KEEPALIVE
    assert not sent(actions, wire.JoinRequest)
    assert one.round == round


def test_a_peer_whose_coordinator_died_asks_the_next_for_the_same_round() -> None:
    """The group may have formed with it, and the coordinator died before it told all members."""
    one, coordinator, second, _ = joining()
    one.handle(seen(coordinator, second, round=8), 1.1)
    actions = one.handle(events.PeerLost(coordinator), 1.2)
    assert not late(actions)
    assert [(peer, request.join.round) for peer, request in sent(actions, wire.JoinRequest)] == [(second, 7)]


def test_a_peer_that_has_just_started_takes_the_number_of_the_others() -> None:
    one = machine("alice")
    one.handle(ready(state=BEFORE), 1.0)
    one.handle(seen("bob", "carol", round=57), 1.1)
    meet(one, "bob", "carol", now=1.2)
    actions = one.handle(events.Woke(), 1.2)
    assert not late(actions)
    assert one.round == 57


def test_a_contribution_to_a_state_that_the_others_have_left_behind_is_late_for_any_later_round() -> None:
    coordinator, second, [absent] = roles(3)
    one, closed_at = closed_without(absent, coordinator, second)
    one.handle(events.RoundEnded(0), closed_at + 1.0)
    sends = one.handle(asks(absent, 1, hops=wire.MAX_HOPS, state=BEFORE), closed_at + 1.0)
    assert not sent(sends, wire.JoinRefused), "the round may have failed"
    actions = one.handle(asks(second, 1, hops=wire.MAX_HOPS, state=AFTER), closed_at + 2.0)
    [(peer, refusal)] = sent(actions, wire.JoinRefused)
    assert peer == absent
    assert refusal.late == pytest.approx(2.0)
    assert formed_of(elapse(one, closed_at + 2.0, closed_at + 10.0)) == []


@pytest.mark.parametrize("mates", [2, 1, 0])
def test_a_coordinator_that_missed_a_round_knows_by_two_mates_that_its_own_contribution_is_late(
    mates: int,
) -> None:
    coordinator, second, [third] = roles(3, round=1)
    others = [second, third]
    one = machine(coordinator, *others)
    [(asked, request)] = sent(one.handle(ready(state=EARLIER), 0.5), wire.JoinRequest)
    group = (coordinator, *others[:mates])
    refusal = wire.JoinRefused(RUN, request.join.ticket, "closed", 1, late=0.1, group=group)
    assert late(one.handle(events.MessageReceived(asked, refusal), 0.5))
    actions = one.handle(ready(state=BEFORE), 1.0)
    for name in others:
        actions += one.handle(asks(name, 1, hops=wire.MAX_HOPS, state=AFTER), 1.5)
    actions += elapse(one, 1.5, 10.0)
    if mates == 2:
        assert [each.seconds > 0 for each in late(actions)] == [True]
        assert formed_of(actions) == [tuple(sorted(others))]
    else:
        assert not late(actions), "strangers may claim any state"


def test_strangers_of_a_later_state_lead_nobody_beyond_the_state_of_a_round_that_they_shared() -> None:
    coordinator, second, (absent, stranger) = roles(4)
    one, closed_at = closed_without(absent, coordinator, second, strangers=[stranger])
    one.handle(events.RoundEnded(0), closed_at + 1.0)
    for name, state in ((stranger, STRANGE), (absent, BEFORE), (second, BEFORE)):
        actions = one.handle(asks(name, 1, hops=wire.MAX_HOPS, state=state), closed_at + 1.0)
        assert not sent(actions, wire.JoinRefused)
    one.context.membership.advance(second, 2)
    one.context.membership.advance(stranger, 3)
    assert one.context.membership.mates_near(1) == [2]


def test_after_a_failed_round_the_same_contributions_count_in_the_next() -> None:
    coordinator, second, [absent] = roles(3)
    one, closed_at = closed_without(absent, coordinator, second)
    one.handle(events.RoundEnded(0), closed_at + 1.0)
    for name in (absent, second):
        actions = one.handle(asks(name, 1, hops=wire.MAX_HOPS, state=BEFORE), closed_at + 1.0)
        assert not sent(actions, wire.JoinRefused)
    one.context.membership.miss([coordinator] * 2)
    [members] = formed_of(elapse(one, closed_at + 1.0, closed_at + 10.0))
    assert set(members) == {absent, second}


def formed_of(actions: list[events.Action]) -> list[tuple[str, ...]]:
    return [*{message.manifest.peers for _, message in sent(actions, wire.GroupFormed)}]


def test_a_join_whose_group_has_just_closed_without_it_is_not_left_behind() -> None:
    coordinator, second, [absent] = roles(3)
    one, closed_at = closed_without(absent, coordinator, second)
    own = one.context.join(ready(state=BEFORE).join, 1)
    assert Coordinator(one.context, ClosePolicy(one.context)).left_behind(own, closed_at + 1.0) == 0.0


def test_a_member_that_is_a_round_behind_is_planned_with_and_a_stranger_is_not() -> None:
    one = machine("alice", "bob", "carol", "dave", group_size=8)
    rounds = [
        {"alice": BEFORE, "bob": BEFORE, "carol": BEFORE, "dave": BEFORE},
        {"alice": AFTER, "bob": AFTER, "carol": BEFORE, "dave": STRANGE},
        {"alice": AFTER, "bob": AFTER, "carol": AFTER, "dave": STRANGE},
    ]
    for number, states in enumerate(rounds):
        weights = {"dave": ATTENDANCE_LIMIT} if number == 2 else {}  # It has missed a round, and attends.
        joins = [
            join(name, number, weight=weights.get(name, 1.0), state=state) for name, state in states.items()
        ]
        one.handle(ready(state=states["alice"]), 0.0)
        assert formed(one.handle(tells(Manifest.of("bob", joins)), 0.0))
        one.handle(events.RoundEnded(number, ok=True), 0.0)
        if number:
            assert set(one.context.membership.group("alice", number + 1)) == {"alice", "bob", "carol"}
    one.handle(ready(weight=0.0), 0.0)
    assert set(one.context.membership.group("alice", 3)) == {"alice", "bob", "carol", "dave"}
