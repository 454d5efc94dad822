"""Whether this peer holds the state that its group holds, and what to do where it does not; reads no clock and no
tensor.

All peers apply the same means in the same order to the same state, so they stay alike without sending parameters.
Each says in every round which state it holds (`StateId`); the most common is the group's (`group_state`), and all
compute it alike. From that a peer knows where it stands:

- *meeting*: it does not know yet: it has just started, or has trained alone. It attends a round with nothing to find
  out.
- *in step*: its state is the group's: it contributes, and applies each mean.
- *astray*: it is not. It attends with nothing, keeps the means it receives, each with the state that it belongs to, and
  fetches a snapshot meanwhile. When that is there, it applies the means that were kept since: in step, and nobody
  waited.

An id's lineage is a running digest: of the first parameters, and of everything applied since. Every `CHECK_EVERY`
epochs it takes in the parameters as they really are, so that hardware that computes otherwise is found out. That link
of the chain can be computed only by who holds the parameters, so it is not compared before the snapshot is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from blake3 import blake3

from equipoise.averaging.state import StateId

CHECK_EVERY = 64
"""Epochs between two looks at the parameters themselves: hashing them takes about as long as a step of a small
model."""

HELD_MEANS = 32
"""Most means kept while a snapshot comes, where memory allows, each as large as the parameters in fp32. A snapshot
with Adam's two moments is twelve bytes a value where a round in int8 is about two, so on a link that bounds both it
takes six rounds, and more if shared."""

NOTICE_SECONDS = 1.0
"""In which donors hear that a snapshot is wanted. Asking for the epoch that comes after it has all of them offer the
same."""

MAX_LEAD = HELD_MEANS // 2
"""Most epochs to ask ahead, half of the means that are kept: those from there on must be held when the download
ends."""

MEETING_WEIGHT = 1e-3
"""Who gives less has nothing to give: a round of only those introduces them to each other, and changes nothing."""

ATTENDANCE = 2.0**-30
"""Weight of one that has nothing to give where a round would not come about without: it needs two contributors.
Beside any number of samples it is nothing in fp32, and what it adds are zeros."""

MAX_INTRODUCTIONS = 3
"""Rounds of newcomers among themselves, while others are known, before they believe that they are the beginning."""

FAILED_ROUNDS = 3
"""Rounds that fail in a row, though others are known, before one that may train alone does; one alone is weather."""

FETCH_PAUSE = 0.5
"""Seconds from a download that failed to the next; twice as many after each in a row: one that no image fits would
have all donors send theirs whole after every round, for ever."""

MAX_FETCH_PAUSE = 600.0
"""Longest of them: what was wrong may have been put right by then."""

Alone = Literal["train", "wait"]


class Phase(Enum):
    """Where a peer stands; see the top of this file."""

    MEETING = "meeting"
    IN_STEP = "in step"
    ASTRAY = "astray"


class RoundSucceeded(NamedTuple):
    """A round came to a mean.

    Attributes:
        group: The group's state before it; None if nobody claims one.
        states: What each claims to hold, by name.
        digest: The outcome's.
        weights: Of the contributors, by name.
        members: Names of all who took part, in an order that all of them see.
        missing: How many of the peers that are known did not.
    """

    group: StateId | None
    states: Mapping[str, StateId]
    digest: str
    weights: Mapping[str, float]
    members: Sequence[str]
    missing: int = 0


class RoundFailed(NamedTuple):
    """A round came to nothing."""

    reason: str


class ImageFetched(NamedTuple):
    """An image of this state is there, checked, ready to be loaded."""

    state: StateId


class FetchFailed(NamedTuple):
    """No image came, or none that fits."""

    reason: str


class Due(NamedTuple):
    """An update is due; `company` says whether any other peer is known."""

    company: bool


class SteppedAlone(NamedTuple):
    """This peer applied what it had itself; `digest` is of that."""

    digest: str


class Checked(NamedTuple):
    """The parameters have this digest now."""

    digest: str


class Interrupted(NamedTuple):
    """An update, or a load, has raised half-way; the means that were held are given up."""


Event = RoundSucceeded | RoundFailed | ImageFetched | FetchFailed | Due | SteppedAlone | Checked | Interrupted


class Apply(NamedTuple):
    """Apply the mean that leads on from this state: the last round's, or one that was held."""

    before: StateId


