"""Federated rounds: the peers that are drawn and waited for, and the time at which a round closes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from equipoise.averaging.draw import draw
from equipoise.averaging.machines import policy
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.group_builder import (
    INVITE_AGAIN_SECONDS,
    UNSETTLED_SECONDS,
    GroupBuilder,
    ParkedJoin,
)
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.options import Needs
from equipoise.averaging.outcome import Gathering, Idle, Outcome
from equipoise.averaging.state import StateId
from equipoise.averaging.strategy import Federated, parse_strategy
from equipoise.averaging.timing import (
    HOLD_SECONDS,
    INITIAL_WAIT,
    INVITE_SECONDS,
    MAX_WAIT,
    MIN_WAIT,
    OVERDUE_SECONDS,
    PATIENT_KEEPALIVE,
    REDRAWN_SECONDS,
    SILENT_SECONDS,
)
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from fakes.matchmaking import (
    NAMES,
    RUN,
    SPEC,
    alive,
    asks,
    elapse,
    formed,
    in_order,
    join,
    meet,
    ready,
    record_of,
    seen,
    sent,
    signer,
    verify,
)

STATE = StateId(3, "b" * 64)


def machine(name: str, count: int, federated: Federated) -> Matchmaking:
    """A machine of a federated run with a warm view of the first `count` peers."""
    needs = Needs(8, federated.quorum, federated.least)
    context = Context(RUN, SPEC, name, needs, signer(name), verify)
    one = Matchmaking(context, policy(federated, context))
    one.handle(events.Woke(), 0.0)
    one.handle(seen(*NAMES[:count]), 0.0)
    meet(one, *(other for other in NAMES[:count] if other != name))
    return one


def roles(count: int, **options: Any) -> tuple[Matchmaking, list[str], list[str]]:
    """The coordinator of the first `count` peers; those that are drawn, in order; and the others."""
    coordinator = in_order(0, NAMES[:count])[0]
    one = machine(coordinator, count, Federated(**options))
    drawn = list(one.draw(STATE, 0.0).peers)
    return one, drawn, [name for name in NAMES[:count] if name not in drawn]


def joins(one: Matchmaking, name: str, now: float, weight: float = 1.0) -> list[events.Action]:
    """A peer's join comes, or the machine's own peer becomes ready."""
    if name == one.context.peer:
        return one.handle(ready(weight, state=STATE), now)
    return one.handle(asks(name, weight=weight, state=STATE), now)


def gathers(spec: str, own: bool = True) -> tuple[Matchmaking, list[str], Callable[[str, float], list[Any]]]:
    """The coordinator of six peers in an all-reduce run, which is ready last; the others; how one of them joins."""
    strategy = parse_strategy(spec)
    coordinator, *others = in_order(0, NAMES[:6])
    context = Context(RUN, SPEC, coordinator, Needs(8, strategy.quorum), signer(coordinator), verify)
    one = Matchmaking(context, policy(strategy, context))
    one.handle(seen(*others), 0.0)
    meet(one, *others)

    def joins(name: str, at: float) -> list[Any]:
        return one.handle(ready() if name == coordinator else asks(name), at)

    return one, [coordinator, *others], joins


def groups(actions: list[events.Action]) -> list[set[str]]:
    found = [message.manifest for _, message in sent(actions, wire.GroupFormed)]
    own = formed(actions)
    return [
        set(manifest.peers)
        for manifest in {one.id: one for one in [*found, *([own] if own else [])]}.values()
    ]


def test_it_closes_at_once_when_all_that_are_drawn_are_in_whatever_the_grace() -> None:
    one, drawn, others = roles(6, fraction=0.5, grace=1000.0)
    assert len(drawn) == 3
    for name in others:
        assert not groups(joins(one, name, 1.0, weight=0.0))
    for name in drawn[:-1]:
        assert not groups(joins(one, name, 1.0))
    assert not groups(alive(one, drawn, 400.0, 1.0)), "as long as the last one lives"
    assert groups(joins(one, drawn[-1], 400.0)) == [set(NAMES[:6])]


def test_grace_runs_from_the_quorum() -> None:
    one, drawn, _ = roles(5, quorum=3, grace=4.0)
    joins(one, drawn[0], 1.0)
    joins(one, drawn[1], 2.0)
    assert not groups(alive(one, drawn, 100.0, 2.0)), "below the quorum nothing closes it"
    joins(one, drawn[2], 100.0)
    assert not groups(alive(one, drawn, 103.9, 100.0))
    joins(one, drawn[3], 103.95)
    actions = alive(one, drawn, 104.0, 103.95)
    assert groups(actions) == [set(drawn[:4])]
    reasons = {message.reason for _, message in sent(actions, wire.GroupFormed)}
    assert any("4 s after the quorum of 3" in reason for reason in reasons)


def test_the_first_round_does_not_close_before_its_coordinator_has_seen_enough_peers() -> None:
    first = StateId(0, "b" * 64)
    coordinator = in_order(0, NAMES[:3])[0]
    one = machine(coordinator, 3, Federated(available=4, grace=1.0))
    for name in NAMES[:3]:
        if name == coordinator:
            assert not groups(one.handle(ready(state=first), 1.0))
        else:
            assert not groups(one.handle(asks(name, state=first), 1.0))
    assert not groups(alive(one, NAMES[:3], 5.0, 1.0))
    assert groups(one.handle(asks(NAMES[3], state=first), 6.0)) == [set(NAMES[:4])]


def test_a_coordinator_that_has_seen_enough_peers_waits_for_none_that_has_died_since() -> None:
    first = StateId(0, "b" * 64)
    coordinator, *others = in_order(0, NAMES[:4])
    one = machine(coordinator, 4, Federated(available=4, grace=1.0))
    assert len(one.draw(first, 0.5).live) == 4  # Its trainer asks.
    one.handle(events.PeerLost(others[-1]), 1.0)
    for name in others[:-1]:
        assert not groups(one.handle(asks(name, state=first), 1.0))
    actions = one.handle(ready(state=first), 1.0)
    actions += alive(one, NAMES[:3], 5.0, 1.0)
    assert groups(actions) == [{coordinator, *others[:-1]}]


def test_half_spent_patience_closes_no_federated_round() -> None:
    one, drawn, _ = roles(4, quorum=2, grace=50.0)
    for name in drawn[:2]:
        own = name == one.context.peer
        request = wire.JoinRequest(RUN, join(name, state=STATE), patience=10.0)
        event = ready(state=STATE, patience=10.0) if own else events.MessageReceived(name, request)
        one.handle(event, 1.0)
    assert not groups(alive(one, drawn, 40.0, 1.0))


@pytest.mark.parametrize("weight", [0.0, ATTENDANCE_LIMIT, 9e-4])
def test_attendance_is_no_contribution_and_declines(weight: float) -> None:
    one, drawn, _ = roles(4, quorum=3, grace=50.0)
    for name in drawn[:2]:
        joins(one, name, 1.0)
    assert not groups(joins(one, drawn[2], 1.0, weight)), "the quorum lacks one"
    assert groups(joins(one, drawn[3], 2.0)) == [set(drawn)], "nobody waits for one that declines"


def test_a_drawn_peer_that_dies_is_replaced_by_the_next_which_has_time_to_leave_and_train() -> None:
    one, drawn, others = roles(6, fraction=0.5, quorum=2, grace=100.0)
    order = draw(NAMES[:6], STATE.lineage, fraction=1.0, minimum=0)
    dead, next_ = next(name for name in drawn if name != one.context.peer), order[3]
    rest = [name for name in drawn if name != dead]
    for name in [*others, *rest]:
        joins(one, name, 1.0, 0.0 if name in others else 1.0)
    actions = one.handle(events.PeerLost(dead), 5.0) + alive(one, NAMES, 5.0 + PATIENT_KEEPALIVE, 5.0)
    if next_ == one.context.peer:
        assert next_ in one.draw(STATE, 6.0).peers
    else:
        told = [message.standing for peer, message in sent(actions, wire.JoinAccepted) if peer == next_]
        assert any(standing is not None and next_ in standing.drawn for standing in told)
        ticket = join(next_, weight=0.0, state=STATE).ticket
        one.handle(events.MessageReceived(next_, wire.LeaveRequest(RUN, ticket)), 6.0)
        assert not groups(alive(one, NAMES, 50.0, 6.0)), "it trains"
        assert groups(joins(one, next_, 50.0)) == [set(NAMES[:6]) - {dead}]


def test_a_round_still_waits_for_a_peer_that_a_newcomer_has_displaced() -> None:
    order = list(draw(NAMES, STATE.lineage, fraction=1.0, minimum=0))
    first, *others = order[4:]
    federated = Federated(fraction=0.4, quorum=2, grace=100.0)
    context = Context(RUN, SPEC, first, Needs(8, 2), signer(first), verify)
    closing = policy(federated, context)
    for peers in (others, [*others, order[0]]):
        context.membership.see([record_of(name) for name in (first, *peers)], 1.0)
        for name in peers:
            context.membership.hear(name, 1.0)
        drawn = closing.draw(STATE, 1.0).peers
    assert order[0] in drawn
    assert order[5] not in drawn, "it is displaced"
    builder = GroupBuilder(0, Needs(8, 2))
    builder.park(ParkedJoin(join(first, state=STATE), 1.0, 99.0, 0))
    expected, _ = closing.awaited(builder, 1.0)
    assert order[5] in expected


@pytest.mark.parametrize("ahead", [0, 1])
def test_another_trains_in_place_of_a_drawn_peer_that_holds_the_other_state_of_a_fork(ahead: int) -> None:
    first, forked, third, _ = order = draw(NAMES[:4], STATE.lineage, fraction=1.0, minimum=0)
    context = Context(RUN, SPEC, first, Needs(8, 2), signer(first), verify)
    closing, gathering = policy(Federated(fraction=0.5, quorum=2), context), GroupBuilder(0, Needs(8, 2))
    context.membership.see([record_of(name) for name in order], 1.0)
    for name in order:
        context.membership.hear(name, 1.0)
    other = StateId(STATE.epoch + ahead, "f" * 64)
    for name, weight, state in ((first, 1.0, STATE), (forked, 1.0, other), (third, 0.0, STATE)):
        gathering.park(ParkedJoin(join(name, weight=weight, state=state), 1.0, 99.0, 0))
    # A peer ahead may give the others the mean between; if none is to be had, they go on without.
    settled = 1.0 + UNSETTLED_SECONDS * ahead
    for now, drawn in ((0.99 * settled, {first, forked if ahead else third}), (settled, {first, third})):
        standing = closing.standing(gathering, now)
        assert standing is not None
        assert set(standing.drawn) == drawn
    assert closing.awaited(gathering, settled)[0] == {first, third}


def test_another_trains_in_place_of_a_drawn_peer_that_has_long_been_in_a_later_round() -> None:
    one, drawn, others = roles(6, fraction=0.5, quorum=2)
    gone = next(name for name in drawn if name != one.context.peer)
    one.context.membership.advance(gone, 5)
    joins(one, others[0], 1.0, 0.0)
    assert gone in one.draw(STATE, UNSETTLED_SECONDS).peers
    alive(one, NAMES, UNSETTLED_SECONDS + 2.0, 1.0)
    assert gone not in one.draw(STATE, UNSETTLED_SECONDS + 2.0).peers


def test_no_peer_is_drawn_from_a_state_that_is_older_than_the_peer() -> None:
    one = machine(NAMES[0], 3, Federated(fraction=0.5))
    one.draw(STATE, 0.0)
    later = StateId(4, "c" * 64)
    assert set(one.draw(later, 1.0).peers) <= set(NAMES[:3])
    one.handle(seen(*NAMES[:9]), 2.0)
    meet(one, *NAMES[3:9])
    assert set(one.draw(later, 3.0).peers) <= set(NAMES[:3])
    last = StateId(5, "d" * 64)
    assert set(one.draw(last, 4.0).peers) == set(draw(NAMES[:9], last.lineage, fraction=0.5, minimum=2))


def test_a_drawn_peer_that_gave_nothing_to_a_failed_round_loses_its_place_longer_each_time() -> None:
    federated = Federated(fraction=0.5, quorum=2)
    coordinator = in_order(0, NAMES[:6])[0]
    one, other = (machine(name, 6, federated) for name in (coordinator, in_order(0, NAMES[:6])[1]))
    order = draw(NAMES[:6], STATE.lineage, fraction=1.0, minimum=0)
    given = next(name for name in order[:3] if name != other.context.peer)
    idle = set(order[:3]) - {given}
    standing = wire.Standing(STATE, order[:3], (given,))
    joins(one, given, 1.0)
    one.handle(ready(0.0 if one.context.peer in idle else 1.0, state=STATE, patience=250.0), 1.0)
    other.handle(ready(0.0, state=STATE, patience=250.0), 1.0)
    search = other._joiner.search
    assert search
    assert search.join
    ticket = search.join.ticket
    word = wire.JoinAccepted(RUN, ticket, 1.0, 2, 6, True, None, standing)
    other.handle(events.MessageReceived(coordinator, word), 2.0)
    for each in (one, other):
        each.handle(events.Withdrew(), 200.0)
    expected = set(order) - idle
    for each in (one, other):
        assert idle.isdisjoint(each.draw(STATE, 201.0).peers), each.context.peer
        assert set(each.draw(STATE, 201.0).peers) == expected & set(order[:5])
    policy_ = other._joiner._policy
    assert policy_.believes(wire.Standing(StateId(4, STATE.lineage), order[:3], ()))
    assert not policy_.believes(standing)
    policy_.ended(wire.Standing(StateId(4, "c" * 64), order[:3], (given,)), failed=True)
    assert not policy_.believes(wire.Standing(StateId(19, "c" * 64), order[:3], ()))
    assert policy_.believes(wire.Standing(StateId(20, "c" * 64), order[:3], ()))
    assert set(other.context.deeds.suspects) == idle
    policy_.ended(wire.Standing(StateId(20, "c" * 64), order[:3], order[:3]), failed=True)
    assert policy_.believes(standing), "a contribution ends it"
    assert not other.context.deeds.suspects


def test_a_drawn_peer_that_gave_nothing_to_three_means_in_a_row_loses_its_place_to_the_next() -> None:
    one = machine(NAMES[0], 6, Federated(fraction=0.5, quorum=2))
    idle = next(name for name in one.draw(STATE, 0.0).peers if name != NAMES[0])
    given = dict.fromkeys(set(NAMES[:6]) - {idle}, 1.0)
    for epoch in (3, 4, 5):
        before = dict.fromkeys(NAMES[:6], StateId(epoch, STATE.lineage))
        mean = Outcome(ok=True, reason="", states=before, contributors=given, drawn=tuple(NAMES[:6]))
        assert not one.context.deeds.suspects
        one.handle(events.MeanHeld(mean), float(epoch))
    assert one.context.deeds.suspects == (idle,)
    for epoch in range(6, 21):
        state = StateId(epoch, f"{epoch:064x}")
        order = draw(NAMES[:6], state.lineage, fraction=1.0, minimum=0)
        assert one.draw(state, float(epoch)).peers == tuple(name for name in order if name != idle)[:3]


def test_a_replacement_that_stays_declines() -> None:
    one, drawn, others = roles(6, fraction=0.5, quorum=2, grace=100.0)
    dead = next(name for name in drawn if name != one.context.peer)
    for name in [*others, *(name for name in drawn if name != dead)]:
        joins(one, name, 1.0, 0.0 if name in others else 1.0)
    one.handle(events.PeerLost(dead), 5.0)
    assert not groups(alive(one, NAMES, 5.0 + REDRAWN_SECONDS - 0.1, 5.0))
    assert groups(alive(one, NAMES, 5.0 + REDRAWN_SECONDS + PATIENT_KEEPALIVE, 5.0 + REDRAWN_SECONDS - 0.1))


def test_a_stopped_peer_that_trains_is_noticed_and_costs_no_more_than_the_grace() -> None:
    one, drawn, _ = roles(4, quorum=3, grace=100.0)
    *rest, _ = sorted(drawn, key=lambda name: name != one.context.peer)
    for name in rest:
        joins(one, name, 1.0)
    assert not groups(alive(one, rest, 1.0 + INVITE_SECONDS, 1.0))
    late = 1.0 + INVITE_SECONDS + SILENT_SECONDS + PATIENT_KEEPALIVE
    assert groups(alive(one, rest, late, 1.0 + INVITE_SECONDS)) == [set(rest)]


def test_missing_peers_are_asked_every_few_seconds_and_parked_ones_told_once_a_second() -> None:
    one, drawn, _ = roles(6, quorum=3, grace=1000.0)
    parked, missing = drawn[:4], drawn[4:]
    for name in parked:
        joins(one, name, 1.0)
    actions = alive(one, drawn, 101.0, 1.0)
    others = [name for name in parked if name != one.context.peer]
    kept = sent(actions, wire.JoinAccepted)
    assert len(kept) <= len(others) * (100 / PATIENT_KEEPALIVE + 1)
    assert sum(message.standing is not None for _, message in kept) <= len(others), (
        "names only if they change"
    )
    invited = [peer for peer, _ in sent(actions, wire.Invitation)]
    expected = [name for name in missing if name != one.context.peer]
    assert set(invited) == set(expected)
    assert len(invited) <= len(expected) * (100 / INVITE_AGAIN_SECONDS + 1)


def test_two_newcomers_are_introduced_without_any_contribution() -> None:
    one, drawn, _ = roles(3)
    for name in drawn[:2]:
        joins(one, name, 1.0, ATTENDANCE_LIMIT)
    assert set(drawn[:2]) <= groups(alive(one, drawn, 10.0, 1.0))[0]


@pytest.mark.parametrize("left", [False, True])
def test_late_peers_form_no_round_of_a_state_that_the_others_have_left(left: bool) -> None:
    one, drawn, _ = roles(4, quorum=2, grace=1.0)
    one.context.membership.shared(NAMES)
    one.context.next_round.floor = one.context.next_round.number = 1
    others = [name for name in drawn if name != one.context.peer]
    for name in others if left else ():
        one.context.membership.advance(name, 2)
    actions = again(one, others[:2], 1.0) + alive(one, NAMES, 30.0, 1.0)
    assert groups(actions) == ([] if left else [set(others[:2])])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("epoch", [2, 4])
def test_a_contribution_to_another_state_than_the_groups_is_late(own: bool, epoch: int) -> None:
    one, drawn, _ = roles(5, quorum=2, grace=5.0)
    stale = next(name for name in drawn if own == (name == one.context.peer))
    state = StateId(epoch, "a" * 64)
    one.handle(ready(1.0, state=state) if own else asks(stale, weight=1.0, state=state), 1.0)
    good = [name for name in drawn if name != stale][:2]
    for name in good:
        joins(one, name, 1.0)
    actions = alive(one, drawn, 10.0, 1.0)
    assert groups(actions) == [set(good)]
    refused = [(peer, message.late > 0, message.group) for peer, message in sent(actions, wire.JoinRefused)]
    assert refused == ([] if own else [(stale, True, ())])
    # It attends the next round, and learns the state of the group.
    assert sum(isinstance(action, events.Late) for action in actions) == own


def after_a_round(ok: bool) -> tuple[Matchmaking, list[str], list[str]]:
    """A coordinator that was in round 0 of `STATE`, with one of its peers; and those that were not, two of them in."""
    one, drawn, _ = roles(5, quorum=2, grace=0.0)
    member, *late = [name for name in drawn if name != one.context.peer]
    joins(one, one.context.peer, 1.0)
    assert groups(joins(one, member, 1.0)) == [{one.context.peer, member}]
    one.handle(events.RoundEnded(0, ok=ok), 2.0)
    return one, [one.context.peer, member], late


def again(one: Matchmaking, names: list[str], now: float) -> list[events.Action]:
    return [
        each for name in names for each in one.handle(asks(name, 1, hops=wire.MAX_HOPS, state=STATE), now)
    ]


def test_late_peers_wait_until_the_round_that_they_missed_is_known_to_have_failed() -> None:
    one, members, late = after_a_round(ok=False)
    actions = again(one, late[:2], 2.0) + alive(one, NAMES, 20.0, 2.0)
    assert not groups(actions), "the others may have succeeded"
    assert not sent(actions, wire.JoinRefused)
    actions = again(one, members[1:], 20.0) + alive(one, NAMES, 21.0, 20.0)
    assert groups(actions) == [{*late[:2], members[1]}]


def test_after_a_round_that_succeeded_a_contribution_to_its_state_is_late_for_any_round() -> None:
    one, _, late = after_a_round(ok=True)
    [(peer, refusal)] = sent(again(one, late[:1], 3.5), wire.JoinRefused)
    assert (peer, refusal.late) == (late[0], pytest.approx(2.5))


def test_no_fewer_are_drawn_than_the_quorum_needs() -> None:
    _, drawn, _ = roles(5, fraction=0.5, quorum=4)
    assert len(drawn) == 4


def test_only_peers_with_all_tags_are_drawn() -> None:
    one = machine("alice", 0, Federated(tags=("gpu",), minimum=1))
    view = [record_of("alice"), record_of("bob", tags=("big", "gpu")), record_of("carol", tags=("big",))]
    one.handle(events.CandidatesSeen(view), 1.0)
    meet(one, "bob", "carol")
    assert one.draw(STATE, 1.0).live == ("bob",)
    assert one.draw(STATE, 1.0).peers == ("bob",)


def test_a_peer_that_observes_does_not_draw_itself_before_its_record_is_there() -> None:
    one = machine("alice", 0, Federated())
    one.context.membership.observes = True
    one.handle(events.CandidatesSeen([record_of("bob")]), 0.0)
    meet(one, "bob")
    assert one.draw(STATE, 0.0).live == ("bob",)


def test_a_peer_that_observes_is_never_drawn_and_no_round_waits_for_it() -> None:
    coordinator, *others = in_order(0, NAMES[:4])
    for evaluates in (coordinator, others[0]):
        one = machine(coordinator, 4, Federated(grace=1000.0))
        one.context.membership.observes = evaluates == coordinator
        view = [record_of(name, observes=name == evaluates) for name in NAMES[:4]]
        one.handle(events.CandidatesSeen(view), 1.0)
        givers = [name for name in [*others, coordinator] if name != evaluates]
        drawn = one.draw(STATE, 1.0)
        assert drawn.live == tuple(sorted(givers))
        assert set(drawn.peers) == set(givers)
        assert groups([action for name in givers for action in joins(one, name, 2.0)]) == [set(givers)]


# ---- the peers that wait ----


def parked(**options: Any) -> tuple[Matchmaking, str, wire.JoinRequest]:
    coordinator, _, third, *_ = in_order(0, NAMES[:5])
    federated = Federated(**options)
    one = machine(third, 5, federated)
    patience = federated.deadline + federated.reserve
    [(peer, request)] = sent(one.handle(ready(0.0, state=STATE, patience=patience), 1.0), wire.JoinRequest)
    assert peer == coordinator
    return one, coordinator, request


def told(request: wire.JoinRequest, short: bool, **fields: Any) -> wire.JoinAccepted:
    return wire.JoinAccepted(RUN, request.join.ticket, PATIENT_KEEPALIVE, 2, 5, short, **fields)


def test_a_waiting_peer_knows_who_is_drawn_who_is_in_and_until_when() -> None:
    one, coordinator, request = parked(quorum=3, deadline=600.0)
    standing = wire.Standing(STATE, tuple(NAMES[:5]), ("alice",))
    one.handle(events.MessageReceived(coordinator, told(request, True, standing=standing)), 2.0)
    state = one.state
    assert isinstance(state, Gathering)
    assert state.reason == "1 of 5 in, waits for 2 more contributions, 599 s at most"
    assert (state.drawn, state.contributed) == (tuple(NAMES[:5]), ("alice",))
    assert one.shortage.startswith(
        "1 contribution in, 3 needed; drawn, and not in: bob, carol, dave and 1 more"
    )
    more = wire.Standing(STATE, tuple(NAMES[:5]), ("alice", "bob", "carol"))
    one.handle(events.MessageReceived(coordinator, told(request, False, standing=more, closes=8.0)), 3.0)
    one.handle(events.MessageReceived(coordinator, told(request, False, closes=6.0)), 5.0)
    state = one.state
    assert isinstance(state, Gathering)
    assert state.reason == "3 of 5 in, quorum reached, closes in 6 s"


def test_a_peer_that_trains_knows_it_too() -> None:
    one, drawn, _ = roles(5, quorum=2, grace=10.0)
    coordinator = one.context.peer
    trains, *others = [name for name in drawn if name != coordinator]
    trainee = machine(trains, 5, Federated(quorum=2, grace=10.0))
    for name in others[:2]:
        joins(one, name, 2.0)
    invited = alive(one, drawn, 5.0, 2.0)
    assert trainee.gathering is None
    [first, *_] = [message for peer, message in sent(invited, wire.Invitation) if peer == trains]
    trainee.handle(events.MessageReceived(coordinator, first), 3.0)
    assert isinstance(trainee.state, Idle)
    for gathering in (trainee.gathering, one.gathering):
        assert gathering is not None
        assert (set(gathering.drawn), set(gathering.contributed)) == (set(drawn), set(others[:2]))
    assert trainee.gathering is not None
    assert trainee.gathering.reason.startswith("2 of 5 in, quorum reached, closes in ")


def test_a_peer_parked_for_minutes_stays_with_a_coordinator_that_speaks_and_leaves_a_silent_one() -> None:
    one, coordinator, request = parked(grace=100.0)
    now = 1.0
    for second in range(1, 1000):
        now = 1.0 + second * PATIENT_KEEPALIVE
        actions = one.handle(events.MessageReceived(coordinator, told(request, second < 900)), now)
        assert not sent(actions, wire.JoinRequest)
    assert sent(elapse(one, now, now + PATIENT_KEEPALIVE + OVERDUE_SECONDS), wire.JoinRequest)


def test_a_coordinator_that_never_closes_is_left_after_grace() -> None:
    one, coordinator, request = parked(grace=20.0)
    now, asked = 1.0, list[str]()
    while not asked and now < 200.0:
        now += PATIENT_KEEPALIVE
        actions = one.handle(events.MessageReceived(coordinator, told(request, False)), now)
        asked = [peer for peer, _ in sent(actions, wire.JoinRequest)]
    assert asked != [coordinator]
    assert 20.0 < now - 1.0 <= 20.0 + HOLD_SECONDS + 2 * PATIENT_KEEPALIVE


def test_a_coordinator_that_is_killed_is_left_at_once() -> None:
    one, coordinator, request = parked()
    one.handle(events.MessageReceived(coordinator, told(request, True)), 2.0)
    [(peer, again)] = sent(one.handle(events.PeerLost(coordinator), 60.0), wire.JoinRequest)
    assert peer != coordinator
    assert again.join == request.join


def test_other_peers_lure_nobody_that_waits() -> None:
    one, coordinator, request = parked()
    one.handle(events.MessageReceived(coordinator, told(request, True)), 2.0)
    for at, name in enumerate(name for name in NAMES[:5] if name not in (coordinator, one.context.peer)):
        actions = one.handle(events.MessageReceived(name, wire.Invitation(RUN, 0)), 2.1 + at / 10)
        assert not sent(actions, wire.JoinRequest)


def test_the_coordinators_draw_counts_and_peers_that_it_thinks_dead_are_asked() -> None:
    one, coordinator, request = parked(fraction=0.4)
    own = one.draw(STATE, 1.0)
    order = draw(NAMES[:5], STATE.lineage, fraction=1.0, minimum=0)
    theirs = (order[1], order[2])
    standing = wire.Standing(STATE, theirs, ())
    actions = one.handle(events.MessageReceived(coordinator, told(request, True, standing=standing)), 2.0)
    assert one.draw(STATE, 2.0).peers == theirs
    assert one.draw(StateId(4, "c" * 64), 2.0).peers != theirs or own.live
    asked = {peer for peer, message in sent(actions, wire.Whereabouts) if message.asks}
    assert asked == {order[0]} - {one.context.peer}


@pytest.mark.parametrize(("seconds", "round"), [(5.0, 0), (29.0, 3)])
def test_a_search_that_ends_in_vain_at_a_short_deadline_leads_to_the_peer_in_a_later_round(
    seconds: float, round: int
) -> None:
    federated = Federated(quorum=2, grace=0.0, deadline=30.0)
    alice = machine("alice", 6, federated)
    alice.handle(events.MessageReceived("bob", wire.Whereabouts(RUN, 3)), 0.0)
    patience = federated.deadline + federated.reserve
    alice.handle(ready(state=STATE, patience=patience), 0.0)
    elapse(alice, 0.0, seconds)
    alice.handle(events.Withdrew(), seconds)
    alice.handle(ready(state=STATE, patience=patience), seconds)
    assert alice.round == round


def test_a_group_of_an_all_reduce_closes_some_seconds_after_its_quorum() -> None:
    one, peers, joins = gathers("allreduce:quorum=3,grace=4")
    before = 0.0
    for name, at in zip(peers[:3], (1.0, 2.0, 20.0), strict=True):
        assert not groups([*alive(one, peers, at, before), *joins(name, at)])
        before = at
    assert not groups(alive(one, peers, 23.9, 20.0))
    actions = alive(one, peers, 24.0, 23.9)
    assert groups(actions) == [set(peers[:3])]
    assert {message.reason for _, message in sent(actions, wire.GroupFormed)} == {
        f"waited 4 s after the quorum of 3; coordinated by {peers[0]}"
    }


@pytest.mark.parametrize("spec", ["allreduce:quorum=3,grace=100", "allreduce:quorum=3,grace=auto"])
def test_a_group_of_an_all_reduce_closes_at_once_when_all_live_peers_are_in(spec: str) -> None:
    one, peers, joins = gathers(spec)
    for name in peers[:4]:
        assert not groups(joins(name, 1.0))
    assert not groups(one.handle(events.PeerLost(peers[5]), 1.1))
    one.context.membership.lose(peers[5], 1.1)
    assert groups(joins(peers[4], 1.2)) == [set(peers[:5])]


@pytest.mark.parametrize(
    ("past", "wait", "why"),
    [
        ([], INITIAL_WAIT, "was 0.0 s late in 0 rounds"),
        ([0.1] * 4, MIN_WAIT, "was 0.1 s late in 4 rounds, give or take 0.0 s"),
        ([2.0, 2.2, 2.5, 2.0], 2.2 + 4 * 0.2, "was 2.2 s late in 4 rounds, give or take 0.2 s"),
        ([1.0, 5.0, 3.0, 3.0, 5.0, 1.0], MAX_WAIT, "was 3.0 s late in 6 rounds, give or take 2.0 s"),
        ([0.0, MAX_WAIT, MAX_WAIT, 0.0], 0.0, f"is mostly over {MAX_WAIT:g} s late"),
    ],
)
def test_a_learnt_grace_follows_from_how_late_each_missing_peer_has_been(
    past: list[float], wait: float, why: str
) -> None:
    one, peers, joins = gathers("allreduce:quorum=3,grace=auto")
    for seconds in past:
        one._coordinator._policy.learn({peers[5]: seconds, peers[4]: 0.0}, (), -1000.0)
    for name in peers[1:5]:
        assert not groups(joins(name, 1.0))
    actions = joins(peers[0], 1.0)
    if wait:
        assert not groups([*actions, *alive(one, peers, 0.99 + wait, 1.0)])
        assert why in one.reason
        assert f"{wait:.1f} s after the quorum of 3: {peers[5]}" in one.reason
        actions = alive(one, peers, 1.01 + wait, 0.99 + wait)
    assert groups(actions) == [set(peers[:5])]
    (told,) = {message.late for _, message in sent(actions, wire.GroupFormed)}
    assert told[-1] == pytest.approx(min(2 * wait, MAX_WAIT), abs=0.05), "the absent one"
    assert not any(told[:-1])


@pytest.mark.parametrize("spec", ["allreduce", "allreduce:quorum=3", "allreduce:quorum=3,grace=0.5"])
def test_a_group_whose_grace_is_not_learnt_says_nothing_of_how_late_its_members_were(spec: str) -> None:
    one, peers, joins = gathers(spec)
    for name in peers[:5]:
        joins(name, 1.0)
    assert {message.late for _, message in sent(alive(one, peers, 5.0, 1.0), wire.GroupFormed)} == {()}


@pytest.mark.parametrize(
    ("period", "tried"),
    [(1000.0, [INITIAL_WAIT, 2 * INITIAL_WAIT]), (20.0, [INITIAL_WAIT]), (8.0, [2.0]), (3.0, [MIN_WAIT])],
)
def test_a_longer_grace_is_tried_until_the_peer_comes_or_is_later_than_any_wait(
    period: float, tried: list[float]
) -> None:
    """A wait is at most a quarter of the time between two groups: the peers that train in 3 s wait 1 s, once."""
    one, peers, joins = gathers("allreduce:quorum=3,grace=auto")
    grace, late = one._coordinator._policy, peers[5]
    for name in peers[:3]:
        joins(name, 1.0)
    (builder,) = one._coordinator._builders.values()
    waits = []
    for _ in range(4):
        grace.learn({late: min(2 * waits[-1], MAX_WAIT)} if waits else {}, [late], 1.0 - period)
        waits.append(grace._wait(builder, [late])[0])
    assert waits == [*tried, *[0.0] * (4 - len(tried))]
    for _ in range(20):
        grace.learn({late: 0.5}, (), 1.0 - period)
    assert grace._wait(builder, [late])[0] == MIN_WAIT, "it is late no more"
