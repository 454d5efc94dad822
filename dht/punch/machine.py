"""One attempt of two peers to punch a hole, at either side. Sans IO: it takes events and the time, returns actions.

    begins                                        the other side
    Measure, Candidates   ------------------->    Measure
                          <-------------------    Candidates
    Probe                 ------------------->
                          <-------------------    Echo
    Go                    ------------------->    Try at once
    Try half the way there and back later

The last four lines repeat until a connection opens. Each time the round trip is measured anew, so that both routers'
first packets cross (libp2p's DCUtR; its CONNECT is our Candidates, its SYNC our Go). Messages are msgpack, bounded, and
checked before use; a peer does not try every place that a stranger names.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from equipoise.dht import sanitize
from equipoise.dht.sanitize import printable
from equipoise.dht.state import PROTOCOL_VERSION

MIN_PORT = 1024
"""Lowest port that a peer may name: routers give outgoing connections no lower port; a service would be there."""

MAX_INSIDE = 2
"""Most places inside. A member that lies can have one more first packet than this sent to this peer's neighbours."""

Place = tuple[str, int]
"""IP address and TCP port."""
_Told = tuple[Annotated[str, msgspec.Meta(max_length=45)], Annotated[int, msgspec.Meta(ge=1, le=65535)]]
PUNCH_PROTOCOL = f"/equipoise/{PROTOCOL_VERSION}/punch"
MAX_MESSAGE_BYTES = 1024
"""Longest message; three IPv6 addresses, or a reason, take less than half of it."""
MAX_REASON_CHARACTERS = 160
MAX_TRIES = 3
"""Most tries, as in DCUtR: a hole that three tries do not open, thirty do not either."""

_Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_TRIES)]

MEASURE_SECONDS = 4.0
"""Longest time to ask public peers where this peer's connections come from."""
ANSWER_SECONDS = 8.0
"""Longest wait for the other side's next message, which may measure first; a relay that is busy takes seconds."""
TRY_SECONDS = 2.0
"""Longest try, and longest wait for news of a channel; the kernel repeats a connection's first packet after 1 s."""
MAX_LEAD_SECONDS = 1.0
"""Longest wait for `Go` to reach the other side; with a slower relay the two sides would not be in step anyway."""


