"""One trainer of the demo, a process of its own: `python -m equipoise.peer.demo.trainer`.

It uses the public client only, as any training script would: connect, join, wrap the optimizer, train.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from equipoise.peer import Outcome, Run, connect
from equipoise.peer.demo.learner import Learner, deal, split_digits, train_alone
from equipoise.peer.demo.options import BATCHES_PER_PEER, EXCHANGE_STEPS, DemoOptions
from equipoise.peer.demo.summary import Failed, Finished, Report, Stepped, encode_report
from equipoise.peer.training import Gossip


def train(run: Run, learner: Learner, options: DemoOptions) -> None:
    """Make all updates together with the others, and report each."""
    optimizer = run.optimizer(
        learner.optimizer, target_batch_size=options.target, alone="wait", wait_for=options.peers - 1
    )
    losses: list[float] = []
    while optimizer.epoch < options.rounds:
        before, last = optimizer.epoch, optimizer.last
        loss, optimizer.batch_size = learner.backward()
        losses.append(loss)
        optimizer.step()
        outcome = optimizer.last
        if outcome is None or outcome is last:
            continue
        if not outcome.ok:
            _say(Failed(update=before + 1, reason=outcome.reason))
        elif optimizer.epoch > before:
            _say(_stepped(optimizer.epoch, sum(losses) / len(losses), outcome))
            losses.clear()
    optimizer.finish()


def gossip(run: Run, learner: Learner, options: DemoOptions) -> None:
    """Make as many local steps, exchange with some other peer now and then, and report each stretch between."""
    with Gossip(run, every=EXCHANGE_STEPS, wait_for=options.peers - 1) as trained:
        for update in range(1, options.rounds + 1):
            losses, before = [], trained.last
            for _ in range(BATCHES_PER_PEER):
                losses.append(learner.backward()[0])
                learner.optimizer.step()
            new = trained.last if trained.last is not before else None
            _say(_stepped(update, sum(losses) / len(losses), new or Outcome(ok=True, reason="no exchange")))
    finished = trained.finished
    if finished is not None and not finished.ok:
        _say(Failed(update=options.rounds, reason=finished.reason))


def main() -> None:
    """Train as told by the arguments HOME INDEX OPTIONS, report on standard output, stay until standard input ends."""
    home, index = Path(sys.argv[1]), int(sys.argv[2])
    options = msgspec.json.decode(sys.argv[3], type=DemoOptions)
    torch.set_num_threads(1)
    training, test = split_digits()
    share = deal(training, index, options.peers)
    learner = Learner(share, seed=index)
    with (
        connect(home=home) as peer,
        peer.join(
            "digits", learner.model, strategy=options.strategy, codec=options.codec, group_size=options.peers
        ) as run,
    ):
        (gossip if run.strategy.pairs else train)(run, learner, options)
        alone = train_alone(share, index, options.rounds)
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
        seconds=outcome.seconds.get("total", 0.0),
    )


def _say(report: Report) -> None:
    print(encode_report(report), flush=True)


if __name__ == "__main__":
    main()
