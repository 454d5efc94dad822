"""A daemon that falls silent while its record stays: it becomes a ghost when its home holds a file `silent`.

`python -c "from e2e.ghost import main; main()" daemon ...` is `equipoise daemon ...` until then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the command line with sessions that can be silenced."""
    from equipoise.averaging.aio.sessions import Sessions
    from equipoise.peer.cli import main as equipoise

    home = Path(sys.argv[sys.argv.index("--home") + 1])
    for name in ("post", "beat"):
        setattr(Sessions, name, _unless_silent(home, getattr(Sessions, name)))
    equipoise()


def _unless_silent(home: Path, said: Callable[..., None]) -> Callable[..., None]:
    def saying(*args: Any) -> None:
        if not (home / "silent").exists():
            said(*args)

    return saying
