"""Scenarios of simulated rounds, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.partition import Part
from equipoise.averaging.weights import CAPPED, cap_of
from simulator.arithmetic import draw_values, draw_weight
from simulator.faults import Fault, When
from simulator.network import Weather
from simulator.process import Start
from simulator.world import Scenario, World

MAX_PART_VALUES = 3
"""Values of a part: enough for a slip of one to show."""

FAULT_COUNTS = (2, 6, 25)
"""Most faults of a round: few are like life, many go where proofs are needed."""

MAX_FAULT_SECONDS = 12.0
"""Faults begin within this time: a few stalls and ballots."""

CAP = cap_of(CAPPED)
"""The most that a contributor counts, in medians: a whole number, so that weights stay multiples of a quarter."""

PHASES = ("decide", "gather", "commit", "commit", "ended", "ended")
"""Most steps are of scattering and gathering, so a moment drawn from all steps is rarely one of paxos."""

MAX_LATENCY, MAX_LIVE_LATENCY = 1.5, 0.3
"""Seconds. With the greater, the living are taken for dead."""

LIVE_TIMEOUT_SECONDS = 90.0
"""Where rounds must succeed, they are given more time than any sound recovery takes."""


def group_of(
    owners: Iterable[int],
    weights: Sequence[float],
    dialable: int = -1,
    leader: int = 0,
    encoded_size: int = 0,
) -> Group:
    """A small round, with a part of one value for each owner."""
    return Group(
        round_id=bytes(16),
        names=tuple("abcdefghijkl"[: len(weights)]),
        weights=tuple(weights),
        dialable=dialable & ((1 << len(weights)) - 1),
        parts=tuple(Part(at, at + 1, owner) for at, owner in enumerate(owners)),
        first_leader=leader,
        encoded_size=encoded_size,
    )


def starts_of(random: Random, group: Group, timeout: float) -> tuple[Start, ...]:
    """How its members begin: nearly at once, with any values."""
    size = len(group.parts)
    return tuple(Start(draw_values(random, size), 0.02 * random.random(), 0.0, timeout) for _ in group.names)


def draw_scenario(seed: int, sizes: tuple[int, int] = (2, 16), live: bool = False) -> Scenario:
    """The scenario of a seed.

    Args:
        seed: Any integer.
        sizes: Fewest and most members.
        live: Whether faults are such that a majority, the `core`, must succeed: each of them touches a member that is
            not in it. Otherwise anything goes wrong anywhere.
    """
    random = Random(f"{seed} {sizes} {live}")
    size = random.randint(*sizes)
    group = _draw_group(random, size)
    core = _draw_core(random, group) if live else 0
    weather = _draw_weather(random, MAX_LIVE_LATENCY if live else MAX_LATENCY)
    values = group.parts[-1].stop
    late = random.choice((0.0, 0.1, 1.0))
    skew = random.choice((0.0, 1.0, 300.0))
    timeout = LIVE_TIMEOUT_SECONDS if live else random.uniform(3, 40)
    starts = tuple(
        Start(
            values=draw_values(random, values),
            at=random.uniform(0, late),
            clock=random.uniform(-skew, skew) + skew,
            timeout=timeout if live else timeout * random.uniform(0.7, 1),
        )
        for _ in range(size)
    )
    count = random.randint(0, random.choice(FAULT_COUNTS))
    faults = [one for _ in range(count) for one in _draw_fault(random, group, core)]
    return Scenario(seed, group, starts, weather, tuple(faults), core)


def _draw_group(random: Random, size: int) -> Group:
    dialable = (1 << size) - 1
    if size > 2 and random.random() < 0.3:
        for member in random.sample(range(size), random.randint(1, size - 1)):
            dialable &= ~(1 << member)
    weights = [draw_weight(random) for _ in range(size)]
    if weights[0] % 1 == 0.25:  # Member 0 claims far more than the others, and is capped.
        weights[1:] = [max(weight // 16 / 4, 0.25) for weight in weights[1:]]
    if size > 2 and random.random() < 0.3:
        for member in random.sample(range(size), random.randint(1, size - 2)):
            weights[member] = 0.0
    owners = [member for member in range(size) if dialable >> member & 1]
    parts, start = [], 0
    for owner in sorted(random.choices(owners, k=random.randint(1, 2 * size))):
        stop = start + random.randint(1, MAX_PART_VALUES)
        parts.append(Part(start, stop, owner))
        start = stop
    return Group(
        round_id=random.randbytes(16),
        names=tuple(f"p{member}" for member in range(size)),
        weights=tuple(weights),
        dialable=dialable,
        parts=tuple(parts),
        first_leader=random.choice(owners),
        cap=CAP,
    )


def _draw_core(random: Random, group: Group) -> int:
    """A majority that can succeed on its own: two of it contribute, one can be dialled."""
    while True:
        core = 0
        for member in random.sample(range(group.size), random.randint(group.size // 2 + 1, group.size)):
            core |= 1 << member
        if core & group.dialable and (core & group.contributors).bit_count() >= 2:
            return core


def _draw_weather(random: Random, most: float) -> Weather:
    latency = random.choice((0.001, 0.02, most))
    transfer = random.choice((0.0001, 0.01, 0.3))
    spread = random.choice((2, 10, 1000))
    return Weather(
        latency=(latency / spread, latency),
        transfer=(transfer / spread, transfer),
        jitter=random.choice((0.0, latency, most / 2)),
        lingers=random.choice((0.0, 0.0, 0.1, 0.5)),
    )


def _draw_fault(random: Random, group: Group, core: int) -> list[tuple[When, Fault]]:
    """One fault and its moment, or none if nobody may suffer any."""
    fragile = [member for member in range(group.size) if not core >> member & 1]
    kinds = [*FAULTS, *(() if core else UNPROMISED_FAULTS)]
    if not fragile:
        return []
    important = [member for member in fragile if member in (group.first_leader, group.parts[0].owner)]
    member = random.choice(important if important and random.random() < 0.5 else fragile)
    return [(_draw_when(random, group, member), random.choice(kinds)(random, group, member))]


def _draw_when(random: Random, group: Group, member: int) -> When:
    kind = random.random()
    if kind < 0.2:
        return When(seconds=MAX_FAULT_SECONDS * random.random() ** 3)
    if kind < 0.5:
        return When(member=member, phase=random.choice(PHASES))
    if kind < 0.7:
        return When(member=random.randrange(group.size), phase=random.choice(PHASES))
    bulk = 2 * len(group.parts) * (group.size - 1)
    return When(step=int(random.random() * 1.3 * (bulk + group.size**2 + 3 * group.size)))


def _kill(random: Random, group: Group, member: int) -> Fault:
    return Fault(World.kill, member, random.choice((0.0, 0.02, 0.3, None)), random.random())


def _stop(random: Random, group: Group, member: int) -> Fault:
    seconds = random.choice((0.5, 1.5, 3.0, 6.0, 20.0)) * random.random()
    return Fault(World.stop, member, seconds, random.random() < 0.5)


def _cut(random: Random, group: Group, member: int) -> Fault:
    seconds = random.choice((0.0, 0.0, 1.0, 5.0, 100.0)) * random.random()
    links, noticed = _draw_links(random, group, member), random.choice((0.0, 0.1, 3.0))
    return Fault(World.cut, links, seconds, noticed * random.random())


def _hold(random: Random, group: Group, member: int) -> Fault:
    links = _draw_links(random, group, member)
    return Fault(World.hold, links, random.choice((0.5, 3.0, 10.0)) * random.random())


def _draw_links(random: Random, group: Group, member: int) -> tuple[tuple[int, int], ...]:
    """Some links of a member, in one direction or both."""
    others = [other for other in range(group.size) if other != member]
    links: list[tuple[int, int]] = []
    direction = random.choice(("in", "out", "both"))
    for other in random.sample(others, random.randint(1, len(others))):
        links += [(other, member)] if direction != "out" else []
        links += [(member, other)] if direction != "in" else []
    return tuple(links)


def _split(random: Random, group: Group, member: int) -> Fault:
    """The group falls apart in two."""
    side = random.getrandbits(group.size) | 1 << member
    links = tuple(
        (one, other)
        for one in range(group.size)
        for other in range(group.size)
        if (side >> one ^ side >> other) & 1
    )
    seconds = random.choice((0.0, 1.0, 5.0, 100.0)) * random.random()
    return Fault(World.cut, links, seconds, random.choice((0.0, 3.0)))


def _leave(random: Random, group: Group, member: int) -> Fault:
    return Fault(World.leave, member)


def _corrupt(random: Random, group: Group, member: int) -> Fault:
    return Fault(World.corrupt, member, random.getrandbits(group.size))


FAULTS: tuple[Callable[[Random, Group, int], Fault], ...] = (
    _kill,
    _kill,
    _kill,
    _stop,
    _stop,
    _cut,
    _cut,
    _hold,
    _hold,
    _leave,
)

UNPROMISED_FAULTS: tuple[Callable[[Random, Group, int], Fault], ...] = (_split, _corrupt)
"""What may keep even a majority from success."""