class Check(NamedTuple):
    """Say what digest the parameters have (`Checked`)."""


class Hold(NamedTuple):
    """Keep the mean of the round that has just ended: it leads on from this state."""

    before: StateId


class Forget(NamedTuple):
    """The mean that leads on from this state is no longer wanted."""

    before: StateId


class Fetch(NamedTuple):
    """Get an image of this epoch or a later one."""

    at_least: int


class Load(NamedTuple):
    """Load the image that was fetched."""


class Meet(NamedTuple):
    """Take part in a round."""


class StepAlone(NamedTuple):
    """Apply what this peer has accumulated itself."""


Action = Apply | Check | Hold | Forget | Fetch | Load | Meet | StepAlone


class Link(NamedTuple):
    """A mean: where it leads from and, but for its last check, where to."""

    before: StateId
    after: StateId


class Replica:
    """One peer's copy of the state that all hold alike.

    Attributes:
        state: What it holds.
        phase: Where it stands.
        reason: Why, one line.
    """

    def __init__(
        self,
        name: str,
        state: StateId,
        now: float,
        alone: Alone = "train",
        patience: float = 10.0,
        held: int = HELD_MEANS,
    ) -> None:
        """This peer, `name`, starts with `state`; `patience` is the seconds without company after which it trains
        alone, if `alone` says so; `held`, at least 2, the means that it has memory to keep."""
        self._most_held = min(held, HELD_MEANS)
        self._name = name
        self.state = state
        self.phase = Phase.MEETING
        self.reason = "it has not met the group yet"
        self._alone = alone
        self._patience = patience
        self._company_at = now
        self._failures = 0
        self._links: deque[Link] = deque()
        self._fetching = False
        self._fetch_after = now
        self._fetch_pause = FETCH_PAUSE
        self._wanted = 0
        self._replaying = False
        self._last_round = now
        self._stands_in = True
        self._group_at = now
        self._introductions = 0

    @property
    def claim(self) -> StateId | None:
        """What to say in a round: nothing while astray, so that those who know better are not outvoted."""
        return None if self.phase is Phase.ASTRAY else self.state

    def attendance(self, others_give: bool = False) -> float:
        """The weight with which to take part where there is nothing to give: none, if the others are a group without.

        Beside a single peer that gives, one of those who do not makes the second contributor; were it all of them, they
        would be groups by themselves, or each with the first peer that comes to a round of several.

        Args:
            others_give: Whether several others are known, and some have accumulated something: they have begun.
        """
        if self.phase is Phase.ASTRAY:
            return ATTENDANCE if self._stands_in else 0.0
        return 0.0 if others_give and not self._failures else ATTENDANCE

    @property
    def contributes(self) -> bool:
        """Whether its gradients are of the parameters that the group holds."""
        return self.phase is Phase.IN_STEP

    @property
    def gives_up(self) -> bool:
        """Whether it trains alone when its next update is due, whoever is known."""
        return self._alone == "train" and self._failures >= FAILED_ROUNDS

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take note of what happened, in seconds of any steady clock; returns what to do, in order."""
        match event:
            case RoundSucceeded():
                return self._round_succeeded(event, now)
            case RoundFailed(reason):
                self._failures += 1
                self._stands_in = True  # Perhaps nobody did.
                if self.phase is not Phase.ASTRAY:
                    self.reason = f"the last round failed: {reason}"
                return self._fetch_again(now)
            case ImageFetched(state):
                return self._image_fetched(state, now)
            case FetchFailed(reason):
                return self._fetch_failed(reason, now)
            case Due(company):
                return self._due(company, now)
            case SteppedAlone(digest):
                return self._stepped_alone(digest)
            case Interrupted():
                return self._interrupted()
            case Checked(digest):
                self.state = StateId(self.state.epoch, follow(self.state.lineage, f"parameters {digest}"))
                return self._replay(now) if self._replaying else []

    def _fetch_failed(self, reason: str, now: float) -> list[Action]:
        self._fetching = False
        pause, self._fetch_pause = self._fetch_pause, min(2 * self._fetch_pause, MAX_FETCH_PAUSE)
        self._fetch_after = now + pause
        self.reason = f"astray: no snapshot yet: {reason}; it looks for one again in {pause:g} s"
        return []

    def _interrupted(self) -> list[Action]:
        """What it holds now nobody else does: an id of its own, of the epoch before, so that it outvotes no equal."""
        lineage = follow(self.state.lineage, f"interrupted at {self._name}")
        self.state = StateId(max(self.state.epoch - 1, 0), lineage)
        self._replaying = False
        return self._give_up_astray("an update was interrupted: what it holds is nobody else's")

    def _round_succeeded(self, event: RoundSucceeded, now: float) -> list[Action]:
        self._failures, self._company_at = 0, now
        group = event.group
        if group is None:
            return self._nobody_knows(now)
        givers = {name for name, weight in event.weights.items() if weight > MEETING_WEIGHT}
        # Also those who had nothing to give yet: they will have next time, and need a second contributor then.
        lasting = {name for name in event.members if event.states.get(name) == group}
        idle = [name for name in event.members if name not in lasting]
        self._stands_in = len(lasting) < 2 and idle[:1] == [self._name]
        self._group_at = now
        introduced = not givers
        if introduced and group == self.state and self._is_inconclusive(event):
            self._introductions += 1
            self.reason = f"it has met some that begin as it does; {event.missing} others may know more"
            return []
        if group == self.state:
            actions = self._forget_all()
            self.phase, self.reason, self._fetching = Phase.IN_STEP, "its state is the group's", False
            self._fetch_pause, self._fetch_after = FETCH_PAUSE, now
            if not introduced:
                self._links.append(_link(group, event.digest))
                actions += self._replay(now)
        else:
            actions = self._stray(group)
            if not introduced:
                actions += self._hold(_link(group, event.digest))
            actions += self._fetch(self._ahead(group, now), now)
        self._last_round = now
        return actions

    def _nobody_knows(self, now: float) -> list[Action]:
        """All in the group were astray. If that lasts, whoever held the state has gone, and each claims its own
        again."""
        if self.phase is not Phase.ASTRAY or now - self._group_at < self._patience:
            return []
        return self._give_up_astray("nobody is left who holds the group's state")

    def _is_inconclusive(self, event: RoundSucceeded) -> bool:
        """Whether newcomers met only each other, while there may be a group that has long begun."""
        return self.state.epoch == 0 and event.missing > 0 and self._introductions < MAX_INTRODUCTIONS

    def _stray(self, group: StateId) -> list[Action]:
        if self.phase is Phase.ASTRAY:
            return []
        self.phase = Phase.ASTRAY
        self.reason = f"astray: it holds {told(self.state)}, the group {told(group)}"
        return []

    def _hold(self, link: Link) -> list[Action]:
        gap = bool(self._links) and not _leads_to(self._links[-1], link.before)
        forgotten: list[Action] = list(self._forget_all()) if gap else []
        if len(self._links) == self._most_held:
            forgotten.append(Forget(self._links.popleft().before))
        self._links.append(link)
        return [*forgotten, Hold(link.before)]

    def _image_fetched(self, state: StateId, now: float) -> list[Action]:
        self._fetching = False
        if self.phase is not Phase.ASTRAY:
            return []
        if self._links and state.epoch < self._links[0].before.epoch:
            self.reason = (
                f"astray: the snapshot of epoch {state.epoch} is older than the means that were kept"
            )
            return self._fetch(self._links[0].before.epoch, now)
        actions: list[Action] = [Load()]
        self.state = state
        while self._links and self._links[0].before.epoch < state.epoch:
            actions.append(Forget(self._links.popleft().before))
        return [*actions, *self._replay(now)]

    def _replay(self, now: float) -> list[Action]:
        """Apply what is held, one after another, as far as the next look at the parameters."""
        actions: list[Action] = []
        self._replaying = True
        while self._links and self._links[0].before == self.state:
            link = self._links.popleft()
            actions.append(Apply(link.before))
            self.state = link.after
            if self.state.epoch % CHECK_EVERY == 0:
                return [*actions, Check()]
        self._replaying = False
        if self._links:
            before = self._links[0].before
            self.phase = Phase.ASTRAY
            self.reason = f"astray: it came to {told(self.state)}, the group to {told(before)}"
            return [*actions, *self._fetch(before.epoch, now)]
        if self.phase is Phase.ASTRAY:
            # The next round tells whether it is the group's; most likely it is.
            self.phase, self.reason = Phase.IN_STEP, f"it caught up with the group at {told(self.state)}"
        return actions

    def _due(self, company: bool, now: float) -> list[Action]:
        if company:
            self._company_at = now
            if self.gives_up:
                return self._step_alone(f"{self._failures} rounds in a row failed")
            return [Meet()]
        if self._alone == "wait":
            self.reason = "it waits: no other peer of this run is known"
            return []
        if now - self._company_at < self._patience:
            self.reason = (
                f"no other peer is known; it looks for one for {self._patience:g} s before it trains alone"
            )
            return []
        return self._step_alone("no other peer of this run is known")

    def _step_alone(self, why: str) -> list[Action]:
        actions = self._give_up_astray("") if self.phase is Phase.ASTRAY else []
        self.phase, self.reason = Phase.MEETING, f"it trains alone: {why}"
        return [*actions, StepAlone()]

    def _stepped_alone(self, digest: str) -> list[Action]:
        lineage = follow(self.state.lineage, f"alone {digest}")
        self.state = StateId(self.state.epoch + 1, lineage)
        return [Check()] if self.state.epoch % CHECK_EVERY == 0 else []

    def _give_up_astray(self, reason: str) -> list[Action]:
        self.phase, self.reason, self._fetching = Phase.MEETING, reason, False
        return self._forget_all()

    def _forget_all(self) -> list[Action]:
        forgotten: list[Action] = [Forget(link.before) for link in self._links]
        self._links.clear()
        return forgotten

    def _fetch(self, at_least: int, now: float) -> list[Action]:
        if self._fetching or now < self._fetch_after:
            return []
        self._fetching, self._wanted = True, at_least
        return [Fetch(at_least)]

    def _fetch_again(self, now: float) -> list[Action]:
        return self._fetch(self._wanted, now) if self.phase is Phase.ASTRAY else []

    def _ahead(self, group: StateId, now: float) -> int:
        """The epoch to ask for: one that all donors will have heard of before they reach it."""
        interval = max(now - self._last_round, NOTICE_SECONDS / MAX_LEAD)
        return group.epoch + min(max(math.ceil(NOTICE_SECONDS / interval), 1), self._most_held // 2)


def beginning(digest: str) -> StateId:
    """The id of a state nobody has trained yet, whose parameters have this digest."""
    return StateId(0, follow("", f"parameters {digest}"))


def follow(lineage: str, what: str) -> str:
    """The lineage after `what` was applied: BLAKE3 in hex."""
    return blake3(f"{lineage}\0{what}".encode()).hexdigest()


def told(state: StateId) -> str:
    """The state as a reason says it."""
    return f"epoch {state.epoch} ({state.lineage[:8]})"


def _link(before: StateId, digest: str) -> Link:
    return Link(before, StateId(before.epoch + 1, follow(before.lineage, f"mean {digest}")))


def _leads_to(link: Link, state: StateId) -> bool:
    if state.epoch % CHECK_EVERY == 0:
        return link.after.epoch == state.epoch
    return link.after == state


def links_told(links: Sequence[Link]) -> str:
    """The epochs of some links, for a log."""
    return ", ".join(str(link.before.epoch) for link in links)
