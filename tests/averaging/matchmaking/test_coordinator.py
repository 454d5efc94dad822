"""The matchmaking machine as a coordinator: whom it parks, refuses and hands on, and when it closes a group."""

from __future__ import annotations

import msgspec
import pytest

from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.context import MAX_JOINS_OF_ONE
from equipoise.averaging.matchmaking.events import Action, Form, MessageReceived, PeerLost, RoundEnded, Woke
from equipoise.averaging.matchmaking.group_builder import INVITE_AGAIN_SECONDS
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.matchmaking.membership import DIAL_SECONDS, LEAP, MISSES, WARM_SECONDS
from equipoise.averaging.options import MAX_PARKED_GROUPS
from equipoise.averaging.timing import INITIAL_WAIT, INVITE_SECONDS, KEEPALIVE, MIN_WAIT, SILENT_SECONDS
from fakes.matchmaking import (
    NAMES,
    OTHER_SPEC,
    RUN,
    asks,
    closed_without,
    elapse,
    formed,
    gathering,
    join,
    machine,
    ready,
    roles,
    seen,
    sent,
)

# ---- parking joins and closing groups ----


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (MessageReceived("mallory", wire.JoinRequest(RUN, join("bob"))), "signed by mallory"),
        (
            MessageReceived("bob", wire.JoinRequest(RUN, msgspec.structs.replace(join("bob"), weight=9.0))),
            "signed by bob",
        ),
        (asks("bob", round=LEAP + 1), "far ahead"),
        (asks("bob", spec=OTHER_SPEC), "expected spec"),
    ],
)
def test_joins_that_are_wrong_are_refused_with_the_reason(request_: MessageReceived, why: str) -> None:
    actions = machine("alice", "bob").handle(request_, 1.0)
    [(peer, refusal)] = sent(actions, wire.JoinRefused)
    assert peer == request_.peer
    assert why in refusal.detail


def counting(one: Matchmaking) -> list[str]:
    """The peers whose signatures the machine verifies from now on."""
    verify = one.context.verify
    seen_: list[str] = []

    def counted(peer: str, data: bytes, signature: bytes) -> bool:
        seen_.append(peer)
        return verify(peer, data, signature)

    one.context.verify = counted
    return seen_


def test_a_false_join_is_refused_for_its_signature() -> None:
    one = machine("alice", "bob", "carol")
    for false in (msgspec.structs.replace(join("bob"), weight=9.0), join("carol")):
        asked = MessageReceived("bob", wire.JoinRequest(RUN, false))
        [(_, refusal)] = sent(one.handle(asked, 1.0), wire.JoinRefused)
        assert "sign" in refusal.detail


def test_joins_of_a_peer_are_looked_at_so_many_times_a_second() -> None:
    one = machine("alice", "bob", "carol")
    verified = counting(one)
    for step in range(1000):
        one.handle(asks("bob", nonce=step.to_bytes(16, "big")), 1.0 + step / 2000)
    assert verified == ["bob"] * MAX_JOINS_OF_ONE
    one.handle(asks("carol"), 1.6)
    assert verified[-1] == "carol"
    one.handle(asks("bob"), 2.1)
    assert verified[-1] == "bob"


def test_a_join_for_a_round_gone_by_is_told_the_next() -> None:
    [(_, refusal)] = sent(
        machine("alice", "bob", round=7).handle(asks("bob", round=5), 1.0), wire.JoinRefused
    )
    assert refusal.round == 7


def test_a_peer_that_asks_again_after_the_closing_gets_the_manifest_again() -> None:
    coordinator, second, _ = roles(2)
    one = machine(coordinator, second)
    one.handle(ready(), 1.0)
    [(_, first)] = sent(one.handle(asks(second), 1.1), wire.GroupFormed)
    assert sent(one.handle(asks(second), 1.2), wire.GroupFormed) == [(second, first)]


