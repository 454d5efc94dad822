from __future__ import annotations

from equipoise.averaging.allreduce.leader import choose


def test_all_owners_that_hold_everything_propose_everyone() -> None:
    assert choose({0: 0b1111, 1: 0b1111, 2: 0b1111, 3: 0b1111}, 0b1111) == (0b1111, None)


def test_a_contributor_that_one_owner_lacks_is_left_out_rather_than_the_owner_replaced() -> None:
    assert choose({0: 0b1111, 1: 0b0111, 2: 0b1111, 3: 0b1111}, 0b1111) == (0b0111, None)


def test_an_owner_whose_link_costs_several_contributors_is_replaced() -> None:
    assert choose({0: 0b1111, 1: 0b0010, 2: 0b1111, 3: 0b1111}, 0b1111) == (0b0010, 1)


def test_an_owner_is_replaced_where_one_contributor_more_makes_the_round_possible() -> None:
    assert choose({0: 0b011, 1: 0b010, 2: 0b011}, 0b011) == (0b010, 1)


def test_a_sole_owner_is_never_replaced() -> None:
    assert choose({0: 0b001}, 0b111) == (0b001, None)