class Candidates(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """The places that one peer's connections come from; the two sides of a punch exchange them first.

    Attributes:
        outside: The place that public peers see: its router's.
        inside: The places that its own machine and its neighbours see.
        steady: Whether its router, as far as is known, gives every destination the same port.
    """

    outside: _Told
    inside: Annotated[tuple[_Told, ...], msgspec.Meta(max_length=MAX_INSIDE)] = ()
    steady: bool = True


def judge(seen: Iterable[Place], inside: Iterable[Place]) -> Candidates:
    """Return this peer's places: where public peers have `seen` its connections come from, and the places `inside`.

    Most observers must agree on the address: otherwise a lying observer could make peers connect to any host. Raises
    ConnectionError with the reason if no observer answered, or they do not agree.
    """
    seen = list(seen)
    # A neighbour sees an inside address, which is of no use beyond the router.
    outside = [place for place in seen if ipaddress.ip_address(place[0]).is_global] or seen
    if not outside:
        raise ConnectionError("no public peer has told where its connections come from")
    [(host, votes)] = Counter(host for host, _ in outside).most_common(1)
    if 2 * votes <= len(outside):
        told = " and ".join(sorted({host for host, _ in outside}))
        raise ConnectionError(f"public peers do not agree where its connections come from: {told}")
    [(place, alike)] = Counter(place for place in outside if place[0] == host).most_common(1)
    return Candidates(place, tuple(dict.fromkeys(inside))[:MAX_INSIDE], steady=2 * alike > votes)


def targets(own: Candidates, theirs: Candidates) -> tuple[Place, ...]:
    """Return where the other peer may be found, the likeliest first; empty if it names nothing worth a packet.

    If both peers are behind one router (one public address), the inside places are tried too. Private addresses are
    tried only if this peer's own address is private. One side's port must be known. The other side's may change: a
    router that filters by address only lets its connection in from any port (RFC 5382, section 4.3).
    """
    found = []
    if (own.steady or theirs.steady) and _alike(own.outside, theirs.outside):
        found = [theirs.outside]
    if own.outside[0] == theirs.outside[0]:
        near = theirs.inside[:MAX_INSIDE]
        found = [place for place in near if any(_alike(one, place) for one in own.inside)] + found
    foreign = (place for place in dict.fromkeys(found) if place not in (own.outside, *own.inside))
    return tuple(place for place in foreign if place[1] >= MIN_PORT)


def obstacle(own: Candidates, theirs: Candidates) -> str:
    """Return in words what is known to stand between the two; empty if nothing is."""
    unsteady = [whose for whose, one in (("this", own), ("the other", theirs)) if not one.steady]
    if not unsteady:
        return ""
    return f"{' and '.join(unsteady)} side's router gives every destination another port"


def _alike(own: Place, theirs: Place) -> bool:
    here, there = ipaddress.ip_address(own[0]), ipaddress.ip_address(theirs[0])
    if there.is_multicast or there.is_unspecified or here.version != there.version:
        return False
    return (here.is_global, here.is_loopback) == (there.is_global, there.is_loopback)


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Sent before try `number`: the receiver answers at once, which measures the round trip."""

    number: _Number


class Echo(msgspec.Struct, frozen=True, array_like=True, tag="echo"):
    """The answer to a probe."""

    number: _Number


class Go(msgspec.Struct, frozen=True, array_like=True, tag="go"):
    """The receiver connects now; the author connects when this message should have arrived."""

    number: _Number


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Without a reason, the author has a channel; with a reason, it gives up."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)] = ""


Message = Candidates | Probe | Echo | Go | End

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Read a stranger's message; raises Malformed if it is no message, or breaks a bound."""
    message = sanitize.decode(_decoder, data, MAX_MESSAGE_BYTES)
    try:
        for host, _ in (message.outside, *message.inside) if isinstance(message, Candidates) else ():
            if ipaddress.ip_address(host) and "%" in host:
                raise ValueError("expected addresses without a zone")
    except ValueError as error:
        raise sanitize.Malformed(f"malformed message: {printable(str(error))}") from None
    return message


class Heard(msgspec.Struct, frozen=True):
    """The other side has sent a message."""

    message: Message


class Measured(msgspec.Struct, frozen=True):
    """The places that this peer's connections come from are known; or, without places, the reason why not."""

    places: Candidates | None
    reason: str = ""


class Opened(msgspec.Struct, frozen=True):
    """A channel was opened through the hole."""


class Missed(msgspec.Struct, frozen=True):
    """No try under way can open a channel any more."""

    reason: str


class Broke(msgspec.Struct, frozen=True):
    """The relayed stream has ended."""

    reason: str


class Tick(msgspec.Struct, frozen=True):
    """The deadline has come."""


Event = Heard | Measured | Opened | Missed | Broke | Tick


class Measure(msgspec.Struct, frozen=True):
    """Find out where this peer's connections come from; report `Measured`."""


class Say(msgspec.Struct, frozen=True):
    """Send a message to the other side."""

    message: Message


class Try(msgspec.Struct, frozen=True):
    """Connect to these places until a channel is open; this replaces an earlier `Try`."""

    targets: tuple[Place, ...]


class Finish(msgspec.Struct, frozen=True):
    """The attempt is over; without a reason, a channel was opened."""

    reason: str


Action = Measure | Say | Try | Finish


Phase = Literal["measuring", "awaiting", "leading", "trying", "settling"]


class Punch:
    """One side of one attempt; `tries` counts the tries begun.

    `Tick` is due at `deadline`, in the caller's time. Once the attempt is over, `deadline` is infinity.
    """

    def __init__(self, begins: bool) -> None:
        """`begins` is True on the side that speaks first."""
        self.deadline = float("inf")
        self.tries = 0
        self._begins = begins
        self._phase: Phase = "measuring"
        self._awaited: type[Message] = Candidates
        self._own: Candidates | None = None
        self._theirs: Candidates | None = None
        self._targets: tuple[Place, ...] = ()
        self._obstacle = ""
        self._probed_at = 0.0
        self._opened = False
        self._told = False
        self._missed = ""

    def start(self, now: float) -> list[Action]:
        """Begin: the side that speaks first measures, the other waits for its places."""
        return self._measure(now) if self._begins else self._await(Candidates, now)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event; return the actions, in order."""
        match event:
            case Heard(End(reason=reason)):
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
                return []  # The start of the next try must not reveal to the other side what answered here.
            case Broke(reason=reason):
                if self._phase == "settling" and not self._opened:
                    return []  # The other side's last message was that it has a channel.
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
        return self._compare() or [Say(places), *self._await(Probe, now)]

    def _on_message(self, message: Message, now: float) -> list[Action]:
        if self._phase != "awaiting" or type(message) is not self._awaited:
            return self._finish(f"the other side said {type(message).__name__} out of turn")
        match message:
            case Candidates():
                self._theirs = message
                return (self._compare() or self._probe(now)) if self._begins else self._measure(now)
            case Probe(number=number) if number == self.tries + 1:
                self.tries = number
                return [Say(Echo(number)), *self._await(Go, now)]
            case Echo(number=number) if number == self.tries:
                self._phase = "leading"
                self.deadline = now + min((now - self._probed_at) / 2, MAX_LEAD_SECONDS)
                return [Say(Go(number))]
            case Go(number=number) if number == self.tries:
                return [*self._await(Probe, now), Try(self._targets)]
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
        """One side has a channel: wait until the other has it too, because hanging up first may break the channel."""
        self._phase, self.deadline = "settling", now + TRY_SECONDS
        return []

    def _measure(self, now: float) -> list[Action]:
        self._phase, self.deadline = "measuring", now + MEASURE_SECONDS
        return [Measure()]

    def _await(self, kind: type[Message], now: float) -> list[Action]:
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
        return [Say(Probe(self.tries)), *self._await(Echo, now)]

    def _again(self, now: float) -> list[Action]:
        if self.tries < MAX_TRIES:
            return self._probe(now)
        failures = f"{self._found()}, in {self.tries} tries"
        # The other side learns nothing of this peer's findings: it may have named places in order to explore them.
        told = f"no connection in {self.tries} tries"
        here, there = ("; ".join(filter(None, (why, self._obstacle))) for why in (failures, told))
        return self._finish(here, there)

    def _found(self) -> str:
        sought = " or ".join(f"{host} port {port}" for host, port in self._targets)
        return self._missed or f"nobody answered at {sought}"

    def _finish(self, reason: str, told: str | None = None, tell: bool = True) -> list[Action]:
        self.deadline = float("inf")
        tell = tell and (self._begins or bool(reason))
        words = (reason if told is None else told)[:MAX_REASON_CHARACTERS]
        last: list[Action] = [Say(End(words))] if tell else []
        return [*last, Finish(reason)]