def test_all_members_are_told_for_which_peer_the_group_waited_and_how_long() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator, second, *rest)
    one.handle(ready(), 1.0)
    one.handle(asks(second), 1.1)
    actions = one.handle(asks(rest[0]), 1.9)
    for _, told in sent(actions, wire.GroupFormed):
        assert (told.last, told.waited) == (rest[0], pytest.approx(0.9))
    [form] = [action for action in actions if isinstance(action, Form)]
    assert (form.last, form.waited) == (rest[0], pytest.approx(0.9))
    later = machine(rest[0], coordinator, second)
    later.handle(ready(), 1.9)
    [form] = [one for one in later.handle(MessageReceived(coordinator, told), 2.0) if isinstance(one, Form)]
    assert form.last == rest[0], "the slow peer hears that it was waited for"


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ((0.0, 0.0), "all observe: 2 contributors are needed, and all weights are 0"),
        ((1.0, 0.0), "2 contributors are needed, 1 of 2 have a weight above 0"),
    ],
)
def test_a_group_without_contributors_says_what_it_lacks(weights: tuple[float, float], why: str) -> None:
    coordinator, second, _ = roles(2)
    one = machine(coordinator, second)
    one.handle(ready(weights[0]), 1.0)
    one.handle(asks(second, weight=weights[1]), 1.1)
    assert one.shortage == f"this peer coordinates: 2 of 2 in; {why}"


def test_a_peer_alone_says_that_nobody_is_there_and_after_a_round_that_nobody_is_left() -> None:
    coordinator, second, _ = roles(2)
    one = machine(coordinator, second)
    one.handle(ready(), 1.0)
    assert (
        one.shortage
        == f"this peer coordinates: 1 of 2 in; waits for {second}, for 3.00 s, as it does at first"
    )
    one.handle(seen(), 1.1)
    one.handle(PeerLost(second), 1.1)
    assert one.shortage == "nobody else is in this run"
    one.handle(seen(second), 1.2)
    one.handle(asks(second), 1.2)
    one.handle(RoundEnded(0), 1.3)
    one.handle(seen(), 1.4)
    one.handle(PeerLost(second), 1.4)
    one.handle(ready(), 1.5)
    assert one.shortage == "nobody is left"


def test_a_peer_that_did_not_come_is_named_too() -> None:
    coordinator, second, rest = roles(3)
    _, actions = closed_without(rest[0], coordinator, second)
    [(_, told)] = sent(actions, wire.GroupFormed)
    assert (told.last, told.waited) == (rest[0], pytest.approx(INITIAL_WAIT))


def test_parked_joins_are_bounded() -> None:
    one = machine("alice", "bob", group_size=2)
    refused = 0
    for index in range(20):
        refused += len(
            sent(one.handle(asks(f"guest{index}", hops=wire.MAX_HOPS, weight=0), 1.0), wire.JoinRefused)
        )
    assert refused == 20 - MAX_PARKED_GROUPS * 2


def test_rounds_gathered_at_once_are_bounded() -> None:
    one = machine("alice", *NAMES[1:])
    refused = []
    for round, name in enumerate(NAMES[1:], 1):
        refused += sent(one.handle(asks(name, round=round, hops=wire.MAX_HOPS), 1.0), wire.JoinRefused)
    assert [peer for peer, _ in refused] == NAMES[4:-1], "the furthest round makes room"


def test_a_peer_that_leaves_or_is_lost_is_not_in_the_group() -> None:
    coordinator, second, rest = roles(4)
    for gone in (MessageReceived(second, wire.LeaveRequest(RUN, join(second).ticket)), PeerLost(second)):
        one = machine(coordinator, second, *rest)
        one.handle(ready(), 1.0)
        one.handle(asks(second), 1.0)
        one.handle(gone, 1.1)
        one.handle(asks(rest[0]), 1.2)
        one.handle(asks(rest[1]), 1.2)
        manifest = formed(one.handle(Woke(), 1.2 + INITIAL_WAIT))
        assert manifest is None or second not in manifest.peers


