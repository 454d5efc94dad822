"""The member that a round waited for, by what each member saw and told."""

from __future__ import annotations

import pytest

from equipoise.averaging.aio.deliveries import Deliveries


def seen(me: int, size: int, contributions: list[float], means: list[float]) -> Deliveries:
    """What a member saw of a round that began at 100 s, if each other's values came so many seconds later."""
    deliveries = Deliveries(me, size, 100.0)
    for mean, times in enumerate((contributions, means)):
        for sender, after in enumerate(times):
            if sender != me:
                deliveries.came(sender, 100.0 + after, mean=bool(mean))
    return deliveries


def told(all_of_them: list[Deliveries]) -> list[Deliveries]:
    for me, one in enumerate(all_of_them):
        for teller, other in enumerate(all_of_them):
            if teller != me:
                one.heard(teller, other.word)
    return all_of_them


def test_all_members_name_the_one_with_the_slow_uplink_itself_too() -> None:
    members = told([seen(me, 4, [1.0, 5.0, 1.2, 1.1], [5.5, 9.0, 5.6, 5.6]) for me in range(4)])
    for member in members:
        assert member.slowest is not None
        slow, seconds = member.slowest
        assert slow == 1
        assert seconds == pytest.approx((5.0 - 1.2) + (9.0 - 5.6), abs=0.2)


def test_of_two_the_slower_one_is_named_by_the_difference() -> None:
    fast, slow = told([seen(0, 2, [2.5, 10.0], [3.0, 12.0]), seen(1, 2, [2.5, 10.0], [3.0, 12.0])])
    assert fast.slowest == slow.slowest == (1, pytest.approx(9.0))


def test_where_all_are_alike_no_member_is_named() -> None:
    members = told([seen(me, 4, [1.0] * 4, [2.0] * 4) for me in range(4)])
    assert [member.slowest for member in members] == [None] * 4


def test_one_liar_names_nobody() -> None:
    members = told([seen(me, 4, [1.0] * 4, [2.0] * 4) for me in range(4)])
    members[0].heard(3, (1, 80_000.0))
    members[0].heard(2, (63, 80_000.0))  # No member.
    assert members[0].slowest is None


def test_before_anything_has_come_no_member_is_named() -> None:
    assert Deliveries(0, 3, 100.0).slowest is None
