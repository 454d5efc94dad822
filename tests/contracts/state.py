"""The promises of `RunCore.offer` and `fetch`, by either face of a run, and with any swarm behind it."""

from __future__ import annotations

import gc
from random import Random
from typing import Any

import pytest
import torch

from contracts.run import OPTIONS, SOON, Peers, join_all
from e2e.swarm import eventually
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.state import StateId
from equipoise.peer import Refused

IMAGE = Random(5).randbytes(3_000_000)

LIMIT = 100_000_000


def state_of(epoch: int) -> StateId:
    return StateId(epoch, f"{epoch:064x}")


def step_all(peers: Peers, count: int) -> list[Any]:
    """Runs of so many peers, of which each knows that the others step."""
    runs = join_all(peers(count), [[torch.zeros(2)] for _ in range(count)])
    for run in runs:
        run.accumulate([torch.ones(2)], weight=1)
    for run in runs:
        eventually(lambda run=run: run.progress().swarm == count, "all that step")
    return runs


class StateContract:
    """Tests that ask for `peers(n)`: clients of n daemons of one swarm."""

    def test_an_offered_state_is_fetched(self, peers: Peers) -> None:
        *donors, newcomer = step_all(peers, 3)
        for donor in donors:
            donor.core.offer(state_of(4), IMAGE)

        download = newcomer.core.fetch(Wish(4, LIMIT), timeout=SOON)
        fetched = download.result()

        assert fetched.ok, fetched.reason
        assert fetched.state == state_of(4)
        image = download.content
        assert image == IMAGE
        assert sum(fetched.sources.values()) >= len(IMAGE)
        image[0] ^= 1
        del download
        gc.collect()
        assert image[1:] == IMAGE[1:], "the memory is the caller's own"

    def test_a_wish_shows_in_the_progress_of_those_who_can_fulfil_it(self, peers: Peers) -> None:
        *donors, newcomer = step_all(peers, 3)
        assert donors[0].progress().wanted is None
        for donor in donors:
            donor.core.offer(state_of(4), IMAGE[:1000])

        pending = newcomer.core.fetch(Wish(7, LIMIT), timeout=2 * SOON)

        for donor in donors:
            eventually(lambda donor=donor: donor.progress().wanted == 7, "the wish")
        for donor in donors:  # The first of them fulfils it.
            donor.core.offer(state_of(7), IMAGE)
        fetched = pending.result()
        assert fetched.ok, fetched.reason
        assert fetched.state == state_of(7)
        assert pending.content == IMAGE
        assert pending.result() is fetched
        for donor in donors:
            eventually(lambda donor=donor: donor.progress().wanted is None, "that nobody wishes any more")

    def test_a_fetch_can_be_cancelled_and_another_begun(self, peers: Peers) -> None:
        clients = peers(2)
        peer = clients[0]
        run, _ = step_all(lambda _: clients, 2)
        pending = run.core.fetch(Wish(0, LIMIT), timeout=SOON)
        eventually(lambda: peer.status().runs[0].transfer, "that the status tells of it")
        with pytest.raises(Refused, match="already"):
            run.core.fetch(Wish(0, LIMIT), timeout=SOON).result()
        with pytest.raises(TimeoutError, match="again"):
            pending.result(0.01)

        pending.cancel()

        assert "cancelled" in pending.result().reason
        assert not run.core.fetch(Wish(0, LIMIT), timeout=0.1).result().ok

    def test_the_mean_of_a_round_that_was_missed_is_recovered(self, peers: Peers) -> None:
        *others, last = peers(3)
        members = join_all(others, [[torch.zeros(2)] for _ in others])
        for run in members:
            run.accumulate([torch.ones(2)], weight=1)
        for run in members:
            eventually(lambda run=run: run.progress().swarm == 2, "all that step")
        pending = [run.step(timeout=SOON, wait=False, state=state_of(4)) for run in members]
        outcome, _ = [pending_round.result() for pending_round in pending]
        assert outcome.ok, outcome.reason
        late = last.join("digits", [torch.zeros(2)], **OPTIONS)
        circle = frozenset(run.peer for run in members)

        def recovered() -> Any:
            download = late.core.fetch(Wish(after=state_of(4), circle=circle), SOON)
            return download if download.result().ok else None

        download = eventually(recovered, "the mean, from peers that know the late one by then")

        found = download.result()
        assert found.round.digest == outcome.digest
        assert found.round.contributors == outcome.contributors
        late.core.binding.read_step(
            download.content, late.core.binding.stepped(), late.mean, shares=found.round.shares
        )
        assert {name: value.tolist() for name, value in late.mean.items()} == {"0": [1.0, 1.0]}
        assert found.sources
        again = members[0].core.fetch(Wish(after=state_of(4)), SOON).result()
        assert again.round is not None
        assert again.round.counted(members[0].peer)

    def test_a_wrong_offer_or_fetch_says_why(self, peers: Peers) -> None:
        (peer,) = peers(1)
        run = peer.join("digits", [torch.zeros(2)])

        with pytest.raises(ValueError, match="timeout"):
            run.core.fetch(Wish(0, LIMIT), timeout=0)
        with pytest.raises(Refused, match="at_least"):
            run.core.fetch(Wish(-1, LIMIT)).result()
        with pytest.raises(Refused, match="shared memory"):
            run.core.fetch(Wish(0, 0)).result()

    def test_a_fetch_ends_with_its_run(self, peers: Peers) -> None:
        run, _ = step_all(peers, 2)
        pending = run.core.fetch(Wish(0, LIMIT), timeout=SOON)
        run.leave()

        assert "left" in pending.result().reason
