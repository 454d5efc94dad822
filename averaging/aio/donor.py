"""What one daemon serves of a run: snapshots of its script's state, and means that others have missed."""

from __future__ import annotations

import asyncio

from equipoise.averaging.aio.round_driver import Shared
from equipoise.averaging.manifest import Manifest
from equipoise.averaging.matchmaking.messages import MAX_DETAIL_CHARS
from equipoise.averaging.ports import Directory
from equipoise.averaging.replication import messages
from equipoise.averaging.replication import transfer_events as events
from equipoise.averaging.replication.chunks import MAX_IMAGE_BYTES, Image, ImageId
from equipoise.averaging.replication.messages import Ask, Item, ToDonor, TransferMessage, encode
from equipoise.averaging.replication.server import Server
from equipoise.averaging.replication.update import EncodedMean
from equipoise.averaging.session.outbox import Frame
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.limits import Allowance, Candidate
from equipoise.tasks import Driver, TaskSet

TRANSFER_FRAME = b"T"
"""First byte of the header of every frame of a transfer; a message follows."""

KEPT_BYTES = 256 * 1024 * 1024
"""Most bytes of all means that a daemon keeps, but for the last of each run, which is kept whatever its size: two of
100 million int8 values. Runs share it alike."""

IMAGE_BYTES, FEW_MEANS = 12, 8
"""Bytes of a value in an image with Adam's two moments: a peer that lacks more bytes of means takes a snapshot, so no
more are kept. But `FEW_MEANS` are, for a snapshot has to be made first."""

ASKS_SECONDS, MAX_ASKS, MAX_ASKS_OF_ONE = 0.5, 64, 8
"""Bounds how many new questions are looked up in the directory, in so many seconds: in all, and of one peer. A peer
that catches up asks for one mean after another. A question that is dropped comes again a second later."""


def flow_of(ticket: bytes, peer: str) -> bytes:
    """Return the flow of one download between this peer and another."""
    return TRANSFER_FRAME + ticket + peer.encode()


async def mates_of(directory: Directory, spec: RunSpec, me: str) -> list[Candidate]:
    """The other peers of a run with the same spec."""
    return [one for one in await directory.peers(spec.name) if one.peer != me and one.spec == spec.hash]


