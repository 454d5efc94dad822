"""Compares this peer's state with its group's, and leads the peer back to the group; reads no clock and no tensor.

All peers apply the same means in the same order to the same state, so they stay alike without sending parameters.
In every round, each peer claims the state that it holds (`StateId`). The group's state is the most common claim among
the peers that this peer has trained with, or else among all (`group_state`). A peer is in one of three phases:

- *meeting*: it does not know the group's state yet. It has just started, or has trained alone, and attends a round.
- *in step*: its state is the group's. It contributes, and applies each mean.
- *astray*: its state is another. It attends without a contribution, and keeps each mean that it receives, with the
  state to which the mean belongs. Meanwhile it fetches the few means that it missed, which all daemons keep for a
  while, or else a snapshot. Then it applies the kept means and is in step; no peer had to wait for it.

A peer whose script has written to the state holds a state of its own, and meets the group anew. It claims its state
only after a round in which nobody claimed one: then the scripts of all others may have written the same.

A round that failed here may have succeeded elsewhere, with this peer's contribution, which must not count twice. So a
peer in step asks for that mean at once.

Identities are free, so a number of claims alone proves nothing. A peer that has trained with others, in rounds in which
they held one state, does not leave that state for a state of strangers, whatever their number or epoch. It believes the
peers that it has trained with (`Known`), so a peer that was cut off, or has trained alone meanwhile, comes back to
them. It follows strangers only if none of the known peers is left: a survivor of one island joins another, but two
islands of several peers keep their states.

The lineage of an id is a running digest of the first parameters and of everything applied since. Every `CHECK_EVERY`
epochs it includes the parameters themselves, which reveals hardware that computes differently. Only a peer that holds
the parameters can compute that link of the chain, so it is not compared before the snapshot is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Literal

from equipoise.averaging.counts import count
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId, group_state
from equipoise.averaging.weights import ATTENDANCE_LIMIT, LEAST_CONTRIBUTION
from equipoise.limits import LruDict, backoff
from equipoise.peer.training import events, lineage
from equipoise.peer.training.events import Action, Event

HELD_MEANS = 32
"""Most means kept while a snapshot comes, if memory allows, each as large as the parameters in fp32. A snapshot with
Adam's two moments has twelve bytes a value, a round in int8 about two. So on a link that bounds both, a snapshot takes
six rounds, and more if the link is shared."""

NOTICE_SECONDS = 1.0
"""Time for donors to hear the wish for a snapshot: if its epoch is still ahead of all donors, all offer the same."""

MAX_LEAD = HELD_MEANS // 2
"""Most epochs to ask ahead: half of the means kept, because the means from there on must last until the image comes."""

ATTENDANCE = ATTENDANCE_LIMIT
"""Weight of a peer without a contribution in a round that would otherwise lack its second contributor. Beside any
number of samples the weight vanishes in fp32, and the peer adds zeros."""

MEETING_WEIGHT = LEAST_CONTRIBUTION
"""Weight that peers which only attend do not reach, also many of them together. A round of only such contributors
introduces them to each other, and changes nothing."""

MAX_INTRODUCTIONS = 3
"""Most rounds of newcomers among themselves, while other peers are known, before they conclude that no group exists."""

FAILED_ROUNDS = 3
"""Failed rounds in a row, while others are known, after which a peer trains alone if it may; one failure is normal."""

LATE_ROUNDS = 2
"""Late contributions in a row without their mean, after which a peer attends a round to learn the group's state. After
a single one, the round that closed without the peer may have failed, so that its contribution still fits."""

FIRST_SNAPSHOT = 2
"""Epoch of the snapshot that a newcomer wants if others train already: peers that start with it are in step by then."""

LOOKS_BACK = 3
"""Most questions of a peer whose group has left for the mean after one state; each may cost seconds of training."""

FETCH_PAUSE = 0.5
"""Seconds from a failed download to the next. The pause doubles after each failure in a row: otherwise a peer that no
image fits would make all donors send whole images after every round, for ever."""

MAX_FETCH_PAUSE = 600.0
"""Longest pause: the fault may have been repaired by then."""

Alone = Literal["train", "wait"]

Trust = Literal["known", "heads"]
"""The peers whose claims decide the group's state: peers that this peer has trained with, or all with equal votes."""

MAX_KNOWN = 256
"""Most peers remembered that this peer has trained with: four of the largest groups. The least recent are forgotten."""

