"""Keeper: the machine of the shards that one peer holds, as their owner or as a copy.

```
missing --State--> whole: as the owner, applies pushes; as a copy, applies what the owner applies
   ^                 |
   +---- the next view, unless no member of it has a later state of the shard
```

The owner applies a push once, by its worker and number, and has the copies apply it too. It answers a push, and a
pull, when all copies have the version that it made, or saw. So a holder that becomes the owner has all that was ever
acknowledged or read, and no reader sees a version go back. A member that has the latest state sends it to the owner,
and the owner to copies. Messages of one sender keep their order: what comes behind a gap says that some were lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from equipoise.averaging.outcome import SHOWN_CHARS
from equipoise.averaging.shared.messages import MAX_ITEMS, Answer, Ask, Copy, Entered, Has, Item, State
from equipoise.averaging.shared.rows import Payload, RowStore
from equipoise.averaging.shared.view import View, latest
from equipoise.limits import LruDict

NOTHING: Payload = MappingProxyType({})
NEEDS, SENT = -2, -1
"""Before the version of a peer: it has no state of the shard; it was sent one, and has not said that it has it."""


class Send(NamedTuple):
    """Send an item in this peer's view, maybe to this peer itself."""

    to: str
    item: Item
    payload: Payload = NOTHING


@dataclass
class _Shard:
    """A shard: it was whole in a `view`, has counted `version` pushes, and of each worker has `seen` those to a number.

    Of each peer that this one feeds, `has` is the version, as it said; NEEDS before the state was sent to it, and then
    SENT. By the asker, and whether it pushes, `answers` wait for all copies to have a version: a peer waits for one of
    each at a time.
    """

    store: RowStore
    view: int = 0
    version: int = 0
    seen: LruDict[str, int] = field(default_factory=lambda: LruDict(MAX_ITEMS))
    has: dict[str, int] = field(default_factory=dict)
    answers: dict[tuple[str, bool], tuple[int, Send]] = field(default_factory=dict)

    def apply(self, worker: str, number: int, push: Payload) -> None:
        """Count a push."""
        self.store.apply(push)
        self.version, self.seen[worker] = self.version + 1, number

    def released(self) -> list[Send]:
        """Return the answers that may go."""
        common = min(self.has.values(), default=self.version)
        free = [key for key, (version, _) in self.answers.items() if version <= common]
        return [self.answers.pop(key)[1] for key in free]


