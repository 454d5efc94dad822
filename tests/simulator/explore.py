"""All that can happen to a small round: every order of deliveries, every crash, by depth-first search.

A state is: the state of every member, what is on every link, who is dead, what may still go wrong, and the time. From a
state, any of these may come next: a link delivers its next frame (or any frame: `Search.any_order`); a reduction is
done; a member crashes, or a connection breaks for good, and the other ends learn of it in their own time, each after as
many of the frames under way as have got through; or a channel breaks, and both ends learn of it in their own time, but
the session brings every frame by the next channel. Time passes only when nothing else can happen: then a machine that
is due is woken.

What cannot change what is reached is left out:

- Frames to members that have crashed or closed have no effect.
- Once every living member has ended, no later event can change how any of them ended.
- What people read (notes, reasons) is not part of a state.

Members' states, frames and links are numbered, and what a member does with an event in a state is remembered: its
machine is run once for each such pair, however many states of the whole have it. Nothing is hashed lossily, so no
state is skipped by mistake.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import Event, Fail, Finish, PeerLost, PeerReturned, Woke
from simulator.core import Violation
from simulator.member import Frame, Job, Member, Output, check_agreement
from simulator.searches import Findings, Search
from simulator.snapshot import clone, fingerprint
from simulator.states import Budget, Numbers, State

LOST, BROKE, BACK = "lost", "broke", "back"
"""On a link: the connection broke for good here; a channel broke, and another takes its place; that one is open."""


class Explorer:
    """One search."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.group = search.group
        self.size = self.group.size
        self.findings = Findings()
        self._loads = Numbers()
        self._lost, self._broke, self._back = (self._loads.of(mark) for mark in (LOST, BROKE, BACK))
        self._links = Numbers()
        self._rests = Numbers()
        self._states = Numbers()
        self._members: list[Member] = []
        self._effects: dict[Hashable, tuple[int, tuple[tuple[int, int], ...]]] = {}

    def run(self) -> Findings:
        """Visit every state.

        Raises:
            Violation: A promise is broken in one of them; the message holds the way there.
        """
        first = self._begin()
        seen = {self._key(first)}
        stack = [("begin", self._following(first))]
        try:
            while stack:
                step = next(stack[-1][1], None)
                if step is None:
                    stack.pop()
                    continue
                what, state = step
                self.findings.steps += 1
                key = self._key(state)
                if key not in seen:
                    seen.add(key)
                    stack.append((what, self._following(state)))
        except Violation as violation:
            way = "\n".join(what for what, _ in stack[1:])
            raise Violation(f"{violation}\n{self.search}\nafter\n{way}") from violation
        self.findings.states = len(seen)
        return self.findings

    def _begin(self) -> State:
        outputs = []
        for index in range(self.size):
            member = Member(self.group, index, (float(3**index),), 0.0, self.search.timeout)
            outputs.append((index, member.start(0.0)))
            self._members.append(member)
        numbers = tuple(self._states.of(fingerprint(member)) for member in self._members)
        search = self.search
        budget = Budget(search.crashes, search.cuts, search.blips, search.duplicates, search.early)
        state = State(numbers, ((),) * self.size**2, 0, 0, budget, 0.0)
        for index, produced in outputs:
            state = self._put(state, index, self._number(index, produced))
        return state

    # ---- what can come next ----

    def _following(self, state: State) -> Iterator[tuple[str, State]]:
        live = [index for index in range(self.size) if not state.dead >> index & 1]
        if all(self._members[state.members[index]].ended for index in live):
            self._conclude(state)
            return
        quiet = True
        for link, loads in enumerate(state.links):
            if loads:
                quiet = False
                yield from self._deliveries(state, link, loads)
        if quiet or state.budget.early:
            yield from self._wakes(state, live, quiet)
        yield from self._faults(state, live)

    def _deliveries(self, state: State, link: int, loads: tuple[int, ...]) -> Iterator[tuple[str, State]]:
        before = next((at for at, load in enumerate(loads) if load in (self._lost, self._broke)), len(loads))
        choices = before if self.search.any_order else min(before, 1)
        for at in range(choices):
            if loads[at] in loads[:at] or (loads[at] == self._back and at):
                continue
            yield self._deliver(state, link, loads[:at] + loads[at + 1 :], loads[at])
            if state.budget.duplicates and loads[at] != self._back:
                budget = state.budget._replace(duplicates=state.budget.duplicates - 1)
                yield self._deliver(state._replace(budget=budget), link, loads, loads[at])
            if loads[at] == self._back:
                return
        if before < len(loads) and loads[before] == self._lost:
            yield self._deliver(state, link, loads[before + 1 :], self._lost)
        elif before < len(loads):
            rest = (self._back, *loads[:before], *loads[before + 1 :])
            yield self._deliver(state, link, rest, self._broke)

    def _deliver(self, state: State, link: int, rest: tuple[int, ...], load: int) -> tuple[str, State]:
        sender, to = divmod(link, self.size)
        links = (*state.links[:link], rest, *state.links[link + 1 :])
        after = self._happen(state._replace(links=links), to, (load, sender))
        return f"{self.group.names[sender]} -> {self.group.names[to]}: {self._loads.values[load]}", after

    def _wakes(self, state: State, live: list[int], quiet: bool) -> Iterator[tuple[str, State]]:
        deadlines = {index: self._members[state.members[index]].machine.deadline for index in live}
        now = max(state.now, min(deadlines.values()))
        budget = state.budget if quiet else state.budget._replace(early=state.budget.early - 1)
        for index, deadline in deadlines.items():
            if deadline <= now:
                after = self._happen(state._replace(now=now, budget=budget), index, (-1, index))
                yield f"{now:g} s: {self.group.names[index]} wakes", after

    def _faults(self, state: State, live: list[int]) -> Iterator[tuple[str, State]]:
        if state.budget.crashes:
            for index in live:
                yield f"{self.group.names[index]} crashes", self._crash(state, index)
        if state.budget.cuts or state.budget.blips:
            for one in live:
                for other in live:
                    if one < other and not state.cut >> (one * self.size + other) & 1:
                        yield from self._breaks(state, one, other)

    def _crash(self, state: State, victim: int) -> State:
        links = list(state.links)
        for index in range(self.size):
            links[index * self.size + victim] = ()
            out = victim * self.size + index
            if index != victim and not self._is_deaf(state, index) and not state.cut >> out & 1:
                links[out] = (*links[out], self._lost)
        budget = state.budget._replace(crashes=state.budget.crashes - 1)
        return state._replace(links=tuple(links), dead=state.dead | 1 << victim, budget=budget)

    def _breaks(self, state: State, one: int, other: int) -> Iterator[tuple[str, State]]:
        there, back = one * self.size + other, other * self.size + one
        marks = {self._lost, self._broke}
        if marks.intersection(state.links[there]) or marks.intersection(state.links[back]):
            return
        names = f"{self.group.names[one]}-{self.group.names[other]}"
        budget = state.budget
        for kind, left, mark in (("cut", budget.cuts, self._lost), ("blip", budget.blips, self._broke)):
            if left:
                links = list(state.links)
                for link, to in ((there, other), (back, one)):
                    if not self._is_deaf(state, to):
                        links[link] = (*links[link], mark)
                cut = state.cut | (1 << there | 1 << back if kind == "cut" else 0)
                spent = budget._replace(cuts=left - 1) if kind == "cut" else budget._replace(blips=left - 1)
                yield f"{kind} {names}", state._replace(links=tuple(links), cut=cut, budget=spent)

    # ---- what follows ----

    def _happen(self, state: State, index: int, cause: tuple[int, int]) -> State:
        number = state.members[index]
        key = (number, cause, state.now)
        effect = self._effects.get(key)
        if effect is None:
            effect = self._effects[key] = self._run_machine(number, cause, state.now)
        after, outputs = effect
        if after != number:
            members = (*state.members[:index], after, *state.members[index + 1 :])
            state = state._replace(members=members)
            if self._members[after].ended is not self._members[number].ended:
                check_agreement([self._members[member] for member in members])
            if self._members[after].closed:
                links = list(state.links)
                for sender in range(self.size):
                    links[sender * self.size + index] = ()
                state = state._replace(links=tuple(links))
        return self._put(state, index, outputs) if outputs else state

    def _run_machine(
        self, number: int, cause: tuple[int, int], now: float
    ) -> tuple[int, tuple[tuple[int, int], ...]]:
        member: Member = clone(self._members[number])
        load = self._loads.values[cause[0]] if cause[0] >= 0 else None
        event: Event | None = None
        if load is None:
            event = Woke()
        elif load in (LOST, BROKE):
            event = PeerLost(cause[1], "connection broke")
        elif load == BACK:
            event = PeerReturned(cause[1])
        if event is not None:
            outputs = member.tell(event, now)
        elif isinstance(load, Job):
            outputs = member.reduced(load, now)
        else:
            assert isinstance(load, Frame)
            outputs = member.receive(load, now)
        after = self._states.of(fingerprint(member))
        if after == len(self._members):
            self._members.append(member)
        return after, self._number(member.index, outputs)

    def _number(self, index: int, outputs: list[Output]) -> tuple[tuple[int, int], ...]:
        """Outputs as (link, load)."""
        numbered = []
        for output in outputs:
            to = output.to if isinstance(output, Frame) else index
            if isinstance(output, Frame) and isinstance(output.message, wire.GiveUp):
                output = Frame(index, to, wire.GiveUp(""))  # why is for people
            numbered.append((index * self.size + to, self._loads.of(output)))
        return tuple(numbered)

    def _put(self, state: State, index: int, outputs: tuple[tuple[int, int], ...]) -> State:
        links = list(state.links)
        for link, load in outputs:
            to = link % self.size
            gone = self._is_deaf(state, to) or state.cut >> link & 1
            # What is sent before its sender knows that the connection broke for good, is lost.
            if not gone and self._lost not in links[to * self.size + index]:
                links[link] = (*links[link], load)
                if self.search.any_order:
                    links[link] = self._sorted(links[link])
        return state._replace(links=tuple(links))

    def _sorted(self, loads: tuple[int, ...]) -> tuple[int, ...]:
        """Frames between two breaks in one order, as the order says nothing."""
        for at in range(len(loads) - 1, -1, -1):
            if loads[at] in (self._lost, self._broke, self._back):
                return (*loads[: at + 1], *sorted(loads[at + 1 :]))
        return tuple(sorted(loads))

    def _is_deaf(self, state: State, index: int) -> bool:
        return bool(state.dead >> index & 1) or self._members[state.members[index]].closed

    def _conclude(self, state: State) -> None:
        letters = ""
        for index, number in enumerate(state.members):
            end = self._members[number].ended
            letters += "o" if isinstance(end, Finish) else "f" if end is not None else "x"
            if self.search.must_succeed and isinstance(end, Fail) and not state.dead >> index & 1:
                raise Violation(f"{self.group.names[index]} failed: {end.reason}")
        self.findings.ends[letters] += 1

    def _key(self, state: State) -> int:
        """The state as one number, which takes less memory than what it stands for."""
        rest = self._rests.of((state.dead, state.cut, state.budget, state.now))
        key = rest << 32 | self._links.of(state.links)
        for number in state.members:
            key = key << 32 | number
        return key