ROUNDS_APART = 3
"""Fewest rounds without a known peer before this peer follows strangers: the known peers may be late for one round."""


class Phase(Enum):
    """Phase of a peer; see the top of this file."""

    MEETING = "meeting"
    IN_STEP = "in step"
    """This peer's gradients are of the group's parameters."""
    ASTRAY = "astray"


class Known:
    """The peers that one peer, `name`, has trained with.

    It follows strangers after `patience` seconds, and `ROUNDS_APART` rounds that nobody missed, without a known peer.
    With the trust `heads` it counts the claims of all peers, known or not.
    """

    def __init__(self, name: str, trust: Trust, patience: float, now: float) -> None:
        self._name = name
        self._trust = trust
        self._patience = patience
        self._names = LruDict[str, None](MAX_KNOWN)
        self._met_at = now
        self._apart = 0

    def add(self, names: Iterable[str]) -> None:
        """Remember peers that contributed to a mean, and held the state to which it was applied."""
        for name in names:
            if name != self._name:
                self._names[name] = None

    @property
    def names(self) -> tuple[str, ...]:
        """PeerIDs of the only peers to take snapshots from, while one of them is there; empty for all peers."""
        return () if self._trust == "heads" else tuple(self._names)

    def group(self, round: events.RoundEnded, now: float) -> StateId | None:
        """The group's state after a round, by the peers that this peer believes; None if none of them claims one."""
        outcome = round.outcome
        if self._trust == "heads" or not self._names:
            return outcome.state
        believed = {self._name, *self._names}
        claims = {name: state for name, state in outcome.states.items() if name in believed}
        if any(name in self._names for name in outcome.group):
            self._met_at, self._apart = now, 0
        elif not round.missing:
            self._apart += 1
            if self._apart >= ROUNDS_APART and now - self._met_at >= self._patience:
                self._names.clear()
                return outcome.state
        return group_state(claims.values())


