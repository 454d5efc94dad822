"""A newcomer and its donors in virtual time: trainers that step, links with latency and bandwidth, faults from a seed.

The machines are the real ones; of an image there are only its name and its chunks' numbers. Donors step in lock-step,
but for some skew, look for wishes where a trainer would, and are killed, stopped, slow, liars or astray as the scenario
says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from blake3 import blake3

from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.replication import messages
from equipoise.averaging.replication import transfer_events as events
from equipoise.averaging.replication.answers import Request, Wish
from equipoise.averaging.replication.chunks import CHUNK_BYTES, ImageId
from equipoise.averaging.replication.client import Fetch
from equipoise.averaging.replication.server import KEPT_MEANS, Server
from equipoise.averaging.state import MAX_EPOCH, StateId
from simulator.core import Driver
from simulator.network import Network, Weather

RUN, SPEC = "sim/step", "5" * 64

MEAN = "mean"
"""Kind of the images of means."""

DIGEST_SECONDS_PER_CHUNK = 0.0002
"""BLAKE3 of one chunk, as measured."""

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
        proved: Whether they will know the mean by its digest.
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
    proved: bool = False
    timeout: float = 120.0


@dataclass
class Result:
    """What a newcomer came to.

    Attributes:
        ended_at: Seconds from its beginning.
        outcome: What the machine said at its end.
        image: The image that it had downloaded last.
        chunks: By chunk, whether what lies there is genuine.
    """

    ended_at: float
    outcome: FetchOutcome
    image: ImageId | None
    chunks: dict[int, bool] = field(default_factory=dict)


def state_of(epoch: int, kind: str = "") -> StateId:
    """The state of an epoch, or another one of that epoch."""
    return StateId(epoch, blake3(f"{kind}{epoch}".encode()).hexdigest())


def image_of(state: StateId, chunks: int, kind: str = "") -> ImageId:
    """The image of a state, or another one that a liar offers."""
    size = chunks * CHUNK_BYTES - 77
    return ImageId(blake3(kind.encode() + state.lineage.encode()).digest(), size)


class World(Network[str, "SimDonor | SimNewcomer"]):
    """Runs one scenario to its end.

    Attributes:
        donors: By name.
        newcomers: Those that have come so far, by name.
        results: What the newcomers came to, by name.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        least, most = scenario.latency
        super().__init__(Weather((least, least), jitter=most - least), Random(seed))
        self.scenario = scenario
        self.results: dict[str, Result] = {}
        self.donors = {f"donor{i}": SimDonor(self, f"donor{i}", t) for i, t in enumerate(scenario.donors)}
        self.newcomers: dict[str, SimNewcomer] = {}
        self.processes.update(self.donors)

    def run(self) -> dict[str, Result]:
        """Run until all newcomers have ended; return what they came to."""
        for name, donor in self.donors.items():
            begins, ends = donor.trouble.stopped
            self.at(0.0, donor.happen, False, donor.reach, 0)
            self.at(donor.trouble.killed_at, self.kill, name, NOTICE_SECONDS)
            self.at(begins, self.stop, name, ends - begins)
        self._step(1)
        for index in range(self.scenario.newcomers):
            self.at(2.0 + index * self.random.random(), self._come, f"new{index}")
        self.run_until(lambda: len(self.results) == self.scenario.newcomers)
        return self.results

    def settle(self, seconds: float) -> None:
        """Run on for some seconds, so that donors forget who has gone."""
        self.run_until(lambda: False, self.now + seconds)

    def _step(self, epoch: int) -> None:
        least, most = self.scenario.step
        ends = self.now + least + self.random.random() * (most - least)
        for donor in self.donors.values():
            skew = self.random.random() * self.scenario.skew
            self.at(ends + skew, donor.step, epoch)
            for look in range(self.scenario.looks):
                self.at(ends + skew + least * look / self.scenario.looks, donor.look)
            self.at(ends - 0.02, donor.reach, epoch - 1)
        self.at(ends, self._step, epoch + 1)

    def _come(self, name: str) -> None:
        newcomer = self.newcomers[name] = self.processes[name] = SimNewcomer(self, name)
        newcomer.look()


