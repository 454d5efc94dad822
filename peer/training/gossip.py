"""Local steps, and now and then an exchange of parameters with another peer, for which the loop never waits.

    with peer.join("digits", model, strategy="gossip") as run, Gossip(run, every=10):
        for batch in batches: ...  # the loop as it is: any torch optimizer over the model's parameters

Asynchronous decentralised SGD (AD-PSGD, Lian 2018, 1710.06952): two peers average copies of their parameters. When the
mean comes, each peer adds mean - copy to its parameters, which keeps the loop's steps meanwhile. Both peers of a pair
move by opposite amounts, so the sum over all peers changes by local steps alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from msgspec import structs

from equipoise.averaging.options import MAX_GROUP_SIZE
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.outer import Nesterov, OuterStep, parse_outer
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.peer.client.futures import PendingRound
from equipoise.peer.client.interrupts import frees_its_run
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.tensors import named_tensors
from equipoise.peer.errors import Refused
from equipoise.peer.training import member
from equipoise.peer.training.local import LocalTraining
from equipoise.peer.training.options import LocalOptions
from equipoise.peer.training.progress import ProgressLine

NEWCOMER = ATTENDANCE_LIMIT
"""Weight of a peer in its first exchange: the mean is almost its partner's model."""

END_GRACE = 10
"""Most seconds that the all-reduce at the end waits for further peers, once two have ended: on busy machines, loops of
as many steps end seconds apart. A group of peers in step closes after three."""

END_SECONDS = 3.0 * END_GRACE
"""Longest time of an end: the first peer that ends also waits for the second."""

log = logging.getLogger(__name__)


MOVED, SLOW = "moved/", "slow/"
"""What the names of the two vectors of a tensor begin with."""


class PairedStep:
    """Exchanges of pairs with an outer step: NoLoCo (2025, 2506.10911).

    Beside its parameters theta each peer holds slow ones, phi. A pair averages copies of both. Each of its peers makes

        m <- alpha m + beta mean(theta - phi) + beta (mean(phi) - phi);  phi <- phi + m;  theta <- phi

    with momentum alpha and rate beta, and keeps what its loop has moved theta by since the copies were taken. Memory is
    four times that of the tensors, in fp32, on their devices.
    """

    def __init__(self, run: JoinedRun, tensors: Mapping[str, torch.Tensor], outer: str) -> None:
        """Agree with the others on the step, and begin with phi at the tensors' values.

        Raises:
            ValueError: `outer` is not the spec of a Nesterov step.
            Refused: The others make another step.
        """
        step: OuterStep = parse_outer(outer)
        if not isinstance(step, Nesterov):
            raise ValueError(f'outer: expected nesterov, as in "nesterov:lr=0.7,momentum=0.3", got {outer!r}')
        self._step = step
        self._tensors = tensors
        self._copies = _copies(tensors)
        self._momentum = {name: torch.zeros_like(copy) for name, copy in self._copies.items()}
        self._slow, self._moved = _copies(tensors), _copies(tensors)
        self._is_new = True
        run.agree({"outer": str(step)})
        named = {MOVED + name: moved for name, moved in self._moved.items()}
        self.run = run.core.branch(
            f"{run.name}/outer", named | {SLOW + name: slow for name, slow in self._slow.items()}
        )

    @torch.no_grad()
    def begin(self, weight: float, timeout: float) -> PendingRound:
        """Begin an exchange of copies of both vectors."""
        for name, tensor in self._tensors.items():
            self._copies[name].copy_(tensor)
            torch.sub(self._copies[name], self._slow[name], out=self._moved[name])
        return self.run.average(weight, timeout, wait=False)

    @torch.no_grad()
    def end(self, pending: PendingRound) -> Outcome:
        """Return the outcome of an exchange, and make the step if the outcome is ok.

        In its first exchange a peer takes phi from its partner. Later it is drawn there by `lr`.
        """
        before = {name: slow.clone() for name, slow in self._slow.items()}
        outcome = pending.result()
        if not outcome.ok:
            return outcome
        for name, tensor in self._tensors.items():
            slow, momentum, moved = self._slow[name], self._momentum[name], self._moved[name]
            drawn = slow - before[name]
            momentum.mul_(self._step.momentum).add_(moved * self._step.lr)
            if not self._is_new:
                momentum.add_(drawn * self._step.lr)
                slow.copy_(before[name])
            slow.add_(momentum)
            tensor.copy_(tensor.float() + (slow - self._copies[name]))
        self._is_new = False
        return outcome


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().clone() for name, tensor in tensors.items()}


