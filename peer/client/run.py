"""`JoinedRun`: one training effort that a script takes part in, with all that its trainers need of it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self, overload

import torch
from msgspec import structs

from equipoise.averaging.metrics import Evaluation, Report, Values, report_of, values_of
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import (
    Exchanging,
    Idle,
    NoPeers,
    Outcome,
    RunState,
    check_weight,
)
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.schema import Dtype, Schema
from equipoise.averaging.spec import check_terms
from equipoise.averaging.state import StateId
from equipoise.averaging.strategy import Strategy, parse_strategy
from equipoise.peer.client.accumulate import Accumulator
from equipoise.peer.client.channels import Channels
from equipoise.peer.client.encoding import Encoded
from equipoise.peer.client.futures import Download, PendingRound, check_timeout
from equipoise.peer.client.interrupts import uninterrupted
from equipoise.peer.client.lanes import kernels_of, pin
from equipoise.peer.client.tensors import Binding, Gradients, Tensors, named_gradients
from equipoise.peer.client.totals import Totals, metrics
from equipoise.peer.control import messages
from equipoise.peer.control.client import Connection
from equipoise.peer.control.messages import Progress
from equipoise.peer.errors import DaemonLost, EquipoiseError, Refused, RoundPending
from equipoise.peer.purposes import AVERAGE, STEP
from equipoise.peer.shared_memory import Region, SharedMemory

STATE_SECONDS = 0.25
"""Longest wait of `state` for a daemon that is busy encoding; it then returns the last answer."""

LOOK_SECONDS = 0.05
"""Seconds between two looks at the number of peers."""

SHORTEST_TIMEOUT = 0.001
"""Least timeout of a round, if preparing its contribution took all of the caller's timeout."""

AGREE_SECONDS = 20.0
"""Longest time for the daemon to look for peers, and to ask the peers that agreed on other terms for theirs."""

OFFER_SECONDS = 60.0
"""Longest time to digest an image, after the image before; a gigabyte takes a second on a busy machine."""

LEAVE_SECONDS = 10.0
"""Longest time to leave: the daemon first finishes or fails an open round, and has a shorter limit for that."""

SETTLE_SECONDS = 1.0
"""Longest wait for the outcome of that round, which the daemon sends right after."""

log = logging.getLogger(__name__)


class Watcher(Protocol):
    """Watches what a run sends with `step`."""

    def sends(self, weight: float, contribution: memoryview) -> None:
        """Take note of an encoded contribution, u8 [bytes], which changes with the next one."""

    def ended(self, outcome: Outcome) -> None:
        """Take note of a round's outcome, before its mean is decoded."""


