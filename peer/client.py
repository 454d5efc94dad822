"""`connect`: the daemon of this machine, as a training script sees it."""

from __future__ import annotations

import functools
import os
from types import TracebackType
from typing import Self

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.spec import RunSpec
from equipoise.peer.binding import Binding
from equipoise.peer.config import find_home
from equipoise.peer.link import CONNECT_SECONDS, START_SECONDS, Link, open_link
from equipoise.peer.memory import Region
from equipoise.peer.messages import (
    AskPeers,
    AskRounds,
    AskStatus,
    Done,
    JoinRun,
    PeersAre,
    RoundsAre,
    StatusIs,
)
from equipoise.peer.purposes import AVERAGE, swarm_name
from equipoise.peer.run import Run
from equipoise.peer.specs import tensor_rows
from equipoise.peer.status import PeerRow, Status
from equipoise.peer.tensors import Tensors

JOIN_SECONDS = 20.0
"""Mapping the memory and announcing the run; the network is not waited for."""


class Client:
    """A connection to one daemon; runs joined through it are left when it closes, or this process ends."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._runs: list[Run] = []

    @property
    def peer_id(self) -> str:
        """PeerID of the daemon."""
        return self._link.welcome.peer_id

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
        group_size: int = 16,
        codec: str = "int8",
        part_values: int = 512 * 1024,
    ) -> Run:
        """Take part in the run `name`; only peers that give the same arguments meet.

        Args:
            name: 1 to 59 printable characters.
            tensors: What to average, on CPU or GPU: a mapping of names to tensors, a list, or an nn.Module. Of a module
                `average` exchanges all parameters and persistent floating-point buffers, and `step` the gradients of
                the parameters that require them; buffers have none and are left alone by `step`.
            strategy: How the run averages: `allreduce`.
            group_size: Most peers that average together in one round, 2 to 64.
            codec: How values travel: `fp32`, `fp16`, `bf16`, `int8`, with options as in `int8:block=256`.
            part_values: Values per part of a share, a multiple of 256.

        Raises:
            SchemaError: There are no tensors, or one cannot be averaged; names it.
            SpecError: Another argument is out of its range.
            equipoise.compression.CodecError: The codec is unknown.
            Refused: The daemon takes part in the run already, or in too many.
            DaemonLost: The daemon has gone.
        """
        binding = Binding(tensors)
        spec = RunSpec.create(
            swarm_name(name, AVERAGE),
            binding.schema,
            strategy=strategy,
            codec=codec,
            group_size=group_size,
            part_values=part_values,
        )
        region = Region.create(binding.values)
        request = JoinRun(
            run=name,
            strategy=spec.strategy,
            codec=spec.codec,
            group_size=spec.group_size,
            part_values=spec.part_values,
            tensors=tensor_rows(binding.schema),
            gradients=tensor_rows(binding.gradients),
            values=binding.values,
        )
        try:
            self._link.wait(self._link.start(request, [region.fd]), Done, JOIN_SECONDS)
        finally:
            region.close_fd()
        branch = functools.partial(
            self.join, strategy=strategy, group_size=group_size, codec=codec, part_values=part_values
        )
        run = Run(self._link, name, binding, region, branch, spec.group_size)
        self._runs = [*(one for one in self._runs if not one.left), run]
        return run

    def status(self) -> Status:
        """What the daemon is doing, and why.

        Raises:
            DaemonLost: The daemon has gone.
        """
        return self._link.ask(AskStatus(), StatusIs).status

    def peers(self) -> tuple[PeerRow, ...]:
        """The known peers of the runs that the daemon takes part in, itself included.

        Raises:
            DaemonLost: The daemon has gone.
        """
        return self._link.ask(AskPeers(), PeersAre).peers

    def rounds(self, limit: int = 20) -> tuple[Outcome, ...]:
        """The last `limit` outcomes, at most 64, of each run of the daemon, oldest first.

        Raises:
            DaemonLost: The daemon has gone.
        """
        return self._link.ask(AskRounds(limit), RoundsAre).rounds

    def close(self) -> None:
        """Leave all runs and disconnect; idempotent."""
        for run in self._runs:
            run.leave()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(home: str | os.PathLike[str] | None = None, timeout: float = CONNECT_SECONDS) -> Client:
    """Connect to the daemon that runs on this machine; one that is just starting is waited for.

    Args:
        home: Its home; by default `$EQUIPOISE_HOME`, else the user's data directory.
        timeout: Seconds to wait for its answer.

    Raises:
        NoDaemon: None runs there; says how to start one.
        ControlError: It is of another version.
        DaemonLost: It does not answer.
    """
    return Client(open_link(find_home(home, os.environ)[0], timeout, START_SECONDS))
