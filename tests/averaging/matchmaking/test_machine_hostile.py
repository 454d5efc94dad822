"""One matchmaking machine among peers that hold it, lure it and flood it, or die before they have told it all."""

from __future__ import annotations

import pytest

from equipoise.averaging.manifest import Manifest
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.events import MessageReceived, RoundHeard, Woke
from equipoise.averaging.timing import HOLD_SECONDS, MAX_WAIT, MISSED_SECONDS, REPLY_SECONDS
from fakes.matchmaking import NAMES, RUN, elapse, formed, join, machine, others_of, ready, roles, seen, sent


def accepts(coordinator: str, ticket: bytes, short: bool = False, wait: float = 10.0) -> MessageReceived:
    return MessageReceived(coordinator, wire.JoinAccepted(RUN, ticket, wait, 2, 4, short))


@pytest.mark.parametrize("short", [False, True], ids=["as if it gathered", "as if nobody else came"])
def test_a_coordinator_that_holds_a_join_for_ever_is_left_and_not_asked_again_at_once(short: bool) -> None:
    coordinator, second, rest = roles(4)
    one = machine(rest[0], *others_of(rest[0], 4))
    [(_, request)] = sent(one.handle(ready(), 1.0), wire.JoinRequest)
    one.handle(seen(*others_of(rest[0], 4), ready=True), 1.0)
    actions, now = one.handle(accepts(coordinator, request.join.ticket, short), 1.0), 1.0
    while not sent(actions, wire.JoinRequest):
        assert now < 1.0 + HOLD_SECONDS + 1.0, "it is held no longer than an honest coordinator would"
        now += 0.5
        actions = one.handle(accepts(coordinator, request.join.ticket, short), now)
    assert now > 1.0 + MAX_WAIT
    assert sent(actions, wire.LeaveRequest)[0][0] == coordinator
    assert sent(actions, wire.JoinRequest)[0][0] == second
    if short:  # It may have waited for its own trainer: it may call once, and must then be quick.
        [(peer, _)] = sent(
            one.handle(MessageReceived(coordinator, wire.Invitation(RUN, 0)), now + 0.1), wire.JoinRequest
        )
        assert peer == coordinator
        actions = []
        for _ in range(5):
            now += 0.5
            actions += one.handle(accepts(coordinator, request.join.ticket), now)
        assert sent(actions, wire.JoinRequest)[0][0] == second
    for lure in (wire.Whereabouts(RUN, 0), wire.Invitation(RUN, 0)):
        assert not sent(one.handle(MessageReceived(coordinator, lure), now + 0.1), wire.JoinRequest)
    [(_, again)] = sent(actions, wire.JoinRequest)
    redirect = wire.JoinRefused(RUN, again.join.ticket, "to and fro", redirect=coordinator)
    [(peer, last)] = sent(one.handle(MessageReceived(second, redirect), now + 0.2), wire.JoinRequest)
    assert (peer, last.hops) == (second, wire.MAX_HOPS)


def test_a_peer_that_lures_again_and_again_is_heeded_once() -> None:
    coordinator, _, rest = roles(4)
    one = machine(rest[0], *others_of(rest[0], 4))
    asked, now = sent(one.handle(ready(), 1.0), wire.JoinRequest), 1.0
    one.handle(seen(*others_of(rest[0], 4), ready=True), 1.0)
    while now < 1.0 + 2 * HOLD_SECONDS + 4.0:
        now += 0.5
        peer, request = asked[-1]
        word = wire.JoinAccepted(RUN, request.join.ticket, 0.2, 2, 4, True)
        asked += sent(one.handle(MessageReceived(peer, word), now), wire.JoinRequest)
        asked += sent(
            one.handle(MessageReceived(coordinator, wire.Invitation(RUN, 0)), now), wire.JoinRequest
        )
    assert sum(peer == coordinator for peer, _ in asked) <= 2


