"""The options of `equipoise demo`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from equipoise.peer.errors import EquipoiseError, FlagError

MAX_PEERS = 16
"""A daemon and a trainer take about 0.7 GB together; more would not fit an ordinary machine."""

MAX_ROUNDS = 10_000

MIN_SURVIVORS = 2
"""One peer alone has nobody to average with."""

CLASSES = 10
"""Labels of the images."""

PLOT_FORMATS = (".png", ".svg")


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of the user.

    Attributes:
        peers: Daemons, each with a trainer of its own.
        rounds: Updates that every trainer makes.
        codec: Codec spec in which values travel; empty for that of the strategy.
        kill: Daemons to SIGKILL half-way, the one that the others joined through among them.
        strategy: Strategy of the run.
        rule: Rule of the run.
        outer: Outer step of federated rounds; empty for `average`.
        split: How the training images are dealt to the peers, as `partition` takes it.
        plot: File for a plot of the accuracy, PNG or SVG; empty for none.
    """

    peers: int = 4
    rounds: int = 50
    codec: str = ""
    kill: int = 0
    strategy: str = "allreduce"
    rule: str = "mean"
    outer: str = ""
    split: str = "iid"
    plot: str = ""

    def check(self) -> DemoOptions:
        """Refuse what cannot work before anything is started; returns the options with their codec named.

        Raises:
            FlagError: A count is out of its range, or the codec or the strategy is unknown.
            EquipoiseError: scikit-learn is missing.
        """
        most, remain = self.peers - MIN_SURVIVORS, f", so that {MIN_SURVIVORS} remain"
        for name, given, allowed, why in (
            ("peers", self.peers, range(MIN_SURVIVORS, MAX_PEERS + 1), ""),
            ("rounds", self.rounds, range(1, MAX_ROUNDS + 1), ""),
            ("kill", self.kill, range(most + 1), remain),
        ):
            if given not in allowed:
                raise FlagError(f"expected --{name} from {allowed[0]} to {allowed[-1]}{why}, got {given}")
        if self.plot and Path(self.plot).suffix not in PLOT_FORMATS:
            raise FlagError(f"--plot: expected a file name that ends in .png or .svg, got {self.plot!r}")
        named = self._named()
        if importlib.util.find_spec("sklearn") is None:
            raise EquipoiseError(
                "the demo's data comes with scikit-learn; install it: pip install 'equipoise[demo]'"
            )
        return named

    def _named(self) -> DemoOptions:
        """The options with every default that depends on the strategy; refuses what the swarm would refuse later."""
        # They import torch, which the command line does without until the demo really runs.
        from equipoise.averaging.outer import parse_outer
        from equipoise.averaging.rules import parse_rule
        from equipoise.averaging.strategy import Federated, parse_strategy
        from equipoise.compression import parse_codec
        from equipoise.peer.simulation import partition

        option = "strategy"
        try:
            strategy = parse_strategy(self.strategy)
            for option, parse in (("rule", parse_rule), ("outer", parse_outer), ("codec", parse_codec)):
                if given := getattr(self, option):
                    parse(given)
            option = "split"
            partition(range(CLASSES), self.peers, self.split)
        except ValueError as error:
            raise FlagError(f"--{option}: {error}") from error
        named = msgspec.structs.replace(self, codec=self.codec or strategy.codec)
        if not isinstance(strategy, Federated):
            if self.outer:
                raise FlagError(f"--outer needs --strategy federated, got {self.strategy}")
            return named
        if strategy.tags:
            raise FlagError("--strategy: the demo's daemons carry no tags, so none would be drawn")
        for name, needed, there in (
            ("available", strategy.available, self.peers),
            ("quorum", strategy.quorum, self.peers - self.kill),
        ):
            if needed > there:
                raise FlagError(f"--strategy: expected {name} of at most {there} peers, got {needed}")
        return msgspec.structs.replace(named, outer=self.outer or "average")

    @property
    def federated(self) -> bool:
        """Whether the rounds are federated; of options that `check` has returned."""
        return bool(self.outer)
