"""A swarm in one process whose groups form as those of the strategy `federated`; see `fakes.training`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from equipoise.averaging.draw import Drawn, draw
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId, group_state
from equipoise.averaging.strategy import Federated, parse_strategy
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.peer.control.messages import StartRound
from fakes.training import Actor, FakeRun, FakeSwarm


class FederatedSwarm(FakeSwarm):
    """Peers of federated runs.

    Attributes:
        closed: When the round after each state closed.
        mute: Whether no coordinator says that a contribution is late: a daemon knows it by the mean that it downloads.
        begun: Who began a round with a contribution: time, peer, state, weight.
    """

    def __init__(self, strategy: str = "federated", codec: str = "fp32") -> None:
        super().__init__(codec)
        self.strategy = strategy
        self.closed: dict[StateId | None, float] = {}
        self.mute = False
        self.begun: list[tuple[float, str, StateId | None, float]] = []
        self.alarms: list[float] = []

    @property
    def rules(self) -> Federated:
        found = parse_strategy(self.strategy)
        assert isinstance(found, Federated)
        return found

    @property
    def makes(self) -> type[FakeRun]:
        return FederatedRun

    def _due(self, actor: Actor) -> float:
        return min([super()._due(actor), *(at for at in self.alarms if at > self.now)])

    def is_late(self, run: FakeRun) -> bool:
        """Whether the group has closed for which the peer contributes."""
        return run.weight > ATTENDANCE_LIMIT and run.claim in self.closed

    def drawn(self, members: Mapping[str, FakeRun], state: StateId) -> Drawn:
        rules, minimum = self.rules, max(self.rules.minimum, self.rules.quorum)
        live = sorted(name for name, run in members.items() if run.agreed is None or not run.agreed.observes)
        return Drawn(draw(live, state.lineage, fraction=rules.fraction, minimum=minimum), tuple(live))

    def _form(self, members: Mapping[str, FakeRun]) -> None:
        waiting = {
            peer: run for peer, run in sorted(members.items()) if run.waiting and not self.is_late(run)
        }
        givers = {peer: run for peer, run in waiting.items() if run.weight > ATTENDANCE_LIMIT}
        state = group_state(run.claim for run in waiting.values() if run.claim is not None)
        introduces = (
            not givers and len(waiting) == len(members) > 1 and all(_attends(run) for run in waiting.values())
        )
        if state is None or (not introduces and len(givers) < self.rules.quorum):
            return
        reached = sorted(run.waits_since for run in givers.values())[self.rules.quorum - 1 :]
        drawn = self.drawn(members, state).peers
        all_in = all(peer in waiting for peer in drawn)
        if not introduces and not all_in and self.now < reached[0] + self.rules.grace:
            return
        self.rounds += 1
        outcome, mean = self._exchange(waiting)
        outcome = msgspec.structs.replace(outcome, drawn=drawn)
        if givers:
            self.closed[state] = self.now
            self.kept[state] = outcome, mean
        for peer, run in waiting.items():
            failed = self.fails(self.rounds, peer)
            told = msgspec.structs.replace(outcome, ok=False, reason="as the test says", contributors={})
            run.end(told if failed else outcome, None if failed else mean)


class FederatedRun(FakeRun):
    """A run whose daemon is that swarm."""

    swarm: FederatedSwarm

    def draw(self, state: StateId) -> Drawn:
        return self.swarm.drawn(self.swarm.runs[self.key], state)

    def recover(self, after: StateId, *args: Any, **options: Any) -> Any:
        self.swarm.alarms.append(self.swarm.now + self.swarm.recover_seconds)
        download = super().recover(after, *args, **options)
        found = download.result

        def result() -> Any:
            got = found()
            if got.ok and self.waiting and self.claim == after and self.swarm.is_late(self):
                self._end_late()
            return got

        download.result = result
        return download

    def _end_late(self) -> None:
        late = self.swarm.now - self.swarm.closed[self.claim]
        reason = f"too late by {late:.3g} s: its round is over"
        self.end(Outcome(ok=False, reason=reason, run=self.name, late=late), None)

    def _start(self, request: StartRound, *when: Any) -> Any:
        pending = super()._start(request, *when)
        if request.weight > ATTENDANCE_LIMIT:
            self.swarm.alarms.append(self.swarm.now + self.swarm.rules.grace)
            self.swarm.begun.append((self.swarm.now, self.peer_name, self.claim, request.weight))
            if self.swarm.is_late(self) and not self.swarm.mute:
                self._end_late()
        return pending


def _attends(run: FakeRun) -> bool:
    return 0 < run.weight <= ATTENDANCE_LIMIT
