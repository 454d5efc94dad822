"""A newcomer and its donors in virtual time: trainers that step, links with latency and bandwidth, faults from a seed.

The machines are the real ones; of an image there are only its name and its chunks' numbers. Donors step in lock-step,
but for some skew, look for wishes where a trainer would, and are killed, stopped, slow, liars or astray as the scenario
says.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random

import msgspec
from blake3 import blake3

from equipoise.averaging.allreduce.messages import Commit, Decision
from equipoise.averaging.state import MAX_EPOCH, StateId
from equipoise.averaging.transfer.donor import Donor
from equipoise.averaging.transfer.events import (
    Allocate,
    AnswerReceived,
    AskReceived,
    BodySent,
    Check,
    Checked,
    ChunkReceived,
    DigestsReceived,
    DonorEvent,
    Drop,
    EpochReached,
    Fail,
    FetchEvent,
    Finish,
    MakeImage,
    MeanKept,
    MeanReady,
    MemoryReady,
    PeerLost,
    PeersSeen,
    Release,
    Send,
    SendBody,
    SnapshotReady,
    SnapshotTaken,
    Woke,
)
from equipoise.averaging.transfer.fetch import Fetch, Request
from equipoise.averaging.transfer.image import CHUNK_BYTES, ImageId
from equipoise.averaging.transfer.kept import KEPT_MEANS
from equipoise.averaging.transfer.messages import (
    Answer,
    Bulk,
    Chunk,
    Digests,
    ToDonor,
    ToNewcomer,
    TransferMessage,
)

RUN, SPEC = "sim/step", "5" * 64

MEAN = "mean"
"""Kind of the images of means."""

VOTES = Commit(0, Decision(0b11, 0b11), bytes(32), 0b11, ((0, b""), (1, b"")))
"""With every offer, a liar's too: here the image alone tells whether a mean is genuine."""

DIGEST_SECONDS_PER_CHUNK = 0.0002
"""BLAKE3 of one chunk, as measured."""

CHECK_SECONDS = 0.02
"""To check a mean's votes and decode it."""

RECORD_SECONDS = 15.0
"""How long the directory lists whoever says nothing any more."""

NOTICE_SECONDS = 0.5
"""How long until a connection to a dead peer is known to be broken, at most."""


@dataclass(frozen=True)
class Trouble:
    """What is wrong with one donor.

    Attributes:
        killed_at: When it is killed; never by default.
        stopped: From when to when it is stopped, as by SIGSTOP.
        flips: Share of its chunks of which a byte is changed.
        lies: How it lies: "" not at all, "image" offers another image, "silent" does so and gives nothing of it,
            "epoch" says it is far ahead, "promise" notes every wish and fulfils none.
        astray: Whether it holds another state than the others.
        absent: Whether it is in the directory, and does not answer at all.
    """

    killed_at: float = float("inf")
    stopped: tuple[float, float] = (float("inf"), float("inf"))
    flips: float = 0.0
    lies: str = ""
    astray: bool = False
    absent: bool = False

    @property
    def honest(self) -> bool:
        """Whether it holds the group's state, says so, and lives as long as it takes."""
        return not (self.flips or self.lies or self.astray or self.absent) and self.killed_at == float("inf")


@dataclass(frozen=True)
class Scenario:
    """One world.

    Attributes:
        donors: What is wrong with each.
        step: Seconds between two updates, the least and the most.
        looks: How many times in a step a trainer looks whether a snapshot is wanted.
        skew: Seconds by which donors' steps are apart at most.
        latency: Seconds that a frame takes, the least and the most.
        chunk: Seconds that a donor's link takes for a chunk.
        chunks: Of an image.
        busy: Whether rounds go on at the donors all the time.
        newcomers: How many fetch at the same time, nearly.
        at_least: How many epochs after the donors' present one is of use.
        missed: How many means newcomers have missed, of which they ask for the first; 0: they are after a snapshot.
        timeout: Of each fetch.
    """

    donors: tuple[Trouble, ...]
    step: tuple[float, float] = (0.5, 1.0)
    looks: int = 2
    skew: float = 0.05
    latency: tuple[float, float] = (0.001, 0.05)
    chunk: float = 0.005
    chunks: int = 40
    busy: bool = False
    newcomers: int = 1
    at_least: int = 1
    missed: int = 0
    timeout: float = 120.0


