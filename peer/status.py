"""`Status`: the one snapshot that feeds command line, JSON and Python API."""

from __future__ import annotations

import msgspec

from equipoise.averaging.outcome import Outcome, RunState
from equipoise.dht.state import ReachState, SwarmStatus
from equipoise.peer.config import Setting


class Exchanges(msgspec.Struct, frozen=True):
    """What a gossip run has come to at this peer.

    Attributes:
        partners: Other peers that answer.
        ok: Exchanges that ended in a mean.
        failed: Exchanges that did not.
        in_doubt: Those of them whose partner may hold the mean.
        spread: How far this peer and its partners were apart before the last exchanges, on average; None before any.
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
        purpose: What it exchanges now: `average` (tensors) or `step` (gradients).
        spec: Hash of its RunSpec; peers with another do not meet.
        codec: How values travel.
        group_size: Most peers of a group.
        values: Length of the flat vector.
        state: Where the next round stands.
        reason: Why, in one line.
        round: Number of its next round.
        rounds_ok: Rounds that ended in a mean.
        rounds_failed: Rounds that did not.
        accumulated: Weight accumulated towards the next step.
        transfer: Which state is being fetched or served, and why, in one line; empty if none is.
        told: What the training script says of itself, by topic: `training`, `checkpoints`; one line each.
        last: What the last round came to.
        strategy: Who meets whom.
        exchanges: What a run whose peers meet in pairs has come to; None for others.
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


class Kernels(msgspec.Struct, frozen=True):
    """Which implementation encodes and decodes, and why."""

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
        reach: How this daemon reaches it: by a channel or connection that is open, else by its own word.
        why: Why that is so, one line: what is open, what came of trying, its own word.
        differs: Which of its options differ, here and there, one line; empty if none do, or that is not known.
        name: What people call it, by its own word; empty if it does not say.
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


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon is doing, and why; everything that people or programs can ask about it.

    Attributes:
        name: What people call it.
        peer_id: Its PeerID.
        pid: Its process.
        uptime: Seconds since it started.
        memory: Resident bytes of its process.
        tasks: Tasks of its event loop; it grows with runs and peers, and not with rounds.
        threads: Threads of its process.
        files: Open descriptors of its process, sockets included.
        clients: How many clients are connected.
        swarm: Where it stands towards the others.
        runs: What it takes part in.
        kernels: Which code encodes and decodes.
        versions: Versions of what it is made of.
        settings: Its configuration, each value with its origin.
        log: Its log file.
        warnings: What a person should put right, of its settings and of the swarm; one line each.
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
