"""Whether others can dial this peer, judged from what those said who tried. Pure: `now` is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

WITNESSES = 3
"""Peers asked: a neighbour on the same network reaches what the rest of the world does not."""
TRUSTED_SECONDS = 300.0
"""An answer is asked for again after so long: routers forget port mappings, machines move."""
UNANSWERED_SECONDS = 10.0
"""Whoever gave no answer, or was too busy to try, is asked again after so long."""
MAX_ASKED = 1024

Verdict = Literal["unknown", "direct", "private"]


@dataclass(frozen=True)
class Finding:
    """What one peer found.

    Attributes:
        seen: IP address that this peer's connection comes from, as the witness sees it.
        reached: Addresses that led here, in the form that `--listen` takes.
        failed: Why none did, if none did.
        direct: TCP port of the witness's direct listener; 0 if it has none.
        blocked: Why this peer's direct port could not be opened; empty if it was, or not tried.
    """

    seen: str
    reached: tuple[str, ...]
    failed: str
    direct: int = 0
    blocked: str = ""


class Reachability:
    """Collects findings.

    Attributes:
        verdict: `direct`, `private` or, before anybody has tried, `unknown`.
        reason: Why, in one line.
        addresses: Those that led here when last heard of; a router's, if it forwards a port.
    """

    def __init__(self, hidden: str = "") -> None:
        """`hidden` says why nobody could dial this peer whatever they tried; then nobody is asked."""
        self._hidden = hidden
        self._asked: dict[str, float] = {}
        self._heard: dict[str, tuple[float, Finding]] = {}
        self.verdict: Verdict = "private" if hidden else "unknown"
        self.reason = hidden or "no peer has tried to dial it yet"
        self.addresses: tuple[str, ...] = ()

    def whom(self, candidates: Iterable[str], now: float) -> list[str]:
        """Choose the peers to ask now, and count them as asked."""
        if self._hidden:
            return []
        self._heard = {
            peer: (at, said) for peer, (at, said) in self._heard.items() if at + TRUSTED_SECONDS > now
        }
        self._asked = {peer: at for peer, at in self._asked.items() if at + UNANSWERED_SECONDS > now}
        room = min(WITNESSES - len(self._heard), MAX_ASKED - len(self._asked))
        chosen = [peer for peer in candidates if peer not in self._heard and peer not in self._asked][
            : max(0, room)
        ]
        self._asked |= dict.fromkeys(chosen, now)
        return chosen

    def hear(self, peer: str, finding: Finding, now: float) -> bool:
        """Weigh what `peer` found; return whether the verdict or the addresses are others now.

        Most of those who tried decide. If they are even it is `private`: owning no share costs this peer nothing,
        being given one that half the group cannot reach costs everybody the round.
        """
        self._heard[peer] = now, finding
        said = [one for _, one in self._heard.values()]
        reached = [one for one in said if one.reached]
        before = self.verdict, self.addresses
        self.addresses = tuple(dict.fromkeys(address for one in reached for address in one.reached))
        self.verdict = "direct" if 2 * len(reached) > len(said) else "private"
        if self.verdict == "direct":
            self.reason = f"{len(reached)} of {_peers(len(said))} reached it at {reached[-1].reached[0]}"
            blocked = [one.blocked for one in reached if one.blocked]
            if blocked:
                # It is `direct` all the same: libp2p carries what the direct port does not.
                self.reason += f"; {len(blocked)} cannot open a direct channel to it: {blocked[-1]}"
        else:
            failed = next(one for one in reversed(said) if not one.reached)
            self.reason = f"{len(said) - len(reached)} of {_peers(len(said))} failed, {failed.failed}"
        return (self.verdict, self.addresses) != before

    @property
    def direct_ports(self) -> dict[str, int]:
        """The ports of the witnesses' direct listeners, by PeerID."""
        return {peer: said.direct for peer, (_, said) in self._heard.items() if said.direct}

    def doubt(self) -> None:
        """Ask everybody again: this peer's addresses are others now, or its network is."""
        self._heard.clear()
        self._asked.clear()
        self.addresses = ()


def _peers(count: int) -> str:
    return f"{count} peer{'' if count == 1 else 's'}"
