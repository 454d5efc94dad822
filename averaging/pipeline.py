"""One peer of a pipeline, as a machine: a model is cut into stages, and micro-batches pass through them and back.

Theory of operation
===================

Peers of stage 0 own data. An update is a batch of each of them, cut into micro-batches. A micro-batch goes from stage
to stage, to the replica that should have it done first, and its gradient comes back the same way (GPipe, Huang 2018,
1811.06965; one forward, one back: PipeDream, Harlap 2018, 1806.03377). A peer *counts* one whose pass back is done.

Updates go from the front to the back. Stage 0 makes its update when all its replicas have counted what is theirs: those
are the micro-batches of the update. Each other stage makes it after the stage before, when its replicas have counted
exactly those, each once. Their weights in the stage's round are shares of the batch, which sum to 1, or the round
fails. So the stages behind one that has an update before it hold the parameters of before, and can do anything again.

A peer keeps what it has sent on until the next stage has made the update. If the receiver dies, it sends that to
another replica, also what the dead one had counted: its gradients died with it. The other first asks the peers of the
next stage. The one that has the micro-batch counts it no second time, and sends the gradient from memory. If two have
counted one micro-batch, since one was taken for dead, the later one by name drops its gradients of the update: it
begins a new *life*, and is sent all again. All that peers tell of themselves, they tell by a `Stand`.

If a peer dies after its stage's update, and one of the next stage before its own, what the first had passed to the
second is gone. When nothing has moved for `LOST_SECONDS`, the stage makes the update without it, and says so. The
stages behind do the same. A micro-batch that is done again draws other dropout masks.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import msgspec

from equipoise.averaging.metrics import Finite

MAX_STAGES = 64

MAX_BATCHES = 4096
"""Most micro-batches of an update, and most that one peer holds."""

LOST_SECONDS = 30.0
"""Time without progress after which micro-batches are lost that no peer has any more."""

NOBODY_SECONDS = 60.0
"""Time without any peer of a stage after which the others give up."""

FRESH = 0.3
"""Weight of the last micro-batch in the pace of a replica."""

Id = Annotated[str, msgspec.Meta(max_length=96)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Sizes = Annotated[dict[Id, Size], msgspec.Meta(max_length=MAX_BATCHES)]
Mark = tuple[int, str]
"""The number of an update, and the id of one of its micro-batches."""


class Stand(msgspec.Struct, frozen=True, tag=True):
    """Where a peer stands.

    Attributes:
        stage: The stage that it holds; -1 before it has chosen one.
        life: Another number means that it has nothing of what it was sent before.
        epoch: The update that it works for; -1 before it has the stage's parameters.
        counted: For its own stage, once it counts nothing more by itself: samples by micro-batch.
        closed: For the next stage: the micro-batches of the update before; None if it has not made that itself.
        speed: Samples that it computes in a second, roughly; 0 before it has.
    """

    stage: Annotated[int, msgspec.Meta(ge=-1, lt=MAX_STAGES)]
    life: Number
    epoch: Annotated[int, msgspec.Meta(ge=-1, le=2**53)] = -1
    counted: Sizes = {}
    closed: Sizes | None = None
    speed: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0


class Forward(msgspec.Struct, frozen=True, tag=True):
    """A micro-batch of so many samples for a life of the receiver; without tensors, asks whether that has it.

    If it comes `again`, another peer may have passed it on before.
    """

    epoch: Number
    id: Id
    size: Size
    life: Number
    again: bool = False


class Backward(msgspec.Struct, frozen=True, tag=True):
    """The gradient of a micro-batch's input, and its mean loss."""

    epoch: Number
    id: Id
    loss: Finite


class Lacks(msgspec.Struct, frozen=True, tag=True):
    """The sender has not the micro-batch that it was asked for."""

    epoch: Number
    id: Id


Note = Stand | Forward | Backward | Lacks


class Began(msgspec.Struct, frozen=True):
    """The script wants the next update, for its micro-batches of so many samples; the parameters have had `epoch`."""

    epoch: int
    sizes: tuple[int, ...] = ()


class Heard(msgspec.Struct, frozen=True):
    """A message of a peer, and whether it has its tensors."""

    peer: str
    note: Note
    whole: bool = False


class Looked(msgspec.Struct, frozen=True):
    """The other live peers; told several times a second."""

    members: frozenset[str]


class Computed(msgspec.Struct, frozen=True):
    """A job is done, in so many seconds; `loss` is the mean loss of the micro-batch, at the last stage."""

    job: Job
    loss: float = 0.0
    seconds: float = 0.0


