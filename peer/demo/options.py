"""The options of `equipoise demo`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from equipoise.averaging.outer import parse_outer
from equipoise.averaging.rules import parse_rule
from equipoise.averaging.strategy import parse_strategy
from equipoise.compression import parse_codec
from equipoise.peer.errors import EquipoiseError, FlagError
from equipoise.peer.simulation import partition

MAX_PEERS = 16
"""A peer takes about 0.5 GB; more would not fit an ordinary machine."""

CLASSES = 10
"""Labels of the images."""


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of the user; `equipoise demo --help` describes them."""

    peers: int = 4
    rounds: int = 50
    codec: str | None = None
    kill: int = 0
    strategy: str = "allreduce"
    rule: str = "mean"
    outer: str = "average"
    split: str = "iid"
    plot: str = ""

    @property
    def federated(self) -> bool:
        """Whether the rounds are federated."""
        return self.strategy.partition(":")[0] == "federated"

    def check(self) -> None:
        """Refuse what cannot work before anything is started.

        Raises:
            FlagError: A count is out of its range, or a spec is wrong.
            EquipoiseError: scikit-learn is missing.
        """
        limits = {"peers": (2, MAX_PEERS), "rounds": (1, 10_000), "kill": (0, self.peers - 2)}
        for name, (least, most) in limits.items():
            if not least <= (given := getattr(self, name)) <= most:
                remain = ", so that 2 remain" if name == "kill" else ""
                raise FlagError(f"expected --{name} from {least} to {most}{remain}, got {given}")
        if self.plot and Path(self.plot).suffix not in (".png", ".svg"):
            raise FlagError(f"--plot: expected a file name that ends in .png or .svg, got {self.plot!r}")
        self._check_specs()
        if importlib.util.find_spec("sklearn") is None:
            hint = "install it: pip install 'equipoise[plots]'"
            raise EquipoiseError("the demo's data comes with scikit-learn", hint)

    def _check_specs(self) -> None:
        try:
            strategy = parse_strategy(self.strategy)
            parse_codec(strategy.codec if self.codec is None else self.codec)
            parse_rule(self.rule)
            parse_outer(self.outer)
            partition(range(CLASSES), self.peers, self.split)
        except ValueError as error:
            raise FlagError(str(error)) from error
        if self.outer != "average" and not self.federated:
            raise FlagError(f"--outer needs --strategy federated, got {self.strategy}")
        if getattr(strategy, "tags", ()):
            raise FlagError("--strategy: the demo's peers carry no tags, so none would be drawn")
        for option, there in (("available", self.peers), ("quorum", self.peers - self.kill)):
            if (needed := getattr(strategy, option, 0)) > there:
                raise FlagError(f"--strategy: expected {option} of at most {there} peers, got {needed}")
