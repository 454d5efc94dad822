"""Population based training (Jaderberg 2017, 1711.09846): who copies whom, and with which hyperparameters it goes on.

Members train apart. Now and then some *exploit*: they copy the weights and hyperparameters of a member with a higher
score. Then they *explore*: they change the hyperparameters. Both are pure: members that give the same records and the
same seed come to the same copies, and ties are broken alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import msgspec

from equipoise.averaging.manifest import PeerName
from equipoise.averaging.metrics import Finite, Values
from equipoise.averaging.state import StateId
from equipoise.compression.grammar import canonical, decimal
from equipoise.compression.registry import Registry


class Scored(msgspec.Struct, frozen=True):
    """A member of a population, as it has described itself.

    Attributes:
        peer: Its PeerID.
        state: The optimizer steps behind its weights, and the BLAKE3 of their image.
        score: Its score; more is better.
        values: Its hyperparameters by name, as numbers; of a `Choice`, the place of the option.
        parent: PeerID of the member that it has copied last, as far as that is known; None without one.
    """

    peer: PeerName
    state: StateId
    score: Finite
    values: Values
    parent: PeerName | None = None


class Space(ABC):
    """The values that a hyperparameter may have, kept as numbers, which travel; `str` is alike on all peers."""

    def __init__(self, low: float, high: float) -> None:
        """Raises ValueError unless both are finite, and `low` is the smaller one."""
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"expected two finite numbers, the smaller one first, got {low!r} and {high!r}")
        self.low, self.high = float(low), float(high)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.low!r}, {self.high!r})"

    @abstractmethod
    def draw(self, random: Random) -> float:
        """Draw a number."""

    def perturbed(self, number: float, factor: float, random: Random) -> float:
        """Return the number times `factor`, cut off at both ends."""
        return min(max(number * factor, self.low), self.high)

    def holds(self, number: float) -> bool:
        """Return whether a number, maybe another peer's, is one of the space."""
        return self.low <= number <= self.high

    def value(self, number: float) -> Any:
        """The value that scripts use, for a number that the space holds."""
        return number


class Uniform(Space):
    """Numbers from `low` to `high`, drawn uniformly."""

    def draw(self, random: Random) -> float:
        """See `Space`."""
        return random.uniform(self.low, self.high)


class Log(Space):
    """Numbers from `low` to `high`, both above 0, whose logarithms are drawn uniformly: for learning rates."""

    def __init__(self, low: float, high: float) -> None:
        """Raises ValueError unless both are finite and above 0, and `low` is the smaller one."""
        super().__init__(low, high)
        if low <= 0:
            raise ValueError(f"expected numbers above 0, got {low!r}")

    def draw(self, random: Random) -> float:
        """See `Space`."""
        return self.perturbed(math.exp(random.uniform(math.log(self.low), math.log(self.high))), 1, random)


class Choice(Space):
    """One of several numbers or texts, in an order: to perturb it moves it by one place at most."""

    def __init__(self, *options: Any) -> None:
        """Raises ValueError unless they are two or more numbers or texts."""
        if len(options) < 2 or not all(isinstance(one, int | float | str) for one in options):
            raise ValueError(f"expected at least two options, numbers or texts, got {options!r}")
        super().__init__(0, len(options) - 1)
        self.options = options

    def __str__(self) -> str:
        return f"Choice{self.options!r}"

    def draw(self, random: Random) -> float:
        """See `Space`."""
        return float(random.randrange(len(self.options)))

    def perturbed(self, number: float, factor: float, random: Random) -> float:
        """See `Space`; a place has no factor."""
        return super().perturbed(number + random.choice((-1, 0, 1)), 1, random)

    def holds(self, number: float) -> bool:
        """See `Space`."""
        return number in range(len(self.options))

    def value(self, number: float) -> Any:
        """See `Space`."""
        return self.options[int(number)]


class Way(NamedTuple):
    """A way to exploit or to explore: a rule, and its only option; `spec` is canonical."""

    rule: Callable[..., Any]
    amount: float
    spec: str

    @classmethod
    def of(cls, rule: Callable[..., Any], most: float, **options: float) -> Way:
        """Raises ValueError if the option is above `most`."""
        ((option, amount),) = options.items()
        name = rule.__name__.strip("_")
        if amount > most:
            raise ValueError(f"{name}: expected {option} of at most {most:g}, got {amount:g}")
        return cls(rule, amount, canonical(name, options))


def _truncation(members: Sequence[Scored], fraction: float, random: Random) -> dict[str, str]:
    """Each member of the worst `fraction` copies one of the best `fraction`, drawn uniformly. Of few, that is one."""
    count = max(int(len(members) * fraction), 1)
    return {one.peer: random.choice(members[:count]).peer for one in members[-count:]}


def _binary(members: Sequence[Scored], threshold: float, random: Random) -> dict[str, str]:
    """Each member draws another one, and copies it if it stands before it, by at least `threshold` in score."""
    copies = {}
    for place, one in enumerate(members):
        drawn = random.choice([other for other in range(len(members)) if other != place])
        if drawn < place and members[drawn].score - one.score >= threshold:
            copies[one.peer] = members[drawn].peer
    return copies


def _perturb(number: float, factor: float, space: Space, random: Random) -> float:
    """Multiplies each by 1 - `factor` or 1 + `factor`, with equal chances. So 0 stays 0."""
    return space.perturbed(number, random.choice((1 - factor, 1 + factor)), random)


def _resample(number: float, chance: float, space: Space, random: Random) -> float:
    """Draws each anew from its space, with a chance of `chance`."""
    return space.draw(random) if random.random() < chance else number


EXPLOITS: Registry[Way] = Registry("way to exploit", "ways to exploit", "truncation:fraction=0.25")
EXPLORES: Registry[Way] = Registry("way to explore", "ways to explore", "perturb:factor=0.2")
EXPLOITS.register("truncation", partial(Way.of, _truncation, 0.5), fraction=decimal(0.25))
EXPLOITS.register("binary", partial(Way.of, _binary, math.inf), threshold=decimal(0.0))
EXPLORES.register("perturb", partial(Way.of, _perturb, 1.0), factor=decimal(0.2))
EXPLORES.register("resample", partial(Way.of, _resample, 1.0), chance=decimal(0.25))


def ranked(records: Iterable[Scored], random: Random) -> list[Scored]:
    """Members in order, the best first, whatever the order of `records`; equal scores in random order."""
    known = sorted(records, key=lambda one: one.peer)
    random.shuffle(known)
    return sorted(known, key=lambda one: -one.score)


def exploit(
    records: Iterable[Scored], random: Random, how: str = "truncation:fraction=0.25"
) -> dict[str, str]:
    """Decide which members copy which; all that give equal records and seeds decide alike.

    Returns:
        PeerID of each member that copies -> PeerID of the other, whose score is no lower.

    Raises:
        ValueError: `how` is no way to exploit.
    """
    way, members = EXPLOITS.parse(how), ranked(records, random)
    copies: dict[str, str] = way.rule(members, way.amount, random) if len(members) > 1 else {}
    return copies


def explore(
    values: Mapping[str, float], random: Random, space: Mapping[str, Space], how: str = "perturb:factor=0.2"
) -> dict[str, float]:
    """Return the hyperparameters, by name, with which a copy of a member with `values` goes on.

    Raises:
        ValueError: `how` is no way to explore.
    """
    way = EXPLORES.parse(how)
    return {name: way.rule(values[name], way.amount, space[name], random) for name in sorted(space)}
