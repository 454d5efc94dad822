"""The follower: events in, actions out. How peers find each other's state is held by `tests/peer/training`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import msgspec
import pytest

from equipoise.averaging.outcome import FetchOutcome, Outcome
from equipoise.averaging.replication import follower
from equipoise.averaging.replication.events import (
    Action,
    Check,
    Checked,
    Commit,
    Deserted,
    Due,
    Ending,
    Fetched,
    FetchMean,
    FetchSnapshot,
    Heal,
    Interrupted,
    Meet,
    Overdue,
    RoundEnded,
    StepAlone,
    SteppedAlone,
    Stopped,
    Written,
)
from equipoise.averaging.replication.follower import (
    ATTENDANCE,
    FAILED_ROUNDS,
    FIRST_SNAPSHOT,
    LOOKS_BACK,
    MAX_INTRODUCTIONS,
    MAX_MISSED,
    Behind,
    Follower,
    FollowerOptions,
)
from equipoise.averaging.replication.lineage import CHECK_EVERY, after, beginning, follow
from equipoise.averaging.state import StateId
from fakes import rounds

START, OTHER = beginning("start"), beginning("other")
LATE = rounds.failed("too late by 1.3 s: the group of round 7 has closed", late=1.3)
LOST = rounds.failed("lost b", formed=True)
NOBODY = rounds.nothing("nobody keeps it")
INTRODUCED = dict.fromkeys("abc", ATTENDANCE)


def state_at(epoch: int) -> StateId:
    state = START
    for at in range(epoch):
        state = after(state, f"m{at}")
    return state


def ok(
    group: StateId | None, weights: Mapping[str, float] = {"b": 8.0, "c": 8.0}, missing: int = 0
) -> RoundEnded:
    """A round from the group's state, whose mean is known by its epoch."""
    states = {} if group is None else dict.fromkeys(weights, group)
    epoch = 0 if group is None else group.epoch
    return rounds.succeeded(states, f"m{epoch}", weights, sorted({*weights, "a"}), missing)


def mean(epoch: int, digest: str = "") -> Fetched:
    weights = {"b": 8.0, "c": 8.0}
    states = dict.fromkeys("bc", state_at(epoch))
    made = Outcome(ok=True, reason="", states=states, digest=digest or f"m{epoch}", contributors=weights)
    return rounds.mean(made)


def told(actions: list[Action]) -> list[Action | str]:
    """The actions; in place of a commit, the mean."""
    return [one.outcome.digest if isinstance(one, Commit) else one for one in actions]


def following(state: StateId = START, counts_late: bool = False) -> Follower:
    machine = Follower("a", state, 0.0, FollowerOptions(counts_late=counts_late))
    assert machine.handle(ok(state, INTRODUCED), 0.0) == []
    assert machine.follows
    return machine


def behind(epoch: int) -> Follower:
    """A peer of another start, whose group keeps no means for it."""
    machine = Follower("a", OTHER, 0.0)
    actions = machine.handle(ok(state_at(epoch)), 10.0)
    if actions == [FetchMean(OTHER)]:
        actions = machine.handle(NOBODY, 10.0)
    assert actions == [FetchSnapshot(epoch)]
    assert machine.phase == Behind(state_at(epoch), epoch)
    return machine


def test_a_follower_applies_each_mean_and_claims_the_state_after_it() -> None:
    machine = following()
    assert [told(machine.handle(ok(state_at(epoch)), epoch)) for epoch in range(3)] == [
        ["m0"],
        ["m1"],
        ["m2"],
    ]
    assert machine.claim == machine.state == state_at(3)


def test_a_peer_behind_claims_nothing_and_applies_the_means_since_the_snapshot() -> None:
    machine = behind(5)
    assert machine.claim is None
    assert machine.reason.startswith("behind: it holds epoch 0")
    assert [machine.handle(ok(state_at(epoch)), 20.0) for epoch in (6, 7)] == [[], []]
    assert machine.handle(rounds.snapshot(state_at(6)), 31.0) == [Heal(), FetchMean(state_at(6))]
    assert told(machine.handle(mean(6), 31.1)) == ["m6", FetchMean(state_at(7))]
    assert machine.follows, "the last round began from here"
    assert told(machine.handle(mean(7), 31.2)) == ["m7"]
    assert machine.state == state_at(8)


