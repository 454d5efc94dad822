"""Compares this peer's state with its group's, and leads the peer back to the group; reads no clock and no tensor.

All peers apply the same means in the same order to the same state, so they stay alike without sending parameters.
In every round, each peer claims the state that it holds (`StateId`). The group's state is the most common claim among
the peers that this peer has trained with, or else among all (`group_state`). A peer is `Joining`, `Following` or
`Behind`.

A peer whose script has written to the state holds a state of its own, and joins the group anew. It claims its state
only after a round in which nobody claimed one: then the scripts of all others may have written the same.

A round that failed here may have succeeded elsewhere, with this peer's contribution, which must not count twice. So a
peer that follows its group asks for that mean at once.

Identities are free, so a number of claims alone proves nothing. A peer that has trained with others, in rounds in which
they held one state, does not leave that state for a state of strangers, whatever their number or epoch. It believes the
peers that it has trained with and, as a newcomer, those by which its user had it join (`Known`). While nobody has
trained, all choose alike among all claims. So a peer that was cut off, or has trained alone meanwhile, comes back to
them. It follows strangers only if none of the known peers is left: a survivor of one island joins another, but two
islands of several peers keep their states.

The lineage of an id is a running digest of the first parameters and of everything applied since. Every `CHECK_EVERY`
epochs it includes the parameters themselves, which reveals hardware that computes differently. Only a peer that holds
the parameters can compute that link of the chain, so it is not compared before the snapshot is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from equipoise.averaging.counts import count
from equipoise.averaging.outcome import FetchOutcome, Outcome
from equipoise.averaging.replication import events, lineage
from equipoise.averaging.replication.events import Action, Event
from equipoise.averaging.replication.known import Known, Trust
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT, LEAST_CONTRIBUTION
from equipoise.limits import backoff

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
"""Epoch of the snapshot that a newcomer wants if others train already: peers that start with it follow by then."""

LOOKS_BACK = 3
"""Most questions of a peer whose group has left for the mean after one state; each may cost seconds of training."""

MAX_MISSED = 32
"""Most means that a peer applies after a snapshot, if daemons keep them. A snapshot with Adam's two moments has twelve
bytes a value, a round in int8 about two. So on a link that bounds both, a snapshot is six rounds old, and older if the
link is shared."""

FETCH_PAUSE = 0.5
"""Seconds from a failed download to the next. The pause doubles after each failure in a row: otherwise a peer that no
image fits would make all donors send whole images after every round, for ever."""

MAX_FETCH_PAUSE = 600.0
"""Longest pause: the fault may have been repaired by then."""

Alone = Literal["train", "wait"]


class Joining(msgspec.Struct, frozen=True):
    """This peer does not know the group's state yet: it has just started, or has trained alone, and attends a round.

    In so many rounds it has met newcomers only.
    """

    introductions: int = 0


class Following(msgspec.Struct, frozen=True):
    """This peer's state is the group's: it contributes, and applies each mean."""


class Behind(msgspec.Struct, frozen=True):
    """This peer's state is not the group's: it attends without a contribution, so that its daemon keeps each mean.

    Meanwhile it fetches the few means that it missed, which all daemons keep for a while, or else a snapshot, and then
    the means since. Then it follows the group; no peer had to wait for it.

    Attributes:
        group: The group's state before the last round; None if others have said no more than their epoch.
        epoch: That epoch, or that state's.
    """

    group: StateId | None
    epoch: int


Phase = Joining | Following | Behind


@dataclass
class _Rounds:
    """The last rounds of this peer.

    Attributes:
        company_at: When another peer was known last, or followed.
        group_at: When a round showed the group's state last.
        failures: Rounds in a row that failed, without those for which this peer was late.
        late: Rounds in a row for which this peer was late, without a mean since.
        stands_in: Whether this peer, while behind, is the second contributor of a round that else has one.
    """

    company_at: float
    group_at: float
    failures: int = 0
    late: int = 0
    stands_in: bool = True


@dataclass
class _Looks:
    """The questions of a peer that is not behind for the mean after its own state.

    Attributes:
        ahead: The number of means to ask for, one after another.
        unsure: Whether to ask once more before the next contribution.
        meets: Whether a round follows, whatever the answer is.
        back: The state about which a group that has left was asked, and how often.
    """

    back: tuple[StateId, int]
    ahead: int = 0
    unsure: bool = False
    meets: bool = False


@dataclass
class _Snapshot:
    """The download of a snapshot.

    Attributes:
        after: The time before which none must begin.
        pause: Seconds from the last failure to the next download.
        asked: The epoch asked for, if one goes on.
        among: The peers that were asked for it.
    """

    after: float
    pause: float = 0.0
    asked: int | None = None
    among: frozenset[str] = frozenset()

    def put_off(self, now: float) -> None:
        """Wait, for longer each time, before the next download."""
        self.pause = backoff(self.pause, FETCH_PAUSE, MAX_FETCH_PAUSE)
        self.after = max(self.after, now + self.pause)


@dataclass(frozen=True)
class FollowerOptions:
    """The wishes of the user and the run.

    Attributes:
        alone: `train` to train alone after `patience` seconds without company.
        trust: The peers whose claims count.
        named: Those by which the user had this peer join.
        counts_late: Whether a contribution that came too late may count in the next round.
    """

    alone: Alone = "train"
    patience: float = 10.0
    trust: Trust = "known"
    named: Iterable[str] = ()
    counts_late: bool = False


class Follower:
    """One peer's copy of the state that all peers of a group hold alike; it needs no time events.

    Attributes:
        state: Id of the state that this peer holds.
        phase: This peer's phase.
        reason: Reason for the phase, one line.
        doubts: Whether the script has written to the state, and no round has ended since.
        known: The peers that this peer has trained with, and believes before all others.
        circle: PeerIDs of the peers that vouch for the group's state: they held it in the last round, or had a vote on
            the snapshot.
    """

    deadline = math.inf

    def __init__(
        self,
        name: str,
        state: StateId,
        now: float,
        options: FollowerOptions = FollowerOptions(),
    ) -> None:
        """This peer, `name`, starts with `state`."""
        self._name = name
        self._options = options
        # What it holds, and what it knows of the group.
        self.state = state
        self.doubts = False
        self._most_missed = MAX_MISSED
        self.phase: Phase = Joining()
        self.reason = "it has not met the group yet"
        self.known = Known(name, options.trust, options.patience, now, options.named)
        self.circle: tuple[str, ...] = ()
        # What it does about it.
        self._placed = self._whole = True
        self._rounds = _Rounds(now, now)
        self._looks = _Looks((state, 0))
        self._asked: StateId | None = None
        self._given_up: StateId | None = None
        self._snapshot = _Snapshot(now)

    @property
    def follows(self) -> bool:
        """Whether this peer's state is the group's, as far as it knows."""
        return isinstance(self.phase, Following)

    @property
    def joins(self) -> bool:
        """Whether this peer does not know the group's state yet."""
        return isinstance(self.phase, Joining)

    @property
    def behind(self) -> bool:
        """Whether this peer's state is not the group's."""
        return isinstance(self.phase, Behind)

    @property
    def claim(self) -> StateId | None:
        """The state to claim in a round; None while behind or in doubt, so that this peer outvotes nobody."""
        return None if self.behind or self.doubts else self.state

    def attendance(self, others_give: bool = False) -> float:
        """The weight of this peer in a round that it only attends; 0 if the others are a group without it.

        Beside a single peer that contributes, one attending peer acts as the second contributor. If all attending peers
        did, they would form groups by themselves, or each with the first contributor of a larger round. `others_give`
        says that several others are known, and some of them have accumulated gradients.
        """
        if self.behind:
            return ATTENDANCE if self._rounds.stands_in else 0.0
        return 0.0 if others_give and not self._rounds.failures else ATTENDANCE

    @property
    def gives_up(self) -> bool:
        """True if this peer trains alone when its next update is due, though others are known."""
        return self._may_train_alone and self._rounds.failures >= FAILED_ROUNDS

    @property
    def _may_train_alone(self) -> bool:
        return self._whole and self._options.alone == "train"

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event, at `now` seconds of any steady clock; return the actions, in order."""
        match event:
            case events.RoundEnded(outcome, most_missed=most_missed):
                self._most_missed = self._most_missed if most_missed is None else most_missed
                return self._round_succeeded(event, now) if outcome.ok else self._round_failed(outcome, now)
            case events.Fetched(outcome, values):
                return self._on_download(outcome, values, now)
        return self._on_own(event, now)

    def _on_download(self, found: FetchOutcome, values: object, now: float) -> list[Action]:
        if found.round is not None:
            return self._mean_fetched(found.round, values, now)
        if found.ok and found.state is not None:
            return self._snapshot_fetched(found.state, found.voters, now)
        if self._snapshot.asked is not None:
            return self._snapshot_failed(found.reason, now)
        return self._give_up_means(found.reason, now) if self.behind else self._look_failed(found, now)

    def _on_own(self, event: events.OwnEvent, now: float) -> list[Action]:
        match event:
            case events.Stopped():
                self._snapshot.asked, self._looks.meets, self._asked = None, False, None
                return []
            case events.Due(company, placed, whole):
                self._placed, self._whole = placed or not company, whole
                return self._due(company, now) if self._placed else self._follow(now)
            case events.Overdue(begun, placed):
                self._placed = self._placed and placed
                return self._overdue(begun, now)
            case events.Deserted():
                return self._deserted(now)
            case events.Ending():
                return self._ending(now)
            case events.SteppedAlone(digest):
                self._become(self.state.epoch + 1, f"alone {digest}")
                return [events.Check()] if lineage.is_checked(self.state.epoch) else []
            case events.Checked(digest):
                self._become(self.state.epoch, f"parameters {digest}")
                return [] if self.joins else self._go_on(now)
            case events.Interrupted():
                # Nobody else holds this state. It has the epoch before, to outvote no peer of an equal one.
                self._become(max(self.state.epoch - 1, 0), f"interrupted at {self._name}")
                self._join_anew("an update was interrupted: what it holds is nobody else's")
                return []
            case events.Written(digest, reason):
                return self._written(digest, reason, now)

    def _become(self, epoch: int, what: str) -> None:
        """Move to the state of `epoch` whose lineage follows from this one by `what`."""
        self.state = StateId(epoch, lineage.follow(self.state.lineage, what))

    def _written(self, digest: str, reason: str, now: float) -> list[Action]:
        """Take an id that follows from the content alone: peers whose scripts have written the same hold one state."""
        self.doubts = self.state.epoch > 0
        self.state = StateId(self.state.epoch, lineage.beginning(digest).lineage)
        if self.behind:
            self._asked, self._given_up = None, self.state
            return self._return(now)
        self._join_anew(reason)
        return []

    # ---- rounds ----

    def _round_failed(self, outcome: Outcome, now: float) -> list[Action]:
        if outcome.late:  # The others have not failed: the group went on without this peer.
            self._rounds.late += 1
        else:
            self._rounds.failures += 1
            self._rounds.stands_in = True  # The round may have lacked its second contributor.
        if self.behind:
            return self._return(now)
        self.reason = outcome.reason if outcome.late else f"the last round failed: {outcome.reason}"
        # The others may have a mean. If this peer's contribution counts in it, this peer must not give that again; if
        # it came too late, the next contribution needs the means.
        most = max(MAX_MISSED, self._most_missed) if outcome.late and self._options.counts_late else 1
        return self._look_ahead(most) if (outcome.group or outcome.late) and self.follows else []

    def _round_succeeded(self, event: events.RoundEnded, now: float) -> list[Action]:
        outcome, rounds, failures = event.outcome, self._rounds, self._rounds.failures
        rounds.failures, rounds.late, rounds.company_at = 0, 0, now
        self._looks.unsure = self.doubts = False
        group = self.known.group(outcome, event.missing, now, event.elsewhere)
        if group is None and event.elsewhere and not self.behind:
            return self._ask_named(now)
        if group is None:
            return self._nobody_knows(now)
        rounds.group_at = now
        self._note_members(outcome, group)
        gave = any(weight >= MEETING_WEIGHT for weight in outcome.contributors.values())
        if not gave and group == self.state and self._waits_for_older_group(event.missing):
            return []
        if group == self.state:
            self._follow_on(outcome, now)
            fits = outcome.before == group
            return self._take_mean(outcome) if gave and fits else self._go_without(outcome, gave, failures)
        if not self.behind:
            told, other = lineage.told(self.state), lineage.told(group)
            self.reason = f"behind: it holds {told}, the group {other}"
        self.phase = Behind(group, group.epoch)
        return self._return(now)

    def _note_members(self, outcome: Outcome, group: StateId) -> None:
        """Note the members that vouch for the group's state, and whether the next round needs this peer beside them."""
        # Peers without a contribution count too: they will contribute next time, and then need a second contributor.
        lasting = {name for name in outcome.group if outcome.states.get(name) == group}
        idle = [name for name in outcome.group if name not in lasting]
        self._rounds.stands_in = len(lasting) < 2 and idle[:1] == [self._name]
        self.circle = self._others_at(group, outcome, outcome.states) or self.circle

    def _others_at(
        self, state: StateId, outcome: Outcome, names: dict[str, StateId] | dict[str, float]
    ) -> tuple[str, ...]:
        return tuple(name for name in names if outcome.states.get(name) == state and name != self._name)

    def _waits_for_older_group(self, missing: int) -> bool:
        """Whether this peer has met newcomers only, so that an older group may exist among `missing` known peers."""
        met = self.phase.introductions if isinstance(self.phase, Joining) else MAX_INTRODUCTIONS
        if self.state.epoch or not missing or met >= MAX_INTRODUCTIONS:
            return False
        self.phase = Joining(met + 1)
        others = count(missing, "other peer")
        self.reason = f"waiting: this peer has met only other newcomers so far; {others} may know more"
        return True

    def _follow_on(self, outcome: Outcome, now: float) -> None:
        """The group's state is this peer's: follow it."""
        self._asked, self._snapshot, self._looks.ahead = None, _Snapshot(now), 0
        self.phase, self.reason = Following(), "its state is the group's"
        most = outcome.state
        if most is not None and most != self.state:
            alike = sum(state == most for state in outcome.states.values())
            others = f"{lineage.told(most)} is that of {count(alike, 'other peer')}"
            self.reason = (
                f"this peer keeps its own state: {others}, with none of which it has trained; "
                'pass trust="heads" to follow the majority'
            )

    def _take_mean(self, outcome: Outcome) -> list[Action]:
        givers = {name: weight for name, weight in outcome.contributors.items() if weight >= MEETING_WEIGHT}
        self.known.add(self._others_at(self.state, outcome, givers))
        return self._commit(outcome)

    def _go_without(self, outcome: Outcome, gave: bool, failures: int) -> list[Action]:
        """The mean, if any, was made for the state of others, so for this peer the round has failed. After some such
        rounds without a peer of its state, strangers are no company: this peer makes its steps alone, if it may."""
        if gave and not self._others_at(self.state, outcome, outcome.states):
            self._rounds.failures = failures + 1
        return [events.StepAlone()] if self.gives_up else []

    def _nobody_knows(self, now: float) -> list[Action]:
        """No member claimed a state. If that lasts, all its holders have left, and each peer claims its own again."""
        if self.behind and now - self._rounds.group_at >= self._options.patience:
            self._join_anew("nobody is left who holds the group's state")
        return []

    def _ask_named(self, now: float) -> list[Action]:
        """Take the state of the peers that the user named: they are in the run, and were not in this round."""
        if self.follows:
            return self._look_ahead()
        return self._fetch(FIRST_SNAPSHOT, now)

    def _join_anew(self, reason: str) -> None:
        self.phase, self.reason, self._snapshot.asked, self._asked = Joining(), reason, None, None

    # ---- the way back ----

    def _return(self, now: float) -> list[Action]:
        """Return to the group: by the missed means or, if no peer has them, by a snapshot."""
        assert isinstance(self.phase, Behind)
        asked, donors = self._snapshot.among, self.donors
        if asked != donors and asked.isdisjoint(donors):
            self._snapshot.asked = None  # The peers that it asked do not hold the group's state.
        if self._snapshot.asked is not None or self._asked is not None:
            return []
        group = self.phase.group
        missed = 0 if group is None else group.epoch - self.state.epoch
        if self._given_up != self.state and 0 < missed <= self._most_missed:
            return self._ask()
        return self._fetch(self.phase.epoch, now)

    def _ask(self) -> list[Action]:
        self._asked = self.state
        return [events.FetchMean(self.state)]

    def _fetch(self, at_least: int, now: float) -> list[Action]:
        if self._snapshot.asked is not None or now < self._snapshot.after:
            return []
        self._snapshot.asked, self._snapshot.among = at_least, self.donors
        return [events.FetchSnapshot(at_least)]

    @property
    def donors(self) -> frozenset[str]:
        """The peers that have a vote on the snapshot, while any is there; all if empty.

        A newcomer that knows the group's state asks the peers that hold it: of them, those that the user named.
        """
        believed = frozenset(self.known.names)
        if self.known.trained or not isinstance(self.phase, Behind) or self.phase.group is None:
            return believed
        return believed.intersection(self.circle) or frozenset(self.circle) or believed

    def _snapshot_failed(self, reason: str, now: float) -> list[Action]:
        self._snapshot.asked = None
        self._snapshot.put_off(now)
        pause = f"it looks for one again in {self._snapshot.pause:g} s"
        self.reason = f"behind: no snapshot yet: {reason}; {pause}"
        return []

    def _snapshot_fetched(self, state: StateId, voters: tuple[str, ...], now: float) -> list[Action]:
        self._snapshot.asked = None
        if self.follows or (self.joins and state.epoch < self.state.epoch):
            return []
        group, epoch = (self.phase.group, self.phase.epoch) if isinstance(self.phase, Behind) else (None, 0)
        if group is None:
            self.circle = voters
        elif group.epoch == state.epoch and group != state:
            told = f"that of epoch {state.epoch} is of another state than the group's"
            return self._snapshot_failed(told, now)
        if epoch - state.epoch > MAX_MISSED:
            self.reason = f"behind: the snapshot of epoch {state.epoch} is older than the means that are kept"
            return self._fetch(epoch, now)
        self.state, self._asked = state, None
        return [events.Heal(), *self._go_on(now)]

    def _mean_fetched(self, outcome: Outcome, values: object, now: float) -> list[Action]:
        if self._asked is None or self._asked != outcome.before:
            return []
        self._asked = None
        self.circle = self._others_at(self.state, outcome, outcome.contributors) or self.circle
        self._looks.meets = self._looks.unsure = False
        self._snapshot.pause, self._rounds.late = 0.0, 0
        if not self.behind:
            self.phase = Following()
            self.reason = f"it missed the mean after {lineage.told(self.state)}, and has it now"
        actions = self._commit(outcome, values)
        return actions if isinstance(actions[-1], events.Check) else [*actions, *self._go_on(now)]

    def _commit(self, outcome: Outcome, values: object = None) -> list[Action]:
        """Apply a mean; now and then, check the parameters too."""
        before, self.state = self.state, lineage.after(self.state, outcome.digest)
        commit = events.Commit(before, outcome, values)
        return [commit, events.Check()] if lineage.is_checked(self.state.epoch) else [commit]

    def _give_up_means(self, reason: str, now: float) -> list[Action]:
        self.reason += f"; the means between are not to be had: {reason}"
        self._asked, self._given_up = None, self.state
        return self._return(now)

    def _go_on(self, now: float) -> list[Action]:
        """Take the next step of the way to the group's state, if this peer is on it and has just moved."""
        group = self.phase.group if isinstance(self.phase, Behind) else None
        if group is not None and self.state != group and self.state.epoch <= group.epoch:
            if group.epoch == self.state.epoch:
                own, other = lineage.told(self.state), lineage.told(group)
                causes = "another machine or library, or a script that wrote to the state"
                self.reason = f"behind: this peer computed {own}, the group {other}: {causes}"
            return self._return(now)
        if self.follows:
            return self._look_ahead(self._looks.ahead - 1)
        # The next round tells whether this is the group's state; most likely it is.
        self.phase = Following()
        self.reason = f"it caught up with the group at {lineage.told(self.state)}"
        return self._look_ahead(MAX_MISSED if group is None else 1)

    # ---- looks for the mean after its own state ----

    def _look_ahead(self, most: int = 1) -> list[Action]:
        """Ask for the mean that the group may have applied to this state, and then for the next, up to `most`."""
        self._looks.ahead = max(most, 0)
        return self._ask() if most > 0 and self._asked is None else []

    def _look_failed(self, found: FetchOutcome, now: float) -> list[Action]:
        decided, beyond = not found.unheard, found.beyond
        looks, self._asked, self._looks.ahead = self._looks, None, 0
        if beyond > self.state.epoch and (
            looks.meets or not self._placed or (self._rounds.late and self._options.counts_late)
        ):
            return self._overtaken(beyond, now)
        if decided and looks.back[0] == self.state:
            looks.back = self.state, LOOKS_BACK
        meets, looks.meets = looks.meets, False
        # This peer asks once more before its next contribution, then not again: the next round tells.
        several = self._rounds.failures + self._rounds.late > 0 or not self._placed
        looks.unsure = not decided and not meets and several
        if self._rounds.late >= LATE_ROUNDS:
            self.phase, self._rounds.late = Joining(), 0
            self.reason = "the others go on without it, and no peer has the mean: it meets the group anew"
        return [events.Meet()] if meets else []

    def _overtaken(self, epoch: int, now: float) -> list[Action]:
        """Fetch a snapshot at once: the others keep no mean that leads on from this state, so it seats nobody."""
        self._looks.meets = self._looks.unsure = False
        self.phase = Behind(None, epoch)
        self.reason = f"behind: it holds {lineage.told(self.state)}, and the group has reached epoch {epoch}"
        self._rounds.group_at = now
        actions = self._return(now)
        # A snapshot that takes longer than means are kept does not help: donors must not send such for ever.
        self._snapshot.put_off(now)
        return actions

    def _overdue(self, begun: int | None, now: float) -> list[Action]:
        """Look for the group's state without a round: none may come, or show no more than the need for a snapshot."""
        if self.follows:
            return self._look_ahead()
        if self.behind:
            return [] if self._placed else self._return(now)
        if begun is None or self.state.epoch not in (0, begun):
            return []
        if begun < (self._snapshot.asked or 0):
            # The others may wait for this peer in the state that it did not ask for.
            self._snapshot.asked = None
        return self._fetch(begun, now)

    def _ending(self, now: float) -> list[Action]:
        if self.behind:
            self._snapshot.after = now
            return self._return(now)
        self._snapshot.asked = None
        return self._look_ahead()

    def _deserted(self, now: float) -> list[Action]:
        """Ask for means that the others have left behind, before this peer goes on without them."""
        state, looks = self._looks.back
        looks = looks if state == self.state else 0
        if self.joins or looks >= LOOKS_BACK:
            return []
        self._looks.back = self.state, looks + 1
        return self._ending(now)

    # ---- updates ----

    def _due(self, company: bool, now: float) -> list[Action]:
        if company:
            self._rounds.company_at = now
            if self.gives_up:
                return self._step_alone(f"{self._rounds.failures} rounds in a row failed")
            ahead = self._look_ahead() if self._looks.unsure else []
            self._looks.meets, self._looks.unsure = bool(ahead), False
            return ahead or [events.Meet()]
        left = self._deserted(now)
        if left:
            return left
        if not self._may_train_alone:
            self.reason = "it waits: no other peer of this run is known"
            return []
        if now - self._rounds.company_at < self._options.patience:
            looks = f"it looks for one for {self._options.patience:g} s before it trains alone"
            self.reason = f"no other peer is known; {looks}"
            return []
        return self._step_alone("no other peer of this run is known")

    def _follow(self, now: float) -> list[Action]:
        """Apply what the group has applied since: this peer has no place in it, and must not train alone."""
        self._rounds.company_at, self._rounds.failures = now, 0
        return self._look_ahead(MAX_MISSED) if self.follows else []

    def _step_alone(self, why: str) -> list[Action]:
        if self.behind:
            self._snapshot.asked = None
        self._asked = None
        self.phase, self.reason, self.doubts = Joining(), f"it trains alone: {why}", False
        return [events.StepAlone()]
