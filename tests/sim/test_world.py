"""The world of the tests: real daemons in virtual time."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from equipoise.averaging.messaging.receiver import Mailbox
from equipoise.peer.control.messages import JoinRun
from fakes.trainers import Trainer, assert_alike
from fakes.world import World


def lived(seed: int) -> tuple[list[tuple[float, str, str]], str]:
    """All that scripts have asked, with the times, and the digest of the last mean, of three peers on a bad network."""
    world = World("int8", seed)
    world.net.loss = 0.01
    trainers = [Trainer(world, index, 8, target_batch_size=24).begin() for index in range(3)]
    world.run()
    assert_alike(trainers)
    asked = [(at, peer, repr(unnamed(request))) for at, peer, request, _ in world.log]
    return asked, trainers[0].last.digest


def unnamed(request: object) -> object:
    """The request, without the random name of the script that joins."""
    return replace(request, mailbox=Mailbox()) if isinstance(request, JoinRun) else request


def test_the_same_seed_gives_the_same_world_to_the_last_bit() -> None:
    first = lived(1)
    assert first == lived(1)
    assert first[0] != lived(2)[0]


def test_peers_that_are_cut_off_come_back_to_the_groups_state() -> None:
    world = World()
    trainers = [Trainer(world, index, 30).begin() for index in range(4)]

    def cut() -> None:
        world.compute(4.0)
        world.net.cut("peer3")
        world.compute(4.0)
        world.net.cuts.clear()

    world.peer("weather", cut)
    world.run()
    assert_alike(trainers)
    ended = [at for at, peer, outcome in world.outcomes if peer == "peer3" and outcome.ok]
    assert not [at for at in ended if 4.5 < at < 8.0]
    assert {peer for peer, _ in world.recovered} == {"peer3"}


def test_all_name_the_peer_that_joins_late_and_it_does_too() -> None:
    world = World()

    def work(index: int) -> tuple[str, float]:
        run = world.join(f"peer{index}", "digits", [torch.zeros(100)])
        assert run.wait_for(2)
        for _ in range(5):
            world.compute(float(index == 2))
            outcome = run.average(timeout=30.0)
            assert len(outcome.contributors) == 3
        return outcome.waits["matchmaking"]

    assert world.each(3, work) == [("peer2", pytest.approx(1.0, abs=0.1))] * 3
