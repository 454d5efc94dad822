"""One attempt of two peers to punch a hole, at either side. Sans IO: told events and the time, it returns actions.

    begins                                        the other side
    Measure, Candidates   ------------------->    Measure
                          <-------------------    Candidates
    Probe                 ------------------->
                          <-------------------    Echo
    Go                    ------------------->    Try at once
    Try half the way there and back later

The last four lines are repeated while no connection comes about: each time the way is measured anew, so that both
routers' first packets cross (libp2p's DCUtR; its CONNECT is our Candidates, its SYNC our Go).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from equipoise.dht.punch import messages
from equipoise.dht.punch.messages import Candidates, Place, obstacle, targets
from equipoise.dht.sanitize import printable

MEASURE_SECONDS = 4.0
"""Longest time to ask public peers where this one's connections come from."""
ANSWER_SECONDS = 8.0
"""Longest wait for the other side's next message, which may measure first; a relay that is busy takes seconds."""
TRY_SECONDS = 2.0
"""For one try, and for the news of a channel to come over; the kernel repeats a connection's first packet after 1 s."""
MAX_LEAD_SECONDS = 1.0
"""Longest wait for the other side to have heard `Go`; a relay slower than that is not in step anyway."""


class Heard(msgspec.Struct, frozen=True):
    """The other side has said something."""

    message: messages.Message


class Measured(msgspec.Struct, frozen=True):
    """It is known where this peer's connections come from; or, without places, why not."""

    places: Candidates | None
    reason: str = ""


class Opened(msgspec.Struct, frozen=True):
    """A channel was opened through the hole."""


class Missed(msgspec.Struct, frozen=True):
    """No try that is under way can lead to a channel any more."""

    reason: str


class Broke(msgspec.Struct, frozen=True):
    """The relayed stream has ended."""

    reason: str


class Tick(msgspec.Struct, frozen=True):
    """The deadline has come."""


Event = Heard | Measured | Opened | Missed | Broke | Tick


class Measure(msgspec.Struct, frozen=True):
    """Find out where this peer's connections come from; to be answered with `Measured`."""


class Say(msgspec.Struct, frozen=True):
    """Send a message to the other side."""

    message: messages.Message


class Try(msgspec.Struct, frozen=True):
    """Connect to these places until a channel is open, instead of what was tried before."""

    targets: tuple[Place, ...]


class Finish(msgspec.Struct, frozen=True):
    """It is over: a channel was opened, if there is no reason."""

    reason: str


Action = Measure | Say | Try | Finish


Phase = Literal["measuring", "awaiting", "leading", "trying", "settling"]


