"""Each daemon of a chaos run on a host of its own, whose link can be cut and slowed (`e2e.netns`)."""

from __future__ import annotations

from e2e.netns import Network


class Wires:
    """The links of a network's hosts, by member."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def prefix(self, member: int) -> list[str]:
        """What goes before the command of the member's daemon."""
        return self._network.hosts[member].command([])

    def listen(self, member: int) -> list[str]:
        """Arguments of the member's daemon."""
        return ["--listen", f"/ip4/{self._network.hosts[member].address}/tcp/0"]

    def cut(self, member: int) -> None:
        """Let nothing through."""
        self._network.cut(self._network.hosts[member])

    def mute(self, member: int) -> None:
        """Lose what it sends."""
        self._network.drop_one_way(self._network.hosts[member])

    def slow(self, member: int, bits: float) -> None:
        """Let so many bits a second through, each way."""
        self._network.shape(self._network.hosts[member], bits / 1e6)

    def heal(self, member: int) -> None:
        """Undo that."""
        host = self._network.hosts[member]
        self._network.heal(host)
        self._network.unshape(host)
