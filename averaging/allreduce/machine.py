"""One all-reduce round of a group, as a machine: events in, actions out (`equipoise.averaging.allreduce.events`).

Theory of operation
===================

The flat vector is cut into parts, each with an owner. In the healthy case:

1. *Scatter.* Every contributor sends each owner its encoded contribution to the owner's parts.
2. *Decide.* Owners report to the leader whose contributions they hold whole; the leader proposes the contributors that
   every owner holds (a `Decision`).
3. *Gather.* Owners reduce over exactly those contributors and send the encoded means to everyone.
4. *Commit.* A member that holds the whole mean tells everyone (`Votes`). Once a majority does, the round has succeeded:
   a member that has all parts finishes, and a member that lacks some fetches them from a holder.

Steps 2 to 4 are one instance of Paxos (`paxos`): to hold the mean is to accept. When an owner
dies before commit, the leader opens a higher ballot. It learns from a majority whether any member may have committed
already; if not, it decides again without the dead. A new `Plan` names the owners, contributors send the new owners the
parts that they lack, and 2 to 4 repeat. When the leader dies, the next member in line does the same. No member applies
anything before commit, so nothing that happens earlier can leave two members with different means.

After every event the machine looks at its whole state and does what is due (`_advance`). So neither the order of
messages nor duplicates matter.

Time without progress raises the *level*: at 1, owners report without the late and members fetch what they lack; at 2, a
leader goes on without the owners that did not report; from 3 on, members open ballots of their own, in line.
"""

from __future__ import annotations

import msgspec

from equipoise.averaging.allreduce import events
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import Action, Event, Fail, Finish, Group
from equipoise.averaging.allreduce.failure_detector import MIN_BYTES_PER_SECOND, Attendance, Awaited
from equipoise.averaging.allreduce.findings import Findings
from equipoise.averaging.allreduce.follower import (
    Fetching,
    awaited,
    due_report,
    names_of,
    phase_of,
    waiting_for,
)
from equipoise.averaging.allreduce.leader import Despair, Reopen, Tell, next_move
from equipoise.averaging.allreduce.messages import Vote
from equipoise.averaging.allreduce.part_table import PartTable
from equipoise.averaging.allreduce.paxos import Paxos, is_majority, members_of
from equipoise.averaging.timing import LINGER_SECONDS, STALL_SECONDS, WAITING_SECONDS

PLENTY = int(MIN_BYTES_PER_SECOND * STALL_SECONDS)
"""Bytes that a `Waiting` counts for: a member that waits for a delivering member is not stalled itself."""


