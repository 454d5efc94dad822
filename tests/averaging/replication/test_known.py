"""The peers whose claims decide the group's state."""

from __future__ import annotations

from collections.abc import Mapping

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.replication.known import MAX_KNOWN, Known
from equipoise.averaging.state import StateId

OURS, THEIRS = StateId(7, "a" * 64), StateId(2**40, "b" * 64)


def of(claims: Mapping[str, StateId | None]) -> Outcome:
    states = {name: state for name, state in claims.items() if state is not None}
    return Outcome(ok=True, reason="", states=states, group=tuple(claims))


def known(*names: str) -> Known:
    mine = Known("a", "known", 10.0, 0.0)
    mine.add(names)
    return mine


def test_a_peer_that_has_trained_with_nobody_follows_most() -> None:
    assert known().group(of({"a": OURS, "b": THEIRS, "c": THEIRS}), 0, 1.0) == THEIRS


def test_of_the_known_peers_most_are_followed() -> None:
    claims = {"a": OURS, "b": THEIRS, "c": THEIRS, "m": OURS, "n": OURS}
    assert known("b", "c").group(of(claims), 0, 1.0) == THEIRS


def test_a_peer_alone_with_its_state_follows_a_known_peer_that_has_others_beside_it() -> None:
    claims = {"a": THEIRS, "b": OURS, "m": OURS, "n": StateId(2**41, "d" * 64)}
    assert known("b").group(of(claims), 0, 1.0) == OURS, "though its own epoch is higher"
    assert known("b").group(of({"a": THEIRS, "b": OURS}), 0, 1.0) == THEIRS


def test_strangers_are_followed_where_no_known_peer_is_left_and_only_after_a_while() -> None:
    mine, alone = known("b", "c"), of({"a": OURS, "m": THEIRS, "n": THEIRS})
    assert [mine.group(alone, 0, at) for at in (1.0, 5.0, 9.9)] == [OURS] * 3
    assert mine.group(of({"a": OURS, "b": OURS, "m": THEIRS, "n": THEIRS}), 0, 11.0) == OURS
    assert [mine.group(alone, 0, at) for at in (12.0, 16.0, 20.9)] == [OURS] * 3
    assert mine.group(alone, 1, 30.0) == OURS, "the missing peer may be known"
    assert mine.group(alone, 0, 21.0) == THEIRS


def test_strangers_are_not_followed_for_one_slow_round() -> None:
    mine, alone = known("b", "c"), of({"a": OURS, "m": THEIRS, "n": THEIRS})
    assert [mine.group(alone, 0, at) for at in (15.0, 30.0, 45.0)] == [OURS, OURS, THEIRS]


def test_of_two_islands_the_one_of_which_one_peer_is_left_joins_the_other() -> None:
    one, other = known("b"), Known("m", "known", 10.0, 0.0)
    other.add(["n"])
    met = of({"a": THEIRS, "m": OURS, "n": OURS})
    assert [one.group(met, 0, at) for at in (18.0, 19.0, 20.0)] == [THEIRS, THEIRS, OURS]
    assert other.group(met, 0, 20.0) == OURS


def test_a_peer_behind_among_strangers_waits_for_those_it_knows() -> None:
    assert known("b").group(of({"a": None, "m": THEIRS}), 0, 1.0) is None


def test_those_remembered_are_bounded_and_the_recent_stay() -> None:
    mine = known("b")
    for number in range(2 * MAX_KNOWN):
        mine.add([f"s{number}", "b"])
    assert len(mine.names) == MAX_KNOWN
    assert "b" in mine.names


def test_a_newcomer_follows_the_peer_that_its_user_named_while_that_is_in_the_run() -> None:
    mine = Known("a", "known", 10.0, 0.0, ["n"])
    start, strangers = StateId(0, "c" * 64), {"x": THEIRS, "y": THEIRS}
    assert mine.group(of({"a": start, "n": OURS, **strangers}), 0, 1.0) == OURS
    beside = of({"a": start, **strangers})
    assert mine.awaits(beside)
    assert mine.group(beside, 0, 2.0, elsewhere=True) is None
    assert mine.group(of({"a": OURS, "b": OURS, "x": THEIRS}), 0, 3.0, elsewhere=True) == OURS
    assert mine.group(beside, 0, 4.0) == THEIRS, "it is not in the run"
    mine.add(["b"])
    assert mine.group(of({"a": OURS, **strangers}), 0, 5.0) == OURS
    assert mine.names == ("n", "b")


def test_untrained_peers_choose_the_same_state_with_and_without_a_named_peer() -> None:
    starts = {name: StateId(0, name * 64) for name in "abcn"}
    peers = [Known("n", "known", 10.0, 0.0), *(Known(name, "known", 10.0, 0.0, ["n"]) for name in "abc")]
    assert {one.group(of(starts), 0, 1.0) for one in peers} == {starts["n"]}
    without = {name: starts[name] for name in "abc"}
    assert {one.group(of(without), 0, 2.0) for one in peers} == {starts["c"]}
    assert {one.group(of(without), 0, 3.0, elsewhere=True) for one in peers[1:]} == {None}, "n has trained"
