"""Averages gradients and parameters among machines that train the same model, without a server.

    from equipoise.peer import connect

    with connect() as peer, peer.join("example", model) as run: ...

`equipoise.connect` and `equipoise.Peer` are the same. `help(equipoise.peer.training)` tells the ways to train.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from equipoise import peer

if TYPE_CHECKING:
    from equipoise.peer.connecting import connect
    from equipoise.peer.embedded import Peer

    __version__: str

__all__ = ["Peer", "__version__", "connect"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # Type checkers see the names above, and report any other.

    def __getattr__(name: str) -> object:
        # `equipoise --help` imports this package first, and must not wait for torch.
        if name == "__version__":
            return metadata.version("equipoise")
        if name in __all__:
            return getattr(peer, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
