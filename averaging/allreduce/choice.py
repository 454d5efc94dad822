"""Whose contributions a leader proposes, given what the owners report to hold."""

from __future__ import annotations

from collections.abc import Mapping


def choose(reports: Mapping[int, int], everyone: int, quorum: int = 2) -> tuple[int, int | None]:
    """The contributors that all owners hold, and the owner that is better replaced first, if any.

    An owner that lacks what the others hold has a bad link of its own: replacing it costs a retry and at most its own
    contribution, so that is done where it saves more contributors than that one, or makes the round possible at all.

    Args:
        reports: Bitmask of the contributors held whole, by owner.
        everyone: Bitmask of all contributors.
        quorum: Fewest contributors of a mean.
    """
    together = _common(reports, everyone)
    gains = {
        owner: _common(
            {other: held for other, held in reports.items() if other != owner}, everyone
        ).bit_count()
        - together.bit_count()
        for owner in reports
    }
    misfit = max(gains, key=lambda owner: (gains[owner], -owner))
    worthwhile = gains[misfit] >= 2 or (gains[misfit] == 1 and together.bit_count() < quorum)
    return together, misfit if len(reports) > 1 and worthwhile else None


def _common(reports: Mapping[int, int], everyone: int) -> int:
    for held in reports.values():
        everyone &= held
    return everyone
