"""What a peer did wrong in rounds is remembered, and costs it what it could do wrong again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
import torch

from equipoise.averaging.aio.round_driver import ROUND_FRAME, group_of
from equipoise.averaging.aio.router import Router
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.deeds import FIRST_SECONDS, MOST_SECONDS, Deeds, suspected
from equipoise.averaging.manifest import MAX_SUSPECTS, Manifest
from equipoise.averaging.outcome import Outcome
from fakes.hostile import Frame, TappedTransport, run_at_once
from fakes.matchmaking import join
from fakes.memory import FakeIdentity, Net
from fakes.specs import spec
from fakes.vectors import averaged

PEERS = ["a", "b", "c", "m"]
RUN = spec({"w": (4000,)}, part_values=256)


def test_a_fault_counts_longer_each_time_and_is_forgotten() -> None:
    deeds = Deeds()
    deeds.now = 100.0
    assert not deeds.blames("m")
    assert deeds.blame("m", "it stalled") == FIRST_SECONDS
    assert deeds.blames("m")
    deeds.now += FIRST_SECONDS
    assert not deeds.blames("m")
    assert deeds.blame("m", "it stalled") == 2 * FIRST_SECONDS
    assert deeds.told("m") == "comes last for 120 s: it stalled"
    for _ in range(9):
        longest = deeds.blame("m", "it stalled")
    assert longest == MOST_SECONDS
    deeds.now += 2 * MOST_SECONDS
    assert deeds.told("m") == ""
    assert deeds.blame("m", "it stalled") == FIRST_SECONDS
    for at in range(9):
        deeds.blame(f"peer{at}", "it stalled")
    assert deeds.suspects == tuple(f"peer{at}" for at in (8, 7, 6, 5)[:MAX_SUSPECTS])


def manifest(*suspects: tuple[str, ...], dialable: str = "abcm") -> Manifest:
    joins = [
        msgspec.structs.replace(join(peer), spec=RUN.hash, suspects=named, dialable=peer in dialable)
        for peer, named in zip(PEERS, suspects, strict=True)
    ]
    return Manifest.of("m", joins)


@pytest.mark.parametrize(
    ("given", "dialable", "owns"),
    [
        (manifest(("m",), ("m",), (), ()), 0b1111, True),
        (manifest(("m",), ("m",), ("m",), ()), 0b0111, False),
        (manifest(("m", "m"), ("m",), (), ()), 0b1111, True),
        (manifest(("m",), ("m",), ("m",), (), dialable="m"), 0b1000, True),
    ],
    ids=["half", "more than half", "named twice by one", "nobody else can be dialled"],
)
def test_a_member_that_more_than_half_name_owns_and_leads_nothing(
    given: Manifest, dialable: int, owns: bool
) -> None:
    group = group_of(RUN, given)
    assert group.dialable == dialable
    assert (3 in {part.owner for part in group.parts}) == owns
    assert (group.first_leader == 3) == owns, "it coordinates"
    assert group.contributors == 0b1111, "it still contributes"
    assert (suspected(given.members) == {"m"}) == (not owns or dialable == 0b1000)


Tap = Callable[[str, bytes, bytes], list[Frame]]


def stalls(_: str, header: bytes, body: bytes) -> list[Frame]:
    """It owes its share of the mean."""
    said = wire.decode(memoryview(header)[17:]) if header[:1] == ROUND_FRAME else None
    return [] if isinstance(said, wire.Mean) else [(header, body)]


def gives_nan(_: str, header: bytes, body: bytes) -> list[Frame]:
    said = wire.decode(memoryview(header)[17:]) if header[:1] == ROUND_FRAME else None
    return [(header, b"\xff" * len(body) if isinstance(said, wire.Contribution) else body)]


def gives_another_mean_to_each(to: str, header: bytes, body: bytes) -> list[Frame]:
    said = wire.decode(memoryview(header)[17:]) if header[:1] == ROUND_FRAME else None
    return [
        (header, ord(to).to_bytes(2, "little") * (len(body) // 2) if isinstance(said, wire.Mean) else body)
    ]


@pytest.mark.parametrize(
    ("tap", "why"),
    [
        (stalls, "owed its share of the mean"),
        (gives_nan, "sent values that do not decode"),
        (gives_another_mean_to_each, "gave members different means"),
    ],
)
def test_a_member_at_fault_costs_the_next_rounds_nothing(tap: Tap, why: str) -> None:
    rounds: list[tuple[list[Outcome], float]] = []

    async def play() -> None:
        net = Net()
        routers = {name: Router(*net.peer(name), FakeIdentity(name)) for name in PEERS[:3]}
        transport, directory = net.peer("m")
        routers["m"] = Router(TappedTransport(transport, tap), directory, FakeIdentity("m"))
        runs = [await router.join(RUN) for router in routers.values()]
        loop = asyncio.get_running_loop()
        for _ in range(5):
            began = loop.time()
            work = [
                asyncio.create_task(averaged(run, torch.ones(4000), torch.zeros(4000), 1.0, 30.0))
                for run in runs
            ]
            outcomes = await asyncio.gather(*work[:3])
            rounds.append((outcomes, loop.time() - began))
            await asyncio.gather(*work)
        assert all(run.search.machine.context.deeds.told("m") for run in runs[:3])
        await asyncio.gather(*(router.stop() for router in routers.values()))

    assert not run_at_once(play())
    assert all(all(outcomes) for outcomes, _ in rounds[2:]), rounds
    blamed = [outcome.faults.get("m", "") for outcomes, _ in rounds for outcome in outcomes]
    assert any(why in one for one in blamed), blamed
    assert max(seconds for _, seconds in rounds[2:]) < 1.0, rounds
