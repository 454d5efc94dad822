"""An outcome as people meet it: in a condition, and printed."""

from __future__ import annotations

import msgspec

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.weights import ATTENDANCE_LIMIT

OK = Outcome(
    ok=True,
    reason="mean over 2 of 2 members",
    run="digits",
    round=3,
    group=("12D3KooWaaaaaaaaFirst111", "12D3KooWaaaaaaaaSecond22"),
    contributors={"12D3KooWaaaaaaaaFirst111": 32.0, "12D3KooWaaaaaaaaSecond22": 1.5},
    digest="0123456789abcdef",
    seconds={"total": 0.25},
    started=1_700_000_000.0,
)

FAILED = Outcome(ok=False, reason="no group within 30 s", run="digits", round=4)


def test_an_outcome_is_true_if_it_is_ok() -> None:
    assert OK
    assert not FAILED


def test_its_repr_says_how_it_ended_who_contributed_and_why() -> None:
    assert repr(OK) == (
        "<Outcome ok: run 'digits', round 3: mean over 2 of 2 members; "
        "contributors ...First111: 32, ...Second22: 1.5; digest 01234567; 0.250 s>"
    )
    assert repr(FAILED) == "<Outcome failed: run 'digits', round 4: no group within 30 s>"


def test_a_member_that_only_attends_is_no_giver() -> None:
    first, second = OK.contributors
    one = msgspec.structs.replace(OK, contributors={first: 1.0, second: ATTENDANCE_LIMIT})
    assert one.tally == "1 of 2 counted, the other caught up"
    assert second[-8:] not in repr(one)
    assert one.counted(second), "its zeros are in the mean"
    three = msgspec.structs.replace(
        one, group=(*OK.group, "x"), contributors={**one.contributors, "x": 2.0**-40}
    )
    assert three.tally == "1 of 3 counted, 2 others caught up"
    met = msgspec.structs.replace(OK, contributors=dict.fromkeys(OK.group, ATTENDANCE_LIMIT))
    assert met.tally == "0 of 2 counted, they meet"
    assert OK.tally == "mean over 2 of 2 members"


def test_events_are_in_its_repr() -> None:
    lost = msgspec.structs.replace(FAILED, events=("lost the peer x", "replaced an owner"))
    assert repr(lost).endswith("30 s; lost the peer x; replaced an owner>")