class Loop:
    """The optimizer or loop that steps a run, with all that it has begun.

    Attributes:
        by: The name of that optimizer or loop; empty before it begins. A run takes one at a time.
        dtypes: Those of the tensors that all peers hold bit for bit: peers with other ones never meet.
        watcher: Watches the contributions, if error feedback needs them.
        reported: Numbers that go with the next contribution, as of the branches; see `JoinedRun.report`.
        finishing: Calls that end it, before the run is left.
        branches: Runs that are a part of this one.
    """

    def __init__(self) -> None:
        self.by = ""
        self.dtypes: tuple[Dtype, ...] = ()
        self.watcher: Watcher | None = None
        self.reported: dict[str, float | torch.Tensor] = {}
        self.finishing: list[Callable[[], None]] = []
        self.branches: list[JoinedRun] = []

    @contextlib.contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Where the block is interrupted, or fails, undo what a loop has begun with the run meanwhile."""
        before, finishing, branches = self.by, list(self.finishing), len(self.branches)
        try:
            yield
        except (KeyboardInterrupt, Exception):
            self.by, self.finishing = before, finishing
            while len(self.branches) > branches:
                self.branches.pop().leave()
            raise

    def give_up(self) -> None:
        """Have the run end without the others, where it is left: another handle of this process takes its place."""
        self.finishing.clear()
        for branch in self.branches:
            branch.core.loop.give_up()
            branch.leave()


class RunCore:
    """What the trainers of a run need of it, and users do not.

    Attributes:
        link: The connection to the daemon.
        request: The request that joined the run, kept for a daemon that replaces a lost one.
        binding: The tensors that the run was joined with, and those that travel.
        region: The memory that the run shares with the daemon.
        lock: Held while a round begins or is collected, and while a daemon replaces a lost one.
        agreed: The request of `Run.agree`, kept for a daemon that replaces a lost one.
        loop: The loop that steps the run, if any.
        is_branch: Whether this run is a part of another.
        left: Whether the script has left the run.
        channels: The messages between this script and others.
        accumulated: The weight that the daemon was told last; None before the first step.
        listeners: Called after each round that made a mean, as curves are; the branches have the same.
    """

    def __init__(
        self,
        link: Connection,
        request: messages.JoinRun,
        binding: Binding,
        region: Region,
        join: Callable[[RunOptions, str, Tensors, Tensors], JoinedRun],
    ) -> None:
        self.link, self.request, self.binding, self.region = link, request, binding, region
        self.channels = Channels(request.run, request.mailbox.script, link, region)
        pin(region, binding.devices)
        self.lock = threading.Lock()
        self.agreed: messages.AgreeRun | None = None
        self.is_branch = self.left = False
        self.loop = Loop()
        self.listeners: list[Callable[[], None]] = []
        self.accumulated: float | None = None
        self._told: dict[messages.Topic, str] = {}
        self._process = os.getpid()
        self._join = join

    @property
    def strategy(self) -> Strategy:
        """The strategy of the run."""
        return parse_strategy(self.request.options.strategy)

    @property
    def joining(self) -> messages.JoinRun:
        """The request that joins the run at another daemon: what the script has received so far goes with it."""
        return structs.replace(self.request, mailbox=self.channels.mailbox)

    def clock(self) -> float:
        """Seconds on a steady clock, by which the run's timeouts count."""
        return self.link.clock()

    @property
    def is_own(self) -> bool:
        """Whether this process takes part by this handle."""
        return not self.left and os.getpid() == self._process

    def report(self, accumulated: float) -> None:
        """Let the daemon publish the accumulated weight; under the lock, so that the last report is the latest."""
        self.accumulated = accumulated
        self.link.start(messages.ReportAccumulated(self.request.run, accumulated))

    def members(self, data: str = "") -> tuple[str, ...]:
        """PeerIDs of the live peers that train, sorted; with the mark of a data set, of those that share it too.

        Raises:
            DaemonLost: The daemon has gone.
        """
        return self.link.ask(messages.AskMembers(self.request.run, data))

    def tell(self, topic: messages.Topic, line: str) -> None:
        """Let the daemon's `status` show a line on a topic, in place of the topic's last line; none if it is empty."""
        with self.lock:
            if self._told.get(topic, "") == line:
                return
            self._told[topic] = line
            self.link.start(messages.TellStatus(self.request.run, topic, line))

    def offer(self, state: StateId, image: bytes | memoryview) -> None:
        """Let the daemon serve the snapshot of a state, u8 [bytes], to newcomers, in place of the last one.

        This costs one copy here. All peers that hold the state must make the same bytes. If the daemon has gone,
        nothing happens.

        Raises:
            Refused: The machine has not enough memory, or the image is larger than can be served.
        """
        size = len(image)
        with contextlib.closing(SharedMemory.reserve(size)) as shared, contextlib.suppress(DaemonLost):
            shared.allocate(size)
            shared.view(size, writable=True)[:] = image
            self.link.ask(messages.OfferState(self.request.run, state, size), OFFER_SECONDS, [shared.fd])

    def fetch(self, wish: Wish, timeout: float = 60.0) -> Download:
        """Download a snapshot of the run's state, verified, or a mean that this peer missed, as the daemon keeps it.

        One download goes on at a time. Daemons keep the last few means of a run whose `step` is given states.

        Args:
            timeout: Seconds after which the download has ended; if no peer has the mean, it ends soon.

        Raises:
            ValueError: The timeout is out of range.
            Refused: The limit is too large for this machine; or, when `result` is called, a download was going on.
        """
        size = wish.limit if wish.after is None else self.binding.mean_size
        return Download(self.link, messages.Fetch(self.request.run, size, timeout, wish))

    def branch(self, name: str, tensors: Tensors, **changes: Any) -> JoinedRun:
        """Join a run that is a part of this one, with another name, other tensors, and its options but for `changes`.

        Raises:
            SchemaError: One of the tensors cannot be averaged; names it.
            Refused: The daemon takes part in the run already, or in too many.
            DaemonLost: The daemon has gone.
        """
        with uninterrupted():  # A loop whose constructor is interrupted leaves its branches.
            options = structs.replace(self.request.options, **changes)
            branch = self._join(options, name, tensors, self.binding.source)
            branch.core.is_branch, branch.core.binding.shadows = True, self.binding.shadows
            branch.core.listeners, branch.core.loop.reported = self.listeners, self.loop.reported
            self.loop.branches.append(branch)
        return branch

    def refuse_without_feedback(self) -> None:
        """Raise `Refused` if the run's codec leaves most values out, so that only loops with error feedback fit it."""
        if self.binding.steps.layout.codec.needs_feedback:
            with_codec = f"with codec {self.request.options.codec}"
            told = f"run {self.request.run!r} sends few values, {with_codec}, and would lose the others"
            hint = "use SparseLoCo(run, every) or DiLoCo(run, every, feedback=0.95), or join with codec='nf4'"
            raise Refused(told, hint)

    def begin_training(self, by: str, feedback: bool = False) -> None:
        """Note the loop that steps the run from now on; raises `Refused` if another one does.

        Or if the codec needs one with `feedback`.
        """
        if not feedback:
            self.refuse_without_feedback()
        if self.loop.by:
            hint = "end that with run.leave() and join again, or join another run for this one"
            raise Refused(f"run {self.request.run!r} is stepped by {self.loop.by} already", hint)
        self.loop.by = by

    def renew(self, link: Connection, region: Region) -> None:
        """Go on through a new daemon, with new shared memory: the lost daemon may still write into the old one."""
        with self.lock:
            if self.left:
                link.start(messages.LeaveRun(self.request.run))
                return
            self.link, self.region = link, region
            pin(region, self.binding.devices)
            for topic, line in self._told.items():
                link.start(messages.TellStatus(self.request.run, topic, line))
            if self.accumulated is not None:
                self.report(self.accumulated)
        self.channels.renew(link, region)


