"""Federated rounds by real daemons, with training scripts in threads, beside a reference of one number at a time."""

from __future__ import annotations

import pytest

from e2e.swarm import DaemonProcess
from e2e.threads import together
from equipoise.peer import connect
from equipoise.peer.training import Federated, History
from oracles.federated import ROUNDS, Noisy, assert_reference

pytestmark = pytest.mark.slow

PEERS = 5


@pytest.mark.parametrize(
    ("outer", "rule"), [("average", "mean"), ("fedadam", "median"), ("fedyogi", "trimmed:beta=0.2")]
)
def test_five_daemons_agree_on_the_values_of_the_reference(
    places: list[DaemonProcess], outer: str, rule: str
) -> None:
    # All five are in each round, however late on a busy machine: the quorum waits, and a grace alone would not.
    strategy = f"federated:available={PEERS},quorum={PEERS}"
    scripts = [Noisy(index) for index in range(PEERS)]

    def train(place: DaemonProcess, script: Noisy) -> tuple[str, History, bytes]:
        terms = {"strategy": strategy, "rule": rule, "codec": "fp32"}
        with connect(place.home) as peer, peer.join(f"{outer}-{rule}", script.model, **terms) as run:
            trained = Federated(run, script.fit, script.evaluate, outer, rounds=ROUNDS)
            return run.peer, trained.run(), bytes(trained.member.image().numpy())

    peers, histories, images = zip(*together(train, places, scripts), strict=True)
    assert len(set(images)) == 1
    assert all(history == histories[0] for history in histories)
    assert_reference(dict(zip(peers, scripts, strict=True)), histories[0], outer, rule)