def test_leaving_with_another_ticket_changes_nothing() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator, second, *rest)
    one.handle(asks(second), 1.0)
    one.handle(MessageReceived(second, wire.LeaveRequest(RUN, b"t" * 8)), 1.1)
    one.handle(ready(), 1.2)
    assert formed(one.handle(asks(rest[0]), 1.3)) is not None


def test_the_worse_coordinator_hands_on_what_is_parked_with_it() -> None:
    coordinator, second, rest = roles(3)
    one = machine(second, *rest)
    assert sent(one.handle(asks(rest[0]), 1.0), wire.JoinAccepted)
    assert not sent(one.handle(seen(coordinator, *rest), 1.1), wire.JoinRefused), "its record is nobody"
    actions = one.handle(MessageReceived(coordinator, wire.Whereabouts(RUN, 0)), 1.2)
    [(peer, refusal)] = sent(actions, wire.JoinRefused)
    assert (peer, refusal.redirect) == (rest[0], coordinator)


def test_a_join_that_has_been_sent_about_is_kept() -> None:
    coordinator, second, rest = roles(3)
    one = machine(second, coordinator, *rest)
    assert sent(one.handle(asks(rest[0]), 1.0), wire.JoinRefused)[0][1].redirect == coordinator
    assert sent(one.handle(asks(rest[0], hops=wire.MAX_HOPS), 1.1), wire.JoinAccepted)


def test_of_two_that_ask_each_other_the_lower_ranked_coordinates() -> None:
    coordinator, second, _ = roles(2)
    one, other = machine(coordinator, second), machine(second, coordinator)
    one.handle(PeerLost(coordinator), 1.0)
    # Each is made to believe that the other coordinates.
    [(_, request)] = sent(other.handle(ready(), 1.0), wire.JoinRequest)
    one.handle(ready(), 1.0)
    manifest = formed(one.handle(MessageReceived(second, request), 1.1))
    assert manifest is not None
    assert manifest.coordinator == coordinator


def test_joining_again_and_again_does_not_put_off_the_end() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator, second, *rest)
    one.handle(ready(patience=2.0), 1.0)
    one.handle(MessageReceived(second, wire.JoinRequest(RUN, join(second), patience=2.0)), 1.0)
    now, actions = 1.0, []
    while not formed(actions):
        now += 0.1
        again = join(second, nonce=f"{now:16.3f}".encode())
        actions = one.handle(MessageReceived(second, wire.JoinRequest(RUN, again, patience=2.0)), now)
    assert now == pytest.approx(2.0)


# ---- how long to wait ----


def test_a_peer_that_says_nothing_when_asked_is_not_waited_for() -> None:
    coordinator, second, rest = roles(4)
    one = machine(coordinator, second, *rest)
    for _ in range(8):
        one.context.straggler_wait.learn(9.0)
    one.context.membership.hear(rest[1], 0.5)
    for name in (coordinator, second, rest[0]):
        one.handle(ready() if name == coordinator else asks(name), 1.0)
    asked = 1.0 + INVITE_SECONDS
    assert formed(elapse(one, 1.0, asked + SILENT_SECONDS - 0.1)) is None
    manifest = formed(elapse(one, asked + SILENT_SECONDS - 0.1, asked + SILENT_SECONDS))
    assert manifest is not None
    assert rest[1] not in manifest.peers


def test_one_not_heard_from_for_long_has_the_time_that_a_dial_takes() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator, second, *rest)
    for _ in range(8):
        one.context.straggler_wait.learn(9.0)
    began = WARM_SECONDS + 1.0
    one.handle(ready(), began)
    one.handle(asks(second), began)
    found_out = began + INVITE_SECONDS + DIAL_SECONDS + SILENT_SECONDS
    assert formed(elapse(one, began, found_out - 0.1)) is None
    assert formed(elapse(one, found_out - 0.1, found_out)) is not None


