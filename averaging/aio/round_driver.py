"""The rounds of one daemon. The driver of each puts bytes and clocks around `allreduce.machine.AllReduce`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import msgspec

from equipoise.averaging.aio.deliveries import Deliveries
from equipoise.averaging.aio.round_buffers import Reduction, RoundBuffers
from equipoise.averaging.aio.sessions import Placed, Sessions
from equipoise.averaging.allreduce import events
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.endpoint import Endpoint
from equipoise.averaging.allreduce.paxos import members_of
from equipoise.averaging.allreduce.vote_signatures import VoteSignatures
from equipoise.averaging.deeds import suspected
from equipoise.averaging.layout import Vectors
from equipoise.averaging.manifest import Identity, Manifest
from equipoise.averaging.metrics import averaged, middles
from equipoise.averaging.outcome import SHOWN_CHARS, Outcome
from equipoise.averaging.partition import balance, settle
from equipoise.averaging.ports import Directory, FrameRefused
from equipoise.averaging.replication.update import EncodedMean
from equipoise.averaging.rules import Mean, RuleError
from equipoise.averaging.session.outbox import Bulk, Frame
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.weights import ATTENDANCE_LIMIT, contributing, counted_weights
from equipoise.compression import CodecError
from equipoise.compression.device_reduce import DeviceReducer
from equipoise.limits import LruDict
from equipoise.tasks import Driver

ROUND_FRAME = b"R"
"""First byte of the header of every frame of a round; the round's id and a message follow."""

HEADER_PREFIX_BYTES = 17
"""Length of that byte and the id."""

MAX_EARLY_FRAMES = 128
"""Most control frames of unknown rounds that are kept of one peer: a hello or two are usual for each run that both wait
in."""

MAX_EARLY_BYTES = 512
"""Most bytes of such a frame: a hello takes 40, and no peer says much to a member that has not spoken yet."""

MAX_EARLY_PEERS = 256
"""Most peers of which such frames are kept: as many as may have channels. The longest silent one goes first."""

MAX_LINGERING = 2
"""Most rounds of one run that are over here and still answer others. A peer that needs an older one asks others."""

MAX_CLOSED_ROUNDS = 1024
"""Most ids of closed rounds that are known, whose late frames are dropped."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one round.

    Attributes:
        spec: The run.
        manifest: The group, already checked.
        vectors: The contribution, and the memory for the mean, which holds it if the outcome is ok.
        timeout: Seconds.
        identity: Signs votes, and checks others'.
    """

    spec: RunSpec
    manifest: Manifest
    vectors: Vectors
    timeout: float
    identity: Identity


def group_of(spec: RunSpec, manifest: Manifest) -> events.Group:
    """The round as every member derives it from the manifest alone."""
    members = manifest.members
    barred = suspected(members)
    able = [index for index, join in enumerate(members) if join.dialable]
    leaders = [index for index in able if members[index].peer not in barred] or able
    uplinks = settle([join.bandwidth for join in members])
    downlinks = settle([join.download or join.bandwidth for join in members])
    weights = manifest.weights
    givers = contributing(weights, spec.strategy.least).bit_count()
    asked = sum(join.weight > 0 for join in members)
    mean_size = spec.layout.mean_size(max(givers, 1))
    growth = mean_size / spec.layout.encoded_size
    owns = [index in leaders for index in range(len(members))]
    fractions = balance(list(zip(uplinks, downlinks, strict=True)), owns, growth)
    convening = [index for index in leaders if members[index].peer == manifest.coordinator]
    return events.Group(
        round_id=manifest.id,
        names=tuple(join.peer[-SHOWN_CHARS:] for join in members),
        weights=weights,
        dialable=sum(1 << index for index in leaders),
        parts=spec.layout.cut(fractions, spec.options.part_values),
        first_leader=(convening or leaders)[0],
        cap=spec.cap,
        quorum=asked if spec.strategy.total else min(spec.strategy.quorum, givers),
        least=spec.strategy.least,
        encoded_size=mean_size,
        norms=tuple(join.norm for join in members),
        norm_cap=spec.norm_cap,
    )


