"""A daemon whose machine's clock is off by `$SHIFTED_SECONDS`.

`python -c "from e2e.shifted import main; main()" daemon ...` is `equipoise daemon ...` with such a clock.
"""

from __future__ import annotations

import os
import time

SHIFT = "SHIFTED_SECONDS"


def main() -> None:
    """Run the command line with a clock that is off."""
    seconds = float(os.environ[SHIFT])
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + round(seconds * 1e9)
    from equipoise.peer.cli import main as equipoise

    equipoise()
