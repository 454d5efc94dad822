"""The rules by which contributions become one vector, one module each, by their specs."""

from __future__ import annotations

from equipoise.averaging.rules.mean import Mean
from equipoise.averaging.rules.rule import Reduced, Rule
from equipoise.compression.grammar import Registry

RULES: Registry[Rule] = Registry("rule", "rules", "mean")
"""All rules; `RULES.register` makes another one known."""

RULES.register("mean", Mean)

parse_rule = RULES.parse
"""Returns the rule of a spec; raises ValueError with what came, what is known, and the nearest known name."""

__all__ = ["RULES", "Mean", "Reduced", "Rule", "parse_rule"]
