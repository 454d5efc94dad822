"""`connect`: the daemon of this machine, as a training script sees it."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Self

from equipoise.averaging.counts import count
from equipoise.averaging.messaging.receiver import Mailbox
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import SHOWN_CHARS, Outcome
from equipoise.averaging.session.machine import SESSION_BYTES
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.strategy import parse_strategy
from equipoise.averaging.weights import CAPPED
from equipoise.compression import parse_codec
from equipoise.peer.client.interrupts import uninterrupted
from equipoise.peer.client.run import AGREE_SECONDS, RunCore
from equipoise.peer.client.tensors import Binding, Tensors
from equipoise.peer.config import find_home
from equipoise.peer.control.client import ANSWER_SECONDS, START_SECONDS, Connection, Link, open_link
from equipoise.peer.control.messages import AgreeRun, AskPeers, AskRounds, AskStatus, JoinRun
from equipoise.peer.errors import DaemonLost, EquipoiseError, NoDaemon
from equipoise.peer.purposes import AVERAGE, swarm_name
from equipoise.peer.run import Run
from equipoise.peer.shared_memory import Region
from equipoise.peer.status import PeerRow, Status

JOIN_SECONDS = 60.0
"""Time after which a daemon that was silent for half of it is lost: while it loads a library, its loop may stand still.
Joining does not wait for the network."""

FIRST_PAUSE = 0.25
"""Seconds from the loss of a daemon to the first look for another; the pause doubles after each look."""

MAX_PAUSE = 2.0
"""Longest pause between two looks; a look costs a file lock."""

WEATHER_LOOKS = 3
"""Refusals for one reason before the script learns of it: a hung daemon may hold the old connection for a moment."""

_handles: weakref.WeakValueDictionary[tuple[str, str], Run] = weakref.WeakValueDictionary()
"""This process's latest handle of each run, by the daemon's PeerID and the run's name."""

log = logging.getLogger(__name__)


