"""`Status`: the one snapshot that feeds command line, JSON and Python API."""

from __future__ import annotations

import msgspec

from equipoise.averaging.ledger import Given
from equipoise.averaging.outcome import Outcome, RunState
from equipoise.dht.state import ReachState, SwarmStatus
from equipoise.peer.config import Setting


class Exchanges(msgspec.Struct, frozen=True):
    """The exchanges of a gossip run at this peer.

    Attributes:
        partners: Other peers that answer.
        ok: Exchanges that ended in a mean.
        failed: Exchanges that did not.
        in_doubt: Those of them whose partner may hold the mean.
        spread: Distance of this peer and its partners before the last exchanges, on average; None before any.
    """

    partners: int
    ok: int
    failed: int
    in_doubt: int
    spread: float | None


class RunStatus(msgspec.Struct, frozen=True):
    """One run of this daemon.

    Attributes:
        name: The run's name.
        purpose: `average` (it exchanges tensors) or `step` (gradients).
        spec: Hash of its RunSpec; peers with another do not meet.
        codec: Encoding of values.
        group_size: Most peers of a group.
        values: Length of the flat vector.
        state: Standing of the next round.
        reason: Why, in one line.
        round: Number of its next round.
        rounds_ok: Rounds that ended in a mean.
        rounds_failed: Rounds that did not.
        accumulated: Weight accumulated towards the next step.
        transfer: The state that is being fetched or served, and the reason, in one line; empty if none is.
        told: Lines of the training script, by topic: `training`, `checkpoints`, `places`; one line each.
        last: Outcome of the last round.
        strategy: Strategy of the run.
        exchanges: Exchanges of a run whose peers meet in pairs; None for others.
        drawn: PeerIDs of the peers that train in the next round of a federated run, in the order of the draw.
        contributed: PeerIDs of those whose contributions are in, as far as this peer knows.
        advice: The plan of exchanges beside the last ones, and the better setting; empty if peers mostly compute.
    """

    name: str
    purpose: str
    spec: str
    codec: str
    group_size: int
    values: int
    state: RunState
    reason: str
    round: int = 0
    rounds_ok: int = 0
    rounds_failed: int = 0
    accumulated: float = 0.0
    transfer: str = ""
    told: dict[str, str] = {}
    last: Outcome | None = None
    strategy: str = ""
    exchanges: Exchanges | None = None
    drawn: tuple[str, ...] = ()
    contributed: tuple[str, ...] = ()
    advice: str = ""


class Kernels(msgspec.Struct, frozen=True):
    """The implementation that encodes and decodes, and the reason."""

    name: str
    reason: str


class PeerRow(msgspec.Struct, frozen=True):
    """One peer of a run, as the directory tells.

    Attributes:
        run: The run's name.
        peer: Its PeerID.
        me: Whether it is this daemon.
        ready: Whether it waits for a group now.
        round: Number of its next round.
        dialable: Whether others can open channels to it, and it may own shares.
        bandwidth: Bytes per second that it says it can send; 0 if it does not say.
        accumulated: Weight accumulated towards its next step.
        same_spec: Whether its options are this daemon's; otherwise they do not meet.
        reach: The way by which this daemon reaches it: an open channel or connection, else its own word.
        why: The reason, one line: an open channel, the result of a try, or the peer's own word.
        differs: Its options that differ, here and there, one line; empty if none do, or that is not known.
        name: Its name for people, by its own word; empty if it does not say.
        tags: Properties of its machine, by its own word.
        role: Its role in a private swarm, by its invitation; `trainer` in the open one.
        banned: Whether this daemon refuses it; `why` has the reason.
        faults: What this daemon blames it for, and for how long, one line; empty if for nothing.
        given: What it has given to the run, by the rounds that this daemon knows.
    """

    run: str
    peer: str
    me: bool
    ready: bool
    round: int
    dialable: bool
    bandwidth: float
    accumulated: float
    same_spec: bool
    reach: ReachState
    why: str
    differs: str = ""
    name: str = ""
    tags: tuple[str, ...] = ()
    role: str = "trainer"
    banned: bool = False
    faults: str = ""
    given: Given = msgspec.field(default_factory=Given)


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that people or programs can ask about a daemon.

    Attributes:
        name: Its name for people.
        peer_id: Its PeerID.
        pid: Its process.
        uptime: Seconds since it started.
        memory: Resident bytes of its process.
        tasks: Tasks of its event loop; it grows with runs and peers, and not with rounds.
        threads: Threads of its process.
        files: Open descriptors of its process, sockets included.
        clients: Number of scripts that are connected, each counted once. `equipoise status` does not count itself.
        swarm: Its standing towards the others.
        runs: The runs that it takes part in.
        kernels: Implementation that encodes and decodes.
        versions: Versions of what it is made of.
        settings: Its configuration, each value with its origin.
        log: Its log file.
        warnings: Problems of its settings, its device and the swarm for a person to solve; one line each.
        given: What it has given to each run since its start, by the run's name.
    """

    name: str
    peer_id: str
    pid: int
    uptime: float
    memory: int
    tasks: int
    threads: int
    files: int
    clients: int
    swarm: SwarmStatus
    runs: tuple[RunStatus, ...]
    kernels: Kernels
    versions: dict[str, str]
    settings: tuple[Setting, ...]
    log: str
    warnings: tuple[str, ...] = ()
    given: dict[str, Given] = {}
