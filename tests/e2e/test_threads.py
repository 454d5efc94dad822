"""Scripts in threads: their results, and their errors although other scripts hang."""

from __future__ import annotations

import threading

import pytest

from e2e.threads import begin, settle, together


def test_results_come_in_order() -> None:
    assert together(divmod, [7, 9], [2, 4]) == [(3, 1), (2, 1)]


def test_an_error_is_raised_at_once_though_another_script_hangs() -> None:
    ends = threading.Event()

    def work(index: int) -> None:
        if index:
            ends.wait()
        raise KeyError(index)

    with pytest.raises(KeyError, match="0"):
        together(work, range(2))
    ends.set()


def test_a_script_that_hangs_is_told() -> None:
    ends = threading.Event()
    with pytest.raises(TimeoutError, match="1 scripts have not ended"):
        settle([begin(ends.wait)], 0.0)
    ends.set()
