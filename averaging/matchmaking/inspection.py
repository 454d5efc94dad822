"""Whether a join that came may count: it is of this run, and signed by the peer that sent it."""

from __future__ import annotations

from equipoise.averaging.manifest import Join
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.messages import JoinRequest, Why
from equipoise.averaging.rate_limit import Allowance
from equipoise.averaging.spec import PROTOCOL_VERSION

JOINS_SECONDS, MAX_JOINS, MAX_JOINS_OF_ONE = 1.0, 2000, 100
"""Joins looked at in so long a time, in all and of one peer: the signature of each costs 0.15 ms. Rounds are some tens
a second at most, and each takes a join or two of a member."""

FORGER_SECONDS = 30.0
"""How long no join is taken from a peer that has sent a false one on its own channel, which nobody does by mistake."""

MAX_FORGERS = 64
"""Forgers remembered; the earliest is given another chance."""

Objection = tuple[Why, str]
"""Why a join does not count, for machines and for people."""


class Inspection:
    """Looks at the joins that one peer gets in one run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._looked_at = Allowance(JOINS_SECONDS, MAX_JOINS, MAX_JOINS_OF_ONE)
        self._forgers: dict[str, float] = {}

    def mismatch(self, request: JoinRequest) -> Objection | None:
        """The request is of another run, spec or version: returns which and why; None if it is not."""
        context, join = self._context, request.join
        if request.version != PROTOCOL_VERSION:
            older = "asking" if request.version < PROTOCOL_VERSION else "convening"
            return Why.OTHER_VERSION, (
                f"expected protocol version {PROTOCOL_VERSION}, got {request.version}: "
                f"upgrade the {older} peer's equipoise, which is older"
            )
        if request.run != context.run:
            return Why.UNKNOWN_RUN, f"expected the run {context.run!a}"
        if join.spec != context.spec:
            return Why.OTHER_SPEC, (
                f"expected spec {context.spec[:12]}, got {join.spec[:12]}: schema or options of the run differ"
            )
        return None

    def forgery(self, peer: str, join: Join, now: float) -> Objection | None:
        """Why a join is not taken for the word of `peer`, on whose channel it came; None if it is."""
        if now < self._forgers.get(peer, float("-inf")):
            return Why.NOT_VALID, f"{peer} has sent a join with a false signature"
        if not self._looked_at.admits(peer, now):
            return Why.BUSY, "more joins have come than are looked at in a second"
        if join.peer != peer or not join.genuine(self._context.verify):
            self._distrust(peer, now)
            return Why.NOT_VALID, f"expected a join signed by {peer}"
        return None

    def _distrust(self, peer: str, now: float) -> None:
        self._forgers.pop(peer, None)
        self._forgers[peer] = now + FORGER_SECONDS
        if len(self._forgers) > MAX_FORGERS:
            del self._forgers[next(iter(self._forgers))]