class Donor:
    """Serves the state of one run, and the means that led to it."""

    def __init__(self, spec: RunSpec, shared: Shared) -> None:
        self._spec = spec
        self._shared = shared
        self._sessions = shared.sessions
        self._rounds = shared.rounds
        self._loop = asyncio.get_running_loop()
        self._server = Server()
        self._asks = Allowance(ASKS_SECONDS, MAX_ASKS, MAX_ASKS_OF_ONE)
        self._held: dict[bytes, Image] = {}
        self._means: dict[StateId, EncodedMean | ImageId] = {}
        self._flows: dict[str, bytes] = {}
        self._offering = asyncio.Lock()
        self._left = False
        self._tasks = TaskSet()
        self._driver = Driver(self._server, self._perform, lambda: events.RoundsSeen(shared.rounds.busy))

    @property
    def wanted(self) -> int | None:
        """Epoch of which a newcomer wants a snapshot."""
        return self._server.wanted

    @property
    def standing(self) -> str:
        """The state that is being served, and the reason, in one line; empty if none."""
        return self._server.standing

    @property
    def keeps(self) -> bool:
        """Whether a mean or a snapshot is kept."""
        return bool(self._means or self._held)

    @property
    def kept_bytes(self) -> int:
        """Bytes of all means and snapshots that are kept."""
        means = (mean.size for mean in self._means.values() if isinstance(mean, EncodedMean))
        return sum(means) + sum(image.name.size for image in self._held.values())

    def reach(self, epoch: int) -> None:
        """Note the epoch of this peer's trainer."""
        self._driver.tell(events.EpochReached(epoch))

    async def offer(self, state: StateId, image: memoryview) -> None:
        """Serve a snapshot, once its digest is known; it takes the place of the one before.

        Returns at once, unless the digest of the one before is still being computed: so a trainer that offers too often
        waits, and no images queue.

        The image's bytes must not change; they are kept until nobody downloads them any more.

        Raises:
            ValueError: It is empty, or larger than can be served.
        """
        if not 0 < len(image) <= MAX_IMAGE_BYTES:
            raise ValueError(f"expected an image of 1 to {MAX_IMAGE_BYTES} bytes, got {len(image)}")
        await self._offering.acquire()
        if self._left:
            self._offering.release()
            return
        self._driver.tell(events.SnapshotTaken(state))
        # Not within the task: a task that is cancelled before its first step runs no line of it.
        self._tasks.spawn(self._digest(state, image)).add_done_callback(lambda _: self._offering.release())

    def keep(self, mean: EncodedMean, age: float = 0.0) -> None:
        """Keep a mean for peers that missed it, if it leads on from a state; its round closed `age` seconds ago."""
        before = mean.before
        if before is not None and not self._left:
            self._drop(before)
            self._means[before] = mean
            useful = max(IMAGE_BYTES * self._spec.layout.size, FEW_MEANS * mean.size)
            most = min(KEPT_BYTES // max(len(self._shared.runs), 1), useful)
            self._driver.tell(events.MeanKept(before, mean.size, most, age))

    def begin(self, manifest: Manifest) -> None:
        """Note that a round of this run exchanges values here; the run driver calls `over` when it has ended."""
        if manifest.before is not None:
            self._driver.tell(events.RoundBegan(manifest.before))

    def over(self, outcome: object) -> None:
        """Note that the round of this run has ended."""
        self._driver.tell(events.RoundOver())

    async def image_of(self, after: StateId) -> memoryview | None:
        """The image of a mean that is kept here, if it is: this daemon was in the round without its script's state."""
        kept = self._means.get(after)
        if isinstance(kept, ImageId):
            return self._held[kept.digest].data
        return memoryview(await self._loop.run_in_executor(None, kept.image)) if kept else None

    def fetching(self, snapshot: bool) -> None:
        """Note whether this peer fetches a snapshot itself."""
        self._driver.tell(events.FetchChanged(snapshot))

    def retire(self) -> None:
        """Serve what is kept, and nothing new: the trainer has left."""
        self._driver.tell(events.TrainerLeft())

    def stop(self) -> None:
        """Serve nothing more."""
        self._left = True
        for flow in self._flows.values():
            self._sessions.leave(flow)
        self._tasks.cancel()
        self._driver.stop()
        self._held.clear()
        self._means.clear()

    def hear(self, peer: str, message: ToDonor) -> None:
        """Take a message of a newcomer."""
        if isinstance(message, Ask) and not self._looked_up(peer, message):
            if self._asks.admits(peer, self._loop.time()):
                self._tasks.spawn(self._on_ask(peer, message))
        else:
            self._driver.tell(events.RoundsSeen(self._rounds.busy))
            self._driver.tell(events.AskReceived(peer, message))

    def lost(self, peer: str, reason: str) -> None:
        """Note that a peer cannot be reached, and that frames to or from it are lost."""
        self._driver.tell(events.PeerLost(peer, reason))

    async def _digest(self, state: StateId, data: memoryview) -> None:
        image = await self._loop.run_in_executor(None, Image.of, data)
        self._held[image.name.digest] = image
        self._driver.tell(events.SnapshotReady(state, image.name))

    async def _make_image(self, before: StateId) -> None:
        mean = self._means.get(before)
        if not isinstance(mean, EncodedMean):
            return
        image = await self._loop.run_in_executor(None, lambda: Image.of(memoryview(mean.image())))
        if self._means.get(before) is not mean:
            return  # Another has taken its place, or none.
        self._means[before] = image.name
        self._held[image.name.digest] = image
        self._driver.tell(events.MeanReady(before, image.name))

    def _drop(self, before: StateId) -> None:
        kept = self._means.pop(before, None)
        if isinstance(kept, ImageId):
            self._held.pop(kept.digest, None)

    async def _on_ask(self, peer: str, ask: Ask) -> None:
        found = next(
            (
                one
                for one in await mates_of(self._shared.directory, self._spec, self._sessions.peer)
                if one.peer == peer
            ),
            None,
        )
        if found is None or ask.spec != self._spec.hash:
            who = "no peer of this run that is known here" if found is None else "of another spec of this run"
            self._post(peer, messages.Refusal(ask.run, ask.ticket, f"you are {who}"[:MAX_DETAIL_CHARS]))
            return
        if not self._looked_up(peer, ask):
            self._leave(peer)
            flow = self._flows[peer] = flow_of(ask.ticket, peer)
            self._sessions.enter(flow, {peer: found.credential})
        self._driver.tell(events.AskReceived(peer, ask))

    def _looked_up(self, peer: str, ask: Ask) -> bool:
        """True if this asker was found in the directory already, when it first asked for the same."""
        return ask.spec == self._spec.hash and self._flows.get(peer) == flow_of(ask.ticket, peer)

    def _perform(self, action: events.DonorAction) -> None:
        match action:
            case events.Send(peer, message):
                self._post(peer, message)
            case events.SendBody(peer, message):
                self._post_body(peer, message)
            case events.Release(image):
                self._held.pop(image.digest, None)
            case events.MakeImage(before):
                self._tasks.spawn(self._make_image(before))
            case events.Drop(before):
                self._drop(before)
            case events.Forget(peer):
                self._leave(peer)

    def _post(self, peer: str, message: TransferMessage) -> None:
        self._sessions.post(peer, TRANSFER_FRAME + encode(message))

    def _post_body(self, peer: str, message: Item) -> None:
        def sent() -> None:
            # This call takes its turn right after the body, so the server learns that the body has left.
            self._loop.call_soon(self._driver.tell, events.BodySent(peer, self._rounds.busy))

        flow = self._flows.get(peer, b"")
        self._sessions.post_bulk(peer, flow, lambda: self._make(message), late=True)
        self._sessions.post_bulk(peer, flow, sent, late=True)

    def _make(self, message: Item) -> Frame | None:
        image = self._held.get(message.digest)
        if image is None:
            return None
        body = image.data[image.name.span(message.item)] if message.item else image.digests
        return TRANSFER_FRAME + encode(message), body

    def _leave(self, peer: str) -> None:
        if flow := self._flows.pop(peer, None):
            self._sessions.leave(flow)
