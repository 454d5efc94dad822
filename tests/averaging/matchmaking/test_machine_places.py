"""More peers than a group holds, all from one state: one coordinator, one group, and who has its places."""

from __future__ import annotations

import pytest

from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.matchmaking.membership import SETTLE_SECONDS
from equipoise.averaging.options import Needs
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId
from equipoise.averaging.timing import INITIAL_WAIT
from fakes.matchmaking import (
    NAMES,
    RUN,
    SPEC,
    alive,
    asks,
    elapse,
    formed,
    meet,
    others_of,
    ready,
    seen,
    sent,
    signer,
    verify,
)

SIX, PLACES = NAMES[:6], 4
START, NEXT = StateId(0, "0" * 64), StateId(1, "1" * 64)


def machine(name: str, *others: str) -> Matchmaking:
    one = Matchmaking(Context(RUN, SPEC, name, Needs(PLACES, places=True), signer(name), verify))
    one.handle(events.Woke(), 0.0)
    one.handle(seen(*others), 0.0)
    meet(one, *others)
    return one


def six() -> dict[str, Matchmaking]:
    return {name: machine(name, *others_of(name, 6)) for name in SIX}


def made(*makers: str, before: StateId = START, round: int = 0) -> events.MeanHeld:
    states = dict.fromkeys(makers, before)
    outcome = Outcome(ok=True, reason="", round=round, contributors=dict.fromkeys(makers, 1.0), states=states)
    return events.MeanHeld(outcome)


def placed(one: Matchmaking) -> set[str]:
    return set(one.draw(NEXT, 1.0).peers)


def waiting(machines: dict[str, Matchmaking]) -> set[str]:
    return {name for name, one in machines.items() if one.context.membership.waits(one.round)}


def test_all_see_the_same_places_and_no_more_than_there_are() -> None:
    (seated,) = {frozenset(placed(one)) for one in six().values()}
    assert len(seated) == PLACES


def test_as_many_as_fit_all_have_a_place() -> None:
    one = machine("alice", *others_of("alice", 4))
    assert placed(one) == set(NAMES[:4])


def test_the_makers_of_the_state_keep_their_places_and_coordinate() -> None:
    makers = {"carol", "dave", "erin", "frank"}
    machines = six()
    for one in machines.values():
        one.handle(made(*makers), 1.0)
        assert placed(one) == makers
    coordinators = {
        one.context.membership.coordinator(name, 1, 1.0) for name, one in machines.items() if name != "alice"
    }
    assert len(coordinators) == 1
    assert coordinators <= makers
    assert {one.round for one in machines.values()} == {1}


def test_the_place_of_a_lost_maker_is_free() -> None:
    one = machine("alice", *others_of("alice", 6))
    one.handle(made("carol", "dave", "erin", "frank"), 1.0)
    one.handle(events.PeerLost("frank"), 1.0)
    assert {"carol", "dave", "erin"} < placed(one)
    assert placed(one) & {"alice", "bob"}


def test_a_place_that_the_last_round_left_empty_is_open_to_all_whatever_they_know_of_earlier_rounds() -> None:
    machines = six()
    for name in ("alice", "frank"):  # The others have only seen the state that came after.
        machines[name].handle(made("carol", "dave", "erin", "frank"), 1.0)
    assert waiting(machines) >= {"alice"}
    after = StateId(2, "2" * 64)
    for one in machines.values():
        one.handle(made("carol", "dave", "erin", before=NEXT, round=1), 2.0)
    assert waiting(machines) == set()
    for one in machines.values():
        one.handle(made("bob", "carol", "dave", "erin", before=after, round=2), 3.0)
    assert waiting(machines) == {"alice", "frank"}


def test_a_mean_of_a_round_before_the_last_changes_no_places() -> None:
    one = machine("alice", *others_of("alice", 6))
    one.handle(made("bob", "carol", before=NEXT), 1.0)
    one.handle(made("erin", "frank"), 2.0)
    assert {"bob", "carol"} < placed(one)


def test_a_newcomer_learns_from_the_makers_themselves_that_they_have_places() -> None:
    one = machine("alice", *others_of("alice", 6))
    for maker in ("carol", "dave", "erin", "frank"):
        one.handle(events.MessageReceived(maker, wire.Whereabouts(RUN, 1, placed=True)), 1.0)
    assert placed(one) == {"carol", "dave", "erin", "frank"}


@pytest.mark.parametrize(
    ("names", "forms"),
    [(("alice", "bob"), False), (("dave", "erin"), False), (("dave", "erin", "frank"), True)],
)
def test_no_group_forms_without_most_of_the_makers_of_the_state(names: tuple[str, ...], forms: bool) -> None:
    one = machine("carol", *others_of("carol", 6))
    one.handle(made("carol", "dave", "erin", "frank"), 0.0)
    joins = [asks(name, round=1, state=NEXT, hops=wire.MAX_HOPS) for name in names]
    actions = [action for each in joins for action in one.handle(each, 0.1)]
    assert bool(sent(actions + alive(one, SIX, 20.0, 0.1), wire.GroupFormed)) is forms


def test_the_first_round_waits_until_no_more_peers_are_met() -> None:
    one = machine("alice", "bob")
    one.handle(ready(state=START), 0.0)
    actions = one.handle(asks("bob", state=START), 0.1)
    assert formed(actions + elapse(one, 0.1, SETTLE_SECONDS - 0.1)) is None
    assert formed(elapse(one, SETTLE_SECONDS - 0.1, SETTLE_SECONDS + INITIAL_WAIT)) is not None