def test_a_snapshot_beyond_the_last_round_is_followed_at_once() -> None:
    machine = behind(5)
    assert machine.handle(rounds.snapshot(state_at(6)), 31.0) == [Heal(), FetchMean(state_at(6))]
    assert machine.handle(NOBODY, 31.1) == []
    assert machine.claim == state_at(6)


def test_a_snapshot_serves_if_daemons_keep_the_means_since() -> None:
    machine = behind(20)
    machine.handle(ok(state_at(60)), 20.0)
    assert machine.handle(rounds.snapshot(state_at(21)), 21.0) == [FetchSnapshot(60)]
    assert "older than the means that are kept" in machine.reason
    first = state_at(60 - MAX_MISSED)
    assert machine.handle(rounds.snapshot(first), 22.0) == [Heal(), FetchMean(first)]
    assert machine.handle(NOBODY, 22.1) == [FetchSnapshot(60)]


def test_a_snapshot_of_another_lineage_is_not_loaded() -> None:
    machine = behind(5)
    assert machine.handle(rounds.snapshot(StateId(5, "f" * 64)), 11.0) == []
    assert "that of epoch 5 is of another state than the group's" in machine.reason
    assert machine.handle(ok(state_at(6)), 12.0) == [FetchSnapshot(6)]


def test_a_peer_that_missed_a_few_rounds_fetches_those_means_in_place_of_a_snapshot() -> None:
    machine = following()
    assert machine.handle(ok(state_at(2)), 1.0) == [FetchMean(START)]
    assert machine.handle(mean(1), 1.05) == [], "it has not asked for that"
    assert told(machine.handle(mean(0), 1.1)) == ["m0", FetchMean(state_at(1))]
    assert machine.claim is None
    assert machine.handle(ok(state_at(3)), 1.2) == []
    for epoch in (1, 2):
        assert told(machine.handle(mean(epoch), 1.3)) == [f"m{epoch}", FetchMean(state_at(epoch + 1))]
    assert told(machine.handle(mean(3), 1.4)) == ["m3"]
    assert machine.handle(ok(state_at(4 + MAX_MISSED + 1)), 2.0) == [FetchSnapshot(4 + MAX_MISSED + 1)]


def test_means_that_are_together_larger_than_a_snapshot_are_not_fetched() -> None:
    for missed, action in ((3, FetchMean(START)), (4, FetchSnapshot(4))):
        ended = msgspec.structs.replace(ok(state_at(missed)), most_missed=3)
        assert following().handle(ended, 1.0) == [action]


def test_all_means_that_followed_are_asked_for_where_a_contribution_came_too_late() -> None:
    machine, lost = following(counts_late=True), following(counts_late=True)
    actions = machine.handle(msgspec.structs.replace(LATE, most_missed=MAX_MISSED + 8), 1.0)
    for epoch in range(MAX_MISSED + 8):
        assert actions[-1] == FetchMean(state_at(epoch))
        actions = machine.handle(mean(epoch), 1.1)
    lost.handle(LATE, 1.0)
    beyond = Fetched(FetchOutcome(ok=False, reason="nobody keeps it", beyond=5))
    assert lost.handle(beyond, 1.1) == [FetchSnapshot(5)]


def test_where_no_more_means_come_a_snapshot_does() -> None:
    machine = following()
    machine.handle(ok(state_at(2)), 1.0)
    lie = after(START, "a lie")
    assert told(machine.handle(mean(0, "a lie"), 1.1)) == ["a lie", FetchMean(lie)]
    assert machine.handle(NOBODY, 1.3) == [FetchSnapshot(2)]
    assert "the means between are not to be had" in machine.reason
    assert machine.handle(ok(state_at(3)), 2.0) == []
    assert machine.handle(rounds.nothing("nobody offers it"), 3.0) == []
    assert machine.handle(ok(state_at(4)), 10.0) == [FetchSnapshot(4)], "it does not ask for the mean again"


