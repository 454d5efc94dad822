"""What training needs of a run: `equipoise.peer.run.Run` has it, and so has a swarm simulated in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, overload

import torch

from equipoise.averaging.outcome import Outcome, RunState
from equipoise.averaging.schema import Schema
from equipoise.averaging.state import StateId
from equipoise.peer.accumulate import Accumulator
from equipoise.peer.tensors import Gradients, Tensors


class Pending(Protocol):
    """A round that was started and not waited for."""

    def stop_search(self, why: str) -> None:
        """End it, if no group has formed yet; its outcome is then not ok, and says `why`."""

    def done(self) -> bool:
        """Whether `result` returns at once."""

    def wait(self, timeout: float) -> bool:
        """Wait, at most `timeout` seconds, until it is done; returns whether it is."""

    def result(self) -> Outcome:
        """The outcome; the run's `mean`, and its module's buffers, are written now."""


class Fetched(Protocol):
    """What a download came to."""

    @property
    def ok(self) -> bool:
        """Whether there is an image."""

    @property
    def reason(self) -> str:
        """Why it ended so."""

    @property
    def state(self) -> StateId | None:
        """Which state the image is of."""

    @property
    def image(self) -> torch.Tensor | memoryview | None:
        """The image: u8 [bytes]."""


class PendingFetch(Protocol):
    """A download that goes on."""

    def done(self) -> bool:
        """Whether `result` returns at once."""

    def wait(self, timeout: float) -> bool:
        """Wait, at most `timeout` seconds, until it is done; returns whether it is."""

    def cancel(self) -> None:
        """End it."""

    def result(self) -> Fetched:
        """What it came to."""


class Recovered(Protocol):
    """What became of a mean that was missed."""

    @property
    def outcome(self) -> Outcome:
        """What its round came to; not ok if it is not to be had."""

    @property
    def values(self) -> Mapping[str, torch.Tensor]:
        """By name, fp32."""

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """By name, fp32."""

    @property
    def behind(self) -> int:
        """If not ok: how many peers are not as far as this one."""

    @property
    def unheard(self) -> int:
        """If not ok: how many have not said whether they have it."""


class PendingMean(Protocol):
    """The download of a mean, which goes on."""

    def done(self) -> bool:
        """Whether `result` returns at once."""

    def wait(self, timeout: float) -> bool:
        """Wait, at most `timeout` seconds, until it is done; returns whether it is."""

    def cancel(self) -> None:
        """End it."""

    def result(self) -> Recovered:
        """What it came to."""


class Progress(Protocol):
    """Weight accumulated towards the next step.

    Attributes:
        local: By this peer.
        swarm: By all known peers.
        wanted: An epoch of which some peer wants a snapshot, or of a later one.
    """

    @property
    def local(self) -> float: ...  # noqa: D102 - told above

    @property
    def swarm(self) -> float: ...  # noqa: D102

    @property
    def wanted(self) -> int | None: ...  # noqa: D102


class TrainingRun(Protocol):
    """See `equipoise.peer.run.Run`, whose methods these are."""

    name: str
    group_size: int
    trained_by: str
    mean: dict[str, torch.Tensor]
    terms: Mapping[str, str]

    def tell(self, topic: str, line: str, /) -> None:
        """Have the daemon's `status` show a line on `training` or `checkpoints`."""

    @property
    def home(self) -> str:
        """The daemon's home; empty where that is a temporary one."""

    @property
    def schema(self) -> Schema:
        """What `step` exchanges."""

    def before_leaving(self, finish: Callable[[], None], /) -> None:
        """Have it called before the run is left."""

    @property
    def peer(self) -> str:
        """PeerID of the daemon."""

    @property
    def source(self) -> Tensors:
        """What the run was joined with."""

    @property
    def accumulated(self) -> float:
        """Weight accumulated towards the next step."""

    @property
    def state(self) -> RunState:
        """Where the next round stands."""

    def branch(self, name: str, tensors: Tensors, /) -> TrainingRun:
        """Join another run with the options of this one."""

    def agree(self, terms: Mapping[str, str], buffers: bool = False) -> None:
        """Have `step` meet only peers that give the same."""

    def accumulate(self, gradients: Gradients, weight: float = 1.0) -> None:
        """Add to what this peer contributes to the next step."""

    def take(self) -> Accumulator | None:
        """Take back what was accumulated."""

    @overload
    def step(
        self, timeout: float = ..., wait: Literal[True] = ..., state: StateId | None = ...
    ) -> Outcome: ...
    @overload
    def step(self, timeout: float = ..., *, wait: Literal[False], state: StateId | None = ...) -> Pending: ...

    def wait_for(self, peers: int, timeout: float = ...) -> bool:
        """Wait until so many others are known; returns whether they are."""

    def progress(self, target: float | None = ...) -> Progress:
        """Weight accumulated towards the next step, of which `target` is wanted, and whether a snapshot is wanted."""

    def offer(self, state: StateId, image: memoryview) -> None:
        """Have the daemon serve this image, in place of the one before."""

    @overload
    def fetch(
        self,
        at_least: int,
        limit: int,
        timeout: float = ...,
        wait: Literal[True] = ...,
        among: tuple[str, ...] = ...,
    ) -> Fetched: ...
    @overload
    def fetch(
        self,
        at_least: int,
        limit: int,
        timeout: float = ...,
        *,
        wait: Literal[False],
        among: tuple[str, ...] = ...,
    ) -> PendingFetch: ...

    def recover(
        self, after: StateId, timeout: float = ..., proved: bool = ..., patient: bool = ...
    ) -> PendingMean:
        """Get the mean that the group applied to a state."""
