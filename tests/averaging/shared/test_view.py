"""Which peers go on from a view, and which one serves what."""

from __future__ import annotations

import pytest

from equipoise.averaging.shared.messages import MAX_EARLIER, SHARDS, Entered
from equipoise.averaging.shared.rows import unpacked
from equipoise.averaging.shared.view import View, Views


def activate(members: dict[str, Views], view: View) -> list[bool]:
    """Have peers enter a view and hear each other; return to whom it is active."""
    for one in members.values():
        one.enter(view, 0, (), ())
    for one in members.values():
        for peer, other in members.items():
            if other.view == view:
                one.heard(peer, view.name, other.mine)
        one.begin()
    return [one.active and one.view == view for one in members.values()]


def views(names: str) -> dict[str, Views]:
    return {name: Views(copies=8) for name in names}


def test_more_than_half_go_on_and_the_others_do_not() -> None:
    peers = views("abcde")
    assert activate(peers, View(1, tuple("abcde"))) == [True] * 5
    assert activate({name: peers[name] for name in "cde"}, View(2, tuple("cde"))) == [True] * 3
    assert activate({name: peers[name] for name in "ab"}, View(2, tuple("ab"))) == [False] * 2
    assert peers["a"].refused == (
        "2 of the 5 peers of view 1 are there, and go on only as more than half, or as half with ..a"
    )


def test_of_two_halves_that_of_the_smallest_peer_goes_on() -> None:
    for half, goes_on in (("ad", True), ("bc", False)):
        peers = views("abcd")
        activate(peers, View(1, tuple("abcd")))
        there = {name: peers[name] for name in half}
        assert activate(there, View(2, tuple(half))) == [goes_on] * 2
    pair = views("ab")
    activate(pair, View(1, tuple("ab")))
    assert activate({"b": pair["b"]}, View(2, ("b",))) == [False]
    assert activate({"a": pair["a"]}, View(2, ("a",))) == [True]


def test_members_that_have_left_count_for_neither_side() -> None:
    peers = views("abcd")
    activate(peers, View(1, tuple("abcd")))
    for left in "ab":
        peers["c"].note_left(left, 1)
    # One that has not heard it does not go on by itself, and hears it from the others.
    assert activate({"d": peers["d"]}, View(2, ("d",))) == [False]
    peers["d"].heard("c", "2.0", Entered(left=(("a", 1), ("b", 1))))
    there = {name: peers[name] for name in "cd"}
    assert activate(there, View(3, tuple("cd"))) == [True] * 2


def test_one_that_has_left_and_begins_anew_is_a_newcomer() -> None:
    peers = views("abc")
    activate(peers, View(1, tuple("abc")))
    for name in "bc":
        peers[name].note_left("a", 1)
    again = {"a": Views(copies=8), "b": peers["b"], "c": peers["c"]}
    assert activate(again, View(2, tuple("abc"))) == [True] * 3
    assert activate({"b": peers["b"]}, View(3, ("b",))) == [False], (
        "one of three, of which none has left since"
    )


def test_a_script_that_was_started_again_counts_for_no_view_before() -> None:
    peers = views("abc")
    activate(peers, View(1, tuple("abc")))
    again = {"a": Views(copies=8), "b": peers["b"]}
    assert activate(again, View(2, tuple("ab"))) == [False] * 2
    assert "1 of the 3 peers of view 1 are there" in again["b"].objection
    assert activate(again | {"c": peers["c"]}, View(3, tuple("abc"))) == [True] * 3


def test_a_view_that_was_entered_and_may_be_active_elsewhere_binds_as_well() -> None:
    peers = views("abc")
    activate(peers, View(1, tuple("abc")))
    for name in "ab":
        peers[name].enter(View(2, tuple("ab")), 0, (), ())  # It may be active to one of them.
    assert activate({name: peers[name] for name in "bc"}, View(3, tuple("bc"))) == [False] * 2
    assert activate(peers, View(4, tuple("abc"))) == [True] * 3


def test_a_view_without_a_holder_of_some_shards_waits_for_one() -> None:
    peers = {name: Views(copies=1) for name in "abc"}
    first = View(1, tuple("abc"))
    activate(peers, first)
    two = {name: peers[name] for name in "ab"}
    assert activate(two, View(2, tuple("ab"))) == [False] * 2
    lost = {shard for shard in range(SHARDS) if first.holders(shard) == ("c",)}
    assert lost
    for one in two.values():
        assert one.objection == f"a peer that holds shards {sorted(lost)}"
        one.patient = False
        assert one.begin()
        assert one.lost == lost


def test_a_peer_that_has_entered_too_many_views_of_which_none_was_active_enters_no_more() -> None:
    mine = Views(copies=2)
    for number in range(1, MAX_EARLIER + 1):
        assert mine.enter(View(number, ("a", "b", "c", f"d{number}")), 0, (), ())
    assert not mine.enter(View(MAX_EARLIER + 1, ("a", "b", "c")), 0, (), ())
    assert mine.refused == "this peer has entered 32 views in a row, and no view became active"


def test_nobody_enters_a_view_of_a_number_that_is_not_later() -> None:
    one = Views(copies=2)
    assert one.enter(View(3, ("a", "b")), 0, (), ())
    assert not one.enter(View(3, ("a", "c")), 0, (), ())
    assert not one.enter(View(2, ("a", "b")), 0, (), ())


def test_what_a_peer_says_before_this_one_enters_counts() -> None:
    one, view = Views(copies=2), View(3, ("a", "b"))
    one.heard("b", view.name, Entered(first=3))
    assert one.objection == "no round has named a view yet"
    one.enter(view, 0, (), ())
    assert one.objection == "view 3, which ..a did not enter yet"
    one.heard("a", view.name, one.mine)
    assert one.begin()


def test_a_peer_that_is_no_member_is_not_heard() -> None:
    one, view = Views(copies=2), View(3, ("a", "b"))
    one.heard("c", view.name, Entered(first=3))
    one.enter(view, 0, (), ())
    assert one.entered == {}


def test_a_view_of_nobody_is_no_view() -> None:
    item = ("Entered", 0, 1, [(1, [])])
    with pytest.raises(ValueError, match="length >= 1"):
        unpacked({}, {"view": "3.01234567", "items": [item]})


def test_holders_follow_from_members_and_a_peer_that_goes_moves_only_what_it_held() -> None:
    members = tuple(f"peer{index}" for index in range(6))
    view, fewer = View(1, members), View(2, members[1:])
    for shard in range(SHARDS):
        before, after = view.holders(shard, 2), fewer.holders(shard, 2)
        assert len(set(before)) == 2
        assert set(before) - {members[0]} <= set(after)
    assert len({view.holders(shard) for shard in range(SHARDS)}) > 3