def test_every_so_often_the_parameters_are_checked_and_a_replay_finds_drift() -> None:
    before = state_at(CHECK_EVERY - 1)
    checked = StateId(CHECK_EVERY, follow(state_at(CHECK_EVERY).lineage, "parameters p"))
    machine = following(before)
    assert told(machine.handle(ok(before), 1.0)) == [f"m{before.epoch}", Check()]
    assert machine.handle(Checked("p"), 1.0) == []
    assert machine.state == checked
    for seen, expected in (("p", FetchMean(checked)), ("q", FetchSnapshot(CHECK_EVERY))):
        machine = behind(before.epoch)
        machine.handle(ok(checked), 20.0)
        assert machine.handle(rounds.snapshot(before), 21.0) == [Heal(), FetchMean(before)]
        assert told(machine.handle(mean(before.epoch), 21.0)) == [f"m{before.epoch}", Check()]
        assert machine.handle(Checked(seen), 21.0) == [expected]
        assert ("this peer computed" in machine.reason) == (seen == "q")


def test_a_peer_whose_round_failed_asks_for_its_mean_at_once() -> None:
    machine = following()
    assert machine.handle(LOST, 1.0) == [FetchMean(START)]
    assert told(machine.handle(mean(0), 1.1)) == ["m0"]
    machine = following()
    assert machine.handle(rounds.failed("nobody came"), 1.0) == []
    assert machine.reason == "the last round failed: nobody came"


def test_while_others_may_still_be_in_the_round_a_peer_asks_again_before_it_gives_once() -> None:
    for failed in (LOST, LATE):
        machine = following()
        machine.handle(failed, 1.0)
        machine.handle(rounds.nothing("not within 3 s", unheard=1), 4.0)
        assert machine.handle(Due(company=True), 4.0) == [FetchMean(START)]
        assert machine.handle(rounds.nothing("not within 3 s", unheard=1), 7.0) == [Meet()]
        assert machine.handle(Due(company=True), 8.0) == [Meet()]


def test_a_peer_that_is_late_again_without_a_mean_meets_the_group_anew() -> None:
    machine = following()
    for second in (1.0, 2.0):
        assert machine.follows, "the round that it missed may have failed for all"
        assert machine.handle(LATE, second) == [FetchMean(START)]
        machine.handle(NOBODY, second)
    assert machine.joins
    assert not machine.gives_up, "the others have not failed"


@pytest.mark.parametrize("event", [Due(company=True, placed=False), Overdue(placed=False)])
def test_a_peer_without_a_place_that_is_overtaken_fetches_a_snapshot(event: Due | Overdue) -> None:
    machine = following()
    assert machine.handle(event, 1.0) == [FetchMean(START)]
    assert machine.handle(rounds.nothing("none keeps it", unheard=1, beyond=12), 1.1) == [FetchSnapshot(12)]
    assert machine.claim is None
    machine.handle(rounds.nothing("nobody offers it"), 1.2)
    assert machine.handle(Overdue(FIRST_SNAPSHOT), 1.3) == [], "after a pause"
    assert machine.handle(Overdue(FIRST_SNAPSHOT), 20.0) == [FetchSnapshot(12)]


def test_a_newcomer_that_finds_others_at_work_fetches_at_once_and_follows_what_came_since() -> None:
    machine = Follower("a", OTHER, 0.0)
    assert machine.handle(Overdue(FIRST_SNAPSHOT), 0.1) == [FetchSnapshot(FIRST_SNAPSHOT)]
    assert machine.handle(Overdue(FIRST_SNAPSHOT), 0.2) == []
    assert machine.handle(Overdue(0), 0.3) == [FetchSnapshot(0)], "the others have begun, and are not as far"
    actions = machine.handle(rounds.snapshot(state_at(5), ("b", "c", "late")), 2.0)
    assert actions == [Heal(), FetchMean(state_at(5))]
    assert machine.circle == ("b", "c", "late")
    assert told(machine.handle(mean(5), 2.1)) == ["m5", FetchMean(state_at(6))]
    assert machine.handle(NOBODY, 2.2) == []
    assert machine.follows


def test_the_circle_are_the_others_that_held_the_groups_state_in_the_last_round() -> None:
    machine = following(state_at(4))
    machine.handle(ok(state_at(4), dict.fromkeys("abcd", 8.0)), 1.0)
    assert machine.circle == ("b", "c", "d")
    held = {"a": state_at(5), "b": state_at(5), "c": OTHER, "n": START}
    machine.handle(rounds.succeeded(held, "m5", {"a": 8.0, "b": 8.0}, tuple("abcn")), 2.0)
    machine.handle(LOST, 3.0)
    assert machine.circle == ("b",), "a round that failed takes nobody away"