def test_a_peer_that_alone_is_ready_waits_with_its_coordinator_for_hours() -> None:
    coordinator, _, rest = roles(4)
    one = machine(rest[0], *others_of(rest[0], 4))
    [(_, request)] = sent(one.handle(ready(), 1.0), wire.JoinRequest)
    for second in range(3600):
        now = 1.0 + second
        assert not sent(one.handle(accepts(coordinator, request.join.ticket, True), now), wire.LeaveRequest)


def test_a_coordinator_that_refuses_and_lures_is_left() -> None:
    coordinator, second, rest = roles(4)
    one = machine(rest[0], *others_of(rest[0], 4))
    asked = [sent(one.handle(ready(), 1.0), wire.JoinRequest)[0]]
    for step in range(100):
        peer, request = asked[-1]
        refusal = wire.JoinRefused(RUN, request.join.ticket, "no room")
        word = refusal if peer == coordinator else wire.Whereabouts(RUN, 0)
        asked += sent(one.handle(MessageReceived(coordinator, word), 1.1 + 0.01 * step), wire.JoinRequest)
    assert asked[-1][0] == second
    assert sum(peer == coordinator for peer, _ in asked) <= HOLD_SECONDS / REPLY_SECONDS + 1


def test_a_silent_coordinator_holds_nobody_by_a_long_promise() -> None:
    coordinator, second, rest = roles(4)
    one = machine(rest[0], *others_of(rest[0], 4))
    [(_, request)] = sent(one.handle(ready(), 1.0), wire.JoinRequest)
    one.handle(accepts(coordinator, request.join.ticket, wait=10.0), 1.1)
    assert sent(one.handle(Woke(), 1.1 + 2.0), wire.JoinRequest)[0][0] == second


# ---- a round that began without the news ----


def test_a_peer_that_hears_of_a_round_asks_for_its_group_and_begins_it() -> None:
    coordinator, second, rest = roles(3)
    told, untold = machine(second, coordinator, *rest), machine(rest[0], coordinator, second)
    joins = [sent(one.handle(ready(), 1.0), wire.JoinRequest)[0][1].join for one in (told, untold)]
    manifest = Manifest.of(coordinator, [join(coordinator), *joins])
    told.handle(MessageReceived(coordinator, wire.GroupFormed(RUN, manifest, 0.0)), 1.1)

    untold.handle(RoundHeard(second), 1.1)
    untold.handle(RoundHeard(second), 1.1)
    [(peer, word)] = sent(elapse(untold, 1.1, 1.1 + MISSED_SECONDS), wire.Whereabouts)
    assert peer == second
    [(_, again)] = sent(told.handle(MessageReceived(rest[0], word), 1.4), wire.GroupFormed)
    assert not sent(told.handle(MessageReceived(rest[0], word), 1.4), wire.GroupFormed), "once"
    assert formed(untold.handle(MessageReceived(second, again), 1.5)) == manifest


def test_news_that_comes_soon_is_not_asked_for() -> None:
    coordinator, second, rest = roles(3)
    one = machine(rest[0], coordinator, second)
    [(_, request)] = sent(one.handle(ready(), 1.0), wire.JoinRequest)
    one.handle(RoundHeard(second), 1.1)
    manifest = Manifest.of(coordinator, [join(coordinator), join(second), request.join])
    one.handle(MessageReceived(coordinator, wire.GroupFormed(RUN, manifest, 0.0)), 1.2)
    assert not sent(elapse(one, 1.2, 3.0), wire.Whereabouts)


def test_manifests_of_others_cost_no_signature() -> None:
    one = machine("alice", *NAMES[1:])

    def refuse(peer: str, data: bytes, signature: bytes) -> bool:
        raise AssertionError("a signature is checked")

    one.context.verify = refuse
    manifest = Manifest.of("bob", [join(name, round=1) for name in NAMES[4:]])
    one.handle(MessageReceived("bob", wire.GroupFormed(RUN, manifest, 0.0)), 1.0)