class Replica:
    """One peer's copy of the state that all peers of a group hold alike.

    Attributes:
        state: Id of the state that this peer holds.
        phase: This peer's phase.
        reason: Reason for the phase, one line.
        doubts: Whether the script has written to the state, and no round has ended since.
        known: The peers that this peer has trained with, and believes before all others.
        circle: PeerIDs of the peers that vouch for the group's state: they held it in the last round, or had a vote on
            the snapshot.
        deadline: Infinity: the replica needs no time events.
    """

    deadline = math.inf

    def __init__(
        self,
        name: str,
        state: StateId,
        now: float,
        alone: Alone = "train",
        patience: float = 10.0,
        held: int = HELD_MEANS,
        trust: Trust = "known",
    ) -> None:
        """This peer, `name`, starts with `state`. With `alone="train"` it trains alone after `patience` seconds without
        company. It has memory for `held` means, at least 2. `trust`: the peers whose claims count."""
        self._most_held = min(held, HELD_MEANS)
        self._name = name
        self.state = state
        self.phase = Phase.MEETING
        self.reason = "it has not met the group yet"
        self.circle: tuple[str, ...] = ()
        self.doubts = False
        self._alone = alone
        self._patience = patience
        self._company_at = now
        self.known = Known(name, trust, patience, now)
        self._failures = self._late_rounds = 0
        self._links: deque[lineage.Link] = deque()
        self._missed = lineage.Missed()
        self._looks_ahead = 0
        self._unsure = self._meets = False
        self._placed = True
        self._looked_back: tuple[StateId, int] = (state, 0)
        self._group: StateId | None = None
        self._fetching = False
        self._fetch_after = now
        self._fetch_pause = 0.0
        self._wanted = 0
        self._replaying = False
        self._last_round = now
        self._stands_in = True
        self._group_at = now
        self._introductions = 0

    @property
    def claim(self) -> StateId | None:
        """The state to claim in a round; None while astray or in doubt, so that this peer outvotes nobody."""
        return None if self.phase is Phase.ASTRAY or self.doubts else self.state

    def attendance(self, others_give: bool = False) -> float:
        """The weight of this peer in a round that it only attends; 0 if the others are a group without it.

        Beside a single peer that contributes, one attending peer acts as the second contributor. If all attending peers
        did, they would form groups by themselves, or each with the first contributor of a larger round. `others_give`
        says that several others are known, and some of them have accumulated gradients.
        """
        if self.phase is Phase.ASTRAY:
            return ATTENDANCE if self._stands_in else 0.0
        return 0.0 if others_give and not self._failures else ATTENDANCE

    @property
    def gives_up(self) -> bool:
        """True if this peer trains alone when its next update is due, though others are known."""
        return self._alone == "train" and self._failures >= FAILED_ROUNDS

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event, at `now` seconds of any steady clock; return the actions, in order."""
        match event:
            case events.RoundEnded(outcome):
                return self._round_succeeded(event, now) if outcome.ok else self._round_failed(outcome, now)
            case events.ImageFetched():
                return self._image_fetched(event, now)
            case events.FetchFailed(reason):
                return self._fetch_failed(reason, now)
            case events.MeanFetched():
                return self._mean_fetched(event, now)
            case events.RecoveryFailed():
                return self._recovery_failed(event, now)
            case events.Overdue(placed):
                self._placed = self._placed and placed
                return self._overdue(now)
            case events.Deserted():
                return self._deserted(now)
            case events.Stopped():
                self._fetching = self._meets = False
                return _forget(self._missed.clear())
            case events.OthersBegun(at_least):
                return self._others_begun(at_least, now)
            case events.Ending():
                return self._ending(now)
            case events.Due(company, placed):
                self._placed = placed or not company
                return self._due(company, now) if self._placed else self._follow(now)
            case events.SteppedAlone(digest):
                return self._stepped_alone(digest)
            case events.Interrupted():
                return self._interrupted()
            case events.Written(digest, reason):
                return self._written(digest, reason, now)
            case events.Checked(digest):
                self._become(self.state.epoch, f"parameters {digest}")
                return self._replay(now) if self._replaying else []

    def _round_failed(self, outcome: Outcome, now: float) -> list[Action]:
        if outcome.late:  # The others have not failed: the group went on without this peer.
            self._late_rounds += 1
        else:
            self._failures += 1
            self._stands_in = True  # The round may have lacked its second contributor.
        if self.phase is Phase.ASTRAY:
            return self._return(now)
        self.reason = outcome.reason if outcome.late else f"the last round failed: {outcome.reason}"
        # The others may have a mean. If this peer's contribution counts in it, this peer must not give that again; if
        # it came too late, the next contribution needs the mean.
        return self._look_ahead() if (outcome.group or outcome.late) and self.phase is Phase.IN_STEP else []

    def _fetch_failed(self, reason: str, now: float) -> list[Action]:
        self._fetching = False
        self._fetch_pause = backoff(self._fetch_pause, FETCH_PAUSE, MAX_FETCH_PAUSE)
        self._fetch_after = now + self._fetch_pause
        self.reason = f"astray: no snapshot yet: {reason}; it looks for one again in {self._fetch_pause:g} s"
        return []

    def _become(self, epoch: int, what: str) -> None:
        """Move to the state of `epoch` whose lineage follows from this one by `what`."""
        self.state = StateId(epoch, lineage.follow(self.state.lineage, what))

    def _interrupted(self) -> list[Action]:
        """Take an id of its own, as no other peer holds its state; with the epoch before, to outvote no equal peer."""
        self._become(max(self.state.epoch - 1, 0), f"interrupted at {self._name}")
        self._replaying = False
        return self._give_up_astray("an update was interrupted: what it holds is nobody else's")

    def _written(self, digest: str, reason: str, now: float) -> list[Action]:
        """Take an id that follows from the content alone: peers whose scripts have written the same hold one state."""
        self.doubts, self._replaying = self.state.epoch > 0, False
        content = lineage.beginning(digest)
        self.state = StateId(self.state.epoch, content.lineage)
        if self.phase is Phase.ASTRAY:
            return [*_forget(self._missed.clear(reason)), *self._return(now)]
        return self._give_up_astray(reason)

    def _round_succeeded(self, event: events.RoundEnded, now: float) -> list[Action]:
        outcome, missing = event.outcome, event.missing
        self._failures, self._late_rounds, self._company_at, self._unsure = 0, 0, now, False
        group, most, self.doubts = self.known.group(event, now), outcome.state, False
        if group is None:
            return self._nobody_knows(now)
        self._group = group
        holders = tuple(
            name for name, state in outcome.states.items() if state == group and name != self._name
        )
        self.circle = holders or self.circle
        givers = {name for name, weight in outcome.contributors.items() if weight >= MEETING_WEIGHT}
        # Peers without a contribution count too: they will contribute next time, and then need a second contributor.
        lasting = {name for name in outcome.group if outcome.states.get(name) == group}
        idle = [name for name in outcome.group if name not in lasting]
        self._stands_in = len(lasting) < 2 and idle[:1] == [self._name]
        self._group_at = now
        introduced = not givers
        beginning = introduced and group == self.state and self.state.epoch == 0
        # Newcomers have met only each other, though an older group may exist.
        if beginning and missing > 0 and self._introductions < MAX_INTRODUCTIONS:
            self._introductions += 1
            others = count(missing, "other peer")
            self.reason = f"waiting: this peer has met only other newcomers so far; {others} may know more"
            return []
        if group == self.state:
            actions = self._forget_all()
            self.phase, self.reason, self._fetching = Phase.IN_STEP, "its state is the group's", False
            if most is not None and most != group:
                alike = sum(state == most for state in outcome.states.values())
                others = f"{lineage.told(most)} is that of {count(alike, 'other peer')}"
                self.reason = (
                    f"this peer keeps its own state: {others}, with none of which it has trained; "
                    'pass trust="heads" to follow the majority'
                )
            self._fetch_pause, self._fetch_after = 0.0, now
            if not introduced:
                self.known.add(name for name in givers if outcome.states.get(name) == group)
                self._links.append(lineage.link_of(group, outcome.digest))
                actions += self._replay(now)
        else:
            if self.phase is not Phase.ASTRAY:
                self.phase = Phase.ASTRAY
                self.reason = f"astray: it holds {lineage.told(self.state)}, the group {lineage.told(group)}"
            actions = [] if introduced else self._hold(lineage.link_of(group, outcome.digest))
            self._wanted = self._wanted if self._fetching else self._ahead(group, now)
            actions += self._return(now)
        self._last_round = now
        return actions

    def _nobody_knows(self, now: float) -> list[Action]:
        """No member claimed a state. If that lasts, all its holders have left, and each peer claims its own again."""
        if self.phase is not Phase.ASTRAY or now - self._group_at < self._patience:
            return []
        return self._give_up_astray("nobody is left who holds the group's state")

    def _hold(self, link: lineage.Link) -> list[Action]:
        gap = bool(self._links) and not lineage.leads_to(self._links[-1], link.before)
        forgotten: list[Action] = list(self._forget_all()) if gap else []
        if len(self._links) == self._most_held:
            forgotten.append(events.Forget(self._links.popleft().before))
        self._links.append(link)
        return [*forgotten, events.Hold(link.before)]

    def _image_fetched(self, event: events.ImageFetched, now: float) -> list[Action]:
        state, self._fetching = event.state, False
        if self.phase is Phase.IN_STEP or (self.phase is Phase.MEETING and state.epoch < self.state.epoch):
            return []
        if any(link.before.epoch == state.epoch and link.before != state for link in self._links):
            told = f"that of epoch {state.epoch} is of another state than the group's"
            return self._fetch_failed(told, now)
        first = self._links[0].before if self._links else state
        if state.epoch < first.epoch and not lineage.within_reach(state, first):
            told = f"the snapshot of epoch {state.epoch} is older than the means that were kept"
            self.reason = f"astray: {told}"
            return self._fetch(first.epoch, now)
        actions: list[Action] = [events.Load(), *_forget(self._missed.clear())]
        self.state = state
        while self._links and self._links[0].before.epoch < state.epoch:
            actions.append(events.Forget(self._links.popleft().before))
        if self._links:
            return [*actions, *self._replay(now)]
        self.circle = event.voters
        # This peer does not know which means the group has applied since.
        return [*actions, *self._replay(now), *self._look_ahead(lineage.MAX_MISSED)]

    # ---- means that were missed ----

    def _return(self, now: float) -> list[Action]:
        """Return to the group: by the missed means or, if no peer has them, by a snapshot."""
        if self._fetching or self._missed.asked is not None:
            return []
        after = self._missed.next(self.state, self._target, self._most_held - len(self._links) + 1)
        if after is not None:
            return [events.Recover(after)]
        return [*_forget(self._missed.clear(self._missed.given_up)), *self._fetch(self._wanted, now)]

    @property
    def _target(self) -> StateId | None:
        """The state from which on this peer has the means; else the group's."""
        return self._links[0].before if self._links else self._group

    def _look_ahead(self, most: int = 1) -> list[Action]:
        """Ask for the mean that the group may have applied to this state, and then for the next, up to `most`."""
        self._looks_ahead = most
        if not most or self._missed.asked is not None:
            return []
        self._missed.asked = self.state
        return [events.Recover(self.state)]

    def _mean_fetched(self, event: events.MeanFetched, now: float) -> list[Action]:
        before = event.before
        if not self._missed.take(before, event.digest):
            return []
        self.circle = tuple(name for name in event.makers if name != self._name) or self.circle
        actions: list[Action] = [events.Keep(before)]
        if self.phase is not Phase.ASTRAY:
            self._meets, self._unsure, self._fetch_pause = False, False, 0.0
            self._late_rounds = 0
            self._links.extend(self._missed.clear())
            actions += [events.DropGiven()] if event.counted else []
            self.phase = Phase.IN_STEP
            self.reason = f"it missed the mean after {lineage.told(before)}, and has it now"
            actions += self._replay(now)
            return actions if self._replaying else [*actions, *self._look_ahead(self._looks_ahead - 1)]
        target = self._target
        assert target is not None, "astray of it"
        if lineage.leads_to(self._missed.links[-1], target):
            self._links.extendleft(reversed(self._missed.clear()))
            return [*actions, *self._replay(now)]
        if self._missed.links[-1].after.epoch >= target.epoch:
            return [*actions, *self._give_up_means("they do not lead to the group's state", now)]
        return [*actions, *self._return(now)]

    def _recovery_failed(self, event: events.RecoveryFailed, now: float) -> list[Action]:
        decided = event.decided
        if self.phase is Phase.ASTRAY:
            return self._give_up_means(event.reason, now)
        self._missed.clear()
        if event.beyond > self.state.epoch and (self._meets or not self._placed):
            return self._overtaken(event.beyond, now)
        if decided and self._looked_back[0] == self.state:
            self._looked_back = (self.state, LOOKS_BACK)
        meets, self._meets = self._meets, False
        # This peer asks once more before its next contribution, then not again: the next round tells.
        several = self._failures + self._late_rounds > 0 or not self._placed
        self._unsure = not decided and not meets and several
        if self._late_rounds >= LATE_ROUNDS:
            self.phase, self._late_rounds = Phase.MEETING, 0
            self.reason = "the others go on without it, and no peer has the mean: it meets the group anew"
        return [events.Meet()] if meets else []

    def _overtaken(self, epoch: int, now: float) -> list[Action]:
        """Fetch a snapshot at once: the others keep no mean that leads on from this state, so it seats nobody."""
        self._meets = self._unsure = False
        self.phase, self._group, self._group_at, self._wanted = Phase.ASTRAY, None, now, epoch
        self.reason = f"astray: it holds {lineage.told(self.state)}, and the group has reached epoch {epoch}"
        actions = [*self._forget_all(), *self._return(now)]
        # A snapshot that takes longer than means are kept does not help: donors must not send such for ever.
        self._fetch_pause = backoff(self._fetch_pause, FETCH_PAUSE, MAX_FETCH_PAUSE)
        self._fetch_after = max(self._fetch_after, now + self._fetch_pause)
        return actions

    def _give_up_means(self, reason: str, now: float) -> list[Action]:
        self.reason += f"; the means between are not to be had: {reason}"
        return [*_forget(self._missed.clear(reason)), *self._return(now)]

    def _others_begun(self, at_least: int, now: float) -> list[Action]:
        """Fetch a snapshot at once: the first round may come late, and would most likely only show the need for it."""
        if self.phase is Phase.ASTRAY and not self._placed:
            return self._return(now)
        begins = self.phase is Phase.MEETING and self.state.epoch in (0, at_least)
        if begins and at_least < self._wanted:
            self._fetching = False  # The others may wait for this peer in the state that it did not ask for.
        return self._fetch(at_least, now) if begins else []

    def _overdue(self, now: float) -> list[Action]:
        """No round comes: this peer may have missed an update, or no donor may ever take the awaited snapshot."""
        if self.phase is Phase.IN_STEP:
            return self._look_ahead()
        lost = self.phase is Phase.ASTRAY and (self._asks_for_less() or not self._placed)
        return self._return(now) if lost else []

    def _ending(self, now: float) -> list[Action]:
        if self.phase is not Phase.ASTRAY:
            self._fetching = False
            return self._look_ahead()
        self._fetch_after = now
        self._asks_for_less()
        return self._return(now)

    def _asks_for_less(self) -> bool:
        """Ask for the group's last known epoch in place of a later one; returns whether that lowers the wish."""
        last = self._links[-1].after if self._links else self._group
        less = last is not None and self._wanted > last.epoch
        if last is not None and less:
            self._fetching, self._wanted = False, last.epoch
        return less

    def _deserted(self, now: float) -> list[Action]:
        """Ask for means that the others have left behind, before this peer goes on without them."""
        state, looks = self._looked_back
        looks = looks if state == self.state else 0
        if self.phase is Phase.MEETING or looks >= LOOKS_BACK:
            return []
        self._looked_back = (self.state, looks + 1)
        return self._ending(now)

    # ---- what is held ----

    def _replay(self, now: float) -> list[Action]:
        """Apply the held means one after another, up to the next check of the parameters."""
        actions: list[Action] = []
        self._replaying = True
        while self._links and self._links[0].before == self.state:
            link = self._links.popleft()
            actions.append(events.Apply(link.before))
            self.state = link.after
            if lineage.is_checked(self.state.epoch):
                return [*actions, events.Check()]
        self._replaying = False
        if self._links:
            before = self._links[0].before
            self.phase, self._wanted = Phase.ASTRAY, before.epoch
            came, group = lineage.told(self.state), lineage.told(before)
            causes = "another machine or library, or a script that wrote to the state"
            self.reason = f"astray: this peer computed {came}, the group {group}: {causes}"
            return [*actions, *self._return(now)]
        if self.phase is not Phase.IN_STEP:
            # The next round tells whether this is the group's state; most likely it is.
            self.phase, told = Phase.IN_STEP, lineage.told(self.state)
            self.reason = f"it caught up with the group at {told}"
        return actions

    def _due(self, company: bool, now: float) -> list[Action]:
        if company:
            self._company_at = now
            if self.gives_up:
                return self._step_alone(f"{self._failures} rounds in a row failed")
            ahead = self._look_ahead() if self._unsure else []
            self._meets, self._unsure = bool(ahead), False
            return ahead or [events.Meet()]
        left = self._deserted(now)
        if left:
            return left
        if self._alone == "wait":
            self.reason = "it waits: no other peer of this run is known"
            return []
        if now - self._company_at < self._patience:
            looks = f"it looks for one for {self._patience:g} s before it trains alone"
            self.reason = f"no other peer is known; {looks}"
            return []
        return self._step_alone("no other peer of this run is known")

    def _follow(self, now: float) -> list[Action]:
        """Apply what the group has applied since: this peer has no place in it, and must not train alone."""
        self._company_at, self._failures = now, 0
        return self._look_ahead(lineage.MAX_MISSED) if self.phase is Phase.IN_STEP else []

    def _step_alone(self, why: str) -> list[Action]:
        actions = self._give_up_astray("") if self.phase is Phase.ASTRAY else []
        self.phase, self.reason, self.doubts = Phase.MEETING, f"it trains alone: {why}", False
        return [*actions, events.StepAlone()]

    def _stepped_alone(self, digest: str) -> list[Action]:
        self._become(self.state.epoch + 1, f"alone {digest}")
        return [events.Check()] if lineage.is_checked(self.state.epoch) else []

    def _give_up_astray(self, reason: str) -> list[Action]:
        self.phase, self.reason, self._fetching = Phase.MEETING, reason, False
        return self._forget_all()

    def _forget_all(self) -> list[Action]:
        forgotten = _forget([*self._missed.clear(), *self._links])
        self._links.clear()
        return forgotten

    def _fetch(self, at_least: int, now: float) -> list[Action]:
        if self._fetching or now < self._fetch_after:
            return []
        self._fetching, self._wanted = True, at_least
        return [events.Fetch(at_least)]

    def _ahead(self, group: StateId, now: float) -> int:
        """The epoch to ask for: so far ahead that all donors hear of the wish before they reach it."""
        interval = max(now - self._last_round, NOTICE_SECONDS / MAX_LEAD)
        return group.epoch + min(max(math.ceil(NOTICE_SECONDS / interval), 1), self._most_held // 2)


def _forget(links: Sequence[lineage.Link]) -> list[Action]:
    return [events.Forget(link.before) for link in links]