def metrics_of(
    spec: RunSpec, manifest: Manifest, counted: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float], dict[str, tuple[float, float]]]:
    """Return the averages of the contributors' training and of the evaluations, and the medians of both.

    All follow from the manifest and the contributors alone. A member whose contribution was lost is in neither. A
    member that observes or only attends is in the evaluations alone. A member that holds another state than the group's
    is not in the evaluations, because it has evaluated that other state.

    Args:
        spec: The run: it says how much one weight may count, and whether averages are means or medians.
        counted: PeerID -> counted weight of each contributor.
    """
    joins = [join for join in manifest.members if join.peer in counted]
    trained = [(counted[join.peer], join.fit) for join in joins if counted[join.peer] > ATTENDANCE_LIMIT]
    expected = contributing(manifest.weights, spec.strategy.least)
    lost = {manifest.peers[member] for member in members_of(expected)} - counted.keys()
    present = [join for join in manifest.members if join.peer not in lost]
    before = manifest.before
    reports = [one.evaluation for one in present if one.evaluation is not None and one.state == before]
    weights = [report.weight for report in reports]
    capped = counted_weights(weights, (1 << len(weights)) - 1, spec.cap)
    scored = list(zip(capped, (report.values for report in reports), strict=True))
    robust = not isinstance(spec.rule, Mean)
    return averaged(trained, robust), averaged(scored, robust), {**middles(trained), **middles(scored)}


def failed_outcome(spec: RunSpec, manifest: Manifest, reason: str) -> Outcome:
    """Return the outcome of a round of this group that has failed."""
    return Outcome(
        ok=False,
        reason=reason,
        run=spec.name,
        round=manifest.round,
        group=manifest.peers,
        states=manifest.states,
        drawn=manifest.drawn,
        compression_ratio=spec.layout.compression_ratio,
    )


def mean_outcome(
    spec: RunSpec, group: events.Group, mean: EncodedMean, digest: bytes, how: str = ""
) -> Outcome:
    """Return the outcome of the round that made this mean of this digest, as far as it is alike at all members.

    Its reason begins with `how`.
    """
    manifest, weights = mean.manifest, group.counted(mean.contributors)
    peers = {member: manifest.peers[member] for member in members_of(mean.contributors)}
    missing = group.contributors & ~mean.contributors
    counted = {peer: weights[member] for member, peer in peers.items()}
    metrics, evaluation, medians = metrics_of(spec, manifest, counted)
    attending = [join for join in manifest.members if 0 < counted.get(join.peer, 0) <= ATTENDANCE_LIMIT]
    told = ((one.peer, one.fit, one.evaluation.values if one.evaluation else {}) for one in attending)
    outcome = msgspec.structs.replace(
        failed_outcome(spec, manifest, ""),
        ok=True,
        contributors=counted,
        capped={peer: group.weights[at] for at, peer in peers.items() if group.weights[at] > counted[peer]},
        left_out=tuple(manifest.peers[member] for member in members_of(missing)),
        shrunk={peer: group.factors[at] for at, peer in peers.items() if group.factors[at] < 1},
        digest=digest.hex(),
        metrics=metrics,
        evaluation=evaluation,
        medians=medians,
        reports={peer: (fit, scores) for peer, fit, scores in told if fit or scores},
    )
    return msgspec.structs.replace(outcome, reason=f"{how}{outcome.tally}{outcome.caps}")


class MemberLinks:
    """The way to the members of one round, by their indices, and the count of the bytes that it took.

    Attributes:
        reached: PeerID -> index of each member that this one can reach.
        header: The first bytes of the header of every frame.
        sent, received: Bytes of frames.
    """

    def __init__(self, manifest: Manifest, others: Sequence[int], sessions: Sessions) -> None:
        """This member can reach the `others`."""
        self._peers: Sequence[str] = manifest.peers
        self.reached = {self._peers[index]: index for index in others}
        self._flow = manifest.id
        self.header = ROUND_FRAME + self._flow
        self.sent = self.received = 0
        self._sessions = sessions
        self._seen = {peer: sessions.received(peer) for peer in self.reached}

    def news(self) -> Iterator[tuple[int, int, float]]:
        """Each member in reach, the bytes that came from it since the last call, and the round-trip time to it."""
        for peer, index in self.reached.items():
            before, self._seen[peer] = self._seen[peer], self._sessions.received(peer)
            yield index, max(self._seen[peer] - before, 0), self._sessions.rtt(peer)

    def post(self, to: int, message: wire.RoundMessage) -> None:
        """Send a frame without a body."""
        header, _ = self.frame(message, memoryview(b""))
        if isinstance(message, wire.Heartbeat):
            self._sessions.beat(self._peers[to], header)
        else:
            self._sessions.post(self._peers[to], header, self._flow)

    def post_bulk(self, to: int, make: Bulk) -> None:
        """Send a frame that `frame` makes when its turn has come."""
        self._sessions.post_bulk(self._peers[to], self._flow, make)

    def frame(self, message: wire.RoundMessage, payload: memoryview) -> Frame:
        """Make a frame that is sent at once."""
        header = self.header + wire.encode(message)
        self.sent += len(header) + len(payload)
        return header, payload