def test_downloads_that_fail_are_tried_ever_less_often() -> None:
    machine = behind(5)
    machine.handle(rounds.nothing("it does not fit"), 10.0)
    began = []
    for second in range(11, 4000):
        if machine.handle(rounds.failed("nobody came"), float(second)):
            began.append(second)
            machine.handle(rounds.nothing("it does not fit"), float(second))
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == follower.MAX_FETCH_PAUSE
    assert "again in 600 s" in machine.reason


def test_one_peer_with_nothing_to_give_stands_in_beside_a_single_giver() -> None:
    first, second = Follower("a", OTHER, 0.0), Follower("b", OTHER, 0.0)
    weights = {"c": 8.0, "a": ATTENDANCE, "b": ATTENDANCE}
    for machine in (first, second):
        machine.handle(rounds.succeeded({"c": state_at(5)}, "m", weights, ("a", "b", "c")), 1.0)
    assert (first.attendance(), second.attendance()) == (ATTENDANCE, 0.0)
    second.handle(rounds.failed("a has gone"), 2.0)
    assert second.attendance() == ATTENDANCE
    assert behind(5).attendance() == 0.0, "beside several"
    assert Follower("a", START, 0.0).attendance(others_give=True) == 0.0


def test_where_nobody_knows_a_peer_holds_on_for_a_while_and_then_claims_its_own_state() -> None:
    machine = behind(5)
    nobody = ok(None, {"a": ATTENDANCE, "b": ATTENDANCE})
    machine.handle(nobody, 15.0)
    assert machine.claim is None
    machine.handle(nobody, 30.0)
    assert machine.claim == OTHER


def test_newcomers_among_themselves_do_not_take_themselves_for_the_beginning() -> None:
    machine = Follower("a", START, 0.0)
    for _ in range(MAX_INTRODUCTIONS):
        assert machine.handle(ok(START, INTRODUCED, missing=3), 1.0) == []
        assert machine.joins
    machine.handle(ok(START, INTRODUCED, missing=3), 1.0)
    assert machine.follows


def test_a_peer_that_claims_the_groups_state_and_gives_nothing_is_not_known() -> None:
    machine = Follower("a", START, 0.0)
    machine.handle(ok(START, {"a": 8.0, "b": 8.0, "m": ATTENDANCE}), 0.0)
    assert machine.known.names == ("b",)


@pytest.mark.parametrize("alone", ["train", "wait"])
def test_without_company_a_peer_looks_for_some_first(alone: follower.Alone) -> None:
    machine = Follower("a", START, 0.0, FollowerOptions(alone))
    assert machine.handle(Due(company=False), 9.0) == []
    assert machine.handle(Due(company=False), 11.0) == ([StepAlone()] if alone == "train" else [])
    assert machine.handle(Due(company=True), 12.0) == [Meet()]
    assert machine.handle(Due(company=False), 13.0) == []


def test_a_peer_whose_group_has_gone_first_asks_for_what_that_has_left_behind() -> None:
    machine = following()
    assert machine.handle(Deserted(), 100.0) == [FetchMean(START)]
    assert told(machine.handle(mean(0), 100.0)) == ["m0"]
    for _ in range(LOOKS_BACK):
        assert machine.handle(Due(company=False), 100.0) == [FetchMean(state_at(1))]
        machine.handle(rounds.nothing("one has not answered", unheard=1), 100.0)
    assert machine.handle(Due(company=False), 100.0) == [StepAlone()]
    machine.handle(SteppedAlone("mine"), 100.0)
    assert machine.state.epoch == 2
    assert machine.joins
    assert machine.handle(Deserted(), 100.0) == [], "it has missed nothing of a group that it has not met"


def test_with_company_whose_rounds_fail_a_peer_trains_alone_after_some() -> None:
    machine = following()
    for _ in range(FAILED_ROUNDS):
        assert machine.handle(Due(company=True), 1.0) == [Meet()]
        machine.handle(rounds.failed("b was lost"), 1.0)
    assert machine.handle(Due(company=True), 1.0) == [StepAlone()]
    assert machine.reason == f"it trains alone: {FAILED_ROUNDS} rounds in a row failed"