class Client:
    """A connection to one daemon; runs joined through it are left when it closes, or this process ends.

    If the daemon is lost, one line says why, rounds fail with that reason, and other calls raise `DaemonLost`. A thread
    looks for a daemon on the same home, joins the runs again on their terms, and reports the accumulated weight.
    """

    def __init__(self, link: Connection, reopen: Callable[[], Connection] | None = None) -> None:
        """`reopen` connects to a daemon in place of a lost one; without it, a lost daemon is not replaced."""
        self._link = link
        self._reopen = reopen
        self._joined: list[Run] = []
        self._closing = threading.Event()
        self._lock = threading.Lock()
        link.watch(self._lost)

    @property
    def peer_id(self) -> str:
        """PeerID of the daemon."""
        return self._link.welcome.peer_id

    @property
    def lost(self) -> str:
        """Why the client has no daemon now, one line; empty while it has one."""
        return str(self._link.lost or "")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The daemon's addresses, in the form that `join` and `--join` take."""
        return self.status().swarm.addresses

    def join(
        self,
        name: str,
        tensors: Tensors,
        *,
        strategy: str = "allreduce",
        rule: str = "mean",
        codec: str | None = None,
        group_size: int = 16,
        part_values: int = 1024 * 1024,
        weights: str = CAPPED,
        norms: str = CAPPED,
        base: str = "",
    ) -> Run:
        """Take part in the run `name`; only peers that give the same arguments meet.

        Args:
            name: 1 to 59 printable characters.
            tensors: The tensors to average, on CPU or GPU: a mapping of names to tensors, a list, or an nn.Module. Of a
                module `average` exchanges all parameters and persistent floating-point buffers, and `step` the
                gradients of the parameters that require them; `step` leaves buffers alone.
            strategy: The form of the groups. `allreduce:quorum=2`: all that are ready, or as many as a group holds,
                round by round; with `grace=10` or `auto`, closed so many seconds after the quorum, and for local steps
                with `late=next`, which counts a late contribution in the next round, at a discount.
                With `total=1`, the contributors' weights sum to 1, or the round fails and each keeps its own.
                `gossip:topology=random`: pairs, whenever two are free; also `exponential` and `ring`.
                `federated:fraction=1,quorum=2,grace=10`: rounds of peers that train for minutes, for
                `equipoise.peer.training.Federated`; `averaging.strategy.Federated` tells all options.
            rule: The rule that makes one vector of the contributions: `mean`, `median` or `trimmed:beta=0.2`.
            codec: The encoding of values: `fp32`, `fp16`, `bf16`, `int8`, `nf4`, with options as in `int8:block=256`.
                Tensors of fewer than 256 values, and a module's buffers, always travel in fp32. None takes the
                strategy's own: `int8`, and `fp16` for gossip, which exchanges parameters.
            group_size: Most peers that average together in one round, 2 to 64. Of more peers that train from one
                state, the others wait for a place; those of `average` meet in several groups, dealt anew each round.
            part_values: Values per part of a share, a multiple of 256 and of the codec's block.
            weights: The limit of a contributor's weight: `capped:10` is 10 times the lower median of the
                contributors, so that no peer makes the mean its own by its claim. `any` is no limit, for swarms whose
                members are known and differ by more than that.
            norms: The same for the 2-norm of a contribution, whose values are scaled down to the limit. A pair of
                gossip whose norms differ by more makes no exchange. Rules other than `mean` need no limit.
            base: A name for the module's frozen parameters, as "smollm2-135m", of up to 64 characters. Peers that give
                the same are believed to hold the same ones, in any dtype, also in 4 bit, and `average` leaves them and
                buffers alone. Without a name, trainers compare the dtypes and values.

        Raises:
            SchemaError: There are no tensors, or one cannot be averaged; names it.
            ValueError: The strategy is unknown.
            SpecError: Another argument is out of its range.
            equipoise.compression.CodecError: The codec is unknown.
            Refused: The daemon takes part in the run already, for another process, or in too many. An earlier handle
                of this process is left.
            DaemonLost: The daemon has gone.
        """
        options = RunOptions(
            strategy=strategy,
            rule=rule,
            codec=parse_strategy(strategy).codec if codec is None else codec,
            group_size=group_size,
            part_values=part_values,
            weights=weights,
            norms=norms,
            base=base,
        )
        return self._join(options, name, tensors)

    def _join(self, options: RunOptions, name: str, tensors: Tensors, carrier: Tensors | None = None) -> Run:
        binding = Binding(tensors, parse_codec(options.codec), carrier, options.group_size, options.base)
        options = RunSpec.create(swarm_name(name, AVERAGE), binding.schema, options).options
        mailbox = Mailbox(os.urandom(SESSION_BYTES))
        request = JoinRun(name, options, binding.schema, binding.gradients, binding.size, mailbox)
        link, key = self._link, (self.peer_id, name)
        earlier = _handles.get(key)
        if earlier is not None and earlier.core.is_own and isinstance(link, Link):
            log.warning("run %s: this process joins it again, and leaves it by its earlier handle", name)
            earlier.core.loop.give_up()
            earlier.leave()
        with uninterrupted():  # The daemon must not take part in a run without a handle that can leave it.
            run = Run(RunCore(link, request, binding, _share(link, request), self._join))
            binding.prepare()
            _handles[key] = run
            with self._lock:
                self._joined = [*(one for one in self._joined if not one.core.left), run]
        return run

    def status(self) -> Status:
        """The status of the daemon, and its reasons."""
        return self._link.ask(AskStatus())

    def peers(self) -> tuple[PeerRow, ...]:
        """The known peers of the runs that the daemon takes part in, itself included."""
        return self._link.ask(AskPeers())

    def rounds(self, limit: int = 20) -> tuple[Outcome, ...]:
        """The last `limit` outcomes, at most 64, of each run of the daemon, oldest first."""
        return self._link.ask(AskRounds(limit))

    def close(self) -> None:
        """Leave all runs and disconnect; idempotent."""
        with self._lock:
            self._closing.set()  # From now on, no link replaces this one.
        for run in self._joined:
            run.leave()
        self._link.close()

    def __repr__(self) -> str:
        welcome = self._link.welcome
        runs = ", ".join(repr(run.name) for run in self._joined if not run.core.left)
        lost = f"; {self.lost}" if self.lost else ""
        return (
            f"<{type(self).__name__} of daemon {welcome.name!r} (...{welcome.peer_id[-SHOWN_CHARS:]}) "
            f"on {welcome.home or 'a temporary home'}: {'runs ' + runs if runs else 'no runs'}{lost}>"
        )

    def _lost(self, error: EquipoiseError) -> None:
        if self._closing.is_set():
            return
        reason = str(error).removesuffix(f"; {error.hint}")
        if self._reopen is None:
            log.warning("%s; this script goes on without", reason)
            return
        plan = "this script goes on without, and connects when one is back"
        log.warning("; ".join(part for part in (reason, plan, error.hint) if part))
        search = threading.Thread(
            target=self._reconnect, args=[self._reopen], name="equipoise-reconnect", daemon=True
        )
        search.start()

    def _reconnect(self, reopen: Callable[[], Connection]) -> None:
        """Look for a daemon on the home until one has taken this client and its runs."""
        pause, refusals = FIRST_PAUSE, Counter[str]()
        while not self._closing.wait(pause):
            pause = min(2 * pause, MAX_PAUSE)
            try:
                self._renew(reopen())
                return
            except (NoDaemon, DaemonLost) as error:
                log.debug("no daemon yet: %s", error)
            except (EquipoiseError, OSError) as error:
                refusals[str(error)] += 1
                if refusals[str(error)] == WEATHER_LOOKS:
                    log.warning("a daemon is back, but this script cannot use it yet: %s", error)

    def _renew(self, link: Connection) -> None:
        """Replace the lost link by `link` for all runs; for none of them if one run is refused."""
        with self._lock:
            joined = [run for run in self._joined if not run.core.left]
        try:
            regions = [_share(link, run.core.joining, run.core.agreed) for run in joined]
            with self._lock:
                if not self._closing.is_set():
                    for run, region in zip(joined, regions, strict=True):
                        run.core.renew(link, region)
                    self._link = link
        finally:
            if self._link is not link:
                link.close()
        log.info("connected again to the daemon on %s: %s", link.welcome.home, count(len(joined), "run"))
        link.watch(self._lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(home: str | os.PathLike[str] | None = None, timeout: float = ANSWER_SECONDS) -> Client:
    """Connect to the daemon that runs on this machine; wait for a daemon that is just starting.

    Args:
        home: Its home; by default `$EQUIPOISE_HOME`, else the user's data directory.
        timeout: Seconds to wait for its answer.

    Raises:
        NoDaemon: No daemon runs there; says how to start one.
        ControlError: The daemon has another version.
        DaemonLost: The daemon does not answer.
    """
    place = find_home(home, os.environ)[0]
    link = open_link(place, timeout, START_SECONDS)
    return Client(link, functools.partial(open_link, place, timeout, patience=0.0))


def _share(link: Connection, request: JoinRun, agreed: AgreeRun | None = None) -> Region:
    """Join a run with new shared memory, on terms that were agreed before."""
    region = Region.create(request.size)
    link.ask(request, JOIN_SECONDS, [region.memory.fd])
    if agreed is not None:
        link.ask(agreed, AGREE_SECONDS)
    return region
