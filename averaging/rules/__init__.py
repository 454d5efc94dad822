"""The rules by which contributions become one vector, one module each, by their specs."""

from __future__ import annotations

from equipoise.averaging.rules.mean import Mean
from equipoise.averaging.rules.rule import Rule
from equipoise.compression.grammar import Registry

RULES: Registry[Rule] = Registry("rule", "rules", "mean")
"""All rules; `RULES.register` makes another one known."""

RULES.register("mean", Mean)

__all__ = ["RULES", "Mean", "Rule"]
