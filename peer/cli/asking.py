"""One question to the daemon of a home."""

from __future__ import annotations

import os
from typing import TypeVar

from equipoise.peer.config import find_home
from equipoise.peer.link import open_link
from equipoise.peer.messages import ReplyBody, RequestBody

Reply = TypeVar("Reply", bound=ReplyBody)


def ask(home: str | None, request: RequestBody, kind: type[Reply]) -> Reply:
    """Connect, ask, disconnect.

    Raises:
        NoDaemon: None runs there; says how to start one.
        DaemonLost: It does not answer.
    """
    link = open_link(find_home(home, os.environ)[0])
    try:
        return link.ask(request, kind)
    finally:
        link.close()