class AllReduce:
    """The round machine of one member.

    Args:
        group: The round as all members know it.
        me: This member's index.
        now: Monotonic seconds.
        timeout: Seconds until the round fails at the latest.

    Attributes:
        ended: How the round has ended here, if it has.
        findings: What went wrong.
        peers: Bitmask of the members that this member can reach. Two members that cannot be dialled never connect.
        released: Whether no reachable member lacks the mean. From then on this member gives signs of life on demand.
        closed: Whether no other member needs an answer.
    """

    def __init__(self, group: Group, me: int, now: float, timeout: float) -> None:
        self.ended: Finish | Fail | None = None
        self.findings = Findings()
        self.closed = False
        self._ends_at = now + timeout
        self._releases_at = float("inf")
        self._said_at = now
        self.peers = (group.everyone if group.dialable >> me & 1 else group.dialable) & ~(1 << me)
        self._attendance = Attendance(group, now, timeout)
        self._paxos = Paxos(group, me)
        self._part_table = PartTable(group, me)
        self._fetching = Fetching(me, len(group.parts))
        self.released = False
        self._yielded = 0
        self._actions: list[Action] = []
        self._again = False

    @property
    def group(self) -> Group:
        """The round as all members know it."""
        return self._paxos.group

    @property
    def me(self) -> int:
        """This member's index."""
        return self._paxos.me

    @property
    def deadline(self) -> float:
        """When `Woke` is due, in monotonic seconds; infinite once closed."""
        if self.closed:
            return float("inf")
        if self.ended is not None:
            return min(self._ends_at, self._releases_at)
        return min(self._ends_at, self._attendance.deadline)

    @property
    def phase(self) -> str:
        """The phase of the round: `scatter`, `decide`, `gather`, `commit` or `ended`."""
        return "ended" if self.ended is not None else phase_of(self._paxos)

    def start(self, now: float) -> list[Action]:
        """The first actions: scatter, and whatever is due at once."""
        self._attendance.progress(now)
        first = self.group.first_leader
        self._on_message(first, wire.Plan(first, 0, self.group.dialable), now)
        return self._advance(now)

    def wants_contribution(self, sender: int, part: int) -> bool:
        """True if a contribution is still of use here."""
        return self.ended is None and self._part_table.arrivals.wants(sender, part)

    def wants_mean(self, sender: int, part: int, contributors: int) -> bool:
        """True if the mean of `part` over `contributors` is still of use here, and `sender` may give it.

        Only this member, the part's owner and the members that were asked for the part may give it. Otherwise a faster
        member could send a false mean. Once our mean has proved wrong, only the members that were asked are believed.
        """
        if self.ended is not None or not self._part_table.means.wants(part, contributors):
            return False
        decision = self._paxos.valued
        fits = decision is None or decision.contributors == contributors
        owns = sender == self.me or (self._part_table.owner_of[part] == sender and not self._fetching.doubts)
        if fits and (owns or self._fetching.expects(sender, part, contributors)):
            return True
        self._fetching.pass_over(sender, part, contributors)
        return False

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event; return what is to be done, in order."""
        if self.closed:
            return []
        match event:
            case events.ContributionReceived(sender, part):
                self._on_contribution(sender, part, now)
            case events.PartReduced(part, contributors, digest):
                self._part_table.forget_reducing(part, contributors)
                self._on_mean(self.me, part, contributors, digest, now)
            case events.MeanReceived(sender, part, contributors, digest):
                self._on_mean(sender, part, contributors, digest, now)
            case events.MessageReceived(sender, message):
                self._on_message(sender, message, now)
            case events.BytesReceived(sender, count):
                self._on_bytes(sender, count, now)
            case events.PeerLost(member, reason, gone, silent):
                self._on_lost(member, reason, now, gone, silent)
            case events.PeerReturned(member):
                if self._attendance.come_back(member):
                    self.findings.note(f"{self.group.names[member]} is back")
            case events.Withdrew(reason):
                if self.ended is None:
                    self._fail(reason, now)
            case events.Woke():
                self._on_woke(now)
        return self._advance(now)

    def excuse(self, seconds: float, now: float) -> None:
        """Blame no member for the last `seconds`: this process stood still, and what came meanwhile is unread."""
        self._attendance.excuse(seconds, now)

    # ---- taking in ----

    def _on_message(self, sender: int, message: wire.RoundMessage, now: float) -> None:
        paxos = self._paxos
        news = False
        match message:
            case wire.Prepare(ballot):
                self._on_prepare(sender, ballot, now)
            case wire.Promise():
                news = paxos.on_promise(sender, message)
            case wire.Refuse(ballot):
                opening = paxos.opening
                if self.ended is None and paxos.on_refuse(sender, ballot):
                    self._follow(ballot, opening)
            case wire.Plan(_, _, owners):
                if news := paxos.on_plan(sender, message):
                    self._part_table.assign(owners)
            case wire.Waiting():
                self._on_waiting(sender, now)
            case wire.Report():
                news = paxos.on_report(sender, message)
            case wire.Propose(_, decision):
                if news := paxos.on_propose(sender, message):
                    self._part_table.assign(decision.owners)
            case wire.Votes(vote, voters):
                if voters == 1 << sender and len(message.shares) == self.group.size:
                    self.findings.shares[sender] = message.shares
                news = self._on_votes(sender, vote, voters)
            case wire.Fetch(contributors, parts):
                self._serve(sender, contributors, parts)
            case wire.GiveUp(reason):
                self._on_lost(sender, f"left the round: {reason}", now, gone=True)
            case wire.Heartbeat(asks=True) if self.released:
                self._send(sender, wire.Heartbeat(asks=False))
        if news:
            self._progress(now)

    def _on_contribution(self, sender: int, part: int, now: float) -> None:
        if self.wants_contribution(sender, part):
            self._part_table.take_contribution(sender, part)
            self._attendance.arrived(sender, now)

    def _on_mean(self, sender: int, part: int, contributors: int, digest: bytes, now: float) -> None:
        if self.wants_mean(sender, part, contributors):
            self._part_table.take_mean(part, contributors, digest)
            self._attendance.arrived(sender, now)

    def _on_bytes(self, sender: int, count: int, now: float) -> None:
        if self.ended is None and self._attendance.received(sender, count, self._awaited, now):
            self._say_waiting(now)

    def _on_waiting(self, sender: int, now: float) -> None:
        """`sender` waits for a member that delivers, so this member, which waits for `sender`, is not stalled either.

        `Waiting` counts only in the first half of the round's time: no member can hold a round longer by words alone.
        Only the leader passes it on: two members that wait for each other would else do so until then.
        """
        if now >= self._attendance.patient_until or sender == self.me or self._awaited.dispensable:
            return
        waits = self.ended is None and self._attendance.received(sender, PLENTY, self._awaited, now)
        if waits and self._paxos.leader == self.me:
            self._say_waiting(now)

    def _say_waiting(self, now: float) -> None:
        if now >= self._said_at + WAITING_SECONDS:
            self._said_at = now
            leader = self._paxos.leader
            self._broadcast(wire.Waiting(), -1 if leader == self.me else 1 << leader)

    def _on_prepare(self, sender: int, ballot: int, now: float) -> None:
        if isinstance(self.ended, Finish):
            self._send_commit(1 << sender)
        if self._paxos.leader_of(ballot) != sender or self.ended is not None:
            return
        # A member that alone has lost a leader must not unseat it while the leader serves all others.
        leader, opening = self._paxos.leader, self._paxos.opening
        trusted = leader != sender and not self._attendance.lost >> leader & 1 and self._attendance.level == 0
        # A member that has left our ballot cannot come back to it. For each we yield once: no liar unseats us for ever.
        yields = opening or (leader == self.me and self._needs(sender) and not self._yielded >> sender & 1)
        answer = self._paxos.on_prepare(ballot, trusted and not yields)
        if isinstance(answer, wire.Refuse):
            self._send(sender, answer)
            return
        self._yielded |= yields << sender
        self._progress(now)
        self._follow(ballot, yields)

    def _needs(self, member: int) -> bool:
        """True if a member may still have to contribute or report, or give means, in this member's own ballot."""
        decision = self._paxos.ballot.decision
        if decision is None:
            return bool((self._part_table.owners | self.group.contributors) >> member & 1)
        return bool(self._part_table.missing_of(1 << member, decision))

    def _follow(self, ballot: int, led: bool) -> None:
        """Promise a higher ballot; if this member `led` one, or tried to, have the members of that follow."""
        self._send(self._paxos.leader_of(ballot), self._paxos.promise())
        if led:
            self._broadcast(wire.Refuse(ballot))

    def _on_votes(self, sender: int, vote: Vote, voters: int) -> bool:
        # The sender may not know yet which mean was chosen. A majority's votes are not answered: two members that have
        # finished with different means would answer each other for ever.
        alone = voters == 1 << sender
        if alone and isinstance(self.ended, Finish) and vote.digest != self.ended.digest:
            self._send_commit(1 << sender)
        return self._paxos.on_votes(vote, voters)

    def _on_lost(self, member: int, reason: str, now: float, gone: bool, silent: bool = False) -> None:
        if member == self.me or not self._attendance.lose(member, now, gone, silent):
            return
        if isinstance(self.ended, Finish):
            # The lost member may have been the leader that would have told the others.
            self._send_commit(self.group.everyone)
        elif self.ended is None:
            self.findings.note(f"{self.group.names[member]} lost in phase {self.phase}: {reason}")

    def _on_woke(self, now: float) -> None:
        if now >= self._ends_at:
            if self.ended is None:
                self._fail(f"timed out {waiting_for(self._paxos, self._part_table)}", now)
            else:
                self._close()
            return
        if self.ended is None and self._attendance.stall(self._awaited, now):
            self._on_stalled()
            if self._paxos.tally.split:
                self._fail_apart(now)

    def _fail_apart(self, now: float) -> None:
        """Fail, as the members hold different means, and blame the owners that gave them."""
        self.findings.blame_for_shares(self._part_table.owners & ~(1 << self.me))
        told = names_of(self.group, sum(1 << member for member in self.findings.faults))
        self._fail(f"members hold different means, by the fault of {told}", now)

    def _on_stalled(self) -> None:
        waited = self._attendance.level * STALL_SECONDS
        self.findings.note(f"no progress for {waited:g} s {waiting_for(self._paxos, self._part_table)}")
        self._fetching.ask_another()
        if self._paxos.decision is not None and not self._paxos.must_fetch:
            owing = self._awaited.members if self._awaited.dispensable else 0
            self.findings.blame(owing & ~self._attendance.gone, "owed its share of the mean")
        line = self._paxos.line(self._attendance.lost)
        if self.me in line and self._paxos.should_open(self._attendance.level, line.index(self.me)):
            self._open_ballot()

    # ---- what is due ----

    def _advance(self, now: float) -> list[Action]:
        self._again = self.ended is None
        while self._again:
            self._again = False
            for step in (
                self._require_majority,
                self._take_lead,
                self._report,
                self._lead,
                self._work_on_parts,
                self._hold,
                self._commit,
                self._fetch_missing,
            ):
                step(now)
                if self.ended is not None:
                    break
        self._attendance.begin(self._paxos.step, now)
        self._release(now)
        actions, self._actions = self._actions, []
        return actions

    def _require_majority(self, now: float) -> None:
        left = self._attendance.hoped_for
        if not is_majority(left, self.group.size):
            why = "; ".join(self.findings.notes[-2:])
            few = f"{left.bit_count()} of {self.group.size}"
            self._fail(f"{few} members left, a majority is needed: {why}", now)

    def _take_lead(self, now: float) -> None:
        if not self._attendance.lost >> self._paxos.leader & 1 or self._alone:
            return
        successor = self._paxos.refused(self._attendance.lost)
        if successor is not None:
            self._on_prepare(self._paxos.leader_of(successor), successor, now)
        elif self._paxos.line(self._attendance.lost)[:1] == [self.me]:
            self._open_ballot()

    def _open_ballot(self) -> None:
        prepare = self._paxos.open()
        self.findings.note(f"opened ballot {prepare.ballot}")
        self._broadcast(prepare)

    def _report(self, now: float) -> None:
        if report := due_report(self._paxos, self._part_table, self._attendance):
            self._tell(report, now, 1 << self._paxos.leader)

    def _lead(self, now: float) -> None:
        if self._paxos.leader != self.me or self._alone:
            return
        match next_move(self._paxos, self._part_table, self._attendance):
            case Tell(message, why):
                self.findings.note(why)
                if isinstance(message, wire.Plan):
                    silent = self._part_table.owners & ~message.owners & ~self._attendance.gone
                    self.findings.blame(silent if message.sequence else 0, "did not report as an owner")
                self._tell(message, now)
            case Reopen(why):
                self.findings.note(why)
                self._open_ballot()
            case Despair(why):
                self._fail(why, now)

    def _work_on_parts(self, now: float) -> None:
        if self._fetching.doubts or not self._part_table.due:
            return
        ballot, valued = self._paxos.ballot, self._paxos.valued
        over = self.group.contributors if valued is None else valued.contributors
        decided = self._paxos.decision is not None
        # A mean that others hold already is fetched from them, not reduced again.
        release = ballot.decision is not None and not ballot.holders
        targets = self.peers & ~self._attendance.gone
        self._actions += self._part_table.work(over, decided, release, targets)

    def _hold(self, now: float) -> None:
        decision = self._paxos.ballot.decision
        if decision is not None and self._part_table.means.is_whole(decision) and self._paxos.hold():
            self._progress(now)
            shares = self._part_table.means.shares(self._part_table.owner_of)
            self.findings.shares[self.me] = shares
            vote = self._paxos.vote(self._part_table.means.digest(decision))
            self._broadcast(msgspec.structs.replace(vote, shares=shares))

    def _commit(self, now: float) -> None:
        chosen = self._paxos.tally.chosen
        if chosen is None or not self._part_table.means.is_whole(chosen.decision):
            return
        if self._part_table.means.digest(chosen.decision) == chosen.digest:
            if vote := self._paxos.concur():
                # The others keep the mean for this member until they hear that it has it.
                self._broadcast(vote)
            self.findings.blame(self._part_table.false_owners, "gave another mean than the group's")
            if missing := self.group.contributors & ~chosen.decision.contributors:
                leader = self.group.names[self._paxos.leader_of(chosen.ballot)]
                self.findings.note(
                    f"{names_of(self.group, missing)} left out by the word of {leader}, which led"
                )
            self._end(Finish(chosen.decision, chosen.digest), now)
            if self._paxos.leader == self.me:
                self._send_commit(self.group.everyone)
        elif self._fetching.doubts >= (self._paxos.tally.voters(chosen) & self.peers).bit_count():
            self._fail("our mean differs from the group's, from whomever of the majority it is fetched", now)
        else:
            self.findings.note("our mean differs from the group's: fetching it again")
            self._fetching.start_again()
            self._part_table.means.drop()
            self._again = True

    def _fetch_missing(self, now: float) -> None:
        reachable = self.peers & ~self._attendance.lost
        if fetch := self._fetching.due(self._paxos, self._part_table, self._attendance, reachable):
            self._actions.append(fetch)

    def _serve(self, to: int, contributors: int, bits: bytes) -> None:
        if isinstance(self.ended, Finish):
            self._send_commit(1 << to)
        asked = [] if self.released else wire.from_bits(bits[: len(self.group.parts) // 8 + 1])
        kept = [part for part in asked if self._part_table.means.has(part, contributors)]
        if self._fetching.may_serve(to, len(kept)):
            self._actions += [events.SendMean(to, part, contributors) for part in kept]

    # ---- ending ----

    def _end(self, how: Finish | Fail, now: float) -> None:
        self.ended = how
        # A member that still fetches may need all the time that the round was given.
        self._ends_at = max(self._ends_at, now + LINGER_SECONDS)
        self._actions.append(how)

    def _fail(self, reason: str, now: float) -> None:
        self._broadcast(wire.GiveUp.because(reason))
        self._end(Fail(reason, in_doubt=self._paxos.held is not None), now)
        if self._paxos.held is None:
            self._close()

    def _release(self, now: float) -> None:
        """Let go of the buffers once every other member holds the mean, or is gone, or was lost for a stall."""
        attendance = self._attendance
        self._releases_at = float("inf")
        kept = self._paxos.held and self._paxos.held[1]
        if isinstance(self.ended, Finish):
            kept = self.ended.decision
        if self.ended is None or kept is None or self.released:
            return
        lacking = self.peers & ~(attendance.gone | self._paxos.holders(kept))
        if lacking & ~attendance.lost:
            return
        if lacking and now < attendance.given_up_at:
            self._releases_at = attendance.given_up_at
            return
        self.released = True
        self._ends_at = now + LINGER_SECONDS
        self._actions.append(events.Release())

    def _close(self) -> None:
        self._actions += [events.Close()] if self.released else [events.Release(), events.Close()]
        self.released = self.closed = True

    # ---- small things ----

    @property
    def _alone(self) -> bool:
        """True if less than a majority can be reached: nothing can be decided until lost members come back."""
        return not is_majority(self._attendance.here, self.group.size)

    @property
    def _awaited(self) -> Awaited:
        return awaited(self._paxos, self._part_table)

    def _progress(self, now: float) -> None:
        self._attendance.progress(now)
        self._again = True

    def _tell(self, message: wire.RoundMessage, now: float, among: int = -1) -> None:
        self._broadcast(message, among)
        if among >> self.me & 1:
            self._on_message(self.me, message, now)

    def _broadcast(self, message: wire.RoundMessage, among: int = -1) -> None:
        for member in members_of(self.peers & ~self._attendance.gone & among):
            self._send(member, message)

    def _send(self, member: int, message: wire.RoundMessage) -> None:
        if self.peers >> member & 1:
            self._actions.append(events.Send(member, message))

    def _send_commit(self, among: int) -> None:
        commit = self._paxos.commit()
        if commit is not None:
            self._broadcast(commit, among)
