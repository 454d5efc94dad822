"""The chain of means: which links lead on from a state, and for whom."""

from __future__ import annotations

import msgspec
import pytest

from equipoise.averaging.replication import chain
from equipoise.averaging.replication.chain import Chain, Link, Log
from equipoise.averaging.replication.lineage import CHECK_EVERY, after, checked
from equipoise.averaging.state import StateId
from fakes.memory import FakeIdentity
from fakes.missed import mean_of

START, VERIFY = StateId(7, "ab" * 32), FakeIdentity("me").verify


def link_of(names: str, state: StateId = START, voters: str = "") -> Link:
    """The link of a round of these peers, all of which claim the state; with the votes of some alone."""
    made = mean_of(names, state).link
    assert made is not None
    link = made()
    votes = tuple(one for one in link.signatures if not voters or link.claims[one[0]].peer in voters)
    return msgspec.structs.replace(link, signatures=votes)


def next_of(link: Link, state: StateId = START) -> StateId:
    return after(state, link.vote.digest.hex())


def follows(link: Link, holders: str, **more: object) -> bool:
    path = Chain(START, frozenset(holders), VERIFY)._replace(**more).follow([link])  # type: ignore[arg-type]
    return [one.state for one in path] == [next_of(link)]


@pytest.mark.parametrize(
    ("members", "voters", "holders", "proved"),
    [
        ("abc", "abc", "abcde", True),
        ("abc", "ab", "abcde", False),
        ("ab", "ab", "abcd", False),
        ("abxyz", "xyz", "abc", False),
        ("xyz", "xyz", "abc", False),
        ("as", "as", "as", True),
        ("sx", "sx", "as", False),
        ("abc", "ab", "", True),
        ("abc", "a", "", False),
    ],
)
def test_more_than_half_of_the_holders_must_have_signed(
    members: str, voters: str, holders: str, proved: bool
) -> None:
    assert follows(link_of(members, voters=voters), holders) is proved


def test_a_link_after_another_state_of_another_round_or_with_false_votes_leads_nowhere() -> None:
    link = link_of("abc")
    assert not follows(link_of("abc", StateId(7, "cd" * 32)), "abc")
    assert not follows(msgspec.structs.replace(link, digest=b"x" * 32), "abc")
    forged = tuple((at, b"?" * len(one)) for at, one in link.signatures)
    assert not follows(msgspec.structs.replace(link, signatures=forged), "abc")
    gives_nothing = tuple(msgspec.structs.replace(one, gives=False) for one in link.claims)
    assert not follows(msgspec.structs.replace(link, claims=gives_nothing), "abc")


def test_a_round_of_its_own_needs_no_more_than_those_that_decided_it() -> None:
    link = link_of("ab")
    assert not follows(link, "abcde")
    assert follows(link, "abcde", me="a", own=lambda id: True)
    assert not follows(link, "abcde", me="c", own=lambda id: True)


def test_a_chain_ends_where_a_link_is_missing_and_holders_change_on_the_way() -> None:
    first = link_of("abcd")
    second = link_of("cd", next_of(first))
    third = link_of("cde", next_of(second, next_of(first)))
    whole = Chain(START, frozenset("abc"), VERIFY).follow([first, third, second])
    assert [set(one.holders) for one in whole] == [set("abcd")]
    assert len(Chain(START, frozenset("abc"), VERIFY).follow([first, second, third])) == 1, "2 of 4 held it"
    assert len(Chain(next_of(first), frozenset("cd"), VERIFY).follow([second, third])) == 2


def test_a_checked_state_has_the_means_of_the_state_before_its_check() -> None:
    before = StateId(CHECK_EVERY - 1, "ab" * 32)
    first = link_of("ab", before)
    state = checked(next_of(first, before), "parameters")
    path = Chain(before, frozenset("ab"), VERIFY).follow([first, link_of("ab", state)])
    assert len(path) == 2
    assert not Chain(before, frozenset("ab"), VERIFY).follow(
        [first, link_of("ab", StateId(CHECK_EVERY, "0" * 64))]
    )[1:]


def test_a_log_gives_the_links_from_an_epoch_on_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    log, link = Log(), link_of("ab")
    size = len(msgspec.msgpack.encode(link))
    monkeypatch.setattr(chain, "LOG_BYTES", 10 * size)
    monkeypatch.setattr(chain, "PAGE_BYTES", 4 * size)
    for epoch in range(40):
        log.add(epoch, lambda: link)
    assert log.page(0) == ()
    assert log.page(14) == (link,) * 4
    assert len(log.page(39)) == 1
    assert log.page(40) == ()