class Updated(msgspec.Struct, frozen=True):
    """This peer's parameters have had so many updates now."""

    epoch: int


class Send(msgspec.Struct, frozen=True):
    """Send a message, with the tensors that are held under a mark: of `out` and `target`, or `gradient`."""

    peer: str
    note: Note
    mark: Mark | None = None


class Failed(msgspec.Struct, frozen=True):
    """This did not arrive, as far as this peer knows: its receiver has no room, or is just starting."""

    send: Send


class Keep(msgspec.Struct, frozen=True):
    """Hold the tensors of the message that is being heard."""

    mark: Mark


class Forget(msgspec.Struct, frozen=True):
    """Hold nothing under a mark any more."""

    mark: Mark


class Drop(msgspec.Struct, frozen=True):
    """Forget all gradients of this update."""


class Finish(msgspec.Struct, frozen=True):
    """The update is made; its mean loss, as far as this peer has counted, and what was lost, if anything."""

    loss: float
    told: str


class Fail(msgspec.Struct, frozen=True):
    """Nothing more can come."""

    reason: str


class Job(NamedTuple):
    """A pass to compute, forward or back."""

    mark: Mark
    forward: bool


Event = Began | Heard | Looked | Computed | Updated | Failed
Action = Send | Keep | Forget | Drop | Finish | Fail
Phase = Literal["here", "away", "back", "counted"]


@dataclass
class Item:
    """A micro-batch that this peer holds.

    Attributes:
        size: Samples.
        source: The peer that wants the gradient; empty for this one.
        again: Whether a peer of the next stage may have it by another sender, or an earlier one.
        target: The peer of the next stage that has it; empty while it is to be sent.
        waits: Peers that may have it, and have not said that they do not; None before they are asked.
        sent_at: The time at which it was sent last.
    """

    size: int
    source: str
    again: bool = False
    phase: Phase = "here"
    loss: float = 0.0
    target: str = ""
    waits: set[str] | None = None
    sent_at: float = 0.0


@dataclass
class Update:
    """The update that a peer works for.

    Attributes:
        epoch: Its number; -1 before the peer has the stage's parameters.
        begun: Whether the script has asked for it.
        moved_at: When something of it has happened last.
        counted: Samples by micro-batch.
        given: The micro-batches that the stage before has closed.
        whole: The micro-batches that this stage closes.
        share: The weight of this peer's gradients, which are to be averaged now; None while they are not.
        told: The micro-batches that are lost, if any.
        closed: Those of the update before, if this peer knows them.
        speed: Samples that it has computed in a second.
    """

    epoch: int
    begun: bool = False
    moved_at: float = 0.0
    counted: dict[str, int] = field(default_factory=dict)
    losses: float = 0.0
    seconds: float = 0.0
    given: Mapping[str, int] | None = None
    whole: Mapping[str, int] | None = None
    share: float | None = None
    told: str = ""
    closed: Mapping[str, int] | None = None
    speed: float = 0.0


