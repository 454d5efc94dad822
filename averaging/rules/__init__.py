"""How contributions become one vector: the rules, one module each, by their specs."""

from __future__ import annotations

from equipoise.averaging.rules.mean import Mean
from equipoise.averaging.rules.rule import Reduced, Rule
from equipoise.compression.grammar import Registry

RULES: Registry[Rule] = Registry("rule", "rules", "mean")
"""All rules; `RULES.register` makes another one known."""

RULES.register("mean", Mean)


def parse_rule(spec: str) -> Rule:
    """Return the rule that `spec` names.

    Raises:
        ValueError: No such rule, option or value; names what came, what is known, and the nearest known name.
    """
    return RULES.parse(spec)


__all__ = ["RULES", "Mean", "Reduced", "Rule", "parse_rule"]
