"""The matchmaking machine as one that wants a group: what it is told, and what it does about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from equipoise.averaging.manifest import NONCE_BYTES, Manifest
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.group_builder import FACTOR
from equipoise.averaging.matchmaking.machine import ANNOUNCE_PERIOD, Matchmaking
from equipoise.averaging.matchmaking.membership import LEAP, MAX_ASKED, MAX_JUMP, SUSPECT_SECONDS
from equipoise.averaging.outcome import Exchanging, Gathering, Idle, NoPeers
from equipoise.averaging.timing import INITIAL_WAIT, KEEPALIVE, OVERDUE_SECONDS, REPLY_SECONDS
from fakes.matchmaking import (
    NAMES,
    RUN,
    asks,
    elapse,
    formed,
    join,
    machine,
    meet,
    others_of,
    ready,
    record_of,
    roles,
    searching,
    seen,
    sent,
    tells,
    verify,
)

# ---- the short way ----


def test_a_ready_peer_asks_the_coordinator_at_once() -> None:
    coordinator, second, _ = roles(4)
    actions = machine(second, *others_of(second, 4)).handle(ready(weight=3), 10.0)
    [(peer, request)] = sent(actions, wire.JoinRequest)
    assert peer == coordinator
    assert request.join.weight == 3
    assert request.join.genuine(verify)


def test_the_last_to_ask_closes_the_group_at_once() -> None:
    coordinator, second, rest = roles(4)
    one = machine(coordinator, *others_of(coordinator, 4))
    one.handle(ready(), 10.0)
    for name in rest:
        assert sent(one.handle(asks(name), 10.0), wire.JoinAccepted)
    actions = one.handle(asks(second), 10.1)
    manifest = formed(actions)
    assert manifest is not None
    assert set(manifest.peers) == set(NAMES[:4])
    assert {peer for peer, _ in sent(actions, wire.GroupFormed)} == {second, *rest}
    assert not sent(actions, wire.JoinAccepted)
    assert one.round == 1
    assert one.state == Exchanging(4, 0)


def test_a_coordinator_that_becomes_ready_last_closes_at_once() -> None:
    coordinator, second, rest = roles(4)
    one = machine(coordinator, *others_of(coordinator, 4))
    for name in (second, *rest):
        one.handle(asks(name), 10.0)
    assert formed(one.handle(ready(), 10.2)) is not None


def test_a_coordinator_that_is_not_ready_closes_the_group_of_the_others() -> None:
    coordinator, second, rest = roles(4)
    one = machine(coordinator, *others_of(coordinator, 4))
    for name in (second, *rest):
        one.handle(asks(name), 10.0)
    one.context.membership.hear(coordinator, 10.0)
    actions = elapse(one, 10.0, 10.0 + INITIAL_WAIT)
    assert formed(actions) is None
    [(_, message), *_rest] = sent(actions, wire.GroupFormed)
    assert set(message.manifest.peers) == {second, *rest}
    assert message.absent == (coordinator,)
    assert message.lateness == pytest.approx(INITIAL_WAIT / FACTOR), "a wait in vain makes the next no longer"
    assert "waited" in message.reason


def test_a_member_begins_the_round_of_a_valid_manifest() -> None:
    coordinator, second, _ = roles(2)
    one = machine(second, coordinator)
    [(_, request)] = sent(one.handle(ready(), 1.0), wire.JoinRequest)
    manifest = Manifest.of(coordinator, [join(coordinator), request.join])
    actions = one.handle(
        events.MessageReceived(coordinator, wire.GroupFormed(RUN, manifest, 0.1, (), "full")), 1.1
    )
    assert formed(actions) == manifest
    assert not one.ready
    one.handle(events.RoundEnded(0), 2.0)
    assert one.state == Idle(1)


def test_a_member_of_a_manifest_that_was_lost_before_is_expected_in_the_next_round() -> None:
    coordinator, second, [third] = roles(3)
    one = machine(second, coordinator, third)
    [(_, request)] = sent(one.handle(ready(), 1.0), wire.JoinRequest)
    one.handle(events.PeerLost(third), 1.0)
    manifest = Manifest.of(coordinator, [join(coordinator), join(third), request.join])
    one.handle(events.MessageReceived(coordinator, wire.GroupFormed(RUN, manifest, 0.1)), 1.1)
    assert third in one.context.membership.expected(1, 1.2)


# ---- whom to ask next ----


def forged(coordinator: str, second: str, own: wire.JoinRequest) -> wire.GroupFormed:
    false = msgspec.structs.replace(join(second), weight=1e6)
    return wire.GroupFormed(RUN, Manifest.of(coordinator, [false, own.join]), 0.0)


@pytest.mark.parametrize(
    "event",
    [
        lambda first, second, own: events.PeerLost(first),
        lambda first, second, own: events.MessageReceived(
            first, wire.JoinRefused(RUN, own.join.ticket, "no")
        ),
        lambda first, second, own: events.MessageReceived(first, forged(first, second, own)),
    ],
    ids=["that cannot be reached", "that refuses", "whose manifest is not valid"],
)
def test_a_coordinator_is_left_for_the_next(event: Callable[[str, str, wire.JoinRequest], Any]) -> None:
    one, coordinator, second, request = searching(4)
    actions = one.handle(event(coordinator, second, request), 1.1)
    assert formed(actions) is None
    assert sent(actions, wire.JoinRequest)[0][0] == second


def test_a_coordinator_that_does_not_answer_is_left_for_the_next() -> None:
    coordinator, second, rest = roles(4)
    one = machine(rest[0], *others_of(rest[0], 4))
    one.handle(ready(), 1.0)
    actions = one.handle(events.Woke(), 1.0 + REPLY_SECONDS)
    assert sent(actions, wire.LeaveRequest)[0][0] == coordinator
    assert sent(actions, wire.JoinRequest)[0][0] == second


def test_a_coordinator_that_breaks_its_promise_is_left_for_the_next() -> None:
    one, coordinator, second, request = searching(4)
    one.handle(
        events.MessageReceived(coordinator, wire.JoinAccepted(RUN, request.join.ticket, KEEPALIVE, 1, 4)), 1.1
    )
    assert not sent(one.handle(events.Woke(), 1.1 + KEEPALIVE), wire.JoinRequest)
    assert (
        sent(one.handle(events.Woke(), 1.1 + KEEPALIVE + OVERDUE_SECONDS), wire.JoinRequest)[0][0] == second
    )


def test_a_suspect_is_trusted_again_when_it_is_heard_from() -> None:
    coordinator, second, rest = roles(3)
    one = machine(rest[0], coordinator, second)
    one.handle(events.PeerLost(coordinator), 1.0)
    assert sent(one.handle(ready(), 1.1), wire.JoinRequest)[0][0] == second
    actions = one.handle(events.MessageReceived(coordinator, wire.Whereabouts(RUN, 0)), 1.2)
    assert sent(actions, wire.JoinRequest)[0][0] == coordinator


def test_a_suspect_is_tried_again_after_a_while() -> None:
    coordinator, second, rest = roles(3)
    one = machine(rest[0], coordinator, second)
    one.handle(events.PeerLost(coordinator), 1.0)
    assert sent(one.handle(ready(), 1.1 + SUSPECT_SECONDS), wire.JoinRequest)[0][0] == coordinator
    assert second != coordinator


def test_a_peer_that_cannot_be_dialled_is_lost_with_its_channel() -> None:
    one = machine("alice")
    one.handle(events.CandidatesSeen([record_of("bob", dialable=False), record_of("carol")]), 0.5)
    meet(one, "bob", "carol")
    one.handle(events.PeerLost("bob"), 1.0)
    one.handle(ready(), 1.1)
    assert isinstance(one.state, Gathering)
    assert one.state.target == 2, "carol and this peer"


def test_a_redirect_is_followed() -> None:
    one, coordinator, _, request = searching(3)
    refusal = wire.JoinRefused(RUN, request.join.ticket, "zoe coordinates", redirect="zoe")
    [(peer, again)] = sent(one.handle(events.MessageReceived(coordinator, refusal), 1.1), wire.JoinRequest)
    assert (peer, again.hops, again.join) == ("zoe", 1, request.join)


def test_redirects_end() -> None:
    coordinator, second, rest = roles(3)
    one = machine(rest[0], coordinator, second)
    peer, [(_, request)] = coordinator, sent(one.handle(ready(), 1.0), wire.JoinRequest)
    for _ in range(wire.MAX_HOPS):
        other = second if peer == coordinator else coordinator
        refusal = wire.JoinRefused(RUN, request.join.ticket, "elsewhere", redirect=other)
        [(peer, request)] = sent(one.handle(events.MessageReceived(peer, refusal), 1.1), wire.JoinRequest)
    assert request.hops == wire.MAX_HOPS


def test_a_stranger_invites_in_vain() -> None:
    one, _, second, request = searching(3)
    actions = one.handle(events.MessageReceived("stranger", wire.Invitation(RUN, request.join.round)), 1.1)
    assert not sent(actions, wire.JoinRequest)
    actions = one.handle(events.MessageReceived(second, wire.Invitation(RUN, request.join.round)), 1.1)
    assert [peer for peer, _ in sent(actions, wire.JoinRequest)] == [second]


@pytest.mark.parametrize("short", [False, True])
def test_an_invitation_is_followed_only_where_no_group_is_possible(short: bool) -> None:
    one, coordinator, second, request = searching(4)
    parked = wire.JoinAccepted(RUN, request.join.ticket, 1.0, 2, 4, short=short)
    one.handle(events.MessageReceived(coordinator, parked), 1.1)
    actions = one.handle(events.MessageReceived(second, wire.Invitation(RUN, request.join.round)), 1.2)
    assert [peer for peer, _ in sent(actions, wire.JoinRequest)] == [second] * short


def test_a_peer_that_sends_it_round_in_circles_is_left() -> None:
    one, coordinator, second, request = searching(4)
    refusal = wire.JoinRefused(RUN, request.join.ticket, "ask me again", redirect=coordinator)
    asked = [coordinator]
    while asked[-1] == coordinator and len(asked) < 100:
        asked += [
            peer
            for peer, _ in sent(
                one.handle(events.MessageReceived(coordinator, refusal), 1.1), wire.JoinRequest
            )
        ]
    assert asked == [coordinator, coordinator, second]


def test_a_round_that_is_gone_is_skipped() -> None:
    one, coordinator, _, request = searching(3)
    refusal = wire.JoinRefused(RUN, request.join.ticket, "over", round=5)
    actions = one.handle(events.MessageReceived(coordinator, refusal), 1.1)
    assert one.round == 5
    for _, again in sent(actions, wire.JoinRequest):
        assert again.join.round == 5


def test_a_peer_that_was_lied_into_a_far_round_comes_back_at_its_next_search_but_not_to_a_past_round() -> (
    None
):
    one = machine("alice", "bob", "carol")
    share_round(one, "bob", "carol")
    one.handle(seen("bob", "carol", round=1), 0.5)
    [(coordinator, request)] = sent(one.handle(ready(nonce=b"m" * NONCE_BYTES), 1.0), wire.JoinRequest)
    refusal = wire.JoinRefused(RUN, request.join.ticket, "over", round=500)
    one.handle(events.MessageReceived(coordinator, refusal), 1.1)
    assert one.round == 500
    one.handle(events.Withdrew(), 1.2)
    one.handle(ready(nonce=b"n" * NONCE_BYTES), 1.3)
    assert one.round == 1


def test_one_peer_alone_cannot_make_it_skip_far() -> None:
    coordinator, second, rest = roles(4)
    one = machine(rest[0], *others_of(rest[0], 4))
    [(_, request)] = sent(one.handle(ready(), 1.0), wire.JoinRequest)
    refusal = wire.JoinRefused(RUN, request.join.ticket, "over", round=LEAP + 1)
    one.handle(events.MessageReceived(coordinator, refusal), 1.1)
    assert one.round == 0
    one.handle(
        events.CandidatesSeen([record_of(coordinator, round=10**9), record_of(second), record_of(rest[1])]),
        1.2,
    )
    assert one.round == 0


@pytest.mark.parametrize(
    "stale", [wire.JoinAccepted(RUN, b"t" * 8, 1.0, 1, 2), wire.JoinRefused(RUN, b"t" * 8, "")]
)
def test_answers_to_other_joins_do_no_harm(stale: wire.JoinAccepted | wire.JoinRefused) -> None:
    coordinator, second, rest = roles(3)
    one = machine(rest[0], coordinator, second)
    one.handle(ready(), 1.0)
    actions = one.handle(events.MessageReceived(coordinator, stale), 1.1)
    assert not sent(actions, wire.JoinRequest)
    assert {peer for peer, _ in sent(actions, wire.LeaveRequest)} <= {coordinator}


# ---- at most one round ----


def test_a_manifest_after_withdrawal_is_ignored() -> None:
    coordinator, second, _ = roles(2)
    one = machine(second, coordinator)
    [(_, request)] = sent(one.handle(ready(), 1.0), wire.JoinRequest)
    assert sent(one.handle(events.Withdrew(), 1.1), wire.LeaveRequest)[0][0] == coordinator
    manifest = Manifest.of(coordinator, [join(coordinator), request.join])
    assert formed(one.handle(tells(manifest), 1.2)) is None
    assert formed(one.handle(ready(nonce=b"m" * NONCE_BYTES), 1.3)) is None
    assert formed(one.handle(tells(manifest), 1.4)) is None


def test_a_manifest_with_a_join_that_was_stated_anew_meanwhile_counts() -> None:
    coordinator, second, _ = roles(2)
    one = machine(second, coordinator)
    [(_, request)] = sent(one.handle(ready(dialable=False), 1.0), wire.JoinRequest)
    restated = one.handle(ready(nonce=b"m" * NONCE_BYTES), 1.2)
    assert [message.ticket for _, message in sent(restated, wire.LeaveRequest)] == [request.join.ticket]
    [(_, anew)] = sent(restated, wire.JoinRequest)
    assert anew.join.dialable
    manifest = Manifest.of(coordinator, [join(coordinator), request.join])
    message = tells(manifest)
    actions = one.handle(message, 1.3)
    assert formed(actions) == manifest
    assert not one.ready


def test_a_second_manifest_is_ignored() -> None:
    coordinator, second, _ = roles(2)
    one = machine(second, coordinator)
    [(_, request)] = sent(one.handle(ready(), 1.0), wire.JoinRequest)
    manifest = Manifest.of(coordinator, [join(coordinator), request.join])
    message = tells(manifest)
    assert formed(one.handle(message, 1.1)) is not None
    assert formed(one.handle(message, 1.2)) is None


def test_a_manifest_that_is_overtaken_by_the_next_round_still_counts() -> None:
    one, coordinator, second, request = searching(3)
    one.handle(seen(coordinator, second, round=2), 1.1)
    assert one.round == 2
    manifest = Manifest.of(coordinator, [join(coordinator), join(second), request.join])
    assert formed(one.handle(tells(manifest), 1.2)) == manifest


def test_a_weight_that_is_no_number_is_the_callers_mistake() -> None:
    one = machine("alice", "bob")
    with pytest.raises(ValueError, match="expected a"):
        one.handle(ready(weight=float("nan")), 1.0)
    assert not one.ready


# ---- what it says of itself ----


def test_states() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator)
    assert isinstance(one.state, NoPeers)
    one.handle(seen(second, *rest), 1.0)
    assert isinstance(one.state, NoPeers), "records are nobody"
    meet(one, second, *rest)
    assert one.state == Idle(2)
    one.handle(ready(), 1.1)
    one.handle(asks(second), 1.2)
    state = one.state
    assert isinstance(state, Gathering)
    assert (state.ready, state.target) == (2, 3)
    assert state.reason


def test_a_client_mode_peer_does_not_coordinate() -> None:
    one = machine("alice")
    one.handle(events.CandidatesSeen([record_of("bob", dialable=False)]), 1.0)
    actions = one.handle(ready(dialable=False), 1.1)
    assert not sent(actions, wire.JoinRequest)
    assert one.deadline < float("inf")
    assert "can be dialled" in one.reason


def test_it_announces_itself_ready_but_not_too_often() -> None:
    one = machine("alice", "bob")
    announced = []
    for step in range(40):
        event = ready(nonce=bytes([step]) * NONCE_BYTES) if step % 2 == 0 else events.Withdrew()
        announced += [each for each in one.handle(event, 1 + step / 10) if isinstance(each, events.Announce)]
    assert 3 <= len(announced) <= 1 + 4 / ANNOUNCE_PERIOD
    assert any(each.ready for each in announced)


# ---- records are nobody ----


def test_a_peer_of_whom_only_a_record_is_known_is_asked_whether_it_is_there() -> None:
    one = machine("alice")
    question = wire.Whereabouts(RUN, 0, asks=True)
    assert sent(one.handle(seen("bob", "carol"), 1.0), wire.Whereabouts) == [
        ("bob", question),
        ("carol", question),
    ]
    assert not sent(one.handle(seen("bob", "carol"), 1.1), wire.Whereabouts), "once, for now"
    one.handle(events.MessageReceived("bob", wire.Whereabouts(RUN, 0)), 1.2)
    assert one.state == Idle(1)
    again = sent(elapse(one, 1.2, 60.0) + one.handle(seen("bob", "carol"), 60.0), wire.Whereabouts)
    assert again == [("carol", question)]


def test_a_peer_that_was_asked_and_never_said_anything_is_mute() -> None:
    one = machine("alice")
    one.handle(seen("bob", "carol"), 1.0)
    one.handle(events.MessageReceived("bob", wire.Whereabouts(RUN, 0)), 1.2)
    assert not one.context.membership.is_mute("carol"), "it may yet answer"
    elapse(one, 1.2, 60.0)
    assert one.context.membership.is_mute("carol")
    one.handle(events.PeerLost("bob"), 60.0)
    assert not one.context.membership.answers("bob")
    assert not one.context.membership.is_mute("bob"), "it has answered once, and may be back"
    one.handle(events.MessageReceived("carol", wire.Whereabouts(RUN, 0)), 61.0)
    assert not one.context.membership.is_mute("carol")


def test_a_peer_that_is_asked_answers_and_an_answer_is_not_answered() -> None:
    one = machine("alice")
    actions = one.handle(events.MessageReceived("bob", wire.Whereabouts(RUN, 0, asks=True)), 1.0)
    assert sent(actions, wire.Whereabouts) == [("bob", wire.Whereabouts(RUN, 0))]
    assert not sent(
        one.handle(events.MessageReceived("bob", wire.Whereabouts(RUN, 0)), 1.1), wire.Whereabouts
    )
    one.handle(seen("bob"), 1.2)
    assert one.state == Idle(1), "its word came before its record"


def test_a_flood_of_records_is_asked_in_turn() -> None:
    one = machine("alice")
    ghosts = [f"ghost{index:03}" for index in range(100)]
    asked = sent(one.handle(seen(*ghosts), 1.0), wire.Whereabouts)
    asked += sent(one.handle(seen(*ghosts), 1.5), wire.Whereabouts)
    assert len({peer for peer, _ in asked}) == len(asked) == 2 * MAX_ASKED


def test_records_of_nobody_are_in_no_group_and_coordinate_none() -> None:
    coordinator, second, rest = roles(4)
    one = machine(second)
    one.handle(seen(coordinator, *rest), 1.0)
    one.handle(ready(), 1.1)
    assert one.context.membership.expected(0, 1.1) == {second}
    assert isinstance(one.state, NoPeers)
    assert not sent(elapse(one, 1.1, 5.0), wire.JoinRequest)
    actions = one.handle(events.MessageReceived(coordinator, wire.Whereabouts(RUN, 0)), 5.1)
    assert [peer for peer, _ in sent(actions, wire.JoinRequest)] == [coordinator]


def test_a_peer_that_is_lost_is_no_company_until_it_answers() -> None:
    one = machine("alice", "bob")
    one.handle(events.PeerLost("bob"), 1.0)
    assert isinstance(one.state, NoPeers)
    assert sent(one.handle(seen("bob"), 1.2 + SUSPECT_SECONDS), wire.Whereabouts)
    one.handle(events.MessageReceived("bob", wire.Whereabouts(RUN, 0)), 1.3 + SUSPECT_SECONDS)
    assert one.state == Idle(1)


def test_of_two_that_cannot_be_dialled_the_record_has_to_do_beside_one_that_answers() -> None:
    one = machine("alice")
    view = events.CandidatesSeen(
        [record_of(name, dialable=name == "bob") for name in ("alice", "bob", "carol")]
    )
    assert [peer for peer, _ in sent(one.handle(view, 1.0), wire.Whereabouts)] == ["bob"]
    assert isinstance(one.state, NoPeers)
    meet(one, "bob", now=1.1)
    assert one.state == Idle(2)


# ---- the number of a round ----

FAR = 2**53
"""What a liar says."""


def share_round(one: Matchmaking, *others: str) -> None:
    """Have the machine take part in its next round with these."""
    peer = one.context.peer
    asked = [coordinator for coordinator, _ in sent(one.handle(ready(), 0.0), wire.JoinRequest)]
    coordinator, joins = [*asked, peer][0], [join(name, one.round) for name in (peer, *others)]
    manifest = Manifest.of(coordinator, joins)
    actions = one.handle(tells(manifest), 0.0)
    assert formed(actions) == manifest
    one.handle(events.RoundEnded(manifest.round), 0.0)


@pytest.mark.parametrize("liars", [1, 2, 20])
@pytest.mark.parametrize("answer", [False, True], ids=["records", "peers that answer"])
def test_liars_move_no_peer_that_has_company(liars: int, answer: bool) -> None:
    one = machine("alice", "bob", "carol")
    share_round(one, "bob", "carol")
    ghosts = [f"ghost{index}" for index in range(liars)]
    view = [
        record_of("bob", round=1),
        record_of("carol", round=1),
        *(record_of(ghost, round=FAR) for ghost in ghosts),
    ]
    one.handle(events.CandidatesSeen(view), 1.0)
    if answer:
        meet(one, *ghosts, now=1.0)
    one.handle(ready(nonce=b"m" * NONCE_BYTES), 1.1)
    elapse(one, 1.1, 10.0)
    assert one.round == 1


@pytest.mark.parametrize("round", [57, 1_000_000])
def test_a_newcomer_is_where_the_others_are_at_once(round: int) -> None:
    one = machine("alice")
    view = [record_of("bob", round=round), record_of("carol", round=round), record_of("dave", round=FAR)]
    one.handle(events.CandidatesSeen([*view, record_of("erin", round=FAR)]), 1.0)
    meet(one, "bob", "carol", "dave", now=1.0)
    one.handle(ready(), 1.1)
    assert one.round == round


def test_where_most_have_restarted_they_go_to_the_one_that_has_not() -> None:
    one = machine("alice")
    one.handle(events.CandidatesSeen([record_of("bob", round=1_000_000), record_of("carol", round=0)]), 1.0)
    meet(one, "bob", "carol", now=1.0)
    one.handle(ready(), 1.1)
    assert one.round == 1_000_000


def test_a_peer_that_was_away_for_long_comes_after_the_others_by_leaps() -> None:
    one = machine("alice", "bob", "carol")
    share_round(one, "bob", "carol")
    one.handle(seen("bob", "carol", round=10 * LEAP), 1.0)
    one.handle(ready(nonce=b"m" * NONCE_BYTES), 1.0)
    assert one.round == 1 + LEAP
    for moment in range(20):
        one.handle(events.Woke(), 1.0 + 0.01 * moment)
    assert one.round == 10 * LEAP


def test_no_number_is_the_last() -> None:
    one = machine("alice")
    one.handle(seen("bob", "carol", round=FAR), 1.0)
    meet(one, "bob", "carol", now=1.0)
    one.handle(ready(), 1.1)
    assert one.round <= MAX_JUMP + LEAP
    other = machine("dave")
    other.handle(seen("erin", "frank", round=MAX_JUMP + 3 * LEAP), 1.0)
    meet(other, "erin", "frank", now=1.0)
    other.handle(ready(), 1.1)
    for moment in range(10):
        other.handle(events.Woke(), 1.1 + 0.01 * moment)
    assert other.round == MAX_JUMP + 3 * LEAP, "who was put there can be joined"