@dataclass
class Result:
    """What a newcomer came to.

    Attributes:
        ended_at: Seconds from its beginning.
        end: The machine's last action.
        chunks: By chunk, whether what lies there is genuine.
    """

    ended_at: float
    end: Finish | Fail
    chunks: dict[int, bool] = field(default_factory=dict)


def state_of(epoch: int, kind: str = "") -> StateId:
    """The state of an epoch, or another one of that epoch."""
    return StateId(epoch, blake3(f"{kind}{epoch}".encode()).hexdigest())


def image_of(state: StateId, chunks: int, kind: str = "") -> ImageId:
    """The image of a state, or another one that a liar offers."""
    size = chunks * CHUNK_BYTES - 77
    return ImageId(blake3(kind.encode() + state.lineage.encode()).digest(), size)


class World:
    """Runs one scenario to its end.

    Attributes:
        now: Virtual seconds.
        results: What the newcomers came to, by name.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.now = 0.0
        self.scenario = scenario
        self.random = Random(seed)
        self.results: dict[str, Result] = {}
        self.donors = {f"donor{i}": SimDonor(self, f"donor{i}", t) for i, t in enumerate(scenario.donors)}
        self.newcomers: dict[str, SimNewcomer] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._last: dict[tuple[str, str, bool], float] = {}

    def at(self, time: float, what: Callable[[], None]) -> None:
        """Do something at a time."""
        if time != float("inf"):
            heapq.heappush(self._queue, (max(time, self.now), next(self._order), what))

    def run(self) -> dict[str, Result]:
        """Run until all newcomers have ended; return what they came to."""
        self._begin_training()
        for index in range(self.scenario.newcomers):
            name = f"new{index}"
            self.at(2.0 + index * self.random.random(), partial(self._come, name))
        while len(self.results) < self.scenario.newcomers:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        return self.results

    def settle(self, seconds: float) -> None:
        """Run on for some seconds, so that donors forget who has gone."""
        until = self.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until

    def carry(self, sender: str, to: str, bulk: bool, deliver: Callable[[], None]) -> None:
        """A frame arrives some time later, in order; not if either end is dead by then."""
        least, most = self.scenario.latency
        arrives = self.now + least + self.random.random() * (most - least)
        arrives = self._last[sender, to, bulk] = max(arrives, self._last.get((sender, to, bulk), 0.0))
        self.at(arrives, lambda: self._arrive(sender, to, deliver))

    def _arrive(self, sender: str, to: str, deliver: Callable[[], None]) -> None:
        donor = self.donors.get(to)
        if donor is not None and not donor.alive:
            newcomer = self.newcomers.get(sender)
            if newcomer is not None:
                newcomer.lose(to)
        elif donor is not None and donor.stopped:
            self.at(donor.trouble.stopped[1], lambda: self._arrive(sender, to, deliver))
        else:
            deliver()

    def _begin_training(self) -> None:
        for donor in self.donors.values():
            if not donor.trouble.absent:
                self.at(0.0, donor.begin)
            self.at(donor.trouble.killed_at, donor.die)
        self._step(1)

    def _step(self, epoch: int) -> None:
        least, most = self.scenario.step
        ends = self.now + least + self.random.random() * (most - least)
        for donor in self.donors.values():
            skew = self.random.random() * self.scenario.skew
            self.at(ends + skew, partial(donor.step, epoch))
            for look in range(self.scenario.looks):
                at = ends + skew + least * look / self.scenario.looks
                self.at(at, donor.look)
            self.at(ends - 0.02, partial(donor.reach, epoch - 1))
        self.at(ends, lambda: self._step(epoch + 1))

    def _come(self, name: str) -> None:
        self.newcomers[name] = SimNewcomer(self, name)
        self.newcomers[name].look()


class SimDonor:
    """A donor's machine, its trainer and its link.

    Attributes:
        snapshots: How many its trainer took.
        held: The images in its memory.
        most_held: How many at once at most.
    """

    def __init__(self, world: World, name: str, trouble: Trouble) -> None:
        self.trouble = trouble
        self.machine = Donor()
        self.alive = not trouble.absent
        self.snapshots = 0
        self.held: set[ImageId] = set()
        self.most_held = 0
        self._world = world
        self._name = name
        self._epoch = 0
        self._offered = -1
        self._free_at = 0.0
        self._waking = float("inf")

    @property
    def stopped(self) -> bool:
        """Whether it is stopped now."""
        begins, ends = self.trouble.stopped
        return begins <= self._world.now < ends

    @property
    def gone(self) -> bool:
        """Whether its record has expired."""
        begins, ends = self.trouble.stopped
        now = self._world.now
        return now >= self.trouble.killed_at + RECORD_SECONDS or begins + RECORD_SECONDS <= now < ends

    @property
    def _acts(self) -> bool:
        return self.alive and not self.stopped

    def begin(self) -> None:
        """Its trainer stands at the first epoch."""
        self.tell(EpochReached(0))

    def reach(self, epoch: int) -> None:
        """Its trainer begins a round that leads from this epoch to the next."""
        if self._acts:
            self.tell(EpochReached(epoch))

    def step(self, epoch: int) -> None:
        """Its trainer has applied a mean."""
        if self._acts:
            before = self._state_of(self._epoch)
            self._epoch = epoch
            self.tell(EpochReached(epoch))
            size = self._world.scenario.chunks * CHUNK_BYTES
            self.tell(MeanKept(before, size, KEPT_MEANS * size))

    def look(self) -> None:
        """Its trainer looks whether a snapshot is wanted, and takes it."""
        wanted = self.machine.wanted
        if not self._acts or wanted is None or not wanted <= self._epoch or wanted <= self._offered:
            return
        if self.trouble.lies == "promise":
            return
        self._offered = self._epoch
        self.snapshots += 1
        state = self._state_of(self._epoch)
        image = image_of(state, self._world.scenario.chunks, self._lie)
        self.tell(SnapshotTaken(state))
        self._world.at(self._digested_at, lambda: self._ready(state, image))

    def _make_image(self, before: StateId) -> None:
        image = image_of(before, self._world.scenario.chunks, MEAN + self._lie)
        self._world.at(self._digested_at, lambda: self._mean_ready(before, image))

    def _mean_ready(self, before: StateId, image: ImageId) -> None:
        if self._acts:
            self.tell(MeanReady(before, image))

    def _state_of(self, epoch: int) -> StateId:
        return state_of(epoch, "astray" if self.trouble.astray else "")

    @property
    def _lie(self) -> str:
        return self._name if self.trouble.lies in ("image", "silent") else ""

    @property
    def _digested_at(self) -> float:
        chunks = self._world.scenario.chunks
        return self._world.now + DIGEST_SECONDS_PER_CHUNK * chunks * (1 + self._world.random.random())

    def die(self) -> None:
        """As by SIGKILL."""
        self.alive = False
        for newcomer in self._world.newcomers.values():
            notice = self._world.now + self._world.random.random() * NOTICE_SECONDS
            self._world.at(notice, partial(newcomer.lose, self._name))

    def tell(self, event: DonorEvent) -> None:
        """Hand an event to the machine, and do what it says."""
        for action in self.machine.handle(event, self._world.now):
            match action:
                case Send(to, message):
                    self._send(to, message)
                case SendBody(to, message):
                    self._send_body(to, message)
                case Release(image):
                    self.held.discard(image)
                case MakeImage(before):
                    self._make_image(before)
                case Drop():
                    pass
        if self.machine.deadline < self._waking:
            self._waking = self.machine.deadline
            self._world.at(self._waking, self._wake)

    def _wake(self) -> None:
        self._waking = float("inf")
        if self.alive:
            self.tell(Woke())

    def _ready(self, state: StateId, image: ImageId) -> None:
        if self._acts:
            self.held.add(image)
            self.most_held = max(self.most_held, len(self.held) - 1)  # Whichever goes has not gone yet.
            self.tell(SnapshotReady(state, image))

    def _send(self, to: str, message: TransferMessage) -> None:
        if isinstance(message, Answer):
            message = self._bend(message)
        assert isinstance(message, ToNewcomer)
        newcomer = self._world.newcomers[to]
        event = AnswerReceived(self._name, message)
        self._world.carry(self._name, to, False, lambda: newcomer.tell(event))

    def _bend(self, answer: Answer) -> Answer:
        answer = msgspec.structs.replace(answer, proof=VOTES if answer.offers else None)
        match self.trouble.lies:
            case "epoch":
                return Answer(answer.run, answer.ticket, MAX_EPOCH - 1, (), ())
            case "promise":
                return Answer(answer.run, answer.ticket, answer.epoch, answer.noted or (1,), ())
        return answer

    def _send_body(self, to: str, message: Bulk) -> None:
        if self.trouble.lies == "silent":
            return
        begins = max(self._free_at, self._world.now)
        self._free_at = begins + self._world.scenario.chunk
        self._world.at(self._free_at, lambda: self._sent(to, message))

    def _sent(self, to: str, message: Bulk) -> None:
        if self.stopped:
            self._world.at(self.trouble.stopped[1], lambda: self._sent(to, message))
        elif self.alive:
            newcomer = self._world.newcomers[to]
            genuine = self._world.random.random() >= self.trouble.flips
            self._world.carry(self._name, to, True, lambda: newcomer.take(self._name, message, genuine))
            self.tell(BodySent(to, self._world.scenario.busy))


class SimNewcomer:
    """A newcomer's machine and its memory."""

    def __init__(self, world: World, name: str) -> None:
        scenario = world.scenario
        present = max((donor._epoch for donor in world.donors.values() if donor.alive), default=0)
        request = Request(
            RUN,
            SPEC,
            name.encode().ljust(8, b"."),
            present + scenario.at_least,
            scenario.chunks * CHUNK_BYTES,
            state_of(max(present - scenario.missed, 0)) if scenario.missed else None,
            frozenset(world.donors),
        )
        self.request = request
        self._world = world
        self._name = name
        self._began = world.now
        self._machine = Fetch(request, world.now, scenario.timeout)
        self._image: ImageId | None = None
        self._chunks: dict[int, bool] = {}
        self._waking = float("inf")

    def look(self) -> None:
        """Read the directory; the dead stay listed for a while."""
        if not self._machine.ended:
            self.tell(PeersSeen(tuple(self._listed())))
            self._world.at(self._world.now + 0.5, self.look)

    def tell(self, event: FetchEvent) -> None:
        """Hand an event to the machine, and do what it says."""
        for action in self._machine.handle(event, self._world.now):
            match action:
                case Send(to, message):
                    self._send(to, message)
                case Allocate(image):
                    self._image, self._chunks = image, {}
                    self._world.at(self._world.now + 0.01, partial(self.tell, MemoryReady(image.size)))
                case Check():
                    self._world.at(self._world.now + CHECK_SECONDS, partial(self.tell, self._look()))
                case Finish() | Fail():
                    took = self._world.now - self._began
                    self._world.results[self._name] = Result(took, action, self._chunks)
        if self._machine.deadline < self._waking:
            self._waking = self._machine.deadline
            self._world.at(self._waking, self._wake)

    def _wake(self) -> None:
        self._waking = float("inf")
        self.tell(Woke())

    def lose(self, peer: str) -> None:
        """The connection to a peer broke."""
        self.tell(PeerLost(peer, "connection reset", False))

    def take(self, peer: str, message: Bulk, genuine: bool) -> None:
        """A body has come: as the driver does."""
        if self._image is None or not self._machine.expects(peer, message):
            return
        if isinstance(message, Digests):
            self.tell(DigestsReceived(peer, self._image, genuine))
        elif isinstance(message, Chunk):
            if genuine:
                self._chunks[message.chunk] = True
            self.tell(ChunkReceived(peer, self._image, message.chunk, genuine))

    def _look(self) -> Checked:
        """Votes tell a mean that the group came to from any other."""
        after = self.request.after
        assert after is not None, "it is after a mean"
        genuine = self._image == image_of(after, self._world.scenario.chunks, MEAN)
        return Checked("" if genuine else "it is made up")

    def _listed(self) -> Iterable[str]:
        return (name for name, donor in self._world.donors.items() if donor.trouble.absent or not donor.gone)

    def _send(self, to: str, message: TransferMessage) -> None:
        assert isinstance(message, ToDonor)
        donor = self._world.donors[to]
        self._world.carry(self._name, to, False, lambda: donor.tell(AskReceived(self._name, message)))