class Keeper:
    """The shards of one peer; `known` is the latest (view, version) of each when the last view began."""

    def __init__(self, me: str, staleness: float, copies: int, new: Callable[[int], RowStore]) -> None:
        """`new` makes the store of a shard, with the values with which it begins."""
        self._me, self._staleness, self._copies, self._new = me, staleness, copies, new
        self._shards: dict[int, _Shard] = {}
        self._sources: dict[int, str] = {}
        self._view, self.known = View(0, ()), tuple[tuple[int, int], ...]()

    @property
    def held(self) -> tuple[tuple[int, int, int], ...]:
        """What this peer says of its shards when it enters a view."""
        return tuple((at, one.view, one.version) for at, one in sorted(self._shards.items()) if one.view)

    def begin(self, view: View, entered: Mapping[str, Entered]) -> None:
        """Serve in a view that has become active, whose members hold what they said when they entered it."""
        self._view, self.known = view, latest(entered)
        for shard, state in enumerate(self.known):
            having = sorted(peer for peer, one in entered.items() if (shard, *state) in one.held)
            self._place(shard, having or list(view.holders(shard)), state[1])

    def _place(self, shard: int, having: list[str], version: int) -> None:
        """Keep, begin or drop a shard, whose latest state the peers `having` it have."""
        me, (owner, *copies) = self._me, self._view.holders(shard, self._copies)
        source = self._sources[shard] = owner if owner in having else having[0]
        if me not in (owner, *copies, source):
            self._shards.pop(shard, None)
            return
        one = self._shards[shard] = self._shards.get(shard) or _Shard(self._new(shard))
        one.answers.clear()
        one.has = {owner: NEEDS} if me == source else {}
        if me == owner:
            one.has = {peer: version if peer in having else NEEDS for peer in copies}
        if me in having and me in (owner, *copies):
            one.view = self._view.number

    def again(self) -> list[Send]:
        """Send states to peers that need them, and ask peers that may lag."""
        return [send for shard in self._shards for send in self._feed(shard)]

    def _feed(self, shard: int) -> list[Send]:
        one = self._shards[shard]
        if self._me == self._view.holders(shard)[0] and one.view != self._view.number:
            return []
        lag, ask = [(to, at) for to, at in one.has.items() if at < one.version], Copy(shard, one.version)
        return [self._state(shard, to) if at == NEEDS else Send(to, ask) for to, at in lag]

    def _state(self, shard: int, to: str) -> Send:
        one = self._shards[shard]
        one.has[to] = max(one.has[to], SENT)  # From now on it gets pushes, which follow the state.
        return Send(to, State(shard, one.version, tuple(one.seen.items())), one.store.dump())

    def got(self, sender: str, worker: str, item: Item, payload: Payload, slowest: int) -> list[Send | str]:
        """Take in an item of the view; `worker` names the sender's script, `slowest` is the slowest's clock.

        Returns:
            What is to be sent; or a line for the log.
        """
        shard: int = getattr(item, "shard", -1)
        if (one := self._shards.get(shard)) is None:
            return []
        owner, sends = self._view.holders(shard)[0], list[Send]()
        feeder = self._sources[shard] if self._me == owner else owner
        try:
            match item:
                case Ask() if self._me == owner and one.view == self._view.number:
                    sends = self._asked(one, sender, worker, item, payload, slowest)
                case Copy() if sender == feeder:
                    sends = self._copy(one, feeder, item, payload)
                case Has() if sender in one.has and item.version < 0:
                    sends = [self._state(shard, sender)]
                case Has() if sender in one.has:
                    one.has[sender] = max(one.has[sender], item.version)
                case State() if sender == feeder:
                    sends = self._stated(one, feeder, item, payload)
        except ValueError as error:
            if isinstance(item, Ask):
                return [Send(sender, Answer(shard, item.number, one.version, str(error)[:250]))]
            return [f"..{sender[-SHOWN_CHARS:]} sent what does not fit: {error}"]
        return [*sends, *one.released()]

    def _asked(
        self, one: _Shard, sender: str, worker: str, item: Ask, payload: Payload, slowest: int
    ) -> list[Send]:
        rows, sends = NOTHING, list[Send]()
        if item.base < 0:
            rows = one.store.read(payload)
        elif item.number > one.seen.get(worker, 0):
            if slowest - item.base > self._staleness:
                raise ValueError(f"its rows are of clock {item.base}, and the slowest peer is at {slowest}")
            one.apply(worker, item.number, payload)
            copy = Copy(item.shard, one.version, worker, item.number)
            sends = [Send(peer, copy, payload) for peer, version in one.has.items() if version != NEEDS]
        answer = Answer(item.shard, item.number, one.version)
        # A question that is repeated, or given up for the next one, has one answer.
        one.answers[sender, item.base >= 0] = one.version, Send(sender, answer, rows)
        return sends

    def _copy(self, one: _Shard, feeder: str, item: Copy, payload: Payload) -> list[Send]:
        if one.view != self._view.number or item.version > one.version + bool(item.worker):
            return [Send(feeder, Has(item.shard, -1))]
        if item.version == one.version + 1:
            one.apply(item.worker, item.number, payload)
        return [Send(feeder, Has(item.shard, one.version))]

    def _stated(self, one: _Shard, feeder: str, item: State, payload: Payload) -> list[Send]:
        begins = one.view != self._view.number
        if begins or item.version > one.version:
            one.store.load(payload)
            one.view, one.version = self._view.number, item.version
            one.seen.clear()
            one.seen.update(item.seen)
        return [Send(feeder, Has(item.shard, one.version)), *(self._feed(item.shard) if begins else ())]