def test_a_record_alone_does_not_make_others_wait_again() -> None:
    one = machine("alice", "bob", "carol", "dave")
    membership = one.context.membership
    membership.miss(["dave"] * MISSES)
    for moment in range(6):
        one.handle(seen("bob", "carol", "dave", ready=moment % 2 == 1), 1.0 + moment)
        assert "dave" not in membership.expected(0, 1.0 + moment)
    one.handle(asks("dave", hops=wire.MAX_HOPS), 8.0)
    assert "dave" in membership.expected(0, 8.0)


def test_while_no_group_could_be_those_missing_are_asked_again() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator, second, *rest)
    one.handle(ready(weight=0.0), 1.0)
    one.handle(asks(second), 1.0)
    asked = []
    for step in range(100):
        actions = elapse(one, 1.0 + 0.2 * step, 1.2 + 0.2 * step)
        asked += sent(
            [*actions, *one.handle(MessageReceived(rest[0], wire.Whereabouts(RUN, 0)), 1.2 + 0.2 * step)],
            wire.Invitation,
        )
    assert [peer for peer, _ in asked] == rest * round(20.0 / INVITE_AGAIN_SECONDS)


def test_standing_still_is_never_less_than_no_lateness() -> None:
    one, _, rest = gathering(3)
    elapse(one, 1.0, 1.1)
    one.handle(Woke(), 2.5)
    [(_, message), *_rest] = sent(one.handle(PeerLost(rest[0]), 2.6), wire.GroupFormed) or sent(
        one.handle(PeerLost(rest[0]), 2.7), wire.GroupFormed
    )
    assert wire.decode(wire.encode(message)) == message


def test_a_peer_that_is_late_and_says_that_it_is_there_is_waited_for() -> None:
    one, _, rest = gathering(3, learnt=4.0)
    elapse(one, 1.0, 1.0 + INVITE_SECONDS)
    one.handle(MessageReceived(rest[0], wire.Whereabouts(RUN, 0)), 1.1 + INVITE_SECONDS)
    assert formed(elapse(one, 1.1 + INVITE_SECONDS, 5.0)) is None
    assert formed(one.handle(asks(rest[0]), 5.0)) is not None


def test_a_coordinator_that_stood_still_hears_first_what_came_meanwhile() -> None:
    one, _, rest = gathering(4, learnt=0.01)
    elapse(one, 1.0, 1.1)
    assert formed(one.handle(Woke(), 1.1 + 1.5)) is None, "the wait was over while it slept"
    one.handle(asks(rest[0]), 1.1 + 1.5)
    manifest = formed(one.handle(asks(rest[1]), 1.1 + 1.5))
    assert manifest is not None
    assert len(manifest.peers) == 4


def test_a_coordinator_that_stood_still_closes_soon_though_its_members_have_no_patience_left() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator, second, *rest)
    one.handle(ready(patience=1.0), 1.0)
    one.handle(MessageReceived(second, wire.JoinRequest(RUN, join(second), patience=1.0)), 1.0)
    one.handle(Woke(), 5.0)
    assert one.deadline > 5.0, "it does not spin"
    assert formed(elapse(one, 5.0, 5.5)) is not None


def test_a_coordinator_that_is_always_a_little_late_closes_all_the_same() -> None:
    one, _, rest = gathering(3)
    now, actions = 1.0, []
    while not formed(actions):
        now = one.deadline + 0.3
        actions = [
            *one.handle(Woke(), now),
            *one.handle(MessageReceived(rest[0], wire.Whereabouts(RUN, 0)), now),
        ]
        assert now < 1.0 + INITIAL_WAIT + 2.5


def test_a_coordinator_that_stood_still_for_too_long_keeps_nobody_who_has_left() -> None:
    one, second, rest = gathering(3)
    elapse(one, 1.0, 1.1)
    assert formed(one.handle(asks(rest[0]), 4.0)) is None, "it has kept the others waiting for too long"
    one.handle(MessageReceived(second, wire.LeaveRequest(RUN, join(second).ticket)), 4.0)
    manifest = formed(elapse(one, 4.0, 6.0))
    assert manifest is not None
    assert second not in manifest.peers