class SimDonor(Driver):
    """A donor's machine, its trainer and its link.

    Its trainer does nothing while the donor is stopped: the others go on without it.

    Attributes:
        snapshots: How many its trainer took.
        held: The images in its memory.
        most_held: How many at once at most.
        epoch: At which its trainer stands.
    """

    machine: Server

    def __init__(self, world: World, name: str, trouble: Trouble) -> None:
        super().__init__(world, Server(), events.Woke())
        self.trouble = trouble
        self.dead = trouble.absent
        self.snapshots = 0
        self.held: set[ImageId] = set()
        self.most_held = 0
        self.epoch = 0
        self._world = world
        self._name = name
        self._offered = -1
        self._free_at = 0.0

    @property
    def gone(self) -> bool:
        """Whether its record has expired."""
        begins, ends = self.trouble.stopped
        now = self._world.now
        return now >= self.trouble.killed_at + RECORD_SECONDS or begins + RECORD_SECONDS <= now < ends

    @property
    def _acts(self) -> bool:
        return not (self.dead or self.stopped)

    def reach(self, epoch: int) -> None:
        """Its trainer begins a round that leads from this epoch to the next."""
        if self._acts:
            self.tell(events.EpochReached(epoch))

    def step(self, epoch: int) -> None:
        """Its trainer has applied a mean."""
        if self._acts:
            before = self._state_of(self.epoch)
            self.epoch = epoch
            self.tell(events.EpochReached(epoch))
            size = self._world.scenario.chunks * CHUNK_BYTES
            self.tell(events.MeanKept(before, size, KEPT_MEANS * size))

    def look(self) -> None:
        """Its trainer looks whether a snapshot is wanted, and takes it."""
        wanted = self.machine.wanted
        if not self._acts or wanted is None or not wanted <= self.epoch or wanted <= self._offered:
            return
        if self.trouble.lies == "promise":
            return
        self._offered = self.epoch
        self.snapshots += 1
        state = self._state_of(self.epoch)
        image = image_of(state, self._world.scenario.chunks, self._lie)
        self.tell(events.SnapshotTaken(state))
        self.after(self._digest_seconds, self._ready, state, image)

    def _state_of(self, epoch: int) -> StateId:
        return state_of(epoch, "astray" if self.trouble.astray else "")

    @property
    def _lie(self) -> str:
        return self._name if self.trouble.lies in ("image", "silent") else ""

    @property
    def _digest_seconds(self) -> float:
        chunks = self._world.scenario.chunks
        return DIGEST_SECONDS_PER_CHUNK * chunks * (1 + self._world.random.random())

    def perform(self, action: events.DonorAction) -> None:
        """Do what the machine asks for."""
        match action:
            case events.Send(to, message):
                self._send(to, message)
            case events.SendBody(to, message):
                self._send_body(to, message)
            case events.Release(image):
                self.held.discard(image)
            case events.MakeImage(before):
                image = image_of(before, self._world.scenario.chunks, MEAN + self._lie)
                self.after(self._digest_seconds, self.tell, events.MeanReady(before, image))

    def _ready(self, state: StateId, image: ImageId) -> None:
        self.held.add(image)
        self.most_held = max(self.most_held, len(self.held) - 1)  # Whichever goes has not gone yet.
        self.tell(events.SnapshotReady(state, image))

    def _send(self, to: str, message: messages.TransferMessage) -> None:
        if isinstance(message, messages.Answer):
            message = self._bend(message)
        assert isinstance(message, messages.ToNewcomer)
        self._world.send(
            self._name, to, self._world.newcomers[to].tell, events.AnswerReceived(self._name, message)
        )

    def _bend(self, answer: messages.Answer) -> messages.Answer:
        match self.trouble.lies:
            case "epoch":
                return messages.Answer(answer.run, answer.ticket, MAX_EPOCH - 1, (), ())
            case "promise":
                return messages.Answer(answer.run, answer.ticket, answer.epoch, answer.noted or (1,), ())
        return answer

    def _send_body(self, to: str, message: messages.Item) -> None:
        if self.trouble.lies != "silent":
            self._free_at = max(self._free_at, self._world.now) + self._world.scenario.chunk
            self._world.at(self._free_at, self.happen, False, self._sent, to, message)

    def _sent(self, to: str, message: messages.Item) -> None:
        genuine = self._world.random.random() >= self.trouble.flips
        take = self._world.newcomers[to].take
        self._world.transmit(self._name, to, take, self._name, message, genuine, bulk=True)
        self.tell(events.BodySent(to, self._world.scenario.busy))


class SimNewcomer(Driver):
    """A newcomer's machine and its memory."""

    machine: Fetch

    def __init__(self, world: World, name: str) -> None:
        scenario = world.scenario
        present = max((donor.epoch for donor in world.donors.values() if not donor.dead), default=0)
        wish = Wish(
            present + scenario.at_least,
            scenario.chunks * CHUNK_BYTES,
            state_of(max(present - scenario.missed, 0)) if scenario.missed else None,
            frozenset(world.donors),
            proved=scenario.proved,
        )
        self.request = Request(RUN, SPEC, name.encode().ljust(8, b"."), wish)
        super().__init__(world, Fetch(self.request, world.now, scenario.timeout), events.Woke())
        self._world = world
        self._name = name
        self._began = world.now
        self._image: ImageId | None = None
        self._chunks: dict[int, bool] = {}

    def look(self) -> None:
        """Read the directory; the dead stay listed for a while."""
        if not self.machine.ended:
            donors = self._world.donors.items()
            self.tell(
                events.PeersSeen(tuple(name for name, one in donors if one.trouble.absent or not one.gone))
            )
            self.after(0.5, self.look)

    def perform(self, action: events.FetchAction) -> None:
        """Do what the machine asks for."""
        match action:
            case events.Send(to, message):
                assert isinstance(message, messages.ToDonor)
                ask = events.AskReceived(self._name, message)
                self._world.send(self._name, to, self._world.donors[to].tell, ask)
            case events.Allocate(image):
                self._image, self._chunks = image, {}
                self.after(0.01, self.tell, events.MemoryReady(image.size))
            case events.Finish(outcome):
                took = self._world.now - self._began
                self._world.results[self._name] = Result(took, outcome, self._image, self._chunks)

    def lose(self, other: str, reason: str) -> None:
        """The connection to a peer broke."""
        self.tell(events.PeerLost(other, reason))

    def take(self, peer: str, message: messages.Item, genuine: bool) -> None:
        """A body has come: as the driver does."""
        if self.machine.expects(peer, message):
            if genuine and message.item:
                self._chunks[message.item] = True
            self.tell(events.BodyReceived(peer, message, genuine))
