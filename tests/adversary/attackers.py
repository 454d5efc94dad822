"""Daemons that attack: `python attackers.py WAY daemon` is `equipoise daemon`.

`stall`: as owner it never sends its share of the mean. `nan`: its contributions do not decode. `each`: as owner it
gives each member another mean. `mute`: it does not vote.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def main(way: str) -> None:
    """Run the command line with modules that do what `way` says."""
    from equipoise.averaging.aio.round_driver import MemberLinks
    from equipoise.averaging.allreduce import messages as wire
    from equipoise.peer.cli import main as equipoise

    framed: Callable[..., Any] = MemberLinks.frame
    post: Callable[..., Any] = MemberLinks.post

    def lies(self: MemberLinks, message: wire.RoundMessage, payload: memoryview) -> Any:
        header, body = framed(self, message, payload)
        if way == "nan" and isinstance(message, wire.Contribution):
            body = memoryview(b"\xff" * len(body))
        if way == "each" and isinstance(message, wire.Mean):
            body = memoryview(np.full(len(body) // 4, os.getpid() + os.urandom(1)[0], np.float32).tobytes())
        return None if way == "stall" and isinstance(message, wire.Mean) else (header, body)

    def says(self: MemberLinks, to: int, message: wire.RoundMessage) -> None:
        if way != "mute" or not isinstance(message, wire.Votes):
            post(self, to, message)

    setattr(MemberLinks, "frame", lies)  # noqa: B010
    setattr(MemberLinks, "post", says)  # noqa: B010
    equipoise()


if __name__ == "__main__":
    main(sys.argv.pop(1))
