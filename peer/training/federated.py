"""Federated rounds: the drawn peers train on their own data, and all peers make the same server step.

    history = Federated(run, fit, evaluate, outer="fedyogi:eta=0.01", rounds=50, until="accuracy >= 0.95").run()

FedAvg (McMahan 2017, 1602.05629) without a server: each drawn peer contributes the difference of the agreed model and
its own, weighted by what `fit` returned; the others observe. The outer step (Reddi 2021, 2003.00295) is replicated:
every peer applies it to the same mean, so all hold the same model, the same moments and the same history.

A failed round keeps the contributions and is tried again; no peer trains twice from one state, unless it had nothing to
contribute: `fit` returned the weight 0, or led to NaN or Inf. A peer that comes too late fetches the mean that it
missed. Its contribution is dropped or, with the strategy's `late=next`, counts once in a later round, with
weight / sqrt(1 + age) as in FedBuff (Nguyen 2022, 2106.06639), age in rounds.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Unpack

import torch
from msgspec import structs

from equipoise.averaging.draw import Drawn
from equipoise.averaging.metrics import Evaluation, report_of
from equipoise.averaging.options import MAX_TERM_CHARS
from equipoise.averaging.outcome import Exchanging, Gathering, Outcome
from equipoise.averaging.outer import OuterStep, parse_outer
from equipoise.averaging.schema import SchemaError
from equipoise.averaging.state import StateId
from equipoise.averaging.strategy import MAX_SECONDS
from equipoise.averaging.strategy import Federated as FederatedStrategy
from equipoise.averaging.weights import LEAST_CONTRIBUTION, discounted
from equipoise.peer.client.interrupts import frees_its_run
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.tensors import stepped_tensors
from equipoise.peer.errors import Refused
from equipoise.peer.training import image
from equipoise.peer.training.agreed import AgreedModel, Named
from equipoise.peer.training.checkpoint import Checkpoints, keep_checkpoints
from equipoise.peer.training.guard import require_same_tensors
from equipoise.peer.training.history import Ending, History, Record, Until
from equipoise.peer.training.member import FINISH_SECONDS, Finished, Member, wait_for
from equipoise.peer.training.options import (
    CommonOptions,
    FederatedKeywords,
    FederatedOptions,
    from_keywords,
    number,
    short,
)

POLL_SECONDS, OBSERVER_POLL_SECONDS = 0.25, 0.5
"""Time between two looks at the draw and at downloads while a peer waits: a peer that is not in step yet, and an
observer in step, which may be drawn in a dead peer's place."""

FIRST_LOOK_SECONDS, LOOK_SECONDS, MAX_LOOK_SECONDS = 0.25, 1.0, 30.0
"""Time until a peer that waits asks for a mean that it may have missed, then from one question to the next, and the
longest such time. It doubles, because each question goes to all peers. An observer misses a round that closes before it
has joined, and does not hear so."""

LEAST_WAIT_SECONDS = 10.0
"""Least time for a peer to join the round, though its training took longer than the deadline."""

WITHHELD_SECONDS = 10.0
"""Longest time for which a peer that came too late waits for the round's mean. Without a mean, that round has failed,
and the peer offers its contribution again: if the round has come about, it only hears once more that it is late."""

OFFER_BYTES = 2**30
"""Largest limit of an image that each peer offers before each round, so that newcomers need not wait for a peer that
trains; a larger one is offered when a newcomer wants it, between two trainings."""

MAX_CONFIG_TERMS = 16
"""Most values of `config` that are a term each, so that a difference is named; more are one term, a digest."""

