"""Builders for tests of one matchmaking machine: views, joins, messages, and what it sent."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from equipoise.averaging.manifest import NONCE_BYTES, Join, Manifest, Sign
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.matchmaking.messages import MAX_PATIENCE, JoinRequest
from equipoise.averaging.matchmaking.topology import rank
from equipoise.averaging.options import Needs
from equipoise.averaging.timing import INITIAL_WAIT, INVITE_SECONDS
from equipoise.limits import Candidate
from fakes.memory import FakeIdentity

RUN, SPEC = "simulated", hashlib.sha256(b"simulated").hexdigest()
NAMES = ["alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi"]
OTHER_SPEC = "0" * 64
verify = FakeIdentity("").verify


def record_of(
    peer: str, ready: bool = False, spec: str = SPEC, dialable: bool = True, **fields: Any
) -> Candidate:
    return Candidate(peer=peer, state="ready" if ready else "joined", spec=spec, dialable=dialable, **fields)


def signer(name: str) -> Sign:
    return FakeIdentity(name).sign


def stated(peer: str = "", **fields: Any) -> Join:
    """What a peer states of itself, not signed; a machine fills in its own name."""
    join = Join(peer, SPEC, 0, 1.0, 0.0, True, b"n" * NONCE_BYTES, b"", None, b"")
    return msgspec.structs.replace(join, **fields)


def in_order(round: int, names: list[str]) -> list[str]:
    """Names in the order in which they coordinate the round."""
    return sorted(names, key=lambda name: rank(str(round), name))


def others_of(name: str, count: int) -> list[str]:
    return [one for one in NAMES[:count] if one != name]


def seen(*names: str, **fields: Any) -> events.CandidatesSeen:
    return events.CandidatesSeen([record_of(name, **fields) for name in sorted(names)])


def machine(name: str, *others: str, group_size: int = 4, round: int = 0) -> Matchmaking:
    """A machine with a warm view of these others, all in its round."""
    context = Context(RUN, SPEC, name, Needs(group_size), signer(name), verify)
    context.next_round.number = round
    one = Matchmaking(context)
    one.handle(events.Woke(), 0.0)
    one.handle(seen(*others, round=round), 0.0)
    meet(one, *others)
    return one


def meet(one: Matchmaking, *others: str, now: float = 0.0) -> None:
    """Have these others answer: what they tell is believed from then."""
    for other in others:
        one.context.membership.hear(other, now)


def ready(weight: float = 1.0, patience: float = MAX_PATIENCE, **fields: Any) -> events.BecameReady:
    """This peer is ready; its machine fills in its name."""
    return events.BecameReady(stated(weight=weight, **fields), patience)


def join(name: str, round: int = 0, **fields: Any) -> Join:
    return stated(name, round=round, **fields).signed(signer(name))


def asks(name: str, round: int = 0, hops: int = 0, **fields: Any) -> events.MessageReceived:
    return events.MessageReceived(name, JoinRequest(RUN, join(name, round, **fields), hops=hops))


def elapse(one: Matchmaking, since: float, until: float) -> list[events.Action]:
    """Let time pass, with every wake-up that the machine asks for; returns what it asked for meanwhile."""
    actions, now = [], since
    while (now := max(now, one.deadline)) < until:
        actions += one.handle(events.Woke(), now)
    return actions + one.handle(events.Woke(), until)


def alive(one: Matchmaking, names: list[str], until: float, now: float) -> list[events.Action]:
    """Let time pass while these peers answer what they are asked."""
    actions: list[events.Action] = []
    while now < until:
        now = min(max(one.deadline, now), until)
        new = one.handle(events.Woke(), now)
        for peer, _ in sent(new, wire.Invitation) + sent(new, wire.Whereabouts):
            if peer in names:
                new += one.handle(events.MessageReceived(peer, wire.Whereabouts(RUN, one.round)), now)
        actions += new
    return actions


def closed_without(absent: str, coordinator: str, second: str) -> tuple[Matchmaking, list[events.Action]]:
    """A coordinator that has gathered from second 1.0 on and closed without a live peer; its actions at the close."""
    one = machine(coordinator, second, absent)
    one.handle(ready(), 1.0)
    one.handle(asks(second), 1.0)
    elapse(one, 1.0, 1.0 + INVITE_SECONDS)
    one.handle(events.MessageReceived(absent, wire.Whereabouts(RUN, 0)), 1.0 + INVITE_SECONDS)
    return one, elapse(one, 1.0 + INVITE_SECONDS, 1.0 + INITIAL_WAIT)


def sent(actions: list[events.Action], kind: type) -> list[tuple[str, Any]]:
    return [
        (each.peer, each.message)
        for each in actions
        if isinstance(each, events.Send) and isinstance(each.message, kind)
    ]


def formed(actions: list[events.Action]) -> Manifest | None:
    return next((each.manifest for each in actions if isinstance(each, events.Form)), None)


def roles(count: int, round: int = 0) -> tuple[str, str, list[str]]:
    """Of a run in one group: its coordinator, the next in line, the others."""
    first, second, *rest = in_order(round, NAMES[:count])
    return first, second, rest


def searching(count: int) -> tuple[Matchmaking, str, str, JoinRequest]:
    """The third in line of so many peers, which has asked the coordinator; that one, the second, and what it asked."""
    coordinator, second, rest = roles(count)
    one = machine(rest[0], *others_of(rest[0], count))
    [(_, request)] = sent(one.handle(ready(), 1.0), JoinRequest)
    return one, coordinator, second, request


def gathering(count: int, learnt: float | None = None) -> tuple[Matchmaking, str, list[str]]:
    """A coordinator that is ready, as the second in line is, which has asked it; the second, and those not ready.

    Stragglers were as late as `learnt`.
    """
    coordinator, second, rest = roles(count)
    one = machine(coordinator, second, *rest)
    for _ in range(0 if learnt is None else 8):
        one.context.straggler_wait.learn(learnt)
    one.handle(ready(), 1.0)
    one.handle(asks(second), 1.0)
    return one, second, rest


def tells(manifest: Manifest) -> events.MessageReceived:
    """A manifest comes from its coordinator."""
    return events.MessageReceived(manifest.coordinator, wire.GroupFormed(RUN, manifest, 0.0))
