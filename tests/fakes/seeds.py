"""How many seeds a randomised test runs by default, and how many with `-m slow`."""

from __future__ import annotations

import pytest


def few_and_many(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrize `seeds`: the first `few` of them always, the others up to `many` only with `-m slow`."""
    return pytest.mark.parametrize(
        "seeds", [range(few), pytest.param(range(few, many), marks=pytest.mark.slow)], ids=["few", "many"]
    )
