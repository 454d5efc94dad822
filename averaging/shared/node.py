"""Node: one peer's part in shared tables: its views, its shards, and what its script asks of those of others.

A pull waits while this peer is more than `staleness` clocks ahead of the slowest member of the view (stale synchronous
parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013). A peer
tells the others its clock when all its pushes before that are settled: so a pull at clock c has all pushes of clocks
up to c - staleness - 1, and a push that was made for rows of clock b is applied while no peer is beyond b + staleness.

One pull and one push are under way at a time. They go to the owners of their shards, again to those of the next view.
A peer serves once its view is active to it. It asks others once all have told their clock, so it is active to them.
What comes for another view is dropped: its sender asks again, in the next view or a second later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from equipoise.averaging.outcome import SHOWN_CHARS
from equipoise.averaging.shared.keeper import Keeper, Send
from equipoise.averaging.shared.messages import SHARDS, Answer, Ask, Clock, Entered, Item, Left
from equipoise.averaging.shared.rows import Payload, RowStore
from equipoise.averaging.shared.view import View, Views
from equipoise.averaging.strategy import SharedTables

RETRY_SECONDS = 1.0
"""Time after which what is not answered is said again: channels lose nothing, unless they are full or a peer ends."""

SLOW_CLOCKS = 8
"""Clocks in a row at whose ends others waited for this peer, after which it is slow for good: chance makes few."""

Parts = Mapping[int, Payload]
"""What goes to each shard, or comes from it."""


class Done(NamedTuple):
    """All shards have answered a pull or push, by its number; or the reason why not; `lost` if nobody can say."""

    number: int
    got: Parts
    reason: str = ""
    lost: bool = False


Does = Send | str | Done
"""What is to be done; a text is a line for the log."""


@dataclass
class _Asked:
    """A pull or a push, which the script began at a time and a clock; a push is for rows of the clock `base`.

    The shards of `parts` have not answered yet, those of `got` have; `reason` says why one has refused it.
    """

    number: int
    parts: dict[int, Payload]
    began: float
    clock: int
    base: int = -1
    sent: bool = False
    got: dict[int, Payload] = field(default_factory=dict)
    reason: str = ""


class Node:
    """One peer. Every method returns what is to be done, in order; a `Send` to this peer itself is done at once.

    Attributes:
        clocks: What each member of the view has told of its own clock.
        there: The members that have told it, so that the view is active to them.
        base: The clock of the slowest when the last pull was sent.
        versions: The version of each shard that was last seen.
        deadline: When to call `woke`.
    """

    def __init__(self, me: str, strategy: SharedTables, new: Callable[[int], RowStore]) -> None:
        """`new` makes the store of a shard."""
        self.views, self.deadline, self.clock, self.base = Views(strategy.copies), 0.0, 0, 0
        self.clocks, self.there, self.versions = dict[str, int](), set[str](), [0] * SHARDS
        self._me, self._strategy = me, strategy
        self._keeper = Keeper(me, strategy.staleness, strategy.copies, new)
        self._pull: _Asked | None = None
        self._pushes: deque[_Asked] = deque()
        self._late = self._wakes = 0

    @property
    def slowest(self) -> int:
        """The clock of the slowest member of the view, as far as this peer knows."""
        return min(self.clocks.values(), default=0)

    @property
    def is_ready(self) -> bool:
        """Whether the view is active to all its members."""
        return self.views.active and self.clocks.keys() <= self.there

    @property
    def is_through(self) -> bool:
        """Whether all that this peer has pushed is settled, and all others are as far or out of reach."""
        return not self._pushes and (self.slowest >= self.clock or not self.views.active)

    @property
    def told(self) -> str:
        """A line for the user."""
        view, slow = self.views.view, self._late >= SLOW_CLOCKS
        told = f"view {view.number} of {len(view.members)} peers, clock {self.clock}, slowest {self.slowest}"
        late = f"; the others waited for this peer at the end of each of {self._late} clocks: less work helps"
        return (self.views.refused or self.views.objection or told) + (late if slow else "")

    def enter(self, view: View) -> list[Does]:
        """A round has named a view: enter it, unless the round left this peer out."""
        clock, keeper = self.clocks.get(self._me, 0), self._keeper
        if self._me not in view.members or not self.views.enter(view, clock, keeper.held, keeper.known):
            return []
        self.there, self._wakes = set(), 0
        return self._say()

    def pull(self, number: int, parts: Parts, now: float) -> list[Does]:
        """Ask for rows; a pull before that has not ended is given up."""
        before, self._pull = self._pull, _Asked(number, dict(parts), now, self.clock)
        return [*([Done(before.number, {}, "another pull took its place")] if before else ()), *self._ask()]

    def push(self, number: int, parts: Parts, now: float) -> list[Does]:
        """Give gradients for the rows of the last pull; numbers rise."""
        self._pushes.append(_Asked(number, dict(parts), now, self.clock, self.base))
        return self._ask()

    def tick(self) -> list[Does]:
        """End a clock."""
        waited = max(self.clocks.values(), default=0) - self.clock > self._strategy.staleness
        self._late = self._late + 1 if waited else 0
        self.clock += 1
        return self._tell()

    def woke(self, now: float) -> list[Does]:
        """The deadline has come: give up what has waited too long, and say all again that others may not have heard."""
        self.deadline = now + RETRY_SECONDS
        ended, self._wakes = self._expired(now, self.views.refused or self.views.objection), self._wakes + 1
        self.views.patient = self._wakes * RETRY_SECONDS < self._strategy.timeout
        begun = self._begin() if not self.views.patient else []
        fed = self._keeper.again() if self.is_ready else []
        return [*ended, *begun, *self._say(), *self._tell(again=True), *fed, *self._ask(again=True)]

    def leave(self) -> list[Does]:
        """Tell the others that they need not wait for this peer; nothing of it is served after this."""
        return [Send(peer, Left()) for peer in sorted(self.views.mates - {self._me})]

    def _expired(self, now: float, objection: str) -> list[Done]:
        limit, ended = self._strategy.timeout, list[Done]()
        if self._pull is not None and now - self._pull.began >= limit:
            waited = f"a pull waited {limit:g} s: {objection or self._missing(self._pull)}"
            ended.append(Done(self._pull.number, {}, waited))
            self._pull = None
        while self._pushes and now - self._pushes[0].began >= limit:
            one = self._pushes.popleft()
            told = f"shards {sorted(one.parts)} have not acknowledged it after {limit:g} s"
            ended.append(Done(one.number, {}, f"{told}{objection and ': '}{objection}", lost=True))
        return ended

    def _missing(self, pull: _Asked) -> str:
        if self._waits(pull):
            behind = min(self.clocks, key=lambda peer: (self.clocks[peer], peer))
            at = self.clocks[behind]
            return f"..{behind[-SHOWN_CHARS:]} is at clock {at}, and this peer at {self.clock}"
        owners = {self.views.view.holders(shard)[0][-SHOWN_CHARS:] for shard in pull.parts}
        return f"rows of ..{', ..'.join(sorted(owners))} have not come"

    def got(self, sender: str, script: str, view: str, item: Item, payload: Payload) -> list[Does]:
        """A peer's script has sent an item in its view."""
        views = self.views
        if isinstance(item, Entered):
            views.heard(sender, view, item)
            return self._begin()
        if isinstance(item, Left):
            views.note_left(sender, int(view.partition(".")[0]))
            return self._begin()
        if view != views.view.name or not views.active or sender not in views.view.members:
            return []
        if isinstance(item, Answer):
            return self._answered(sender, item, payload)
        if not isinstance(item, Clock):
            return [*self._keeper.got(sender, f"{sender}/{script}", item, payload, self.slowest)]
        begins = not self.is_ready
        self.there.add(sender)
        self.clocks[sender] = max(self.clocks[sender], item.clock)
        begins = begins and self.is_ready
        return [*(self._keeper.again() if begins else ()), *self._ask(begins)]

    def _begin(self) -> list[Does]:
        """Go on in a view that becomes active; its newcomers begin at the slowest clock of the others."""
        views, entered = self.views, self.views.entered
        if not views.begin():
            return []
        last = max(one.last for one in entered.values())
        start = min(one.clock for one in entered.values() if one.last == last)
        self.there = {self._me}
        self.clocks = {peer: max(one.clock, start) for peer, one in entered.items()}
        self.clock = max(self.clock, self.clocks[self._me])
        self._keeper.begin(views.view, entered)
        told = f"shards {sorted(views.lost)} have lost all their holders, and what those had counted"
        notes = [told] if views.lost else []
        return [*notes, *self._tell(again=True), *self._ask(again=True)]

    def _answered(self, sender: str, item: Answer, payload: Payload) -> list[Does]:
        asked = [self._pull, *list(self._pushes)[:1]]
        one = next((one for one in asked if one is not None and one.number == item.number), None)
        if one is None or item.shard not in one.parts or sender != self.views.view.holders(item.shard)[0]:
            return []
        self.versions[item.shard] = max(self.versions[item.shard], item.version)
        del one.parts[item.shard]
        one.got[item.shard], one.reason = payload, one.reason or item.reason
        if one.parts:
            return []
        done = Done(one.number, one.got, one.reason)
        if one is self._pull:
            self._pull = None
            return [done]
        self._pushes.popleft()
        return [done, *self._ask(), *self._tell()]

    def _say(self) -> list[Does]:
        """Tell members to which the view may not be active that it is entered."""
        return [Send(peer, self.views.mine) for peer in self.views.view.members if peer not in self.there]

    def _tell(self, again: bool = False) -> list[Does]:
        """Tell all members the clock before which all pushes are settled, if it has risen, or again."""
        if not self.views.active:
            return []
        told, settled = self.clocks[self._me], self._pushes[0].clock if self._pushes else self.clock
        self.clocks[self._me] = max(told, settled)
        if not again and settled <= told:
            return []
        item = Clock(self.clocks[self._me])
        return [*(Send(peer, item) for peer in self.clocks if peer != self._me), *self._ask()]

    def _ask(self, again: bool = False) -> list[Does]:
        """Send the pull, once it waits for slower peers no longer, and the first push; or again."""
        pull, sends, view = self._pull, list[Does](), self.views.view
        asked = [*([pull] if pull and not self._waits(pull) else ()), *list(self._pushes)[:1]]
        for one in asked if self.is_ready else ():
            if again or not one.sent:
                self.base = self.slowest if one.base < 0 and not one.sent else self.base
                one.sent = True
                for shard, payload in one.parts.items():
                    sends.append(Send(view.holders(shard)[0], Ask(shard, one.number, one.base), payload))
        return sends

    def _waits(self, pull: _Asked) -> bool:
        return not pull.sent and self.clock - self.slowest > self._strategy.staleness