class Gossip(LocalTraining[Outcome]):
    """Exchanges with another peer once in `every` steps; a context manager.

    Attributes:
        steps: Steps of the loop's optimizer.
        last: The outcome of the last exchange that has ended.
        exchanged: Number of exchanges that were ok.
        finished: The outcome of the all-reduce at the end.
    """

    @frees_its_run
    def __init__(
        self,
        run: JoinedRun,
        every: int = 0,
        outer: str = "",
        *,
        weight: float = 1.0,
        timeout: float = 30.0,
        wait_for: int = 0,
    ) -> None:
        """Watch the steps of the optimizer that holds the run's parameters, from `with` on.

        Args:
            run: Joined with the model and `strategy="gossip"`, and used for nothing else.
            every: Steps from the start of one exchange to the start of the next, if the first has ended by then.
            outer: Step that each peer makes with the mean of a pair (`noloco`), as "nesterov:lr=0.7,momentum=0.3".
                Without it the mean takes the place of the parameters.
            weight: Weight of this peer in the mean of a pair; both count as the smaller of the two.
            timeout: Seconds for one exchange, the search for a partner included. The loop does not wait for it.
            wait_for: Other peers to wait for before the loop begins, at most a minute.

        Raises:
            ValueError: An option is out of its range, or `outer` is no Nesterov step.
            Refused: Another loop trains with the run already, or the run has another strategy. Or no optimizer can step
                any of its tensors.
        """
        self._options = LocalOptions(every=every, weight=weight, timeout=timeout, wait_for=wait_for)
        source, strategy = run.core.binding.source, run.core.strategy
        tensors = named_tensors(source)
        super().__init__(run, tensors.values())
        run.core.begin_training(type(self).__name__)
        if not strategy.pairs:
            raise Refused(
                f"expected a run whose peers meet in pairs, {run.name!r} has the strategy {strategy.spec!r}",
                'join it with strategy="gossip"',
            )
        self.exchanged = 0
        self.last: Outcome | None = None
        self._progress = ProgressLine(run.name)
        self._pending: PendingRound | None = None
        # All live peers are drawn, so the group closes at once when they are in, or with two and after the grace.
        all_of_them = {"strategy": f"federated:quorum=2,grace={END_GRACE}", "group_size": MAX_GROUP_SIZE}
        self._end = run.core.branch(f"{run.name}/end", source, **all_of_them)
        self._paired = PairedStep(run, tensors, outer) if outer else None
        member.wait_for((run if self._paired is None else self._paired.run, self._end), wait_for)

    def finish(self, timeout: float = END_SECONDS) -> Outcome:
        """End with one all-reduce among the peers that end too, so that they have one model. `with` calls this.

        It begins when all live peers end, or `END_GRACE` seconds after two do. It ends within `timeout` seconds.

        Returns:
            The outcome of the all-reduce; not ok if no other peer ends.
        """
        self._progress.clear()
        deadline = self._run.core.clock() + timeout
        if self._pending is not None:
            self._pending.stop_search("this peer ends")
            if self._pending.wait(timeout):
                self._collect()
        left = max(deadline - self._run.core.clock(), member.LEAST_SECONDS)
        self.finished = self._end.average(self._options.weight, left)
        ends, known = len(self.finished.group), getattr(self._end.state, "peers", 0) + 1
        if self.finished.ok and ends < known:
            told = f"{ends} of {known} peers end with this model"
            log.warning("run %s: %s", self._run.name, told)
            self.finished = structs.replace(self.finished, reason=f"{self.finished.reason}; {told}")
        return self.finished

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1
        self._progress.show(self.exchanged, f"step {self.steps}", self.last)
        if self._pending is not None and self._pending.done():
            self._collect()
        if self._pending is None and self.steps % self._options.every == 0:
            weight = self._options.weight if self.exchanged else NEWCOMER
            begin = self._run.shift if self._paired is None else self._paired.begin
            self._pending = begin(weight, self._options.timeout)

    def _collect(self) -> None:
        assert self._pending is not None, "an exchange goes on"
        pending, self._pending = self._pending, None
        self.last = pending.result() if self._paired is None else self._paired.end(pending)
        self.exchanged += self.last.ok
        if self.last.in_doubt:
            log.warning("run %s: an exchange is in doubt: %s", self._run.name, self.last.reason)
