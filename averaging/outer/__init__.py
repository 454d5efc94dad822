"""Outer steps of training with local steps: what all peers do alike with the mean of what they have moved by.

Between two exchanges every peer trains by itself, from the parameters on which all agreed; then the
mean of the differences takes those one step further, on every peer the same one.
"""

from __future__ import annotations

from equipoise.averaging.outer.step import OuterStep
from equipoise.averaging.outer.steps import Average, FedAdagrad, FedAdam, FedAvgM, FedYogi, Nesterov
from equipoise.compression.grammar import decimal
from equipoise.compression.registry import Plugins, Registry

OUTER_STEPS: Registry[OuterStep] = Registry(
    "outer step", "outer steps", "nesterov:lr=0.7", 128, Plugins("equipoise.outer", OuterStep)
)
"""All outer steps; `OUTER_STEPS.register` makes another one known, as does an entry point `equipoise.outer` of a
package."""

OUTER_STEPS.register("average", Average)
OUTER_STEPS.register("nesterov", Nesterov, lr=decimal(0.7), momentum=decimal(0.9))
OUTER_STEPS.register("fedavgm", FedAvgM, lr=decimal(1.0), momentum=decimal(0.9))
OUTER_STEPS.register("fedadagrad", FedAdagrad, eta=decimal(0.1), tau=decimal(1e-3))

_ADAPTIVE = {"beta1": decimal(0.9), "beta2": decimal(0.99), "tau": decimal(1e-3)}
OUTER_STEPS.register("fedadam", FedAdam, eta=decimal(0.1), **_ADAPTIVE)
OUTER_STEPS.register("fedyogi", FedYogi, eta=decimal(0.01), **_ADAPTIVE)

parse_outer = OUTER_STEPS.parse
"""Returns the outer step of a spec, which `str` gives back in its canonical form; raises ValueError with what came,
what is known, and the nearest known name."""

__all__ = ["OUTER_STEPS", "Average", "Nesterov", "OuterStep", "parse_outer"]
