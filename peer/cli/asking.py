"""Questions to the daemon of a home."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

from equipoise.peer.config import find_home
from equipoise.peer.link import Link, open_link
from equipoise.peer.messages import ReplyBody, RequestBody

ANSWER_SECONDS = 8.0
"""For each of greeting and answer: milliseconds on most machines, seconds on one that swaps. People wait for them."""

Reply = TypeVar("Reply", bound=ReplyBody)


def linked(home: Path) -> contextlib.closing[Link]:
    """A connection to the daemon on `home`.

    Raises:
        NoDaemon: None runs there; says how to start one.
        DaemonLost: It does not answer; says what to do.
    """
    return contextlib.closing(open_link(home, ANSWER_SECONDS))


def ask(home: str | None, request: RequestBody, kind: type[Reply]) -> Reply:
    """Connect, ask, disconnect; errors as of `linked`."""
    with linked(find_home(home, os.environ)[0]) as link:
        return link.ask(request, kind, ANSWER_SECONDS)