class Punch:
    """One side of one attempt, of which so many `tries` were begun.

    `Tick` is due at `deadline`, in the caller's time; that is infinity once it is over, and nothing is to be handled.
    """

    def __init__(self, begins: bool) -> None:
        """`begins` for the side that speaks first."""
        self.deadline = float("inf")
        self.tries = 0
        self._begins = begins
        self._phase: Phase = "measuring"
        self._awaited: type[messages.Message] = Candidates
        self._own: Candidates | None = None
        self._theirs: Candidates | None = None
        self._targets: tuple[Place, ...] = ()
        self._obstacle = ""
        self._probed_at = 0.0
        self._opened = False
        self._told = False
        self._missed = ""

    def start(self, now: float) -> list[Action]:
        """Begin: the one side measures, the other waits for its offer."""
        return self._measure(now) if self._begins else self._await(Candidates, now)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in what has happened; return what is to be done."""
        match event:
            case Heard(messages.End(reason=reason)):
                return self._on_end(reason, now)
            case Heard(message):
                return self._on_message(message, now)
            case Measured(places=places, reason=reason):
                return self._on_measured(places, reason, now)
            case Opened():
                self._opened = True
                return self._finish("") if self._begins or self._told else self._settle(now)
            case Missed(reason=reason):
                self._missed = reason
                return []  # When the next try begins must not tell the other side what has answered here.
            case Broke(reason=reason):
                if self._phase == "settling" and not self._opened:
                    return []  # Its last word was that it has a channel.
                why = "" if self._opened else f"the relayed stream has ended: {reason}"
                return self._finish(why, tell=False)
            case Tick():
                return self._on_tick(now)

    def _on_measured(self, places: Candidates | None, reason: str, now: float) -> list[Action]:
        if places is None:
            return self._finish(reason)
        self._own = places
        if self._begins:
            return [Say(places), *self._await(Candidates, now)]
        return self._compare() or [Say(places), *self._await(messages.Probe, now)]

    def _on_message(self, message: messages.Message, now: float) -> list[Action]:
        if self._phase != "awaiting" or type(message) is not self._awaited:
            return self._finish(f"the other side said {type(message).__name__} out of turn")
        match message:
            case Candidates():
                self._theirs = message
                return (self._compare() or self._probe(now)) if self._begins else self._measure(now)
            case messages.Probe(number=number) if number == self.tries + 1:
                self.tries = number
                return [Say(messages.Echo(number)), *self._await(messages.Go, now)]
            case messages.Echo(number=number) if number == self.tries:
                self._phase = "leading"
                self.deadline = now + min((now - self._probed_at) / 2, MAX_LEAD_SECONDS)
                return [Say(messages.Go(number))]
            case messages.Go(number=number) if number == self.tries:
                return [*self._await(messages.Probe, now), Try(self._targets)]
        return self._finish(f"the other side speaks of another try than the {self.tries}.")

    def _on_end(self, reason: str, now: float) -> list[Action]:
        if reason or self._begins:
            here = f"; here: {self._found()}" if self.tries else ""
            return self._finish(f"the other side gave up: {printable(reason)}{here}", tell=False)
        self._told = True
        return self._finish("") if self._opened else self._settle(now)

    def _on_tick(self, now: float) -> list[Action]:
        match self._phase:
            case "leading":
                self._phase, self.deadline = "trying", now + TRY_SECONDS
                return [Try(self._targets)]
            case "trying":
                return self._again(now)
            case "measuring":
                return self._finish(f"public peers do not answer within {MEASURE_SECONDS:.0f} s")
            case "settling":
                missing = "the other side has a channel, this one has not"
                return self._finish("" if self._opened else missing, tell=False)
            case "awaiting":
                return self._finish(f"the other side does not answer within {ANSWER_SECONDS:.0f} s")

    def _settle(self, now: float) -> list[Action]:
        """One side has a channel: wait until the other has, for the first to hang up may break what it is about."""
        self._phase, self.deadline = "settling", now + TRY_SECONDS
        return []

    def _measure(self, now: float) -> list[Action]:
        self._phase, self.deadline = "measuring", now + MEASURE_SECONDS
        return [Measure()]

    def _await(self, kind: type[messages.Message], now: float) -> list[Action]:
        self._phase, self._awaited, self.deadline = "awaiting", kind, now + ANSWER_SECONDS
        return []

    def _compare(self) -> list[Action]:
        """Give up unless the other side has named a place that is worth trying."""
        if self._own and self._theirs:
            self._targets = targets(self._own, self._theirs)
            self._obstacle = obstacle(self._own, self._theirs)
        if self._targets:
            return []
        return self._finish(self._obstacle or "the two have no kind of address in common")

    def _probe(self, now: float) -> list[Action]:
        self.tries += 1
        self._probed_at = now
        return [Say(messages.Probe(self.tries)), *self._await(messages.Echo, now)]

    def _again(self, now: float) -> list[Action]:
        if self.tries < messages.MAX_TRIES:
            return self._probe(now)
        failures = f"{self._found()}, in {self.tries} tries"
        # Of what was found there the other side is told nothing: it may have named places to have them looked at.
        told = f"no connection in {self.tries} tries"
        here, there = ("; ".join(filter(None, (why, self._obstacle))) for why in (failures, told))
        return self._finish(here, there)

    def _found(self) -> str:
        sought = " or ".join(f"{host} port {port}" for host, port in self._targets)
        return self._missed or f"nobody answered at {sought}"

    def _finish(self, reason: str, told: str | None = None, tell: bool = True) -> list[Action]:
        self.deadline = float("inf")
        tell = tell and (self._begins or bool(reason))
        words = (reason if told is None else told)[: messages.MAX_REASON_CHARACTERS]
        last: list[Action] = [Say(messages.End(words))] if tell else []
        return [*last, Finish(reason)]
