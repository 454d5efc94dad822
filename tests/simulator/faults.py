"""What can go wrong in a world, as values: drawn from a seed, shown in a story, made by the world's methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

Arguments = ParamSpec("Arguments")


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


class Fault:
    """A method of a world that makes something go wrong, with arguments that it takes."""

    def __init__(
        self,
        strike: Callable[Concatenate[Any, Arguments], None],
        *args: Arguments.args,
        **named: Arguments.kwargs,
    ) -> None:
        self.method: Callable[..., None] = strike
        self._args, self._named = args, named

    def __repr__(self) -> str:
        return f"{self.method.__name__}{self._args}"

    def strike(self, world: Any) -> None:
        """Make it go wrong."""
        self.method(world, *self._args, **self._named)
