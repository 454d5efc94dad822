"""What others say they have accumulated: how much of it counts, and who is named when it does not come."""

from __future__ import annotations

import pytest

from equipoise.averaging.claims import Claims

TARGET = 3200.0


def settled(claims: Claims, contributors: dict[str, float]) -> str:
    """Have a round begin and end with these contributors; returns what is said of those that gave less."""
    claims.begin()
    return claims.settle(contributors)


def test_a_first_claim_counts_up_to_a_fair_share_of_the_target() -> None:
    claims = Claims(group_size=32)
    assert claims.count({"bob": 300.0, "liar": 1e12}, TARGET) == 300.0 + TARGET / 3
    assert Claims(32).count({"bob": 300.0, "carol": 1e6}, None) == 300.0 + 1e6, "no target, no share"


def test_a_claim_counts_up_to_twice_what_its_peer_contributed_last() -> None:
    claims = Claims(group_size=32)
    claims.count({"bob": 300.0}, TARGET)
    assert not settled(claims, {"alice": 2900.0, "bob": 300.0})
    assert claims.count({"bob": 1e12}, TARGET) == 600.0
    assert claims.count({"bob": 1e12}, None) == 600.0
    assert claims.count({}, TARGET) == 0
    assert claims.count({"bob": 10.0}, TARGET) == 10.0


def test_a_peer_that_claims_and_does_not_come_counts_no_more_and_is_named() -> None:
    claims = Claims(group_size=32)
    for number in range(3):
        counted = claims.count({"bob": 1000.0, "liar": 1e12}, TARGET)
        own = TARGET - counted
        said = settled(claims, {"alice": own, "bob": 1000.0})
        if number == 0:
            assert "liar gave 0 where 1066.67 was counted on" in said
        else:
            assert not said, "from the second round on it is full without the liar"
            assert own + 1000.0 == TARGET
    settled(claims, {"alice": 2200.0, "bob": 1000.0, "liar": 5.0})
    assert claims.count({"liar": 1e12}, TARGET) == 10.0


@pytest.mark.parametrize("group_size", [8, 16, 32])
@pytest.mark.parametrize("liars", [1, 2, 20])
def test_every_round_is_full_or_names_a_liar(liars: int, group_size: int) -> None:
    ghosts = [f"ghost{index:02}" for index in range(liars)]
    everyone = [Claims(group_size) for _ in range(2)]
    for number in range(10):
        # Both go on until the sum that they see reaches the target, each a sample at a time.
        made = 0.0
        claimed = dict.fromkeys(ghosts, 1e12)
        while made + everyone[0].count(claimed | {"other": made}, TARGET) < TARGET:
            made += 1.0
        everyone[1].count(claimed | {"other": made}, TARGET)
        said = [settled(peer, {"own": made, "other": made}) for peer in everyone]
        assert 2 * made >= 0.95 * TARGET or all("ghost" in line for line in said)
        assert number == 0 or 2 * made >= 0.95 * TARGET


def test_in_a_run_of_many_groups_one_that_was_in_another_is_not_blamed() -> None:
    claims = Claims(group_size=2)
    claimed = dict.fromkeys(("bob", "carol", "dave"), 800.0)
    claims.count(claimed, TARGET)
    settled(claims, {"alice": 800.0, "bob": 800.0})
    assert claims.count(claimed, TARGET) == 800.0, "carol and dave have had their first share"
    for mate in ("carol", "dave", "bob"):
        settled(claims, {"alice": 800.0, mate: 800.0})
        claims.count(claimed, TARGET)
    assert claims.count(claimed, TARGET) == 2400.0


def test_a_short_round_names_those_that_gave_less_than_before() -> None:
    claims = Claims(group_size=32)
    claims.count({"bob": 1000.0, "carol": 1000.0}, TARGET)
    settled(claims, {"alice": 1200.0, "bob": 1000.0, "carol": 1000.0})
    claims.count({"bob": 900.0, "carol": 0.0}, TARGET)
    said = settled(claims, {"alice": 1200.0, "bob": 1000.0})
    assert said == "2200 of 3200 came together: carol gave 0 where 1000 was counted on"
