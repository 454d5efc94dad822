"""A peer without a place waits for the next mean, until the others are beyond it."""

from __future__ import annotations

from equipoise.averaging.replication.answers import Request, UpdateQuery, Wish
from equipoise.averaging.state import StateId, Step
from fakes.transfer import RUN, SPEC, TICKET, answer

AFTER = StateId(7, "7" * 64)
MAKERS = ("a", "b", "c")


def query(follows: bool) -> UpdateQuery:
    request = Request(RUN, SPEC, TICKET, Wish(0, 1 << 20, AFTER, frozenset(MAKERS)), follows=follows)
    one = UpdateQuery(request)
    one.see(MAKERS, 0.0)
    for maker in MAKERS:
        one.hear(maker, answer(7), 0.0)
    return one


def test_it_waits_until_a_chain_of_means_leads_on_that_nobody_keeps() -> None:
    assert query(follows=False).hopeless(60.0)
    one = query(follows=True)
    for maker in MAKERS:
        one.hear(maker, answer(9), 60.0)
    assert not one.hopeless(60.0), "anybody may claim an epoch"
    one.prove("a", (Step(StateId(8, "8" * 64), MAKERS),))
    assert one.hopeless(60.0)