def closing_time(one: Matchmaking, now: float) -> float:
    """Wake it by its own deadlines until it closes its group."""
    for _ in range(100):
        now = max(now, one.deadline)
        actions = one.handle(Woke(), now)
        if formed(actions) is not None:
            return now
        assert one.deadline < float("inf")
    raise AssertionError("expected it to close its group")


def test_the_wait_shrinks_with_what_is_learnt() -> None:
    for round in range(6):
        coordinator, second, rest = roles(4, round)
        one = machine(coordinator, second, *rest, round=round)
        for _ in range(8):
            one.context.straggler_wait.learn(0.01)
        one.handle(ready(), 1.0)
        one.handle(asks(second, round), 1.0)
        assert formed(elapse(one, 1.0, 1.0 + MIN_WAIT)) is not None


def test_the_dead_are_found_out_by_asking_after_them() -> None:
    one, _, rest = gathering(3)
    actions = elapse(one, 1.0, 1.0 + INVITE_SECONDS)
    assert [peer for peer, _ in sent(actions, wire.Invitation)] == rest
    assert formed(one.handle(PeerLost(rest[0]), 1.6)) is not None


def test_a_peer_that_missed_two_rounds_is_not_waited_for_until_it_shows_itself() -> None:
    one = machine("alice", "bob", "carol", "dave")
    one.context.membership.own_misses = 2

    def closes_at_once(round: int, *names: str) -> bool:
        actions: list[Action] = []
        for name in names:
            actions = one.handle(asks(name, round, hops=wire.MAX_HOPS), 10.0 * round)
        for step in range(40):
            now = 10.0 * round + INVITE_SECONDS * step
            elapse(one, now, now + INVITE_SECONDS)
            one.context.membership.hear("dave", now + INVITE_SECONDS)
        return bool(sent(actions, wire.GroupFormed))

    assert [closes_at_once(round, "bob", "carol") for round in range(4)] == [False, False, True, True]
    assert closes_at_once(4, "bob", "dave", "carol")
    assert not closes_at_once(5, "bob", "carol")


def test_an_impatient_pair_does_not_wait_for_a_third_until_it_is_too_late() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator, second, *rest)
    one.handle(ready(patience=1.0), 1.0)
    one.handle(MessageReceived(second, wire.JoinRequest(RUN, join(second), patience=1.0)), 1.0)
    assert closing_time(one, 1.0) == pytest.approx(1.5)


def test_nobody_closes_a_group_that_could_not_succeed() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator, second, *rest)
    one.handle(ready(weight=0), 1.0)
    one.handle(asks(second), 1.0)
    one.handle(asks(rest[0], weight=0), 1.0)
    for _ in range(20):
        assert formed(one.handle(Woke(), one.deadline)) is None
    one.handle(MessageReceived(rest[0], wire.LeaveRequest(RUN, join(rest[0], weight=0).ticket)), 60.0)
    assert formed(one.handle(asks(rest[0]), 61.0)) is not None


def test_the_lonely_are_told_that_they_are_still_parked() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator, second, *rest)
    one.handle(asks(second), 1.0)
    [(peer, accepted)] = sent(one.handle(Woke(), 1.0 + KEEPALIVE), wire.JoinAccepted)
    assert (peer, accepted.ready) == (second, 1)


def test_an_invited_peer_says_where_it_is_and_comes_if_it_is_alone() -> None:
    coordinator, second, rest = roles(3)
    one = machine(coordinator, second, *rest)
    one.handle(ready(), 1.0)
    actions = one.handle(MessageReceived(second, wire.Invitation(RUN, 0)), 1.1)
    assert sent(actions, wire.Whereabouts) == [(second, wire.Whereabouts(RUN, 0))]
    assert sent(actions, wire.JoinRequest)[0][0] == second
