from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from equipoise.dht.p2pd import P2pd, P2pdError, P2pdOptions
from equipoise.dht.supervisor import Supervisor


async def test_a_p2pd_whose_streams_cannot_be_taken_is_ended_and_started_again(monkeypatch) -> None:
    """Without descriptors the listeners cannot be named to it: it must not stay, and look like one that works."""
    started = SimpleNamespace(stop=AsyncMock())
    refusing = AsyncMock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    link = SimpleNamespace(attach=refusing, detach=AsyncMock())
    monkeypatch.setattr(P2pd, "start", AsyncMock(return_value=started))
    supervisor = Supervisor(link, SimpleNamespace(), P2pdOptions(Path(), Path(), ()), Mock())
    with pytest.raises(P2pdError, match="Too many open files"):
        await supervisor.start()
    started.stop.assert_awaited_once()
    link.detach.assert_awaited_once()