def test_a_peer_whose_contribution_is_a_part_makes_no_step_alone() -> None:
    machine = following()
    for _ in range(FAILED_ROUNDS):
        assert machine.handle(Due(company=True, whole=False), 1.0) == [Meet()]
        machine.handle(rounds.failed("b was lost"), 1.0)
    assert machine.handle(Due(company=True, whole=False), 1.0) == [Meet()]
    assert machine.handle(Due(company=True), 1.0) == [StepAlone()]
    alone = Follower("a", START, 0.0, FollowerOptions(patience=0.0))
    assert alone.handle(Due(company=False, whole=False), 11.0) == []
    assert alone.handle(Due(company=False), 11.0) == [StepAlone()]


def test_at_the_end_a_peer_asks_for_what_it_may_have_missed() -> None:
    machine = following()
    assert machine.handle(Ending(), 1.0) == [FetchMean(START)]
    assert told(machine.handle(mean(0), 1.1)) == ["m0"]
    assert machine.handle(Ending(), 1.2) == [FetchMean(state_at(1))]
    machine.handle(Stopped(), 1.3)
    assert machine.handle(Ending(), 1.4) == [FetchMean(state_at(1))]
    machine = behind(20)
    machine.handle(rounds.nothing("nobody offers it"), 10.0)
    assert machine.handle(Ending(), 10.0) == [FetchSnapshot(20)], "without a pause"


def test_an_interrupted_update_leaves_a_state_that_outvotes_nobody() -> None:
    machine = following()
    machine.handle(ok(START), 1.0)
    assert machine.handle(Interrupted(), 1.0) == []
    assert machine.state.epoch == 0
    assert machine.state not in (START, state_at(1))
    assert machine.joins


def test_a_state_that_the_script_has_written_is_claimed_only_after_a_round() -> None:
    machine = following()
    machine.handle(ok(START), 1.0)
    machine.handle(Written("w", "it was told to"), 1.0)
    assert machine.claim is None
    machine.handle(ok(None, INTRODUCED), 2.0)
    assert machine.claim == StateId(1, beginning("w").lineage)


def test_a_newcomer_asks_the_peers_that_hold_the_groups_state_and_asks_others_once_another_is_the_groups() -> (
    None
):
    machine = Follower("a", OTHER, 0.0, FollowerOptions(named=["n"]))
    machine.handle(Overdue(FIRST_SNAPSHOT), 1.0)
    assert machine.donors == {"n"}
    assert machine.handle(ok(START, {"b": 8.0}), 2.0) == [FetchSnapshot(0)], "n may never hold that"
    assert machine.donors == {"b"}
    assert machine.handle(ok(START, {"b": 8.0}), 3.0) == []
    assert machine.handle(ok(state_at(4), {"c": 8.0}), 4.0) == [FetchMean(OTHER)]
    assert machine.handle(NOBODY, 4.1) == [FetchSnapshot(4)]
    assert machine.donors == {"c"}
    assert machine.handle(ok(state_at(5), {"n": 8.0}), 5.0) == [FetchSnapshot(5)]
    assert machine.donors == {"n"}, "its user named it, and it holds the group's state now"


@pytest.mark.parametrize("alone", ["train", "wait"])
def test_beside_strangers_a_peer_applies_none_of_their_means_and_makes_its_steps_alone(
    alone: follower.Alone,
) -> None:
    machine = Follower("a", START, 0.0, FollowerOptions(alone))
    machine.handle(ok(START, {"b": 8.0, "c": 8.0}), 0.0)
    own, theirs = machine.state, StateId(2**40, "b" * 64)
    states = {"a": own, "m": theirs, "n": theirs}
    weights = {"m": 8.0, "n": 8.0}
    round = rounds.succeeded(states, "theirs", weights, "abmn", missing=1)
    beside_a_fellow = rounds.succeeded({**states, "b": own}, "theirs", weights, "abmn")
    for event in (round, round, beside_a_fellow, round, round):
        assert machine.handle(event, 1.0) == []
    assert machine.handle(round, 2.0) == ([StepAlone()] if alone == "train" else [])
    assert machine.follows
    assert machine.state == own
    assert "keeps its own state" in machine.reason
