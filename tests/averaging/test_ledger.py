"""The ledger: each round once, each missed round with its reason, and the same counts at all peers."""

from __future__ import annotations

from random import Random

import pytest
import torch
from msgspec import structs

from equipoise.averaging.ledger import Ledger
from equipoise.averaging.outcome import Outcome
from equipoise.peer.training import Federated, Task
from fakes.world import World


def a_round(number: int, *givers: str, group: str = "ab", **changes: object) -> Outcome:
    outcome = Outcome(ok=True, reason="", round=number, group=tuple(group), digest=f"{number:064x}")
    return structs.replace(outcome, contributors=dict.fromkeys(givers, 32.0), **changes)


def test_each_round_counts_once_with_its_last_end() -> None:
    ledger = Ledger("a")
    failed = a_round(2, ok=False)
    ends = [
        a_round(1, "a", "b"),
        failed,
        a_round(2, "a", "b"),  # It succeeded after all,
        a_round(2, "a", "b"),  # and its mean was downloaded too.
        a_round(3, ok=False, group="", late=0.5),
        a_round(3, "b", "c", group="bc"),  # The mean that this peer was late for.
        a_round(4, ok=False, group=""),
        a_round(5, "b", left_out=("a",)),
        a_round(6, "b"),
        structs.replace(failed, round=7),
        Outcome(ok=False, reason="the run was left"),
    ]
    for outcome in ends:
        ledger.add(outcome, 100)
    assert str(ledger.of("a")) == (
        "contributed to 2 of 7 rounds, 64 samples; "
        "5 missed: 1 failed, 1 late, 1 no group, 1 left out, 1 attended"
    )
    assert str(ledger.of("b")) == "contributed to 5 of 5 rounds, 160 samples"
    assert str(ledger.of("c")) == "contributed to 1 of 3 rounds, 32 samples"
    assert ledger.of("b").bytes == 500
    ledger.begin()
    ledger.add(a_round(1, "b", digest="another training of that name"), 100)
    assert ledger.of("a").missed["attended"] == 2


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_peer_that_is_late_in_a_third_counts_itself_as_all_others_count_it(rounds: int) -> None:
    world, chance = World(), Random(3)

    def work(index: int) -> None:
        w = torch.zeros(8)

        def fit(task: Task) -> tuple[float, dict[str, float]]:
            late = index == 0 and chance.random() < 0.3
            world.compute(2.2 if late else 1.0)
            w.add_(1.0)
            return 10.0 + index, {}

        with world.join(f"peer{index}", "digits", [w], strategy="federated:quorum=2,grace=1") as run:
            Federated(run, fit, rounds=rounds, wait_for=3).run()

    world.each(4, work)
    ledgers = [daemon.service.ledgers["digits"] for daemon in world.daemons.values()]
    own = ledgers[0].of("peer0")
    assert set(own.missed) <= {"late", "attended"}, "draws pass over a peer that was late in rounds in a row"
    assert own.rounds == rounds > own.counted > 0
    for peer in range(4):
        counts = {(g.counted, g.samples, g.bytes) for g in (one.of(f"peer{peer}") for one in ledgers)}
        assert len(counts) == 1, f"peer{peer}: {counts}"
