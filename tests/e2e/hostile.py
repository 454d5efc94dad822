"""A daemon that turns hostile when it is told to, by a file in its home: `hold`, `flood`, `silent` or `lie`.

The records of one that lies say that it is in the last round of all and has accumulated 1e12 samples.

`python -c "from e2e.hostile import main; main()" daemon ...` is `equipoise daemon ...` until then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLOOD = 20
"""Forged groups to each other peer, each time that the machine wakes."""


def main() -> None:
    """Run the command line with a matchmaking that can be turned."""
    from equipoise.averaging.aio.run_driver import RunDriver
    from equipoise.averaging.aio.sessions import Sessions
    from equipoise.averaging.manifest import MAX_ROUND, Join, Manifest
    from equipoise.averaging.matchmaking.coordinator import Coordinator
    from equipoise.averaging.matchmaking.events import Send, Woke
    from equipoise.averaging.matchmaking.group_builder import GroupBuilder, Parked
    from equipoise.averaging.matchmaking.machine import Matchmaking
    from equipoise.averaging.matchmaking.messages import GroupFormed, Invitation, JoinAccepted
    from equipoise.peer.cli import main as equipoise

    home = Path(sys.argv[sys.argv.index("--home") + 1])
    decide, accept, handle = GroupBuilder.decide, Coordinator._accept, Matchmaking.handle
    announce = RunDriver._announce

    def deciding(builder: GroupBuilder, *args: Any) -> Any:
        return None if (home / "hold").exists() else decide(builder, *args)

    def accepting(coordinator: Coordinator, builder: GroupBuilder, parked: Parked, *args: Any) -> None:
        if not (home / "hold").exists():
            accept(coordinator, builder, parked, *args)
            return
        run, join = coordinator._context.run, parked.join
        coordinator._context.send(join.peer, JoinAccepted(run, join.ticket, 10.0, 3, 4, False))
        coordinator._context.send(join.peer, Invitation(run, builder.round))

    def handling(machine: Matchmaking, event: Any, now: float) -> list[Any]:
        actions = handle(machine, event, now)
        if isinstance(event, Woke) and (home / "flood").exists():
            context = machine.context
            joins = [
                Join(peer, context.spec, context.round, 1.0, 0.0, True, bytes(16), b"", None, bytes(64))
                for peer in context.membership.others(now)
            ]
            if len(joins) > 1:
                forged = GroupFormed(context.run, Manifest.of(context.peer, joins), 0.0)
                actions += [Send(join.peer, forged) for join in joins for _ in range(FLOOD)]
        return actions

    async def announcing(run: RunDriver) -> None:
        if not (home / "lie").exists():
            await announce(run)
            return
        lies = {"round": MAX_ROUND, "accumulated": 1e12}
        await run._directory.announce(run.spec.name, spec=run.spec.hash, ready=True, **lies)

    patches: list[tuple[type, str, Any]] = [
        (GroupBuilder, "decide", deciding),
        (Coordinator, "_accept", accepting),
        (Matchmaking, "handle", handling),
        (Sessions, "post", _unless_silent(home, Sessions.post)),
        (Sessions, "beat", _unless_silent(home, Sessions.beat)),
        (RunDriver, "_announce", announcing),
    ]
    for machine, name, turned in patches:
        setattr(machine, name, turned)
    equipoise()


def _unless_silent(home: Path, said: Callable[..., None]) -> Callable[..., None]:
    """What is said while the daemon is not silent; its records are published all the same: it is a ghost."""

    def saying(*args: Any) -> None:
        if not (home / "silent").exists():
            said(*args)

    return saying
