"""The rules by which contributions become one vector, by their specs."""

from __future__ import annotations

from equipoise.averaging.rules.ranking import Median, Trimmed
from equipoise.averaging.rules.rule import Mean, Reduced, Rule, RuleError
from equipoise.compression.grammar import decimal
from equipoise.compression.registry import Plugins, Registry

RULES: Registry[Rule] = Registry(
    "rule", "rules", "trimmed:beta=0.2", plugins=Plugins("equipoise.rules", Rule)
)
"""All rules; `RULES.register` makes another one known, as does an entry point `equipoise.rules` of a package."""

RULES.register("mean", Mean)
RULES.register("median", Median)
RULES.register("trimmed", Trimmed, beta=decimal(0.2))

parse_rule = RULES.parse
"""Returns the rule of a spec; raises ValueError with what came, what is known, and the nearest known name."""

__all__ = ["RULES", "Mean", "Median", "Reduced", "Rule", "RuleError", "Trimmed", "parse_rule"]
