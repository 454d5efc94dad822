"""Bounds on what other peers send, and on the memory and work that they cause. Times are seconds of one clock.

`Stand` and `Candidate` are the records that the directory has of peers, with their bounds.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from typing import Annotated, Literal, TypeVar

import msgspec

MAX_PEERS = 4096
"""Most peers with a bucket. The least recently seen is forgotten: its bucket has long been full again."""

MAX_HEADER_BYTES = 192 * 1024
"""Longest header of a frame, of one control message; the largest is a manifest of 64 signed joins, up to 160 KB."""

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Longest body of a frame, of one part: 1 Mi values in fp32."""

MAX_CREDENTIAL_BYTES = 1024
"""Longest credential: its owner's addresses, of which two take about 50 bytes, and long host names more."""

MAX_BANDWIDTH = 1e13
"""Highest bandwidth, in bytes per second: a hundred times today's fastest link. It bounds the harm of false claims."""

MAX_SPEC_CHARACTERS = 128
"""Longest hash of a spec: 512 bits in hex."""

MAX_MARK_CHARACTERS = 16
"""Longest mark of a data set."""

MAX_NAME_CHARACTERS = 64
MAX_TAGS, MAX_TAG_CHARACTERS = 8, 24
"""Most tags of a peer, and the longest."""

MAX_COUNT = 2**63 - 1

Tag = Annotated[str, msgspec.Meta(pattern=rf"\A[A-Za-z0-9_.-]{{1,{MAX_TAG_CHARACTERS}}}\Z")]
Tags = Annotated[tuple[Tag, ...], msgspec.Meta(max_length=MAX_TAGS)]
Mark = Annotated[str, msgspec.Meta(max_length=MAX_MARK_CHARACTERS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]

Part = Literal["joined", "ready", "left", "offline"]
"""A peer's part in a run: it computes, it waits for a group now, it has left and serves what it kept, or is gone."""

_K = TypeVar("_K")
_V = TypeVar("_V")


class Stand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a peer stands in a run, by its own word.

    Attributes:
        state: Its part in the run.
        spec: Hash of its RunSpec in hex; peers average together only where it equals their own.
        round: Number of its next round.
        accumulated: Weight accumulated towards its next contribution.
        bandwidth: Bytes per second that it can send; 0 if unknown.
        observes: Whether it trains nothing in the run: no draw takes it.
        trained: Whether it holds a trained state of the run.
        data: The mark of the data set that it shares with those that have an equal one; empty if it shares none.
    """

    state: Part
    spec: Annotated[str, msgspec.Meta(max_length=MAX_SPEC_CHARACTERS)] = ""
    round: Count = 0
    accumulated: Amount = 0.0
    bandwidth: Amount = 0.0
    observes: bool = False
    trained: bool = False
    data: Mark = ""

    @property
    def ready(self) -> bool:
        """True while it waits for a group."""
        return self.state == "ready"

    @property
    def left(self) -> bool:
        """True if it takes part no more, and serves what it kept."""
        return self.state == "left"


class Candidate(Stand, frozen=True, kw_only=True, omit_defaults=True):
    """The directory's record of one peer of a run.

    Attributes:
        peer: PeerID of its author.
        dialable: Whether others can open connections to it.
        credential: Where others open direct channels with it, for the transport to check; empty if it has none.
        tags: Properties of its machine, in its user's words.
        name: What people call it.
    """

    peer: str
    dialable: bool = False
    credential: Annotated[bytes, msgspec.Meta(max_length=MAX_CREDENTIAL_BYTES)] = b""
    tags: Tags = ()
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)] = ""


class LruDict(OrderedDict[_K, _V]):
    """Keeps the `limit` keys that were set last."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


def backoff(pause: float, first: float, most: float, growth: float = 2.0) -> float:
    """Return the pause after one more failure: `first`, then `growth` times the `pause` before, `most` at most."""
    return min(pause * growth or first, most)


class RateLimit:
    """Token buckets by peer: `rate` tokens come in a second, and a bucket holds `burst` of them."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: LruDict[str, tuple[float, float]] = LruDict(MAX_PEERS)

    def allow(self, peer: str, now: float) -> bool:
        """Take one token of `peer`; False if it has none."""
        tokens, since = self._buckets.get(peer, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate)
        allowed = tokens >= 1
        self._buckets[peer] = (tokens - 1 if allowed else tokens, now)
        return allowed


class Allowance:
    """Admits `each` requests of a peer within `seconds`, and `count` requests of all peers together."""

    def __init__(self, seconds: float, count: int, each: int = 1) -> None:
        self._seconds = seconds
        self._count = count
        self._each = each
        self._since = float("-inf")
        self._left = count
        self._peers: Counter[str] = Counter()

    def admits(self, peer: str, now: float) -> bool:
        """Return whether a request of this peer is admitted now; if so, it counts."""
        if now - self._since >= self._seconds:
            self._since, self._left = now, self._count
            self._peers.clear()
        if self._peers[peer] >= self._each or not self._left:
            return False
        self._peers[peer] += 1
        self._left -= 1
        return True