Fit = Callable[["Task"], tuple[float, Mapping[str, float]]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """The purpose of one call of `fit` or `evaluate`.

    Attributes:
        number: `fit`: the number of the round, 1 for the first. `evaluate`: the number of the round whose model is
            evaluated, 0 before the first.
        config: The options that all peers have alike.
        proximal: Returns FedProx's term, to add to the loss: mu / 2 ||w - w_t||^2, w_t the agreed parameters (Li 2020,
            1812.06127).
    """

    number: int
    config: Mapping[str, Any]
    proximal: Callable[[], torch.Tensor]
    _seconds_left: Callable[[], float]

    @property
    def seconds_left(self) -> float:
        """Seconds until the round's deadline, at least 0; if a quorum is there before, the round ends sooner."""
        return self._seconds_left()


@dataclass
class Result:
    """The result of this peer's training.

    Attributes:
        state: The state from which it trained.
        values: That state's parameters minus the trained ones, by name, fp32.
        weight: What `fit` returned.
        metrics: The finite ones of the metrics that `fit` returned.
    """

    state: StateId
    values: dict[str, torch.Tensor]
    weight: float
    metrics: dict[str, float]

    def weight_at(self, state: StateId) -> float:
        """Its weight in the round after a state: discounted by its age."""
        return discounted(self.weight, state.epoch - self.state.epoch)


@dataclass
class Training:
    """What this peer has trained.

    Attributes:
        result: What waits to count in a round.
        trained: The state from which it trained last; None if that is to be done again.
        nothing: Why the last training has no result.
        withheld: For which state, and until when, a result that came too late is not offered again.
    """

    result: Result | None = None
    trained: StateId | None = None
    nothing: str = ""
    withheld: tuple[StateId | None, float] = (None, 0.0)

    def give_up(self, why: str) -> None:
        """Give the result to no round; if the round fails, this peer trains again."""
        self.result, self.nothing = None, why


@dataclass
class Draw:
    """The peers of the round that is due, as this peer sees them.

    Attributes:
        number: The round's number.
        peers: PeerIDs of those that are drawn to train.
        live: Number of the available peers.
        begun: Whether as many have been available as the first round needs.
    """

    number: int = 0
    peers: tuple[str, ...] = ()
    live: int = 0
    begun: bool = False


class Pace:
    """The deadline of the round that is due, and when this peer looks around again; in seconds of `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.deadline = self.look_at = clock()
        self.pause = 0.0

    @property
    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(self.deadline - self.clock(), 0.0)

    def looks(self) -> bool:
        """Whether it is time for a look; the next one is due after twice the pause."""
        now = self.clock()
        if now < self.look_at + self.pause:
            return False
        self.look_at, self.pause = now, min(max(2 * self.pause, LOOK_SECONDS), MAX_LOOK_SECONDS)
        return True


class Federated:
    """A training in rounds; made once for a run that has the strategy `federated`.

    The model's floating-point buffers, such as BatchNorm's statistics, are averaged with its parameters. A run that was
    joined with some of the tensors leaves all others each peer's own (personal layers).

    Attributes:
        history: One record for each round that came about.
        finished: The result of `finish`, once it has returned.
        member: This peer's part in the replicated state.
        model: The agreed model, and the run's tensors.
    """

    @frees_its_run
    def __init__(
        self,
        run: JoinedRun,
        fit: Fit | None,
        evaluate: Fit | None = None,
        outer: str | OuterStep = "average",
        *,
        checkpoints: Checkpoints | None = None,
        **options: Unpack[FederatedKeywords],
    ) -> None:
        """Agree with the others on the way of training.

        Args:
            run: Joined with the model or its tensors and the strategy `federated`, and used for nothing else.
            fit: Trains the run's tensors, which hold the agreed model at its call, on this peer's data; returns a
                weight, usually the number of samples, and metrics. None: this peer only evaluates.
            evaluate: Returns a weight and metrics of the agreed model; called before the first round and after each.
            outer: The outer step or its spec.
            checkpoints: Checkpoints of the agreed state, one epoch a round.
            **options: Fields of `FederatedOptions`.

        Raises:
            TypeError: An option is unknown; names it, and the closest known one.
            ValueError: An option is out of its range, or `checkpoints.mode` is not the direction of `until`.
            Refused: The run has another strategy, is used already, or its peers agreed on other terms.
            CheckpointError: Training should resume, but the checkpoints are damaged or of another training.
        """
        others = ("fit", "evaluate", "outer", "checkpoints")
        given = from_keywords("Federated", FederatedOptions, dict(options), others)
        self._options = replace(given, config=MappingProxyType(_plain(given.config)))
        until = Until.parse(self._options.until) if self._options.until else None
        if checkpoints and until and checkpoints.best == until.name and checkpoints.mode != until.mode:
            # The worst checkpoint would be kept as the best, by the very metric that is to get better.
            raise ValueError(
                f"checkpoints: expected mode={until.mode!r}, as until={str(until)!r} asks for it, "
                f"got {checkpoints.mode!r}"
            )
        self._ending = Ending(self._options.rounds, until, self._options.patience)
        run.core.begin_training(type(self).__name__)
        if not isinstance(strategy := run.core.strategy, FederatedStrategy):
            told = f"expected a run with the strategy federated, {run.name!r} has {strategy.spec!r}"
            raise Refused(told, 'join it with strategy="federated"')
        self._run, self._fit, self._evaluate = run, fit, evaluate
        outer = parse_outer(outer) if isinstance(outer, str) else copy.deepcopy(outer)
        buffers, source = image.averaged_buffers(run), run.core.binding.source
        local, counters = stepped_tensors(source), run.core.binding.counters
        self.model = AgreedModel(local, buffers, outer, counters, self._return_to_agreed)
        self.history = History()
        self.finished: Finished | None = None
        self._judged: tuple[StateId | None, Evaluation | None] = (None, None)
        self._own, self._draw, self._deserted = Training(), Draw(), ""
        frozen = image.frozen_of(source, run.options.base)
        run.agree(self._terms(outer, bool(buffers)), bool(buffers), observes=fit is None, frozen=frozen)
        self.member = self._join()
        self._pace = Pace(self.member.clock)
        self._keeper = keep_checkpoints(self.member, run, checkpoints, scores=True)
        run.core.loop.finishing.append(self._leave)  # Before the keeper, which records the final state.
        wait_for([run], self._options.wait_for)

    @property
    def epoch(self) -> int:
        """Number of rounds that are in the model that this peer holds."""
        return self.member.id.epoch

    @property
    def evaluation(self) -> Evaluation | None:
        """What `evaluate` returned last, for this peer's data; None before."""
        return self._judged[1]

    @property
    def ended(self) -> bool:
        """Whether the training has ended: by `rounds`, `until` or `patience`, as equal histories say alike, or because
        all others have left and not come back for as long as a round may take.
        """
        return bool(self._why_ended)

    @property
    def reason(self) -> str:
        """Why the training has ended; until then, why this peer is in step with the group or not, one line."""
        return self._why_ended or self.member.reason

    @property
    def _why_ended(self) -> str:
        return self._ending.reason(self.history) or self._deserted

    @property
    def _strategy(self) -> FederatedStrategy:
        strategy = self._run.core.strategy
        assert isinstance(strategy, FederatedStrategy), "checked at the beginning"
        return strategy

    def run(self) -> History:
        """Make rounds until the training ends, and end together with the others; a failed round is tried again.

        Raises:
            TypeError: `fit` or `evaluate` returned something else than a weight and metrics.
            ValueError: The weight or a metric is not valid; the error names it.
        """
        while not self.ended:
            began = self._pace.clock()
            record = self.step()
            if not record.ok and self._pace.clock() - began < LOOK_SECONDS:  # The daemon has gone, say.
                self._run.core.link.sleep(LOOK_SECONDS)
        self.finish()
        return self.history

    def step(self) -> Record:
        """Make one round, or find out that it failed; after the training's end, return its last record.

        A peer that begins, or has missed rounds, first catches up with the group.
        """
        began = self._pace.clock()
        self._pace.deadline = began + self._strategy.deadline
        sent, received, late = 0, 0, 0.0
        failure, number = "", None
        while not failure and (number is None or self.epoch < number):
            if number is None and self.member.in_step:
                if self.ended:
                    return self.history[-1]
                number = self.epoch + 1
            ended = self.member.outcomes
            failure = self._advance()
            if self.member.outcomes != ended and self.member.last is not None:
                sent += self.member.last.bytes_sent
                received += self.member.last.bytes_received
                late = late or self.member.last.late
        number = number or self.epoch + 1
        if failure:
            if self._own.result is None:
                self._own.trained = None  # Its training counted nothing, so it trains again.
            drawn = self._draw.peers if self._draw.number == number else ()
            record = Record(number=number, ok=False, reason=failure, drawn=drawn)
        else:
            told = "the state that this peer took on has no record of this round"
            lacking = Record(number=number, ok=False, reason=told)  # Its donors may have lied.
            record = next((one for one in reversed(self.history) if one.number == number), lacking)
        record = structs.replace(
            record,
            late=late,
            seconds=self._pace.clock() - began,
            bytes_sent=sent,
            bytes_received=max(received, record.bytes_received),
            reason=f"its contribution came too late by {late:.1f} s; {record.reason}"
            if late
            else record.reason,
        )
        if record.ok:
            self.history.add(record)
            self._look_at_model()
        log.info("run %s, round %d: %s", self._run.name, number, record.reason)
        return record

    def finish(self, timeout: float = FINISH_SECONDS) -> Finished:
        """End together with the others, within `timeout` seconds: catch up, and stay while others are not as far.

        Returns:
            Whether this peer ends with the group's model, and why not; and what it trained for no round.
        """
        self.member.withdraw("this peer ends")
        end = self.member.finish(timeout)
        self._return_to_agreed()
        self._forget_the_old()
        self.finished = end.without(self._own.result.weight if self._own.result else 0.0)
        return self.finished

    # ---- one round ----

    def _advance(self) -> str:
        """Take the next step that is due, and wait a moment; returns why the round failed, if it has."""
        drawn = self._run.progress(held=self.member.id).drawn
        self._note_draw(drawn)
        if self.member.in_step:
            self._forget_the_old()
            self._look_at_model()
            if self.member.limit <= OFFER_BYTES:
                # Not sooner: where a round has just closed, others still apply its mean.
                self.member.offer()
            self._draw.number, self._draw.peers = self.epoch + 1, drawn.peers
            if self._trains(drawn):
                self._train()
        before, ended = (self.member.id, self.member.in_step), self.member.outcomes
        self._take_part()
        self._look_around()
        poll = OBSERVER_POLL_SECONDS if self.member.in_step else POLL_SECONDS
        if not self.member.pending:
            self._run.core.link.sleep(POLL_SECONDS)
        self.member.wait(min(poll, self._pace.pause))
        if (self.member.id, self.member.in_step) != before:
            # A download may have brought a mean or the state while this peer waited for the round.
            self.member.withdraw("this peer has caught up with the group")
            self._pace.pause = FIRST_LOOK_SECONDS
            return ""
        if self.member.outcomes != ended:
            return self._failure()
        if not self._pace.left and not self._comes_about():
            return self._give_up()
        return ""

    def _note_draw(self, drawn: Drawn) -> None:
        draw, places = self._draw, self._run.options.group_size
        draw.live = len(drawn.live)
        told = f"{draw.live} peers share {places} places: each round draws anew, and the others follow"
        self._run.core.tell("places", told if draw.live > places else "")
        self.member.show(f"{len(drawn.peers)} of {draw.live} peers are drawn")
        draw.begun = draw.begun or self.epoch > 0 or draw.live >= self._strategy.available

    def _comes_about(self) -> bool:
        """Whether the round has begun, or will within the grace: its quorum is there."""
        state = self._run.state
        gathered = len(state.contributed) if isinstance(state, Gathering) else 0
        return isinstance(state, Exchanging) or gathered >= self._strategy.quorum

    def _failure(self) -> str:
        """Why the round that has just ended failed; empty if this peer only missed it."""
        outcome = self.member.last
        assert outcome is not None, "it has just ended"
        if outcome.late and self._own.result is not None:
            self._own.withheld = self.member.id, self._pace.clock() + WITHHELD_SECONDS
        return "" if outcome.ok or outcome.late else outcome.reason

    def _give_up(self) -> str:
        """End the search for a group at the deadline; returns why."""
        before, waits = self.member.id, getattr(self._run.state, "reason", "")
        if not self._draw.begun:
            waits = f"{self._draw.live} available peers are there, {self._strategy.available} are needed"
        waits = "; ".join(filter(None, (self._own.nothing, waits or self.member.reason)))
        told = f"no round within {self._strategy.deadline:g} s: {waits}"
        if self.history and not self.member.has_company():
            self._deserted = f"all other peers have left, {told}"
        self.member.withdraw(told)
        return "" if self.member.id != before else told

    def _look_around(self) -> None:
        """Look for means and snapshots that this peer lacks, and serve newcomers, now and then."""
        if (self.member.pending and self.member.round_done) or not self._pace.looks():
            return
        if self.member.has_company():
            # Where others have begun, fewer may be left than the first round needs.
            self.member.look_ahead(0 if self._draw.begun else 1)
            self.member.serve()
        else:
            self.member.look_back()

    def _take_part(self) -> None:
        """Join the round with this peer's contribution, or as an observer, unless it has joined already."""
        if not self._draw.begun:
            return  # All begin together. To observe would be to decline.
        state, result = self.member.id, self._own.result
        late_for, until = self._own.withheld
        is_free = late_for != state or self._pace.clock() >= until
        gives = result is not None and self.member.in_step and is_free
        if self.member.pending:
            if self.member.gave or not gives:
                return
            self.member.withdraw("this peer offers its contribution again")
            if self.member.id != state or not self.member.in_step:
                return
        self._pace.look_at = self._pace.clock()
        seconds = min(self._pace.left + self._strategy.reserve, MAX_SECONDS)
        evaluation = self.evaluation if self._judged[0] == state else None
        if result is None or not gives:
            self.member.observe(seconds, evaluation)
            return
        try:
            weight = result.weight_at(state)
            self.member.give(result.values, weight, seconds, result.metrics, evaluation)
        except SchemaError as error:
            log.warning("run %s: the training has led nowhere, and is given up: %s", self._run.name, error)
            self._give_up_training(f"this peer's training has led nowhere: {error}")

    def _trains(self, drawn: Drawn) -> bool:
        """Whether this peer is to train now: it is drawn, and has nothing to contribute yet."""
        if self._fit is None or self._own.result is not None or self._own.trained == self.member.id:
            return False
        return self._draw.begun and self._run.peer in drawn.peers

    def _train(self) -> None:
        state = self.member.id
        self.member.withdraw("this peer is drawn")
        if self._fit is None or self.member.id != state or not self.member.in_step:
            return
        ends = time.strftime("%H:%M:%S", time.localtime(time.time() + self._pace.left))
        told = f"it trains; the round fails at {ends}, unless its quorum is there"
        self._run.core.tell("training", f"round {state.epoch + 1}: {told}")
        self._return_to_agreed()
        try:
            weight, metrics = _returned("fit", self._fit(self._task(state.epoch + 1)))
            require_same_tensors(self._run.core.binding.source, self.model.local)
            values = self.model.moved()
        except BaseException:  # Ctrl-C too leaves the model as it was.
            self.model.part.restore()
            raise
        finally:
            self._return_to_agreed()
        now = self._pace.clock()
        self._pace.deadline = max(self._pace.deadline, now + LEAST_WAIT_SECONDS)
        result = Result(state, values, weight, dict(metrics))
        self._own = Training(result, state, withheld=self._own.withheld)
        if weight < LEAST_CONTRIBUTION:
            self._give_up_training(f"this peer's `fit` returned the weight {weight:g}")
        # The answer to its join tells first whether it is late; to ask all peers at once delays a round that forms.
        self._pace.look_at, self._pace.pause = now, LOOK_SECONDS
        self._run.core.tell("training", f"round {state.epoch + 1}: it has trained")

    def _give_up_training(self, why: str) -> None:
        self._own.give_up(why)
        self.model.part.restore()

    def _look_at_model(self) -> None:
        """Evaluate the agreed model and checkpoint it, each once."""
        state, result = self.member.id, self._own.result
        if not self.member.in_step or self._judged[0] == state or (result and result.state == state):
            return
        self._judged = state, None
        if self._keeper is not None:
            self._keeper()
        if self._evaluate is not None:
            self._return_to_agreed()
            self._judged = state, _returned("evaluate", self._evaluate(self._task(state.epoch)))

    def _task(self, number: int) -> Task:
        return Task(number, self._options.config, self._proximal, lambda: self._pace.left)

    def _proximal(self) -> torch.Tensor:
        terms = [
            (own.float() - self.model.began(name)).square().sum() for name, own in self.model.local.items()
        ]
        return torch.stack(terms).sum() * (self._options.proximal / 2)

    # ---- the replicated state ----

    def _join(self) -> Member:
        parts: dict[str, image.Part] = {"history": self.history, "outer": self.model.outer}
        state = image.TrainingState(self.model.part, parts, self._options.extra)
        # With a draw, most peers of a round have not contributed together yet, so all claims count alike.
        options = CommonOptions(alone="wait", trust="heads")
        return Member(self._run, state, options, self._update)

    def _update(self, mean: Named, before: StateId, outcome: Outcome | None) -> None:
        """Make the outer step; the run's tensors become its result."""
        assert outcome is not None, "no peer makes a round alone"
        self.history.add(Record.of(before.epoch + 1, outcome))
        if self._keeper is not None:
            self._keeper.best.score(before, outcome.evaluation)
        self.model.step(mean)
        self._return_to_agreed()

    def _return_to_agreed(self) -> None:
        self.model.write()

    def _forget_the_old(self) -> None:
        """Drop a contribution that counts no more: it has counted, weighs too little, or is late and is not to count.

        The history says whether it has counted, also where a snapshot brought the round's mean.
        """
        result = self._own.result
        if result is None:
            return
        later = [record for record in self.history if record.number > result.state.epoch]
        has_counted = any(self._run.peer in record.contributors for record in later)
        too_old = self._strategy.late == "drop" and result.state != self.member.id
        if has_counted or too_old or result.weight_at(self.member.id) < LEAST_CONTRIBUTION:
            self._own.result = None

    def _leave(self) -> None:
        if self.finished is None and sys.exc_info()[0] is None:  # After an error it does not linger.
            self.finish()

    def _terms(self, outer: OuterStep, buffers: bool) -> dict[str, str]:
        options, rounds = self._options, self._options.rounds
        terms = {
            "training": type(self).__name__,
            "outer step": str(outer),
            "rounds": "no limit" if rounds is None else number(rounds),
            "until": str(self._ending.until or "no condition"),
            "patience": number(options.patience),
            "proximal": number(options.proximal),
            "buffers": "averaged" if buffers else "none",
            "extra state": short(", ".join(sorted(options.extra))) or "none",
        }
        told = {
            f"config {name}": short(json.dumps(one, sort_keys=True)) for name, one in options.config.items()
        }
        if len(told) > MAX_CONFIG_TERMS or any(len(name) > MAX_TERM_CHARS for name in told):
            told = {"config": short(json.dumps(dict(options.config), sort_keys=True))}
        return {**terms, **told}


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config`, as all peers will see it: as JSON has it.

    Raises:
        ValueError: JSON cannot hold it.
    """
    try:
        if not all(isinstance(name, str) for name in config):
            raise TypeError("a name is no string")
        plain: dict[str, Any] = json.loads(json.dumps(dict(config), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"config: expected values that JSON can hold, by name: {error}") from None
    return plain


def _returned(who: str, found: Any) -> Evaluation:
    """The result of `fit` or `evaluate` as numbers; metrics that are not finite are left out.

    Raises:
        TypeError: The result is no pair of a weight and metrics.
        ValueError: The weight or a metric's name is not valid; names it.
    """
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
        told = f"{who}: expected (weight, {{name: number}}) to be returned, got {repr(found)[:80]}"
        raise TypeError(f"{told}; parameters are written into the model, and not returned")
    weight, metrics = found
    finite = {name: one for name, one in metrics.items() if not _is_infinite(one)}
    if len(finite) < len(metrics):
        told = "%s: these metrics are not finite, and not told: %s"
        log.warning(told, who, sorted(metrics.keys() - finite))
    try:
        report = report_of((weight, finite))
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from None
    return report.weight, dict(report.values)


def _is_infinite(metric: Any) -> bool:
    """Whether a metric is a number that is not finite; `report_of` names what is no number at all."""
    try:
        return not math.isfinite(metric)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several values.
        return False
