"""A plan: how long exchanges take on the links of a swarm, by codec, and how often they pay."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable
from itertools import pairwise

import msgspec

from equipoise.averaging.options import MAX_GROUP_SIZE
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.partition import FAST, exchange_seconds
from equipoise.compression import Codec, parse_codec

WHOLE = ("fp32", "fp16", "int8", "nf4")
"""Codecs that carry every value, and so serve every way to train."""

CODECS = (*WHOLE, "sparse")
"""Codecs that a plan compares, unless one is named; `sparse` is for local steps with error feedback."""

COMPUTING, RATIO = 0.95, 19
"""Share of the time for which a swarm should compute, and that time beside the time of its exchanges."""

LINK_SHARE = 0.9
"""Share of a link's rate that carries the bytes of an exchange: headers and the starts of TCP take the rest."""

LEAST_ROUNDS = 3
"""Fewest rounds by which a run is judged."""

WORTH = 0.8
"""Most seconds of another codec, as a share of the present one's, with which the other is worth naming."""


class Exchange(msgspec.Struct, frozen=True):
    """One exchange of all parameters, as each peer sees it.

    Attributes:
        codec: Spec of the codec.
        sent: Bytes that a peer sends.
        received: Bytes that a peer receives.
        seconds: Time that the links need.
        share: Share of the time that exchanges take.
        every: Fewest steps between two exchanges with which peers compute for `COMPUTING` of the time.
        problem: Why it does not fit; empty if it does.
    """

    codec: str
    sent: int
    received: int
    seconds: float
    share: float
    every: int
    problem: str


def plan(
    parameters: int,
    peers: int,
    upload: float,
    download: float,
    step: float,
    codecs: Iterable[str] = CODECS,
    every: int = 1,
    memory: float = math.inf,
) -> tuple[Exchange, ...]:
    """Tell what exchanges of a model take where all peers have the same link.

    Each of n peers sends and receives (n - 1) / n of its encoded contribution, and then of the means
    (`exchange_seconds`). Machines, and not links, set the pace above `FAST`.

    Args:
        parameters: Number of values that are averaged, > 0.
        peers: Peers of a group, at least 2.
        upload: Bytes per second that a peer sends at most, > 0.
        download: Bytes per second that a peer receives at most, > 0.
        step: Seconds of a training step, > 0.
        codecs: Specs of codecs.
        every: Steps between two exchanges.
        memory: Bytes that a peer has for what it needs beside its model and optimizer: in fp32 the agreed parameters
            and a momentum, and encoded a contribution, a mean and the contributions to its own share.

    Returns:
        One exchange for each codec, in their order.

    Raises:
        ValueError: A number is out of its range, or there is no such codec.
    """
    numbers = {"parameters": parameters, "upload": upload, "download": download, "step": step, "every": every}
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"expected {name} above 0, got {number}")
    if peers < 2:
        raise ValueError(f"expected at least 2 peers, got {peers}")
    links = [(LINK_SHARE * min(upload, FAST), LINK_SHARE * min(download, FAST))] * peers
    found = []
    for codec in map(parse_codec, codecs):
        size, mean_size = codec.encoded_size(parameters), codec.mean_size(parameters, peers)
        moved = (size + mean_size) * (peers - 1) // peers
        seconds = size * exchange_seconds(links, [1 / peers] * peers, mean_size / size)
        problem = _problem(codec, parameters, peers, memory)
        share, least = (
            seconds / (seconds + every * step),
            math.ceil(RATIO * seconds / step),
        )
        found.append(Exchange(codec.spec, moved, moved, seconds, share, max(least, 1), problem))
    return tuple(found)


def judge(outcomes: Collection[Outcome], values: int, codec: str, upload: float, download: float) -> str:
    """Compare the plan of a run with its last rounds, and name the better setting.

    Args:
        outcomes: The last rounds, oldest first.
        values: Values that a round averages.
        codec: Spec of the run's codec.
        upload: Bytes per second that this peer sends at most; 0 if that is unknown.
        download: Bytes per second that it receives at most; 0 if that is unknown.

    Returns:
        One line; empty if peers compute for `COMPUTING` of the time, or not enough is known.
    """
    rounds = [one for one in outcomes if one.ok and "exchange" in one.seconds]
    if len(rounds) < LEAST_ROUNDS or not upload:
        return ""
    took = statistics.median(one.seconds["exchange"] for one in rounds)
    period = statistics.median(after.started - before.started for before, after in pairwise(rounds))
    computes = max(period - took, 1e-9)
    if computes >= COMPUTING * period:
        return ""
    present, *others = plan(
        values, len(rounds[-1].group), upload, download or upload, computes, (codec, *WHOLE)
    )
    best = min(others, key=lambda one: one.seconds)
    advice = f"{math.ceil(RATIO * took / computes)} times as many steps between exchanges make that 5 %"
    if best.seconds <= WORTH * present.seconds:
        advice = f'codec="{best.codec}" needs {best.seconds:.2g} s; {advice}'
    planned = f"the links need {present.seconds:.2g} s"
    return f"exchanges take {took / period:.0%} of the time, {took:.2g} s each; {planned}; {advice}"


def _problem(codec: Codec, parameters: int, peers: int, memory: float) -> str:
    most = codec.most_members or MAX_GROUP_SIZE
    if peers > most:
        return f"a group holds at most {most} peers"
    needed = 2 * 4 * parameters + 2 * codec.encoded_size(parameters) + codec.mean_size(parameters, peers)
    if needed > memory:
        return f"a peer needs {needed / 1e9:.1f} GB beside its model and optimizer; {memory / 1e9:.1f} GB are free here"
    return ""