class Stage:
    """One peer of a stage.

    Attributes:
        at: The stage.
        stands: What the others have told of themselves.
        members: The other live peers.
        update: The update that this peer works for.
    """

    deadline = math.inf  # It looks at the time with each `Looked`.

    def __init__(self, me: str, at: int, of: int, life: int, back_first: bool) -> None:
        """`me` holds stage `at` of `of`; `back_first` is one forward, one back."""
        self.me, self.at, self._of, self._back_first = me, at, of, back_first
        self._life = life
        self.stands: dict[str, Stand] = {}
        self.members: frozenset[str] = frozenset()
        self._told: dict[str, Stand] = {}
        self._seen_at: dict[int, float] = {}
        self._paces: dict[str, tuple[float, float]] = {}
        self._items: dict[Mark, Item] = {}
        self.update = Update(-1)
        self._actions: list[Action] = []

    @property
    def samples(self) -> int:
        """Samples behind this peer's gradients."""
        return sum(self.update.counted.values())

    @property
    def is_last(self) -> bool:
        """Whether this peer holds the last stage."""
        return self.at == self._of - 1

    @property
    def siblings(self) -> tuple[str, ...]:
        """The other peers of this stage."""
        return tuple(self._of_stage(self.at, -1))

    @property
    def passed_on(self) -> bool:
        """Whether the next stage has made all updates that this one has."""
        return self.is_last or self._next >= self.update.epoch

    @property
    def job(self) -> Job | None:
        """What to compute next."""
        update = self.update
        if not update.begun or update.share is not None:
            return None
        ours = [(mark, item) for mark, item in self._items.items() if mark[0] == update.epoch]
        back = next((Job(mark, False) for mark, item in ours if item.phase == "back"), None)
        ahead = next((Job(mark, True) for mark, item in ours if item.phase == "here"), None)
        if self._back_first and sum(item.phase == "away" for _, item in ours) >= self._window:
            ahead = None
        return back or ahead if self._back_first else ahead or back

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in an event; return what is to be done, in order."""
        match event:
            case Began(epoch, sizes):
                self._begin(epoch, sizes, now)
            case Heard(peer, note, whole):
                self._hear(peer, note, whole, now)
            case Looked(members):
                self._look(members)
            case Computed(job, loss, seconds):
                self.update.seconds += seconds
                self._computed(job, loss, now)
            case Updated(epoch):
                self._updated(epoch, now)
            case Failed(Send(peer, Stand())):
                self._told.pop(peer, None)
            case Failed(send) if self._is_of_use(send):
                self._actions.append(send)
        self._advance(now)
        actions, self._actions = self._actions, []
        return actions

    # ---- taking in ----

    def _begin(self, epoch: int, sizes: tuple[int, ...], now: float) -> None:
        if epoch != self.update.epoch:
            self._updated(epoch, now)
        self.update.begun, self.update.moved_at = True, now
        self._seen_at = dict.fromkeys(range(self._of), now)
        for index, size in enumerate(sizes if self.at == 0 else ()):
            self._items[epoch, f"{self.me}/{index}"] = Item(size, "")

    def _look(self, members: frozenset[str]) -> None:
        gone, self.members = self.members - members, members
        for peer in gone:
            self.stands.pop(peer, None)
            self._told.pop(peer, None)
            self._release(peer)

    def _hear(self, peer: str, note: Note, whole: bool, now: float) -> None:
        if isinstance(note, Stand):
            self._hear_stand(peer, note)
            return
        mark = (note.epoch, note.id)
        item, stage = self._items.get(mark), self.stands[peer].stage if peer in self.stands else -1
        match note:
            case Forward() if stage == self.at - 1:
                self._hear_forward(peer, note, whole, item)
            case Backward(loss=loss) if item is not None and peer in (item.target, *(item.waits or ())):
                item.target, item.waits = peer, set()
                if whole and item.phase == "away":
                    item.phase, item.loss = "back", loss
                    self._actions.append(Keep(mark))
                    self._measure(peer, item, now)
            case Lacks() if item is not None and item.waits is not None:
                item.waits.discard(peer)
        self.update.moved_at = now if note.epoch == self.update.epoch else self.update.moved_at

    def _hear_stand(self, peer: str, note: Stand) -> None:
        before, self.stands[peer] = self.stands.get(peer), note
        if before is None or before.life != note.life:
            self._release(peer)
            self._told.pop(peer, None)  # It may have been started again since it was told.

    def _hear_forward(self, peer: str, note: Forward, whole: bool, item: Item | None) -> None:
        mark = (note.epoch, note.id)
        if note.epoch < self.update.epoch or note.life != self._life:
            return
        if item is not None:
            item.source = peer
            if item.phase == "counted":
                self._answer(mark, item)
        elif not whole:
            self._send(peer, Lacks(*mark))
        elif len(self._items) < MAX_BATCHES:
            self._items[mark] = Item(note.size, peer, note.again)
            self._actions.append(Keep(mark))

    def _computed(self, job: Job, loss: float, now: float) -> None:
        item, update = self._items[job.mark], self.update
        update.moved_at = now
        if job.forward:
            item.phase, item.loss = ("back", loss) if self.is_last else ("away", item.loss)
            return
        item.phase = "counted"
        update.counted[job.mark[1]] = item.size
        update.losses += item.loss * item.size
        if item.source:
            self._answer(job.mark, item)

    def _updated(self, epoch: int, now: float) -> None:
        before, samples = self.update, self.samples
        closed = before.whole if epoch == before.epoch + 1 else None
        speed = float(f"{samples / before.seconds:.1g}") if samples and before.seconds else before.speed
        self.update = Update(epoch, moved_at=now, closed=closed, speed=speed)
        for mark, item in list(self._items.items()):
            of_next = item.phase == "counted" and mark[1] in (closed or ()) and not self.is_last
            if mark[0] < epoch and not of_next:
                self._forget(mark)
        if before.begun:
            loss = before.losses / samples if samples else math.nan
            self._actions.append(Finish(loss, before.told))

    def _measure(self, peer: str, item: Item, now: float) -> None:
        """Take from a gradient how long a replica takes for a sample."""
        pace, returned_at = self._paces.get(peer, (None, 0.0))
        took = (now - max(item.sent_at, returned_at)) / item.size
        self._paces[peer] = (took if pace is None else pace + FRESH * (took - pace)), now

    # ---- what is due ----

    def _advance(self, now: float) -> None:
        if not self.is_last:
            self._send_on(now)
        self._judge(now)
        for peer in sorted(self.members | self.stands.keys()):
            if self._told.get(peer) != (stand := self._stand_for(peer)):
                self._told[peer] = stand
                self._send(peer, stand)
        self._require_stages(now)

    def _is_of_use(self, send: Send) -> bool:
        """Whether a message that did not arrive, and is no `Stand`, is to be sent again."""
        assert not isinstance(send.note, Stand), "that is told anew"
        item = self._items.get((send.note.epoch, send.note.id))
        wanted = item is not None and send.peer in (item.target, item.source, *(item.waits or ()))
        return send.peer in self.members and (wanted or isinstance(send.note, Lacks))

    def _send_on(self, now: float) -> None:
        """Send on what has been computed, and forget what the next stage has no use for any more."""
        ahead, done = self._of_stage(self.at + 1, 0), self._next
        for mark, item in list(self._items.items()):
            if mark[0] < min(done, self.update.epoch):
                self._forget(mark)
            if item.phase not in ("away", "counted") or item.target or mark[0] < done or not ahead:
                continue
            if item.again and item.waits is None:
                item.waits = set(ahead)
                for peer, stand in ahead.items():
                    self._send(peer, Forward(*mark, item.size, stand.life, again=True))
            able = [peer for peer, stand in ahead.items() if stand.epoch >= mark[0] - 1]
            if not item.waits and able:
                item.target, item.sent_at = self._fastest(able, item.size), now
                note = Forward(*mark, item.size, ahead[item.target].life, item.again)
                self._actions.append(Send(item.target, note, mark))

    def _fastest(self, peers: list[str], size: int) -> str:
        """The peer that should have so many samples more done first, by what it has and its pace."""
        load = Counter[str]()
        for item in self._items.values():
            load[item.target] += item.size if item.phase == "away" else 0
        known = {peer: self._paces[peer][0] for peer in peers if peer in self._paces}
        pace = {peer: known.get(peer, min(known.values(), default=1.0)) for peer in peers}
        order = {
            peer: zlib.crc32((self.me + peer).encode()) for peer in peers
        }  # Others begin with another one.
        return min(peers, key=lambda peer: ((load[peer] + size) * pace[peer], order[peer]))

    def _judge(self, now: float) -> None:
        """See whether this stage has all of the update."""
        update = self.update
        for one in self._of_stage(self.at - 1, self.update.epoch + 1).values():
            if update.given is None and one.epoch == self.update.epoch + 1:
                update.given = one.closed
        for one in self._of_stage(self.at, self.update.epoch).values():
            if update.closed is None and one.epoch == self.update.epoch:
                update.closed = one.closed
        whole = self._whole(now) if update.begun else None
        if whole is None:
            update.share = None
        else:
            samples, update.whole = sum(whole.values()), whole
            update.share = self.samples / samples if samples else 1 / (1 + len(self.siblings))

    def _whole(self, now: float) -> Mapping[str, int] | None:
        """The micro-batches that this stage has counted, if they are all and each once; else None."""
        update = self.update
        others = self._of_stage(self.at, self.update.epoch - 1)
        union = update.counted | {
            id: size
            for one in others.values()
            if one.epoch == self.update.epoch
            for id, size in one.counted.items()
        }
        if self.at == 0:
            late = any(one.epoch != self.update.epoch or not one.counted for one in others.values())
            return None if late or not self._counts_all else union
        stuck = now >= update.moved_at + LOST_SECONDS and bool(
            self._of_stage(self.at - 1, self.update.epoch + 1)
        )
        if update.given is None and not stuck:
            return None
        given = union if update.given is None else update.given
        here = [(peer, one.counted) for peer, one in others.items() if one.epoch == self.update.epoch]
        twice = [peer for peer, counted in here if counted.keys() & update.counted.keys()]
        if update.counted.keys() - given.keys() or any(peer < self.me for peer in twice):
            self._drop(now)
            return None
        lost = sorted(given.keys() - union.keys())
        if twice or union.keys() - given.keys() or (lost and not stuck):
            return None  # Others drop what they have counted, or count more.
        if lost or update.given is None:
            update.given, some = union, f"as {lost[0]}" if lost else "and nobody knows which"
            update.told = f"{len(lost) or 'some'} of its micro-batches are lost, {some}"
        return union

    @property
    def _counts_all(self) -> bool:
        """Whether this peer of stage 0 has counted its whole batch."""
        return all(
            item.phase == "counted" for mark, item in self._items.items() if mark[0] == self.update.epoch
        )

    def _drop(self, now: float) -> None:
        """Begin a new life without the gradients of this update, and without all that this peer was sent."""
        self.update.counted, self.update.losses, self.update.moved_at = {}, 0.0, now
        self._life += 1
        for mark in [mark for mark in self._items if mark[0] >= self.update.epoch]:
            self._forget(mark)
        self._actions.append(Drop())

    def _release(self, peer: str) -> None:
        """Have all that a peer has got from here sent again, and wait for no answer of it."""
        self._paces.pop(peer, None)
        for item in self._items.values():
            (item.waits or set()).discard(peer)
            if item.target == peer:
                item.target, item.again, item.waits = "", True, set()

    def _require_stages(self, now: float) -> None:
        """Give up when a stage has had no peer for too long."""
        for stage in range(self._of):
            if stage == self.at or self._of_stage(stage, -1) or not self.update.begun:
                self._seen_at[stage] = now
        empty = [str(stage) for stage, at in sorted(self._seen_at.items()) if now >= at + NOBODY_SECONDS]
        if empty and self.update.begun:
            self._actions.append(Fail(f"no peer holds stage {' or '.join(empty)}"))
            self._seen_at = dict.fromkeys(range(self._of), now)

    # ---- small things ----

    def _of_stage(self, stage: int, epoch: int) -> dict[str, Stand]:
        return {one: it for one, it in self.stands.items() if it.stage == stage and it.epoch >= epoch}

    @property
    def _next(self) -> int:
        """The most updates that a peer of the next stage has made."""
        return max((one.epoch for one in self._of_stage(self.at + 1, 0).values()), default=0)

    @property
    def _window(self) -> int:
        """Most micro-batches that are away at once with one forward, one back: one for each stage from here on."""
        widest = max((len(self._of_stage(stage, 0)) for stage in range(self.at + 1, self._of)), default=1)
        return (self._of - self.at) * max(math.ceil(widest / (1 + len(self.siblings))), 1)

    def _stand_for(self, peer: str) -> Stand:
        """What to tell a peer: micro-batches to whom they matter, and to peers of far stages no number of an update."""
        update, stage = self.update, self.stands[peer].stage if peer in self.stands else -2
        settled = self._counts_all if self.at == 0 else update.given is not None
        return Stand(
            self.at,
            self._life,
            update.epoch if abs(stage - self.at) <= 1 else min(update.epoch, 0),
            dict(update.counted) if stage == self.at and settled else {},
            dict(update.closed) if update.closed is not None and stage in (self.at, self.at + 1) else None,
            update.speed,
        )

    def _answer(self, mark: Mark, item: Item) -> None:
        self._actions.append(Send(item.source, Backward(*mark, item.loss), mark))

    def _forget(self, mark: Mark) -> None:
        del self._items[mark]
        self._actions.append(Forget(mark))

    def _send(self, peer: str, note: Note) -> None:
        self._actions.append(Send(peer, note))


def throughputs(stands: Mapping[str, Stand], of: int) -> list[float]:
    """Samples a second that each of `of` stages computes, then those of a usual peer: 1.0 if no speed is known.

    A peer that has not told its speed counts as a usual one.
    """
    held = [[one.speed for one in stands.values() if one.stage == stage] for stage in range(of)]
    known = [speed for speeds in held for speed in speeds if speed]
    usual = sum(known) / len(known) if known else 1.0
    return [*(sum(speed or usual for speed in speeds) for speeds in held), usual]


def vacancy(throughputs: Sequence[float], rank: int) -> int:
    """The stage that a peer without one takes, if `rank` peers choose before it.

    Each takes the stage with the least throughput, of several the first one, and adds that of a usual peer.
    """
    *held, usual = throughputs
    for _ in range(rank):
        held[held.index(min(held))] += usual
    return held.index(min(held))
