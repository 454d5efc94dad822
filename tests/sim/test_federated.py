"""Federated rounds in virtual time, with the faults of a seed; `scripts/simulate.py --what federated` runs more."""

from __future__ import annotations

import pytest

from simulator.federated import storm


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 2, 3, 11, 12),
        1042,  # A peer that begins again is drawn for the first round, and first sees fewer peers than that needs.
    ],
)
def test_no_promise_is_broken_while_peers_train_die_come_and_are_cut_off(seed: int) -> None:
    assert storm(seed).counts["rounds ok"] >= 2
