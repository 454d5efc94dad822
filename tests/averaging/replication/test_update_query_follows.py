"""A peer without a place waits for the next mean, until the others are beyond it."""

from __future__ import annotations

from equipoise.averaging.replication.answers import Request, UpdateQuery, Wish
from equipoise.averaging.replication.chunks import CHUNK_BYTES
from equipoise.averaging.state import StateId
from fakes.transfer import RUN, SPEC, TICKET, answer, offer_of

AFTER = StateId(7, "7" * 64)
MAKERS = ("a", "b", "c")


def query(follows: bool) -> UpdateQuery:
    request = Request(RUN, SPEC, TICKET, Wish(0, 1 << 20, AFTER, frozenset(MAKERS)), follows=follows)
    one = UpdateQuery(request)
    one.see(MAKERS, 0.0)
    for maker in MAKERS:
        one.hear(maker, answer(7), 0.0)
    return one


def test_it_waits_while_the_makers_are_no_further_and_gives_up_once_they_are() -> None:
    assert query(follows=False).hopeless(60.0)
    one = query(follows=True)
    assert not one.hopeless(60.0)
    one.hear("a", answer(9), 60.0)
    assert not one.hopeless(60.0), "a single peer may lie"
    assert one.beyond == 0
    one.hear("b", answer(10), 60.0)
    assert one.hopeless(60.0)
    assert one.beyond == 9, "the epoch that most have reached"


def test_a_mean_that_most_of_its_circle_do_not_offer_holds_it_up_no_longer() -> None:
    offer = offer_of(7)
    one = UpdateQuery(
        Request(RUN, SPEC, TICKET, Wish(0, 10 * CHUNK_BYTES, offer.state, frozenset("abc")), follows=True)
    )
    one.see((*"abc",), 0.0)
    one.hear("a", answer(8, offer), 0.0)
    for peer in "bc":
        one.hear(peer, answer(7), 0.0)
    assert not one.hopeless(1.0), "the two may still come to it"
    for peer in "bc":
        one.hear(peer, answer(8), 1.0)
    assert one.agreement(60.0) is None
    assert "1 of the 3 peers that vouch" in one.hopeless(1.0)


def test_the_first_answer_does_not_end_the_wait_for_the_answers_of_the_others() -> None:
    """The first question may have been lost everywhere: then all answer the second one, a second later."""
    offer = offer_of(7)
    wish = Wish(0, 10 * CHUNK_BYTES, offer.state, frozenset("abc"))
    one = UpdateQuery(Request(RUN, SPEC, TICKET, wish, follows=True))
    one.see((*"abc",), 0.0)
    one.hear("a", answer(8, offer), 1.1)
    assert not one.hopeless(1.1)
    one.hear("b", answer(8, offer), 1.1)
    agreed = one.agreement(1.1)
    assert agreed is not None
    assert agreed.donors == ("a", "b")
