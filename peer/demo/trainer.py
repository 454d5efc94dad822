"""One trainer of the demo, a process of its own: `python -m equipoise.peer.demo.trainer`.

It uses the public client only, as any training script would: connect, join, accumulate, step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import torch

from equipoise.peer import Client, Idle, Outcome, connect
from equipoise.peer.demo.digits import deal, split_digits
from equipoise.peer.demo.learner import Learner, train_alone
from equipoise.peer.demo.lockstep import Lockstep
from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.reports import Failed, Finished, Report, Stepped, encode_report

STEP_SECONDS = 10.0
"""A round takes a fraction of a second, and two seconds more where a member is lost."""

MEET_SECONDS = 0.05
"""Between two looks for the other trainers."""

BATCH_SECONDS = 0.04
"""What a batch takes at least, as those of a larger network do: what the swarm has accumulated is known to all about a
tenth of a second later, and should not come from one peer alone by then."""


class Trainer:
    """Trains one learner together with the swarm.

    Attributes:
        batches: How many own batches went into each update.
    """

    def __init__(self, peer: Client, learner: Learner, options: DemoOptions) -> None:
        self.batches: list[int] = []
        strategy, size = options.strategy, options.peers
        self._run = peer.join(
            "digits", learner.model, strategy=strategy, group_size=size, codec=options.codec
        )
        self._states = peer.join(
            "digits-state", learner.state(), strategy=strategy, group_size=size, codec="fp32"
        )
        self._learner = learner
        self._options = options
        self._lockstep = Lockstep()
        self._deadline = time.monotonic() + options.limit

    def train(self) -> None:
        """Make all updates.

        Raises:
            TimeoutError: The demo's time is over.
        """
        self._meet()
        while self._learner.updates < self._options.rounds:
            loss = self._gather()
            outcome = self._step()
            self._learner.update()
            weight = self._lockstep.follow(outcome)
            if weight is not None:
                self._exchange_states(weight)
            _say(_stepped(self._learner.updates, loss, outcome))

    def _meet(self) -> None:
        """Wait for the other trainers, which are still starting; whoever comes later has missed rounds."""
        others = self._options.peers - 1
        while time.monotonic() < self._deadline:
            state = self._run.state
            if isinstance(state, Idle) and state.peers >= others:
                return
            time.sleep(MEET_SECONDS)
        raise TimeoutError(f"the other {others} trainers were not all there in {self._options.limit:.0f} s")

    def _gather(self) -> float:
        """Accumulate own batches until the swarm has the target; returns their mean loss."""
        losses = []
        while True:
            time.sleep(BATCH_SECONDS)
            loss, samples = self._learner.backward()
            self._run.accumulate(self._learner.model, weight=samples)
            losses.append(loss)
            if self._run.progress(self._options.target).swarm >= self._options.target:
                self.batches.append(len(losses))
                return sum(losses) / len(losses)

    def _step(self) -> Outcome:
        """Average until it works; a failed round has kept what was accumulated."""
        while time.monotonic() < self._deadline:
            outcome = self._run.step(timeout=STEP_SECONDS)
            if outcome.ok:
                return outcome
            self._lockstep.follow(outcome)
            _say(Failed(update=self._learner.updates + 1, reason=outcome.reason))
        raise TimeoutError(f"no round succeeded by the end of the demo's {self._options.limit:.0f} s")

    def _exchange_states(self, weight: float) -> None:
        outcome = self._states.average(weight=weight, timeout=STEP_SECONDS)
        if not outcome.ok:
            _say(Failed(update=self._learner.updates, reason=f"exchange of states: {outcome.reason}"))


def main() -> None:
    """Train as told by the arguments HOME INDEX OPTIONS, report on standard output, stay until standard input ends."""
    home, index, options = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        msgspec.json.decode(sys.argv[3], type=DemoOptions),
    )
    torch.set_num_threads(1)
    training, test = split_digits()
    share = deal(training, index, options.peers)
    learner = Learner(share, seed=index)
    with connect(home=home) as peer:
        trainer = Trainer(peer, learner, options)
        trainer.train()
        alone = train_alone(share, index, trainer.batches)
        _say(
            Finished(
                digest=learner.digest(),
                accuracy=learner.accuracy(test),
                alone=alone.accuracy(test),
                values=learner.values,
            )
        )
        # A neighbour may still need this peer to finish its last round.
        sys.stdin.read()


def _stepped(update: int, loss: float, outcome: Outcome) -> Stepped:
    return Stepped(
        update=update,
        group=len(outcome.group),
        contributors=len(outcome.contributors),
        loss=loss,
        bytes_sent=outcome.bytes_sent,
        bytes_received=outcome.bytes_received,
        seconds=outcome.seconds["total"],
    )


def _say(report: Report) -> None:
    print(encode_report(report), flush=True)


if __name__ == "__main__":
    main()
