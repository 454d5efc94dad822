"""Compares this peer's state with its group's, and leads the peer back to the group; reads no clock and no tensor.

All peers apply the same means in the same order to the same state, so they stay alike without sending parameters.
In every round, each peer claims the state that it holds (`StateId`). A peer is `Joining`, `Following` or `Behind`.

A peer whose script has written to the state holds a state of its own, and joins the group anew. It claims its state
only after a round in which nobody claimed one: then the scripts of all others may have written the same.

A round that failed here may have succeeded elsewhere, with this peer's contribution, which must not count twice. So a
peer that follows its group asks for that mean at once.

Identities are free, and so is an epoch, so claims prove nothing. A newcomer takes the state of most. A peer that has
trained with others leaves its state only along a chain of means, each with the signed votes of more than half of the
peers that held the state before (`chain`). So it keeps its state against any number of others, and says so. A peer that
goes on with less than half of its group remembers where that was: if the others went on by a majority, it comes back.

The lineage of an id is a running digest of the first parameters and of everything applied since. Every `CHECK_EVERY`
epochs it includes the parameters themselves, which reveals hardware that computes differently. Only a peer that holds
the parameters can compute that link of the chain, so it is not compared before the snapshot is there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from equipoise.averaging.counts import count
from equipoise.averaging.outcome import FetchOutcome, Outcome
from equipoise.averaging.replication import events, lineage
from equipoise.averaging.replication.events import Action, Event
from equipoise.averaging.state import StateId, Step, group_state
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
"""Most means that a peer applies on its way to the group's state, if daemons keep them. A snapshot with Adam's two
moments has twelve bytes a value, a round in int8 about two. So on a link that bounds both, a snapshot is six rounds
old, and older if the link is shared."""

FETCH_PAUSE = 0.5
"""Seconds from a failed download to the next. The pause doubles after each failure in a row: otherwise a peer that no
image fits would make all donors send whole images after every round, for ever."""

MAX_FETCH_PAUSE = 600.0
"""Longest pause: the fault may have been repaired by then."""

LOOK_PAUSE, MAX_LOOK_PAUSE = 4.0, 16.0
"""First and longest time from a question whether the group has left this peer's state, to which no peer had proof, to
the next. Peers that claim anything could else cost a question after every round."""

Alone = Literal["train", "wait"]

Trust = Literal["known", "heads"]
"""Whether a peer that has trained leaves its state only along means, or for the state that most claim."""


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
    """The download of a snapshot: the epoch asked for, if it goes on; else, the time before which none must begin.

    A snapshot of the state `unproved` is here, and the proof that a chain of means leads to it is asked for.
    """

    after: float
    pause: float = 0.0
    asked: int | None = None
    unproved: StateId | None = None

    def put_off(self, now: float) -> None:
        """Wait, for longer each time, before the next download."""
        self.pause = backoff(self.pause, FETCH_PAUSE, MAX_FETCH_PAUSE)
        self.after = max(self.after, now + self.pause)


@dataclass
class _Chain:
    """What this peer leaves its state for.

    Attributes:
        fork: The state, and its holders, after which this peer went on with less than half of them.
        path: The states that were proved, each with its holders; empty if this peer is not on its way to any.
        held: The outcome of a round whose mean waits for the answer whether the group has left this peer's state.
        look_at: When to ask that again.
        pause: The time from that question to the next.
        spared: The state to which a mean was not applied, as less than half of its holders were in the round.
    """

    fork: Step | None = None
    path: tuple[Step, ...] = ()
    held: Outcome | None = None
    look_at: float = -math.inf
    pause: float = 0.0
    spared: StateId | None = None

    def holders(self, state: StateId) -> tuple[str, ...]:
        """The peers that hold a state to which the path leads; none if it does not lead there."""
        found = (one.holders for one in self.path if lineage.continues(one.state, state))
        return next(found, ())

    def put_off(self, now: float) -> None:
        """Wait, for longer each time, before the next question."""
        self.pause = backoff(self.pause, LOOK_PAUSE, MAX_LOOK_PAUSE)
        self.look_at = now + self.pause


class Follower:
    """One peer's copy of the state that all peers of a group hold alike; it needs no time events.

    Attributes:
        state: Id of the state that this peer holds.
        phase: This peer's phase.
        reason: Reason for the phase, one line.
        doubts: Whether the script has written to the state, and no round has ended since.
        holders: PeerIDs of the peers that hold this peer's state since their last mean; empty for a newcomer.
        circle: PeerIDs of the peers whose votes decide the answer to the present question.
    """

    deadline = math.inf

    def __init__(
        self,
        name: str,
        state: StateId,
        now: float,
        alone: Alone = "train",
        patience: float = 10.0,
        trust: Trust = "known",
        named: tuple[str, ...] | None = None,
    ) -> None:
        """This peer, `name`, starts with `state`. With `alone="train"` it trains alone after `patience` seconds without
        company. `trust`: see `Trust`. `named`: PeerIDs of the peers that its user told it to join by, whose state it
        takes as a newcomer; told of none, it keeps its own beside others that are no more common."""
        self._name = name
        self._alone = alone
        self._patience = patience
        # What it holds, and what it knows of the group.
        self.state = state
        self.doubts = False
        self.phase: Phase = Joining()
        self.reason = "it has not met the group yet"
        self.holders: frozenset[str] = frozenset()
        self.circle: frozenset[str] = frozenset()
        self._heads = trust == "heads"
        self._named = None if trust == "heads" else named
        self._claimants: tuple[str, ...] = ()
        self._chain = _Chain()
        # What it does about it.
        self._placed = True
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
    def proves(self) -> bool:
        """Whether a snapshot is taken only from the circle, as this peer is on its way to a state that was proved."""
        return bool(self._chain.path)

    @property
    def gives_up(self) -> bool:
        """True if this peer trains alone when its next update is due, though others are known."""
        return self._alone == "train" and self._rounds.failures >= FAILED_ROUNDS

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take an event, at `now` seconds of any steady clock; return the actions, in order."""
        match event:
            case events.RoundEnded(outcome):
                self._chain.held = None
                return self._round_succeeded(event, now) if outcome.ok else self._round_failed(outcome, now)
            case events.Fetched(outcome, values):
                return self._on_download(outcome, values, now)
        return self._on_own(event, now)

    def _on_download(self, found: FetchOutcome, values: object, now: float) -> list[Action]:
        if self._snapshot.unproved is not None:
            return self._proof_fetched(found, now)
        if found.round is not None:
            return self._mean_fetched(found, values, now)
        if found.ok and found.state is not None:
            return self._snapshot_fetched(found.state, found.voters, now)
        if self._snapshot.asked is not None:
            return self._snapshot_failed(found.reason, now)
        return self._give_up_means(found.reason, now) if self.behind else self._look_failed(found, now)

    def _on_own(self, event: events.OwnEvent, now: float) -> list[Action]:
        if self._chain.held is not None:  # Nothing waits longer for the answer.
            return [*self._keep_own(now), *self._on_own(event, now)]
        match event:
            case events.Stopped():
                self._snapshot.asked, self._looks.meets, self._asked = None, False, None
                self._snapshot.unproved = None
                return []
            case events.Due(company, placed):
                self._placed = placed or not company
                return self._due(company, now) if self._placed else self._follow(now)
            case events.Overdue(begun, placed):
                self._placed = self._placed and placed
                return self._overdue(begun, now)
            case events.Deserted():
                return self._deserted(now)
            case events.Ending():
                return self._ending(now)
            case events.SteppedAlone(digest):
                self._fork(Outcome(ok=False, reason="", states={self._name: self.state}))
                self.holders &= {self._name}
                self._become(self.state.epoch + 1, f"alone {digest}")
                return [events.Check()] if lineage.is_checked(self.state.epoch) else []
            case events.Checked(digest):
                self.state = lineage.checked(self.state, digest)
                return [] if self.joins else self._go_on(now)
            case events.Interrupted():
                self._leave_chain()
                self.doubts = True  # Nobody else holds this state.
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
        self._leave_chain()
        self.state = StateId(self.state.epoch, lineage.beginning(digest).lineage)
        if self.behind:
            self._asked, self._given_up = None, self.state
            return self._return(now)
        self._join_anew(reason)
        return []

    def _fork(self, outcome: Outcome) -> None:
        """Remember this state if a round that goes on from it has no majority of its holders."""
        if self._chain.fork is None and self._lacks_holders(outcome):
            self._chain.fork = Step(self.state, tuple(sorted(self.holders)))

    def _lacks_holders(self, outcome: Outcome) -> bool:
        """Whether a round has less than half of the holders, but for members that hold no state any more."""
        left = {*outcome.group} - outcome.states.keys()
        here = sum(outcome.states.get(peer) == self.state for peer in self.holders)
        return bool(self.holders) and 2 * here <= len(self.holders - left)

    def _leave_chain(self) -> None:
        """Hold a state that no mean has led to: only the peers that held the last such state are believed."""
        if self.holders:
            self._chain.fork = self._chain.fork or Step(self.state, tuple(sorted(self.holders)))
        self.holders = frozenset()

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
        # it came too late, the next contribution needs the mean.
        return self._look_ahead() if (outcome.group or outcome.late) and self.follows else []

    def _round_succeeded(self, event: events.RoundEnded, now: float) -> list[Action]:
        outcome, rounds = event.outcome, self._rounds
        rounds.failures, rounds.late, rounds.company_at = 0, 0, now
        self._looks.unsure = self.doubts = False
        group = self._group(outcome)
        if group is None:
            return self._nobody_knows(now)
        rounds.group_at = now
        self._note_members(outcome, group)
        gave = any(weight >= MEETING_WEIGHT for weight in outcome.contributors.values())
        if not gave and group == self.state and self._waits_for_older_group(event.missing):
            return []
        if group == self.state:
            return self._look_for_chain(outcome, now) or self._follow_on(outcome, now)
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
        self._claimants = tuple(name for name, state in outcome.states.items() if state == group)

    def _group(self, outcome: Outcome) -> StateId | None:
        """The group's state after a round: this peer's own, unless it is a newcomer or behind."""
        if self._heads or not self._anchor:
            return self._newcomers_group(outcome)
        if self.holders and not self.behind:
            return self.state
        believed = {self._name, *self._anchor[-1].holders}
        claims = [state for name, state in outcome.states.items() if name in believed]
        return group_state(claims, outcome.states.values())

    def _newcomers_group(self, outcome: Outcome) -> StateId | None:
        """The state of the peers that this peer was told to join by, if they are there; or else that of most."""
        group, states = outcome.state, outcome.states
        found = group_state(states[peer] for peer in self._named or () if peer in states)
        if found is not None and (found.epoch or not self.state.epoch):
            return found
        heads = Counter(states.values())
        if self._named != () or group is None or not heads[self.state]:
            return group
        alike = (group.epoch > 0) == (self.state.epoch > 0)
        return self.state if alike and heads[group] <= heads[self.state] else group

    @property
    def _anchor(self) -> tuple[Step, ...]:
        """The path of this peer, or else the last state to which means have led it; empty for a newcomer."""
        if self._chain.path or self._heads:
            return self._chain.path
        if self.holders:
            return (Step(self.state, tuple(sorted(self.holders))),)
        return (self._chain.fork,) if self._chain.fork else ()

    def _look_for_chain(self, outcome: Outcome, now: float) -> list[Action]:
        """Ask for proof that the group has left this peer's state, if so many holders are not here that it may have."""
        chain, states = self._chain, outcome.states
        if self._heads or not self.holders:
            return []
        if self._lacks_holders(outcome):
            chain.held = outcome
            return self._ask()
        fork = chain.fork.holders if chain.fork else ()
        elsewhere = sum(states.get(peer, self.state) != self.state for peer in fork)
        if chain.fork is not None and now >= chain.look_at and 2 * elsewhere > len(fork):
            chain.held, self._asked, self.circle = outcome, chain.fork.state, frozenset(fork)
            return [events.FetchMean(chain.fork.state, proof=True)]
        return []

    def _keep_own(self, now: float) -> list[Action]:
        """Apply the mean that was held back: there is no proof that the group has left this peer's state.

        The first mean without most holders is not applied, if some may still hold this state: they cannot follow it.
        """
        outcome, self._chain.held = self._chain.held, None
        assert outcome is not None, "its mean was held back"
        self._chain.put_off(now)
        absent = self.holders - {*outcome.group}
        if absent and self._chain.spared != self.state and self._lacks_holders(outcome):
            self._chain.spared = self.state
            self.reason = (
                "it waits for the other peers that hold its state: the last round had less than half of them"
            )
            return []
        return self._follow_on(outcome, now)

    def _waits_for_older_group(self, missing: int) -> bool:
        """Whether this peer has met newcomers only, so that an older group may exist among `missing` known peers."""
        met = self.phase.introductions if isinstance(self.phase, Joining) else MAX_INTRODUCTIONS
        if self.state.epoch or not missing or met >= MAX_INTRODUCTIONS:
            return False
        self.phase = Joining(met + 1)
        others = count(missing, "other peer")
        self.reason = f"waiting: this peer has met only other newcomers so far; {others} may know more"
        return True

    def _follow_on(self, outcome: Outcome, now: float) -> list[Action]:
        """The group's state is this peer's: follow it."""
        others = self.holders & {*self._claimants}
        if self.holders and self._name not in self._claimants and 2 * len(others) <= len(self.holders):
            return []  # A download has brought a later state: this mean is of no more use.
        gave = any(weight >= MEETING_WEIGHT for weight in outcome.contributors.values())
        self._asked, self._snapshot, self._looks.ahead = None, _Snapshot(now), 0
        self.phase, self.reason = Following(), "its state is the group's"
        other = group_state(state for state in outcome.states.values() if state != self.state)
        if other is not None and self.holders:
            alike = sum(state == other for state in outcome.states.values())
            whose = f"{lineage.told(other)} is that of {count(alike, 'other peer')}"
            self.reason = (
                f"this peer keeps its own state: {whose}, and no chain of means leads there from its own; "
                'pass trust="heads" to follow the majority'
            )
        if not gave:
            return []
        self._fork(outcome)
        fork = self._chain.fork
        if (
            fork is not None
            and self.holders
            and 2 * len({*fork.holders} & {*self._claimants}) > len(fork.holders)
        ):
            self._chain.fork = None
        return self._commit(outcome)

    def _nobody_knows(self, now: float) -> list[Action]:
        """No member claimed a state. If that lasts, all its holders have left, and each peer claims its own again."""
        if self.behind and now - self._rounds.group_at >= self._patience:
            self._join_anew("nobody is left who holds the group's state")
        return []

    def _join_anew(self, reason: str) -> None:
        self.phase, self.reason, self._snapshot.asked, self._asked = Joining(), reason, None, None
        self._chain.path, self._snapshot.unproved = (), None

    # ---- the way back ----

    def _return(self, now: float) -> list[Action]:
        """Return to the group: by the missed means or, if no peer has them, by a snapshot."""
        assert isinstance(self.phase, Behind)
        if self._snapshot.asked is not None or self._asked is not None:
            return []
        group = self.phase.group
        if not self.holders:
            self._chain.path = self._anchor
        missed = 0 if group is None else group.epoch - self.state.epoch
        if not self._chain.path and self._given_up != self.state and 0 < missed <= MAX_MISSED:
            return self._ask()
        self._chain.path = self._anchor
        return self._fetch(self.phase.epoch, now)

    def _ask(self) -> list[Action]:
        self._asked = self.state
        self.circle = frozenset() if self._heads else self.holders
        return [events.FetchMean(self.state)]

    def _fetch(self, at_least: int, now: float) -> list[Action]:
        if self._snapshot.asked is not None or now < self._snapshot.after:
            return []
        self._snapshot.asked = at_least
        believed = self._chain.path[-1].holders if self._chain.path else self._named or ()
        self.circle = frozenset(believed) - {self._name}
        return [events.FetchSnapshot(at_least)]

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
        if self._chain.path:
            return self._prove(state, now)
        if group is not None and group.epoch == state.epoch and group != state:
            told = f"that of epoch {state.epoch} is of another state than the group's"
            return self._snapshot_failed(told, now)
        if epoch - state.epoch > MAX_MISSED:
            self.reason = f"behind: the snapshot of epoch {state.epoch} is older than the means that are kept"
            return self._fetch(epoch, now)
        return self._load(state, (self._claimants if group else ()) or voters, now)

    def _load(self, state: StateId, holders: Iterable[str], now: float) -> list[Action]:
        self.state, self._asked = state, None
        self.holders = frozenset(() if self._heads else holders) - {self._name}
        self._chain = _Chain()
        return [events.Heal(), *self._go_on(now)]

    def _prove(self, state: StateId, now: float) -> list[Action]:
        """Load the snapshot of a state that a chain leads to; ask for the rest of the chain if it is beyond."""
        last = self._chain.path[-1]
        if holders := self._chain.holders(state):
            return self._load(state, holders, now)
        if state.epoch <= last.state.epoch:
            return self._snapshot_failed("no chain of means leads to its state from this peer's", now)
        self._snapshot.unproved, self.circle = state, frozenset(last.holders)
        return [events.FetchMean(last.state, proof=True)]

    def _proof_fetched(self, found: FetchOutcome, now: float) -> list[Action]:
        state, self._snapshot.unproved = self._snapshot.unproved, None
        assert state is not None, "its proof was asked for"
        self._chain.path += found.path
        if found.path:
            return self._prove(state, now)
        return self._snapshot_failed(f"no chain of means leads to its state: {found.reason}", now)

    def _mean_fetched(self, found: FetchOutcome, values: object, now: float) -> list[Action]:
        outcome, self._chain.held = found.round, None
        if outcome is None or self._asked is None or self._asked != found.state:
            return []
        self._asked = None
        self._claimants = tuple(name for name, state in outcome.states.items() if state == self.state)
        self._fork(outcome)
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
        self.holders = frozenset(() if self._heads else self._claimants)
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
        decided, path = not found.unheard, found.path if self._asked is not None else ()
        looks, self._asked, self._looks.ahead = self._looks, None, 0
        if path:
            return self._overtaken(path, now)
        if self._chain.held is not None:
            return self._keep_own(now)
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

    def _overtaken(self, path: tuple[Step, ...], now: float) -> list[Action]:
        """Fetch a snapshot at once: a chain of means leads on, and the others keep no mean after this state."""
        self._looks.meets = self._looks.unsure = False
        self._chain.held, self._chain.path = None, path
        self.phase = Behind(path[-1].state, path[-1].state.epoch)
        fork = self._chain.fork
        own = (
            ""
            if fork is None
            else f", which it left with less than half of its group at epoch {fork.state.epoch}"
        )
        told, group = lineage.told(self.state), lineage.told(self.phase.group or self.state)
        self.reason = f"behind: it holds {told}, and a chain of means leads the group to {group}{own}"
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
        if begun is None or self.state.epoch not in (0, begun) or self._anchor:
            return []
        if begun < (self._snapshot.asked or 0):
            self._snapshot.asked = (
                None  # The others may wait for this peer in the state that it did not ask for.
            )
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
        if self._alone == "wait":
            self.reason = "it waits: no other peer of this run is known"
            return []
        if now - self._rounds.company_at < self._patience:
            looks = f"it looks for one for {self._patience:g} s before it trains alone"
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