class JoinedRun:
    """A run without its trainers, which build on it; see `equipoise.peer.run.Run`."""

    def __init__(self, core: RunCore) -> None:
        self.core = core
        self.name = core.request.run
        self.options = core.request.options
        self.mean: dict[str, torch.Tensor] = {}
        self.pending: PendingRound | None = None
        self._accumulated: Accumulator | None = None
        self._contributed: Accumulator | None = None
        self._spare: Accumulator | None = None
        self._state: RunState = NoPeers("it has just been joined")
        self._asked: concurrent.futures.Future[RunState] | None = None
        self.totals = Totals()
        self.terms: Mapping[str, str] = {}

    def agree(
        self,
        terms: Mapping[str, str],
        buffers: bool = False,
        observes: bool = False,
        frozen: tuple[str, ...] = (),
    ) -> None:
        """Let `step` meet only peers that give the same terms; call it before the first `accumulate` and `step`.

        This peer is refused if a peer that its daemon's user named (`--join`), or more than half of the others in its
        last mean, were in the run before with other terms. Beside other peers with other terms it waits, with a warning
        in the log: `state`, `status` and `peers` name the difference.

        Args:
            terms: Further values that must be alike, as {"target batch size": "4096"}: at most 32, of up to 64 and 256
                characters of printable ASCII. They have no other effect.
            buffers: Whether the module's persistent floating-point buffers, such as BatchNorm's statistics, travel
                behind the gradients, in fp32 with any codec. `step` sends their values at its call; collecting its
                outcome overwrites them by their weighted mean. Of short integer and bool buffers, such as counters,
                copies travel, and the buffers stay as they are.
            observes: Whether this peer trains nothing: a federated run never draws it.
            frozen: A line for each tensor that no peer trains, of up to 640 characters, with its name first.

        Raises:
            Refused: Peers that have a say have other terms, which the error names. Or the run has accumulated or
                stepped.
            SpecError: A term is too long or not printable.
            SchemaError: The run was not joined with a module, so it has no buffers.
            DaemonLost: The daemon has gone.
        """
        agreed = check_terms(terms)
        with self.core.lock:
            if self.core.left or self.core.accumulated is not None:
                happened = "was left" if self.core.left else "has accumulated or stepped already"
                hint = "agree after join, before the first accumulate and step"
                raise Refused(f"run {self.name!r} {happened}", hint)
            carried = self.core.binding.buffer_schema() if buffers else Schema(())
            dtypes = self.core.loop.dtypes
            request = messages.AgreeRun(self.name, agreed, carried, observes, dtypes, frozen)
            if differs := self.core.link.ask(request, AGREE_SECONDS):
                log.warning(
                    "run %s: %s; this peer waits beside it for peers with its own", self.name, differs
                )
            self.core.binding.carry(carried)
            self.terms, self.core.agreed = dict(agreed), request

    @overload
    def average(self, weight: float = ..., timeout: float = ..., wait: Literal[True] = ...) -> Outcome: ...
    @overload
    def average(self, weight: float = ..., timeout: float = ..., *, wait: Literal[False]) -> PendingRound: ...

    def average(
        self, weight: float = 1.0, timeout: float = 30.0, wait: bool = True
    ) -> Outcome | PendingRound:
        """Replace the tensors, in place, by the weighted mean of the group's tensors.

        Args:
            weight: A finite number >= 0, usually the number of samples. With 0 the peer observes: it only receives.
            timeout: Seconds after which the round has ended one way or the other.
            wait: Whether to wait for the outcome. If not, the tensors are written by `PendingRound.result`.

        Returns:
            The outcome. Unless it is ok, the tensors are untouched.

        Raises:
            SchemaError: A tensor differs from what was joined with, or holds NaN or Inf.
            ValueError: The weight or the timeout is out of range.
            RoundPending: A round of this run has not been collected.
        """
        with self._withdrawn_if_interrupted():
            pending = self._start_average(weight, timeout, moves=False)
            return pending.result() if wait else pending

    def shift(self, weight: float = 1.0, timeout: float = 30.0) -> PendingRound:
        """Average a copy of the tensors, and move them by its difference from the mean: tensors += mean - copy.

        For loops that go on changing the tensors during the round: those changes are kept.

        Args:
            weight: A finite number above 0.
            timeout: Seconds after which the round has ended one way or the other.

        Returns:
            The round; its `result` moves the tensors if it is ok.

        Raises:
            SchemaError: A tensor differs from what was joined with, or holds NaN or Inf.
            ValueError: The weight or the timeout is out of range.
            RoundPending: A round of this run has not been collected.
        """
        if weight == 0:
            raise ValueError("expected a weight above 0: an observer has no copy to move from, call average")
        with self._withdrawn_if_interrupted():
            return self._start_average(weight, timeout, moves=True)

    def accumulate(self, gradients: Gradients, weight: float = 1.0) -> None:
        """Add weight * gradient, in fp32 on the tensors' device, to this peer's contribution to the next step.

        Args:
            gradients: A module (its parameters' `.grad`), a mapping by name, or a list in order. None counts as zeros.
            weight: A finite number >= 0, usually the number of samples.

        Raises:
            SchemaError: A gradient is missing, has a wrong shape, or holds NaN or Inf; nothing was added.
            ValueError: The weight is not a finite number >= 0, or fp32 does not hold it; nothing was added.
        """
        with self.core.lock:
            if self._accumulated is None:
                self._accumulated = self._spare or Accumulator(self.core.binding.stepped())
                self._spare = None
            self._accumulated.add(named_gradients(gradients), weight)
            self.core.report(self.accumulated)

    @overload
    def step(
        self,
        timeout: float = ...,
        wait: Literal[True] = ...,
        state: StateId | None = ...,
        *,
        metrics: Mapping[str, float] = ...,
        evaluation: Evaluation | None = ...,
    ) -> Outcome: ...
    @overload
    def step(
        self,
        timeout: float = ...,
        *,
        wait: Literal[False],
        state: StateId | None = ...,
        metrics: Mapping[str, float] = ...,
        evaluation: Evaluation | None = ...,
    ) -> PendingRound: ...

    def step(
        self,
        timeout: float = 30.0,
        wait: bool = True,
        state: StateId | None = None,
        *,
        metrics: Mapping[str, float] = MappingProxyType({}),
        evaluation: Evaluation | None = None,
    ) -> Outcome | PendingRound:
        """Exchange the accumulated gradients for the mean of all gradients that the group has accumulated.

        If ok, `mean` holds it. If the run was joined with a module, and no `optimizer` or loop of ours trains it, the
        `.grad` of its parameters holds it too, in their dtype; sparse for the weight of an `nn.Embedding(sparse=True)`
        that nothing else uses. The contribution is dropped only if it counted. A peer that has accumulated nothing
        observes. Gradients accumulated while a step with `wait=False` goes on belong to the next step.

        Args:
            timeout: Seconds after which the round has ended one way or the other.
            wait: Whether to wait for the outcome. If not, `mean` is written by `PendingRound.result`.
            state: The state of the run that this peer holds; the outcome has the states of all members that gave one.
            metrics: The metrics of the training that made the contribution, as {"loss": 0.3}: at most 8 finite numbers,
                with names of up to 24 characters of printable ASCII. `Outcome.metrics` holds the average over the
                contributors, by the weights that counted; of any name over those that gave it.
            evaluation: The scores of the state before the round on this peer's data, with a weight, as the number of
                samples, as (1000, {"accuracy": 0.9}). `Outcome.evaluation` holds the average over all members that gave
                one, observers too. Where the run's rule is not the mean, both are medians.

        Raises:
            ValueError: The timeout is out of range, or a metric is not valid: the error names it.
            SchemaError: The parameters have changed since the run was joined, or a buffer is not finite.
            RoundPending: A round of this run has not been collected.
        """
        reports = {name: float(one) for name, one in self.core.loop.reported.items()}
        told = metrics or {name: one for name, one in reports.items() if math.isfinite(one)}
        reported = values_of(told), None if evaluation is None else report_of(evaluation)
        with self._withdrawn_if_interrupted():
            pending = self._start_step(timeout, state, *reported)
            return pending.result() if wait else pending

    def _start_step(
        self, timeout: float, state: StateId | None, metrics: Values, evaluation: Report | None
    ) -> PendingRound:
        deadline = self.core.clock() + check_timeout(timeout)
        with uninterrupted(), self.core.lock:
            self._require_idle()
            self.core.accumulated = self.core.accumulated or 0.0
            stepped, accumulated, region = self.core.binding.stepped(), self._accumulated, self.core.region
            weight, encoded, began = accumulated.weight if accumulated else 0.0, Encoded(), self.core.clock()
            self.core.binding.carried()  # A buffer that has changed is told before the round, also to an observer.
            if accumulated is not None and weight > 0 and self.core.link.lost is None:
                encoded = self.core.binding.write_step(accumulated, region.contribution)
                if (watcher := self.core.loop.watcher) is not None:
                    size = self.core.binding.steps.layout.encoded_size
                    watcher.sends(weight, region.contribution[:size])
            self._contributed, self._accumulated = accumulated, None
            settle = partial(self._stepped, tensors=stepped, region=region, me=self.peer)
            try:
                request = messages.StartRound(
                    self.name, STEP, weight, timeout, state, metrics, evaluation, *encoded
                )
                return self._start(request, deadline, settle, began)
            except EquipoiseError:
                self._keep()
                raise

    def report(self, **metrics: float | torch.Tensor) -> None:
        """Report numbers with each contribution from now on, where a loop of ours calls `step`, as report(loss=loss).

        Tensors of one value are read when the next round begins, so a GPU is not waited for. NaN and Inf are left out.

        Raises:
            ValueError: There are more than 8, a name is too long or not printable, or a value is not one number.
        """
        values_of(dict.fromkeys(metrics, 0.0))
        for name, one in metrics.items():
            if isinstance(one, torch.Tensor) and one.numel() != 1:
                raise ValueError(f"expected one number as {name!r}, got a tensor of shape {list(one.shape)}")
        read = {
            name: one.detach() if isinstance(one, torch.Tensor) else float(one)
            for name, one in metrics.items()
        }
        self.core.loop.reported.clear()
        self.core.loop.reported.update(read)

    def metrics(self) -> dict[str, float]:
        """Numbers for curves: of the last round that made a mean, and sums over all that have ended here.

        Returns:
            By name: the means of what the peers reported, as `loss`; scores of the state before the round, as
            `before/accuracy`; `round`, `group_size`, and `seconds/PHASE` of that round; and of all `rounds`,
            `rounds_ok`, `rounds_counted` (in which this peer's contribution counts), `bytes_sent`, `bytes_received`.
        """
        return metrics([one.totals for one in (self, *self.core.loop.branches)])

    @property
    def rounds_ok(self) -> int:
        """Number of rounds that were ok."""
        return self.totals.ok

    @property
    def rounds_failed(self) -> int:
        """Number of rounds that failed."""
        return self.totals.failed

    @property
    def kernels(self) -> str:
        """The kernels that encode and decode, one line for all devices of the tensors, and why if not the best."""
        devices = {tensor.device for tensor in self.core.binding.tensors().values()}
        return "; ".join(sorted(kernels_of(device) for device in devices))

    @property
    def accumulated(self) -> float:
        """Weight accumulated towards the next step, without the contribution to an open round."""
        return self._accumulated.weight if self._accumulated else 0.0

    @property
    def state(self) -> RunState:
        """State of the next round: `NoPeers`, `Gathering`, `Exchanging` or `Idle`; never waits for peers or rounds.

        If the daemon has gone, it is `NoPeers` with that reason.
        """
        asked = self._asked or self.core.link.start(messages.AskState(self.name))
        if not self.core.link.settled(asked, STATE_SECONDS):
            self._asked = asked
            return self._state
        self._asked = None
        try:
            self._state = self.core.link.wait(asked)
        except DaemonLost as error:
            self._state = NoPeers(str(error))
        return self._state

    @property
    def members(self) -> tuple[str, ...]:
        """PeerIDs of the live peers of this run that train, sorted; see `wait_for` for which count.

        Raises:
            DaemonLost: The daemon has gone.
        """
        return self.core.members()

    def wait_for(self, peers: int, timeout: float = 60.0) -> bool:
        """Wait until `peers` others of this run are known, at most `timeout` seconds; returns whether they are.

        Only peers with equal terms count, so a run that is stepped agrees on its terms first, as `optimizer` does.

        Raises:
            ValueError: The timeout is out of range.
        """
        deadline = self.core.clock() + check_timeout(timeout)
        while _others(self.state) < peers:
            if self.core.clock() >= deadline:
                return False
            self.core.link.sleep(LOOK_SECONDS)
        return True

    def progress(self, target: float | None = None, held: StateId | None = None) -> Progress:
        """Weight accumulated towards the next step, here and in the swarm; only here if the daemon has gone.

        Another peer's claim counts if that peer answers, and up to twice its last contribution.

        Args:
            target: Weight that all peers together must accumulate, if any. The claim of a peer that has not contributed
                yet counts up to its fair share of the target. If a round falls short of the target, `Outcome.events`
                names the peers that contributed less than their claims.
            held: The state that the group has agreed on: which peers train from it? All peers draw alike among the same
                live peers, and the next in order stand for those that die. A run that is not federated draws all.
        """
        local = self.accumulated
        try:
            answer = self.core.link.ask(messages.AskProgress(self.name, target, held))
        except DaemonLost:
            return Progress(local, local)
        return structs.replace(answer, local=local, swarm=max(answer.swarm - answer.local, 0.0) + local)

    def take(self) -> Accumulator | None:
        """Take back the accumulated gradients that are not part of an open round; None without any."""
        with self.core.lock:
            taken, self._accumulated = self._accumulated, None
            self.core.report(self.accumulated)
        return taken

    @property
    def peer(self) -> str:
        """PeerID of the daemon."""
        return self.core.link.welcome.peer_id

    @contextlib.contextmanager
    def _withdrawn_if_interrupted(self) -> Iterator[None]:
        """Where Ctrl-C interrupts the block, cancel the round that the block has started: nobody has its handle.

        A round that was cancelled, and had not ended then, ends first.
        """
        before = self.pending
        if before is not None and before.cancelled:
            with contextlib.suppress(EquipoiseError):
                before.result()
        try:
            yield
        except KeyboardInterrupt:
            if self.pending is not None and self.pending is not before:
                self.pending.cancel()
            raise

    def leave(self) -> None:
        """Stop taking part; idempotent. An open round is finished or fails."""
        if self.core.left:
            return
        try:
            with contextlib.ExitStack() as ending:  # If one `finish` raises, the others still run.
                while self.core.loop.finishing:
                    ending.callback(self.core.loop.finishing.pop(0))
        finally:
            self._tell_if_none_was_ok()
            with self.core.lock:
                self.core.left, link = True, self.core.link
            self.core.channels.close("this script has left the run")
            # An error means that the run was left before, or that the daemon has gone: either way it has ended.
            with contextlib.suppress(EquipoiseError):
                link.ask(messages.LeaveRun(self.name), LEAVE_SECONDS)
            if self.pending is not None:
                self.pending.wait(SETTLE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def __repr__(self) -> str:
        parts = [self, *self.core.loop.branches]
        ok, failed = sum(one.rounds_ok for one in parts), sum(one.rounds_failed for one in parts)
        told = f"<Run {self.name!r}{', left' if self.core.left else ''}, rounds: {ok} ok, {failed} failed"
        latest = [one.totals.last_ok for one in parts if one.totals.last_ok is not None]
        if not latest:
            return f"{told}>"
        return f"{told}; the last ok one: {max(latest, key=lambda outcome: outcome.started)!r}>"

    def _tell_if_none_was_ok(self) -> None:
        parts = [self, *self.core.loop.branches]
        used = any(one.core.loop.by or one.core.accumulated is not None or one.rounds_failed for one in parts)
        if self.core.is_branch or not used or any(one.rounds_ok for one in parts):
            return
        reasons = [one.totals.why_not for one in parts if one.totals.why_not] or [
            getattr(self.state, "reason", "")
        ]
        log.warning(
            "run %s ends without one round that was ok: %s",
            self.name,
            reasons[0] or "others were there, but the script ended before a round",
        )

    def _collected(self, outcome: Outcome | None) -> None:
        self.pending = None
        if outcome is None:
            return
        self.totals.add(outcome, self.peer in outcome.givers)
        for listener in self.core.listeners if outcome.givers else ():
            listener()

    def _require_idle(self) -> None:
        """Refuse to encode where another may use the memory: an open round's, or that of the process that forked.

        Wait for devices that still read the mean of the last round.
        """
        if os.getpid() != self.core._process:
            raise Refused(
                f"run {self.name!r} belongs to process {self.core._process}", "connect again after a fork"
            )
        if self.core.left:
            raise Refused(f"run {self.name!r} was left", "join it again")
        if self.pending is not None:
            hint = "call .result() on what average or step returned, or on .pending; .cancel() withdraws it"
            raise RoundPending(f"a round of run {self.name!r} is going on or has not been collected", hint)
        self.core.binding.settle()

    def _start(
        self,
        request: messages.StartRound,
        deadline: float,
        settle: Callable[[Outcome | None], None],
        began: float,
    ) -> PendingRound:
        """Start a round, with what is left of its timeout: the encoding of its contribution `began` then."""
        now = self.core.clock()
        request = structs.replace(request, timeout=max(deadline - now, SHORTEST_TIMEOUT))
        self.pending = PendingRound(self.core.link, request, deadline, settle, now - began)
        return self.pending

    def _start_average(self, weight: float, timeout: float, moves: bool) -> PendingRound:
        """Contribute the tensors; if the round is ok, they become the mean, or move by its difference."""
        self.core.refuse_without_feedback()
        deadline = self.core.clock() + check_timeout(timeout)
        weight = check_weight(weight)
        with uninterrupted(), self.core.lock:
            self._require_idle()
            tensors, region = self.core.binding.tensors(), self.core.region
            encoded, began = Encoded(), self.core.clock()
            copies = self.core.binding.unrounded(tensors) if moves else {}
            # An observer's tensors may hold NaN: the mean will replace it.
            if weight > 0 and self.core.link.lost is None:
                encoded = self.core.binding.averages.encode(copies or tensors, region.contribution)
            settle = partial(self._averaged, tensors=tensors, region=region, copies=copies)
            request = messages.StartRound(self.name, AVERAGE, weight, timeout, **encoded._asdict())
            return self._start(request, deadline, settle, began)

    def _averaged(
        self,
        outcome: Outcome | None,
        tensors: Mapping[str, torch.Tensor],
        region: Region,
        copies: dict[str, torch.Tensor],
    ) -> None:
        """Let the tensors be the mean, or move them by its difference from their `copies`."""
        with self.core.lock:
            self._collected(outcome)
            if outcome is not None and outcome.ok:
                # The tensors may have been reshaped; a partial write must not happen.
                self.core.binding.schema.check(tensors)
                if copies:
                    self.core.binding.shift(region.mean, tensors, copies)
                else:
                    self.core.binding.averages.decode(region.mean, tensors)

    def _stepped(
        self, outcome: Outcome | None, tensors: Mapping[str, torch.Tensor], region: Region, me: str
    ) -> None:
        with self.core.lock:
            self._collected(outcome)
            if outcome is not None and (watcher := self.core.loop.watcher) is not None:
                watcher.ended(outcome)
            if outcome is not None and me in outcome.contributors:  # Also where the script has cancelled it.
                self._spare, self._contributed = self._contributed, None  # Its memory serves again.
                if self._spare is not None:
                    self._spare.clear()
            else:
                self._keep()
            if outcome is not None and outcome.ok:
                hand_back, shares = not self.core.loop.by, outcome.shares
                self.core.binding.read_step(region.mean, tensors, self.mean, hand_back, shares)
            self.core.report(self.accumulated)

    def _keep(self) -> None:
        """Take back the contribution, and merge the gradients accumulated since."""
        contributed, self._contributed = self._contributed, None
        if contributed is not None and self._accumulated is not None:
            contributed.merge(self._accumulated)
        self._accumulated = contributed or self._accumulated


def _others(state: RunState) -> int:
    """Least number of other peers that are known."""
    match state:
        case Idle(peers):
            return peers
        case Exchanging(members):
            return members - 1
    return 0