class RoundDriver:
    """One round at one member, from the manifest to the last straggler.

    Args:
        closed: Called with its id when the round can be forgotten.
        keep: Called with the encoded mean, if the round succeeds.
        reducer: Reduces parts on a device, one after another, in its thread. Without one the loop does: a CPU takes
            less time for a part than a thread needs to get the interpreter's lock.
    """

    def __init__(
        self,
        task: Task,
        sessions: Sessions,
        closed: Callable[[bytes], None],
        keep: Callable[[EncodedMean], None],
        reducer: DeviceReducer | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        me, now = task.manifest.peers.index(sessions.peer), self._loop.time()
        self.group = group_of(task.spec, task.manifest)
        self.outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self.task = task
        self._sessions = sessions
        self._closed = closed
        self._keep = keep
        self._store = RoundBuffers(
            self.group, me, task.spec.layout, task.vectors, sessions.pool, task.spec.rule, reducer
        )
        self._endpoint = Endpoint(self.group, me, now, task.timeout)
        self._machine = self._endpoint.machine
        self._links = MemberLinks(task.manifest, self._endpoint.others, sessions)
        self._vote_signatures = VoteSignatures(self.group.round_id, me, task.manifest.peers, task.identity)
        self._deliveries = Deliveries(me, self.group.size, now)
        self._phases = [(self._machine.phase, now)]
        self._driver = Driver(self._endpoint, self._perform, self._wake)

    def start(self) -> None:
        """Admit the members, greet each, and begin the round."""
        credentials = {join.peer: join.credential for join in self.task.manifest.members}
        self._sessions.enter(self.group.round_id, credentials, round=True)
        self._driver.perform(self._endpoint.start(self._loop.time()))

    def withdraw(self, reason: str) -> None:
        """Leave the round; the outcome says why."""
        self._driver.tell(events.Withdrew(reason))

    def place(self, peer: str, header: bytes, size: int) -> Placed:
        """Place the body of a frame. Whether the body is wanted is seen once it is here.

        Raises:
            FrameRefused: The body has another size than the part that the frame names.
        """
        member = self._links.reached.get(peer)
        if member is None:
            return self._sessions.scratch(size)
        message = _message(header)
        if not isinstance(message, wire.Contribution | wire.Mean) or message.part >= len(self.group.parts):
            raise FrameRefused(f"a {type(message).__name__} has no body of {size} bytes in this round")
        part = message.part
        if isinstance(message, wire.Mean):
            expected = self._store.mean_size(part, message.contributors)
        else:
            expected = self._store.size(part)
        if size != expected:
            raise FrameRefused(f"expected {expected} bytes for part {part}, got {size}")
        return self._sessions.pool.take(size), partial(self._hear, member, message, header)

    def frame(self, peer: str, header: bytes) -> None:
        """Take a frame without a body; one of a peer that is no member, or that neither end could dial, is passed over.

        Raises:
            FrameRefused: It holds no message of a round.
        """
        if (member := self._links.reached.get(peer)) is not None:
            self._hear(member, _message(header), header, memoryview(b""))

    def _hear(self, member: int, message: wire.RoundMessage, header: bytes, body: memoryview) -> None:
        self._links.received += len(header) + len(body)
        if actions := self._endpoint.heard(member, self._loop.time()):
            self._driver.perform(actions)
        try:
            event = self._keep_values(member, message, body)
        except CodecError as error:
            event = events.PeerLost(member, f"sent values that do not decode: {error}")
            self._machine.findings.faults[member] = event.reason
        if event is not None:
            self._driver.tell(event)

    def lost(self, peer: str, reason: str, gone: bool = False) -> None:
        """Note that no channel to a peer can be opened; if it is `gone`, its session is over and frames are lost."""
        if (member := self._links.reached.get(peer)) is not None:
            self._driver.tell(events.PeerLost(member, reason, gone))

    # ---- from the world to the machine ----

    def _keep_values(self, member: int, message: wire.RoundMessage, body: memoryview) -> events.Event | None:
        """Keep the values of a frame, if it has any; return its event, or None if the machine has no use for it."""
        match message:
            case wire.Heartbeat(asks) if not (asks and self._machine.released):
                return None
            case wire.Contribution(part):
                if not self._machine.wants_contribution(member, part):
                    return None
                self._store.keep_contribution(part, member, body)
                self._deliveries.came(member, self._loop.time(), mean=False)
                return events.ContributionReceived(member, part)
            case wire.Mean(part, contributors):
                if not self._machine.wants_mean(member, part, contributors):
                    return None
                digest = self._store.keep_mean(part, contributors, body)
                self._deliveries.came(member, self._loop.time(), mean=True)
                return events.MeanReceived(member, part, contributors, digest)
            case wire.Votes():
                self._deliveries.heard(member, message.late)
        return events.MessageReceived(member, self._vote_signatures.check(member, message))

    def _wake(self) -> events.Woke:
        for member, count, rtt in self._links.news():
            self._endpoint.received(member, count)
            if not self.outcome.done():
                self._endpoint.allow(member, rtt)
        return events.Woke()

    # ---- from the machine to the world ----

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.Send(to, message):
                self._post(to, message)
            case events.SendContribution(to, part):
                self._links.post_bulk(to, partial(self._make_contribution, part))
            case events.SendMean(to, part, contributors):
                self._links.post_bulk(to, partial(self._make_mean, part, contributors))
            case events.Reduce(part, contributors):
                self._reduce(part, contributors)
            case events.Finish() | events.Fail():
                self._conclude(action)
            case events.Release():
                self._store.release()
            case events.Close():
                self.close()
        self._mark_phase()

    def _reduce(self, part: int, contributors: int) -> None:
        job = self._store.reduction(part, contributors)
        if self._store.reducer is None:
            self._reduced(part, contributors, job)
            return

        running = self._loop.run_in_executor(self._store.reducer.executor, job)
        running.add_done_callback(lambda job: self._reduced(part, contributors, job.result))

    def _reduced(self, part: int, contributors: int, result: Callable[[], Reduction]) -> None:
        try:
            reduction = result()
        except CodecError as error:
            self.withdraw(f"our own values: {error}")
        except RuleError as error:
            self.withdraw(str(error))
        else:
            # The round may have ended meanwhile, or be over other contributors, whose mean must not be replaced.
            if self._machine.wants_mean(self._store.me, part, contributors):
                self._store.keep_reduction(part, contributors, reduction)
            self._driver.tell(events.PartReduced(part, contributors, reduction.digest))

    def _post(self, to: int, message: wire.RoundMessage) -> None:
        message = self._vote_signatures.seal(message)
        if isinstance(message, wire.Votes):
            message = msgspec.structs.replace(message, late=self._deliveries.word)
        self._links.post(to, message)

    def _make_contribution(self, part: int) -> Frame | None:
        if self._machine.ended is not None:
            return None
        try:
            return self._links.frame(wire.Contribution(part), self._store.contribution(part))
        except CodecError as error:
            self.withdraw(f"our own values: {error}")
            return None

    def _make_mean(self, part: int, contributors: int) -> Frame | None:
        payload = self._store.mean(part, contributors)
        return None if payload is None else self._links.frame(wire.Mean(part, contributors), payload)

    def _conclude(self, end: events.Finish | events.Fail) -> None:
        self._mark_phase()
        spec, manifest, clamped = self.task.spec, self.task.manifest, self._store.clamped
        peers, links = manifest.peers, self._links
        seconds = {"exchange": self._loop.time() - self._phases[0][1]}
        for (phase, since), (_, until) in pairwise(self._phases):
            seconds[phase] = seconds.get(phase, 0.0) + until - since
        apart: float | None = None
        if isinstance(end, events.Finish):
            mean = EncodedMean(manifest, end.decision.contributors, self._store.means())
            self._keep(mean)
            outcome = mean_outcome(spec, self.group, mean, end.digest)
            apart = self._apart(outcome.contributors)
        else:
            outcome = failed_outcome(spec, manifest, end.reason)
        slowest = self._deliveries.slowest
        notes = [f"{clamped} values beyond the range of {spec.options.codec} were clamped"] if clamped else []
        outcome = msgspec.structs.replace(
            outcome,
            apart=apart,
            faults={peers[member]: why for member, why in self._machine.findings.faults.items()},
            waits={"exchange": (peers[slowest[0]], slowest[1])} if slowest else {},
            in_doubt=isinstance(end, events.Fail) and end.in_doubt,
            bytes_sent=links.sent,
            bytes_received=links.received,
            seconds=seconds,
            events=(*self._machine.findings.notes, *notes),
        )
        self.outcome.set_result(outcome)

    def _apart(self, counted: Mapping[str, float]) -> float | None:
        """Return how far two partners were apart, from this peer's distance to the mean and the partner's share of it.

        None if a newcomer's share is as small as rounding: then this peer's values tell nothing of the newcomer's.
        """
        if not self.task.spec.strategy.pairs:
            return None
        share = 1 - counted[self._sessions.peer] / sum(counted.values())
        if share <= ATTENDANCE_LIMIT:
            return None
        try:
            apart, norm = self._store.apart()
        except CodecError:  # The script has written to its contribution meanwhile.
            return None
        return apart / share / norm if norm else 0.0

    def close(self) -> None:
        """Forget the round at once, though members may still need its answers."""
        self._store.release()
        self._sessions.leave(self.group.round_id)
        self._driver.stop()
        self._closed(self.group.round_id)

    def _mark_phase(self) -> None:
        if (phase := self._machine.phase) != self._phases[-1][0]:
            self._phases.append((phase, self._loop.time()))


class Rounds:
    """The rounds of one daemon.

    Attributes:
        open: The rounds that take frames, by id. Some of them are over, and answer other members.
    """

    def __init__(self, sessions: Sessions, reducer: DeviceReducer | None = None) -> None:
        self._reducer = reducer
        self.open: dict[bytes, RoundDriver] = {}
        self._sessions = sessions
        self._closed: LruDict[bytes, None] = LruDict(MAX_CLOSED_ROUNDS)
        self._early: LruDict[str, deque[bytes]] = LruDict(MAX_EARLY_PEERS)

    @property
    def busy(self) -> bool:
        """True if a round exchanges values now."""
        return any(not round.outcome.done() for round in self.open.values())

    def begin(self, task: Task, keep: Callable[[EncodedMean], None]) -> RoundDriver:
        """Start a round, which gets the frames that came before it; `keep` is called with its mean."""
        name = task.spec.name
        over = [one for one in self.open.values() if one.task.spec.name == name and one.outcome.done()]
        for one in over[:-MAX_LINGERING]:
            one.close()
        round = RoundDriver(task, self._sessions, self._forget, keep, self._reducer)
        round_id = round.group.round_id
        self.open[round_id] = round
        round.start()
        for peer in task.manifest.peers:
            early = self._early.get(peer, ())
            for header in [one for one in early if one[1:HEADER_PREFIX_BYTES] == round_id]:
                try:
                    round.frame(peer, header)
                except FrameRefused as error:
                    round.lost(peer, str(error))
        return round

    def keep_early(self, round_id: bytes, peer: str, header: bytes) -> bool:
        """Keep a control frame of a round that is not open; return whether the round may yet begin."""
        if round_id in self._closed:
            return False
        # By peer, so that a peer that floods this daemon pushes out only its own frames.
        frames = self._early[peer] = self._early.get(peer) or deque(maxlen=MAX_EARLY_FRAMES)
        if len(header) <= MAX_EARLY_BYTES:
            frames.append(header)
        return True

    def _forget(self, round_id: bytes) -> None:
        self.open.pop(round_id, None)
        self._closed[round_id] = None


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts of a daemon that all its runs share.

    Attributes:
        sessions: Carry frames.
        directory: Knows the peers of a run.
        identity: Signs this peer's joins, and checks others' signatures.
        rounds: The open rounds, which go before all else.
        runs: The runs that the daemon takes part in, which share what means may be kept.
    """

    sessions: Sessions
    directory: Directory
    identity: Identity
    rounds: Rounds
    runs: Sized


def _message(header: bytes) -> wire.RoundMessage:
    return wire.decode(memoryview(header)[HEADER_PREFIX_BYTES:])
