"""What the program asks of its parts: the swarm (`equipoise.dht`) and the hub of runs (`equipoise.averaging.aio`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import torch

from equipoise.averaging.outcome import Outcome, RunState
from equipoise.averaging.ports import Candidate
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.transfer.outcome import FetchOutcome, MeanOutcome
from equipoise.dht.state import ReachStatus, SwarmStatus


class Standing(Protocol):
    """Where a run stands at this peer."""

    @property
    def reason(self) -> str:
        """Why its state is what it is, in one line."""

    @property
    def round(self) -> int:
        """Number of the next round."""

    @property
    def rounds_ok(self) -> int:
        """Rounds that ended in a mean."""

    @property
    def rounds_failed(self) -> int:
        """Rounds that did not."""


class Averager(Protocol):
    """One run of this daemon."""

    @property
    def state(self) -> RunState:
        """Where the next round stands."""

    @property
    def history(self) -> Sequence[Outcome]:
        """The last outcomes, oldest first."""

    async def average(
        self,
        contribution: torch.Tensor,
        result: torch.Tensor,
        weight: float,
        timeout: float,
        state: StateId | None = None,
    ) -> Outcome:
        """Take part in one round; both tensors are f32 [D] by the layout of the run's spec.

        `result` holds the mean if and only if the outcome is ok.
        """

    def stop_search(self, why: str) -> None:
        """End the search for a group, if one goes on; its outcome is not ok, and says `why`."""

    def report_accumulated(self, weight: float) -> None:
        """Publish the weight accumulated towards the next contribution."""

    async def others_accumulated(self, target: float | None = None) -> float:
        """Weight that the others have accumulated, as far as their word counts towards this target of all together."""

    def status(self) -> Standing:
        """Where the run stands, and why."""

    def difference(self, peer: str) -> str:
        """How the spec of another peer of this name differs, one line; empty if it does not, or that is not known."""

    async def objection(self, timeout: float) -> str:
        """Why this peer should rather not take part with its spec, one line; empty if it may."""

    async def leave(self, reason: str) -> None:
        """Stop taking part; an open round is finished, or failed with `reason`."""


Room = Callable[[int], Awaitable[memoryview]]
"""Makes room for an image: a writable view of just so many bytes. Raises ValueError where there is none."""


class Transfer(Protocol):
    """State of one run, given to newcomers and taken from others."""

    @property
    def wanted(self) -> int | None:
        """Epoch of which a newcomer wants a snapshot."""

    @property
    def standing(self) -> str:
        """What is being fetched or served, and why, in one line; empty if nothing."""

    def reach(self, epoch: int) -> None:
        """This peer's trainer stands at that epoch."""

    async def offer(self, state: StateId, image: memoryview) -> None:
        """Serve a snapshot in place of the one before; raises ValueError if it is too large."""

    async def fetch(
        self, at_least: int, limit: int, timeout: float, room: Room, among: frozenset[str] = ...
    ) -> FetchOutcome:
        """Download a snapshot, `among` these peers alone while any of them is there; raises ValueError if a download is
        going on."""

    async def recover(
        self,
        after: StateId,
        timeout: float,
        result: Callable[[], torch.Tensor],
        proved: bool = False,
        patient: bool = False,
    ) -> MeanOutcome:
        """Get a mean that was missed into what `result` makes, f32 [D]; raises ValueError if a download is going on."""

    @property
    def values(self) -> int:
        """D, the number of values of a mean."""

    def withdraw(self, reason: str) -> None:
        """End the download that is going on, if any."""


class Hub(Protocol):
    """All runs of this daemon."""

    def transfer(self, run: str) -> Transfer:
        """Gives and takes the state of a run that this daemon takes part in."""

    async def join(self, spec: RunSpec) -> Averager:
        """Take part in a run.

        Raises:
            ValueError: This daemon takes part in a run of that name already.
        """

    async def stop(self) -> None:
        """Leave all runs; open rounds are finished or failed."""


class Members(Protocol):
    """Who takes part in a run, as far as this peer knows."""

    async def peers(self, run: str) -> Sequence[Candidate]:
        """The peers of the run, this one included if it takes part, sorted by PeerID."""


class Swarm(Protocol):
    """This daemon's place among the others."""

    @property
    def peer(self) -> str:
        """PeerID of this daemon."""

    @property
    def directory(self) -> Members:
        """Who takes part in which run."""

    def status(self) -> SwarmStatus:
        """Where it stands, and why."""

    def name(self, peer: str) -> str:
        """What people call `peer`, by its own word; empty if it has not said."""

    def reach(self, peer: str) -> ReachStatus:
        """How this daemon reaches `peer`, and why."""

    async def stop(self) -> None:
        """Leave, and end whatever was started."""
