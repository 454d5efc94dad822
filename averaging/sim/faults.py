"""What can go wrong in a simulated round, as values: drawn from a seed, shown in a story, applied by the world."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class When:
    """A moment.

    Attributes:
        step: After so many steps of all machines; or
        seconds: after so many virtual seconds; or
        member: with the step by which this member's machine
        phase: enters this phase.
    """

    step: int | None = None
    seconds: float | None = None
    member: int | None = None
    phase: str | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """A process ends, after it has done some of what its machine asked for last.

    Attributes:
        member: Who.
        noticed: Seconds until the others' connections to it break; None: only its silence tells.
        done: Share of the last actions that it still did, if the moment is one of its own steps.
    """

    member: int
    noticed: float | None
    done: float


@dataclass(frozen=True, slots=True)
class Stop:
    """A process is stopped (SIGSTOP) for a time; then all that came meanwhile comes at once.

    Attributes:
        member: Who.
        seconds: For how long.
        timers_first: Whether it sees its timers before what came.
    """

    member: int
    seconds: float
    timers_first: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """Links carry nothing, and lose what was under way; later they work again.

    Attributes:
        links: (sender, receiver) of each.
        seconds: For how long; 0 is a connection that broke and was opened again.
        noticed: Seconds until the ends of each link are told that frames were lost.
    """

    links: tuple[tuple[int, int], ...]
    seconds: float
    noticed: float


@dataclass(frozen=True, slots=True)
class Drop:
    """One of two channels breaks: the values under way on links are lost, and only their senders are told.

    Control frames go on, as the mesh sends them again by the other channel.

    Attributes:
        links: (sender, receiver) of each.
    """

    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """Links deliver nothing for a time, and lose nothing.

    Attributes:
        links: (sender, receiver) of each.
        seconds: For how long.
    """

    links: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Leave:
    """A member's user cancels the round.

    Attributes:
        member: Who.
    """

    member: int


@dataclass(frozen=True, slots=True)
class Corrupt:
    """From now on, means that a member sends to some others are not the ones that it keeps.

    Attributes:
        member: Who sends them.
        victims: Bitmask of those who get them.
    """

    member: int
    victims: int


@dataclass(frozen=True, slots=True)
class Poison:
    """A member sends everyone means of all parts, none of which it was asked for or owns, as if they were right.

    Attributes:
        member: Who.
    """

    member: int


@dataclass(frozen=True, slots=True)
class Forge:
    """A member tells everyone that everyone holds a mean of its invention, with signatures of its own making.

    Attributes:
        member: Who.
    """

    member: int


@dataclass(frozen=True, slots=True)
class Slow:
    """From now on, a part takes long on some links.

    Attributes:
        links: (sender, receiver) of each.
        transfer: Seconds per part.
    """

    links: tuple[tuple[int, int], ...]
    transfer: float


Fault = Kill | Stop | Cut | Drop | Hold | Leave | Corrupt | Poison | Forge | Slow
