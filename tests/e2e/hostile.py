"""A daemon that turns hostile when it is told to, by a file in its home: `hold`, `flood`, `silent` or `lie`.

The records of one that lies say that it is in the last round of all and has accumulated 1e12 samples.

`python -c "from e2e.hostile import main; main()" daemon ...` is `equipoise daemon ...` until then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

FLOOD = 20
"""Forged groups to each other peer, each time that the machine wakes."""


def main() -> None:
    """Run the command line with a matchmaking that can be turned."""
    from equipoise.averaging.aio.averager import Averager
    from equipoise.averaging.aio.mesh import Mesh
    from equipoise.averaging.manifest import MAX_ROUND, Join, Manifest
    from equipoise.averaging.matchmaking.convening import Convening
    from equipoise.averaging.matchmaking.events import Send, Woke
    from equipoise.averaging.matchmaking.gathering import Gathering
    from equipoise.averaging.matchmaking.machine import Matchmaking
    from equipoise.averaging.matchmaking.messages import GroupFormed, Invitation, JoinAccepted
    from equipoise.peer.cli import main as equipoise

    home = Path(sys.argv[sys.argv.index("--home") + 1])
    decide, accept, handle = Gathering.decide, Convening._accept, Matchmaking.handle
    post, announce = Mesh.post, Averager._announce

    def deciding(gathering: Gathering, *args: Any) -> Any:
        return None if (home / "hold").exists() else decide(gathering, *args)

    def accepting(convening: Convening, gathering: Gathering, join: Join, *args: Any) -> None:
        if not (home / "hold").exists():
            accept(convening, gathering, join, *args)
            return
        run = convening._standing.run
        convening._standing.send(join.peer, JoinAccepted(run, join.ticket, 10.0, 3, 4, False))
        convening._standing.send(join.peer, Invitation(run, gathering.round))

    def handling(machine: Matchmaking, event: Any, now: float) -> list[Any]:
        actions = handle(machine, event, now)
        if isinstance(event, Woke) and (home / "flood").exists():
            standing = machine._standing
            joins = [
                Join(peer, standing.spec, standing.round, 1.0, 0.0, True, bytes(16), b"", None, bytes(64))
                for peer in standing.roster.others(now)
            ]
            if len(joins) > 1:
                forged = GroupFormed(standing.run, Manifest.of(standing.peer, joins), 0.0)
                actions += [Send(join.peer, forged) for join in joins for _ in range(FLOOD)]
        return actions

    def posting(mesh: Mesh, *args: Any, **options: Any) -> None:
        if not (home / "silent").exists():  # Its records are published all the same: a ghost.
            post(mesh, *args, **options)

    async def announcing(run: Averager) -> None:
        if not (home / "lie").exists():
            await announce(run)
            return
        lies = {"round": MAX_ROUND, "accumulated": 1e12}
        await run._directory.announce(run.spec.name, spec=run.spec.hash, ready=True, reason="", **lies)

    patches: list[tuple[type, str, Any]] = [
        (Gathering, "decide", deciding),
        (Convening, "_accept", accepting),
        (Matchmaking, "handle", handling),
        (Mesh, "post", posting),
        (Averager, "_announce", announcing),
    ]
    for machine, name, turned in patches:
        setattr(machine, name, turned)
    equipoise()
