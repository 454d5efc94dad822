"""The replica machine: events in, actions out."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest

from equipoise.averaging.state import StateId
from equipoise.peer.training import events, replica
from equipoise.peer.training.events import (
    Apply,
    Check,
    Checked,
    Deserted,
    DropGiven,
    Due,
    Ending,
    Fetch,
    FetchFailed,
    Forget,
    Hold,
    ImageFetched,
    Keep,
    Load,
    MeanFetched,
    Meet,
    OthersBegun,
    Overdue,
    Recover,
    RecoveryFailed,
    RoundEnded,
    StepAlone,
    SteppedAlone,
    Stopped,
)
from equipoise.peer.training.lineage import CHECK_EVERY, MAX_MISSED, beginning, follow, within_reach
from equipoise.peer.training.member import affordable
from equipoise.peer.training.replica import (
    ATTENDANCE,
    FAILED_ROUNDS,
    FIRST_SNAPSHOT,
    HELD_MEANS,
    LOOKS_BACK,
    MAX_INTRODUCTIONS,
    MAX_LEAD,
    Phase,
    Replica,
)
from fakes import rounds

START = beginning("start")
OTHER = beginning("other")


def after(state: StateId, digest: str) -> StateId:
    return StateId(state.epoch + 1, follow(state.lineage, f"mean {digest}"))


def state_at(epoch: int, since: StateId = START) -> StateId:
    for at in range(since.epoch, epoch):
        since = after(since, f"m{at}")
    return since


def succeeded(
    group: StateId | None, digest: str = "", weights: Mapping[str, float] | None = None, **more: int
) -> RoundEnded:
    weights = {"b": 8.0, "c": 8.0} if weights is None else weights
    states = {} if group is None else dict.fromkeys(weights, group)
    members = sorted({*weights, "a"})
    return rounds.succeeded(states, digest or f"m{group.epoch if group else 0}", weights, members, **more)


INTRODUCED = dict.fromkeys("abc", ATTENDANCE)


def in_step(state: StateId = START) -> Replica:
    machine = Replica("a", state, 0.0)
    assert machine.handle(succeeded(state, weights=INTRODUCED), 0.0) == []
    assert machine.phase is Phase.IN_STEP
    return machine


def astray(group: StateId) -> Replica:
    machine = Replica("a", OTHER, 0.0)
    assert machine.handle(succeeded(group), 10.0) == [Hold(group), *missing(machine, group)]
    assert nobody_keeps_any(machine, group) == [Fetch(group.epoch + 1)]
    return machine


def missing(machine: Replica, group: StateId) -> list[events.Action]:
    """What it asks for first where it has missed few means."""
    return [Recover(machine.state)] if within_reach(machine.state, group) else [Fetch(group.epoch + 1)]


def nobody_keeps_any(machine: Replica, group: StateId) -> list[events.Action]:
    if not within_reach(machine.state, group):
        return [Fetch(group.epoch + 1)]
    return machine.handle(RecoveryFailed("nobody keeps it"), 10.0)


def test_it_begins_by_meeting_with_nothing_to_give() -> None:
    machine = Replica("a", START, 0.0)
    assert machine.claim == START
    assert machine.phase is not Phase.IN_STEP
    assert machine.attendance() == ATTENDANCE


def test_to_a_group_that_has_begun_it_comes_without_weight_unless_that_fails() -> None:
    machine = Replica("a", START, 0.0)
    assert machine.attendance(others_give=True) == 0.0
    machine.handle(rounds.failed("too few"), 60.0)
    assert machine.attendance(others_give=True) == ATTENDANCE


def test_in_step_it_applies_each_mean_and_follows_the_lineage() -> None:
    machine = in_step()
    for epoch in range(3):
        assert machine.handle(succeeded(state_at(epoch)), epoch) == [Apply(state_at(epoch))]
    assert machine.state == state_at(3)
    assert machine.claim == state_at(3)


def test_other_means_lead_to_another_lineage() -> None:
    first, second = in_step(), in_step()
    first.handle(succeeded(START, "x"), 1.0)
    second.handle(succeeded(START, "y"), 1.0)
    assert first.state.epoch == second.state.epoch
    assert first.state != second.state


def test_a_failed_round_changes_nothing() -> None:
    machine = in_step()
    assert machine.handle(rounds.failed("lost b"), 1.0) == []
    assert machine.state == START
    assert machine.reason == "the last round failed: lost b"


def test_astray_it_holds_fetches_and_replays() -> None:
    machine = astray(state_at(5))
    assert machine.claim is None
    assert "astray: it holds epoch 0" in machine.reason
    assert machine.handle(succeeded(state_at(6)), 20.0) == [Hold(state_at(6))]
    assert machine.handle(succeeded(state_at(7)), 30.0) == [Hold(state_at(7))]
    assert machine.handle(ImageFetched(state_at(6)), 31.0) == [
        Load(),
        Forget(state_at(5)),
        Apply(state_at(6)),
        Apply(state_at(7)),
    ]
    assert machine.state == state_at(8)
    assert machine.phase is Phase.IN_STEP
    assert machine.handle(succeeded(state_at(8)), 40.0) == [Apply(state_at(8))]


def test_a_gap_makes_what_was_held_before_useless() -> None:
    machine = astray(state_at(5))
    assert machine.handle(succeeded(state_at(7)), 20.0) == [Forget(state_at(5)), Hold(state_at(7))]
    assert machine.handle(ImageFetched(state_at(7)), 22.0) == [Load(), Apply(state_at(7))]


def test_a_snapshot_a_few_means_too_old_serves_if_those_can_be_had() -> None:
    machine = astray(state_at(20))
    machine.handle(succeeded(state_at(30)), 20.0)
    assert machine.handle(ImageFetched(state_at(21)), 21.0) == [Fetch(30)]
    assert "older than the means that were kept" in machine.reason
    assert machine.handle(ImageFetched(state_at(29)), 22.0) == [Load(), Recover(state_at(29))]
    assert machine.handle(MeanFetched(state_at(29), "m29", False), 22.1) == [
        Keep(state_at(29)),
        Apply(state_at(29)),
        Apply(state_at(30)),
    ]
    assert machine.phase is Phase.IN_STEP


def test_its_circle_are_the_others_that_held_the_group_s_state_in_the_last_round() -> None:
    machine = in_step(state_at(4))
    machine.handle(succeeded(state_at(4), weights=dict.fromkeys("abcd", 8.0)), 1.0)
    assert machine.circle == ("b", "c", "d")
    held = {"a": state_at(5), "b": state_at(5), "c": OTHER, "n": START}
    machine.handle(rounds.succeeded(held, "m5", {"a": 8.0, "b": 8.0}, tuple("abcn")), 2.0)
    assert machine.circle == ("b",)
    machine.handle(rounds.failed("lost b", formed=True), 3.0)
    assert machine.circle == ("b",), "a round that failed takes nobody away"


def test_strangers_do_not_become_the_circle_of_one_that_keeps_its_state() -> None:
    machine = in_step(state_at(4))
    machine.handle(succeeded(state_at(4)), 1.0)
    strange = {"a": state_at(5), **dict.fromkeys("xyz", state_at(9, OTHER))}
    machine.handle(rounds.succeeded(strange, "m9", {"x": 8.0, "y": 8.0}, tuple("axyz")), 2.0)
    assert machine.circle == ("b", "c")


def test_those_that_had_a_vote_on_its_snapshot_are_its_circle_until_the_first_round() -> None:
    machine = Replica("a", OTHER, 0.0)
    machine.handle(OthersBegun(FIRST_SNAPSHOT), 0.1)
    machine.handle(ImageFetched(state_at(5), ("b", "c", "late")), 2.0)
    assert machine.circle == ("b", "c", "late")
    machine.handle(succeeded(state_at(5)), 3.0)
    assert machine.circle == ("b", "c")
    other = astray(state_at(5))
    other.handle(ImageFetched(state_at(5), ("x", "y", "z")), 11.0)
    assert other.circle == ("b", "c"), "the round that it attended says more"


def test_an_image_of_another_lineage_is_not_loaded() -> None:
    machine = astray(state_at(5))
    assert machine.handle(ImageFetched(StateId(5, "f" * 64)), 11.0) == []
    assert machine.phase is Phase.ASTRAY
    assert "that of epoch 5 is of another state than the group's" in machine.reason
    assert Fetch(7) in machine.handle(succeeded(state_at(6)), 12.0)


def test_one_that_missed_a_few_rounds_gets_those_means_and_needs_no_snapshot() -> None:
    machine = in_step()
    assert machine.handle(succeeded(state_at(2)), 1.0) == [Hold(state_at(2)), Recover(START)]
    assert machine.claim is None
    assert machine.handle(MeanFetched(START, "m0", False), 1.1) == [Keep(START), Recover(state_at(1))]
    assert machine.handle(succeeded(state_at(3)), 1.2) == [Hold(state_at(3))]
    assert machine.handle(MeanFetched(state_at(1), "m1", False), 1.3) == [
        Keep(state_at(1)),
        *(Apply(state_at(epoch)) for epoch in range(4)),
    ]
    assert machine.phase is Phase.IN_STEP
    assert machine.state == state_at(4)


def test_means_that_do_not_lead_to_the_groups_state_are_not_applied() -> None:
    machine = in_step()
    machine.handle(succeeded(state_at(2)), 1.0)
    machine.handle(MeanFetched(START, "a lie", False), 1.1)
    lie = after(START, "a lie")
    assert machine.handle(MeanFetched(lie, "m1", False), 1.3) == [
        Keep(lie),
        Forget(START),
        Forget(lie),
        Fetch(3),
    ]
    assert machine.state == START
    assert "do not lead to the group's state" in machine.reason
    assert machine.handle(succeeded(state_at(3)), 2.0) == [Hold(state_at(3))]


def test_what_was_not_asked_for_is_not_taken() -> None:
    machine = in_step()
    assert machine.handle(MeanFetched(START, "m0", False), 1.0) == []
    machine.handle(succeeded(state_at(2)), 1.0)
    assert machine.handle(MeanFetched(state_at(1), "m1", False), 1.1) == []


def test_one_that_missed_many_rounds_fetches_a_snapshot() -> None:
    machine = in_step()
    group = state_at(MAX_MISSED + 1)
    assert machine.handle(succeeded(group), 1.0) == [Hold(group), Fetch(group.epoch + 1)]


def test_no_chain_leads_to_a_look_at_the_parameters() -> None:
    """Whose digest is in the id after it, and not in any mean."""
    for epoch, first in ((CHECK_EVERY - 1, Recover), (CHECK_EVERY, Fetch), (CHECK_EVERY + 1, Fetch)):
        machine = in_step(state_at(CHECK_EVERY - 3))
        _, action = machine.handle(succeeded(state_at(epoch)), 1.0)
        assert isinstance(action, first)


def test_where_memory_is_short_it_asks_for_fewer_means() -> None:
    machine = Replica("a", START, 0.0, held=4)
    assert machine.handle(succeeded(state_at(5)), 1.0) == [Hold(state_at(5)), Fetch(6)]
    machine = Replica("a", START, 0.0, held=4)
    assert machine.handle(succeeded(state_at(4)), 1.0) == [Hold(state_at(4)), Recover(START)]


def test_as_long_as_others_may_still_be_at_it_nothing_is_given_again() -> None:
    machine = in_step()
    machine.handle(rounds.failed("cut off", formed=True), 1.0)
    machine.handle(RecoveryFailed("not within 3 s", decided=False), 4.0)
    assert machine.handle(Due(company=True), 4.0) == [Recover(START)]
    assert machine.handle(RecoveryFailed("not within 3 s", decided=False), 7.0) == [Meet()]
    assert machine.handle(Due(company=True), 8.0) == [Meet()]


def test_what_is_stopped_can_be_asked_for_again() -> None:
    machine = astray(state_at(50))
    machine.handle(Stopped(), 11.0)
    assert machine.handle(succeeded(state_at(51)), 12.0) == [Hold(state_at(51)), Fetch(52)]
    machine = in_step()
    machine.handle(Ending(), 1.0)
    machine.handle(Stopped(), 2.0)
    assert machine.handle(Ending(), 3.0) == [Recover(START)]


def test_one_whose_round_failed_asks_at_once_whether_it_did_for_all() -> None:
    machine = in_step()
    assert machine.handle(rounds.failed("lost b", formed=True), 1.0) == [Recover(START)]
    assert machine.handle(RecoveryFailed("nobody keeps it"), 1.1) == []
    assert machine.phase is Phase.IN_STEP
    assert machine.reason == "the last round failed: lost b"


LATE = rounds.failed("too late by 1.3 s: the group of round 7 has closed", late=1.3)


def test_one_that_was_too_late_catches_up_with_the_mean_that_it_missed() -> None:
    machine = in_step()
    assert machine.handle(LATE, 1.0) == [Recover(START)]
    assert machine.reason.startswith("too late by 1.3 s")
    assert machine.handle(MeanFetched(START, "m0", False), 1.1) == [Keep(START), Apply(START)]
    assert machine.state == state_at(1)


def test_one_that_is_always_late_does_not_train_alone() -> None:
    machine = in_step()
    for epoch in range(2 * FAILED_ROUNDS):
        machine.handle(LATE, float(epoch))
        machine.handle(MeanFetched(state_at(epoch), f"m{epoch}", False), float(epoch))
    assert not machine.gives_up


def test_while_the_round_that_it_missed_goes_on_it_asks_again_before_it_gives_anything() -> None:
    machine = in_step()
    machine.handle(LATE, 1.0)
    assert machine.handle(RecoveryFailed("not within 3 s", decided=False), 4.0) == []
    assert machine.handle(Due(company=True), 4.0) == [Recover(START)]


def test_a_peer_without_a_place_that_is_overtaken_takes_a_snapshot_and_no_seat() -> None:
    machine = in_step()
    assert machine.handle(Due(company=True, placed=False), 1.0) == [Recover(START)]
    assert machine.handle(RecoveryFailed("none keeps it", decided=False, beyond=12), 1.1) == [Fetch(12)]
    assert machine.phase is Phase.ASTRAY
    assert machine.claim is None
    assert "the group has reached epoch 12" in machine.reason
    assert machine.handle(OthersBegun(FIRST_SNAPSHOT), 2.0) == [], "it fetches"
    assert machine.handle(ImageFetched(state_at(12), ("b",)), 9.0) == [Load(), Recover(state_at(12))]
    assert machine.handle(RecoveryFailed("none keeps it", beyond=30), 9.1) == [Fetch(30)]
    machine.handle(FetchFailed("nobody offers it"), 9.2)
    assert machine.handle(OthersBegun(FIRST_SNAPSHOT), 9.2) == [], "after a pause"
    assert machine.handle(OthersBegun(FIRST_SNAPSHOT), 20.0) == [Fetch(30)]


def test_a_peer_that_no_draw_takes_fetches_a_snapshot_once_it_is_overtaken() -> None:
    machine = in_step()
    assert machine.handle(Overdue(placed=False), 1.0) == [Recover(START)]
    assert machine.handle(RecoveryFailed("none keeps it", beyond=12), 1.1) == [Fetch(12)]
    machine.handle(FetchFailed("nobody offers it"), 1.2)
    assert machine.handle(Overdue(placed=False), 1.3) == [], "after a pause"
    assert machine.handle(Overdue(placed=False), 9.0) == [Fetch(12)]


def test_a_peer_whose_last_look_told_nothing_looks_again_before_it_takes_a_seat() -> None:
    machine = in_step()
    machine.handle(Due(company=True, placed=False), 1.0)
    machine.handle(RecoveryFailed("not within 0.25 s", decided=False), 1.3)
    assert machine.handle(Due(company=True), 2.0) == [Recover(START)]
    assert machine.handle(RecoveryFailed("none keeps it", beyond=12), 2.1) == [Fetch(12)]


def test_late_again_without_a_mean_it_meets_the_group_anew() -> None:
    machine = in_step()
    for second in (1.0, 2.0):
        assert machine.phase is Phase.IN_STEP, "the round that it missed may have failed for all"
        assert machine.handle(LATE, second) == [Recover(START)]
        machine.handle(RecoveryFailed("nobody keeps it"), second)
    assert machine.phase is Phase.MEETING
    assert machine.attendance() == ATTENDANCE


@pytest.mark.parametrize("counted", [False, True])
def test_what_it_had_given_is_dropped_if_it_is_in_the_mean(counted: bool) -> None:
    machine = in_step()
    machine.handle(rounds.failed("lost b", formed=True), 1.0)
    dropped = [DropGiven()] if counted else []
    fetched = machine.handle(MeanFetched(START, "m0", counted), 1.1)
    assert fetched == [Keep(START), *dropped, Apply(START)]
    assert machine.state == state_at(1)
    assert machine.handle(succeeded(state_at(1)), 2.0) == [Apply(state_at(1))]


def test_a_newcomer_that_finds_others_at_work_fetches_at_once() -> None:
    machine = Replica("a", OTHER, 0.0)
    assert machine.handle(OthersBegun(FIRST_SNAPSHOT), 0.1) == [Fetch(FIRST_SNAPSHOT)]
    assert machine.handle(OthersBegun(FIRST_SNAPSHOT), 0.2) == []
    assert machine.handle(succeeded(state_at(5)), 1.0) == [Hold(state_at(5))]
    assert machine.handle(ImageFetched(state_at(5)), 2.0) == [Load(), Apply(state_at(5))]
    assert machine.phase is Phase.IN_STEP


def test_a_snapshot_that_comes_before_any_round_is_followed_by_what_came_since() -> None:
    machine = Replica("a", OTHER, 0.0)
    machine.handle(OthersBegun(FIRST_SNAPSHOT), 0.1)
    assert machine.handle(ImageFetched(state_at(5)), 2.0) == [Load(), Recover(state_at(5))]
    assert machine.handle(MeanFetched(state_at(5), "m5", False), 2.1) == [
        Keep(state_at(5)),
        Apply(state_at(5)),
        Recover(state_at(6)),
    ]
    assert machine.handle(RecoveryFailed("nobody keeps it"), 2.2) == []
    assert machine.phase is Phase.IN_STEP


def test_at_the_end_it_asks_for_what_it_may_have_missed() -> None:
    machine = in_step()
    assert machine.handle(Ending(), 1.0) == [Recover(START)]
    assert machine.handle(MeanFetched(START, "m0", True), 1.1) == [Keep(START), DropGiven(), Apply(START)]
    assert machine.handle(Ending(), 1.2) == [Recover(state_at(1))]
    assert machine.handle(RecoveryFailed("nobody keeps it"), 1.3) == []


def test_at_the_end_no_snapshot_of_an_epoch_to_come_is_waited_for() -> None:
    machine = Replica("a", OTHER, 0.0)
    assert machine.handle(succeeded(state_at(50)), 0.1) == [Hold(state_at(50)), Fetch(60)]
    assert machine.handle(Ending(), 0.2) == [Fetch(51)]
    assert machine.handle(Ending(), 0.3) == []


def test_where_no_round_comes_the_last_known_state_is_asked_for_in_place_of_one_to_come() -> None:
    machine = Replica("a", OTHER, 0.0)
    assert machine.handle(succeeded(state_at(20)), 0.05) == [Hold(state_at(20)), Fetch(20 + MAX_LEAD)]
    machine.handle(succeeded(state_at(21)), 0.1)
    assert machine.handle(Overdue(), 20.0) == [Fetch(22)], "the means after 20 and 21 are here"
    assert machine.handle(Overdue(), 30.0) == [], "that is asked for already"


def test_one_that_has_not_met_the_group_asks_for_none_of_its_states_meanwhile() -> None:
    assert Replica("a", START, 0.0).handle(Overdue(), 20.0) == []


def test_means_are_held_up_to_a_bound() -> None:
    machine = astray(state_at(5))
    for epoch in range(6, 5 + HELD_MEANS):
        assert machine.handle(succeeded(state_at(epoch)), epoch) == [Hold(state_at(epoch))]
    epoch = 5 + HELD_MEANS
    assert machine.handle(succeeded(state_at(epoch)), epoch) == [Forget(state_at(5)), Hold(state_at(epoch))]


@pytest.mark.parametrize(
    ("size", "available", "held"),
    [(2**20, 2**40, HELD_MEANS), (2**30, 2**35, 8), (2**30, 2**30, 2), (2**30, 0, 2), (0, 2**30, HELD_MEANS)],
)
def test_means_take_a_share_of_the_memory_and_two_are_kept_in_any_case(
    size: int, available: int, held: int
) -> None:
    assert affordable(size, available) == held


def test_where_memory_is_short_fewer_means_are_held_and_it_asks_less_far_ahead() -> None:
    machine = Replica("a", OTHER, 100.0, held=4)
    assert machine.handle(succeeded(state_at(50)), 100.001) == [Hold(state_at(50)), Fetch(50 + 2)]
    for epoch in range(51, 54):
        assert machine.handle(succeeded(state_at(epoch)), 101.0) == [Hold(state_at(epoch))]
    assert machine.handle(succeeded(state_at(54)), 101.0) == [Forget(state_at(50)), Hold(state_at(54))]


@pytest.mark.parametrize(("interval", "lead"), [(5.0, 1), (1.0, 1), (0.5, 2), (0.001, replica.MAX_LEAD)])
def test_it_asks_for_an_epoch_that_donors_have_not_passed_when_they_hear_of_it(
    interval: float, lead: int
) -> None:
    machine = Replica("a", OTHER, 100.0)
    actions = machine.handle(succeeded(state_at(50)), 100.0 + interval)
    assert actions == [Hold(state_at(50)), Fetch(50 + lead)]


def test_it_fetches_again_after_the_next_round() -> None:
    machine = astray(state_at(5))
    assert machine.handle(FetchFailed("no donor"), 11.0) == []
    assert "no snapshot yet: no donor" in machine.reason
    assert machine.handle(rounds.failed("nobody came"), 12.0) == [Fetch(6)]
    machine.handle(FetchFailed("no donor"), 13.0)
    assert machine.handle(succeeded(state_at(6)), 23.0) == [Hold(state_at(6)), Fetch(7)]


def test_downloads_that_fail_are_tried_ever_less_often() -> None:
    machine = astray(state_at(5))
    machine.handle(FetchFailed("it does not fit"), 10.0)
    began = []
    for second in range(11, 4000):
        if Fetch(6) in machine.handle(rounds.failed("nobody came"), float(second)):
            began.append(second)
            machine.handle(FetchFailed("it does not fit"), float(second))
    pauses = [after - before for before, after in pairwise(began)]
    assert pauses[:4] == [1, 2, 4, 8]
    assert pauses[-1] == replica.MAX_FETCH_PAUSE
    assert "again in 600 s" in machine.reason


def test_without_a_fetch_it_is_back_where_the_group_takes_on_its_state() -> None:
    machine = astray(state_at(5))
    assert machine.handle(succeeded(OTHER, weights=INTRODUCED), 20.0) == [Forget(state_at(5))]
    assert machine.phase is Phase.IN_STEP


def test_one_of_those_with_nothing_stands_in_beside_a_single_giver() -> None:
    first, second = Replica("a", OTHER, 0.0), Replica("b", OTHER, 0.0)
    group = state_at(5)
    event = rounds.succeeded({"c": group}, "m", {"c": 8.0, "a": ATTENDANCE, "b": ATTENDANCE}, ("a", "b", "c"))
    for machine in (first, second):
        machine.handle(event, 1.0)
    assert (first.attendance(), second.attendance()) == (ATTENDANCE, 0.0)
    second.handle(rounds.failed("a has gone"), 2.0)
    assert second.attendance() == ATTENDANCE


def test_beside_several_givers_it_observes() -> None:
    assert astray(state_at(5)).attendance() == 0.0


def test_where_nobody_knows_it_holds_on_for_a_while_and_then_claims_its_own_state() -> None:
    machine = astray(state_at(5))
    nobody = succeeded(None, weights={"a": ATTENDANCE, "b": ATTENDANCE})
    assert machine.handle(nobody, 15.0) == []
    assert machine.claim is None
    assert machine.handle(nobody, 30.0) == [Forget(state_at(5))]
    assert machine.claim == OTHER


def test_newcomers_among_themselves_do_not_take_themselves_for_the_beginning() -> None:
    machine = Replica("a", START, 0.0)
    for _ in range(MAX_INTRODUCTIONS):
        assert (
            machine.handle(succeeded(START, weights={"a": ATTENDANCE, "b": ATTENDANCE}, missing=3), 1.0) == []
        )
        assert machine.phase is Phase.MEETING
    machine.handle(succeeded(START, weights={"a": ATTENDANCE, "b": ATTENDANCE}, missing=3), 1.0)
    assert machine.phase is Phase.IN_STEP


@pytest.mark.parametrize("alone", ["train", "wait"])
def test_without_company_it_looks_for_some_first(alone: replica.Alone) -> None:
    machine = Replica("a", START, 0.0, alone, patience=10.0)
    assert machine.handle(Due(company=False), 9.0) == []
    assert machine.handle(Due(company=False), 11.0) == ([StepAlone()] if alone == "train" else [])
    assert machine.handle(Due(company=True), 12.0) == [Meet()]
    assert machine.handle(Due(company=False), 13.0) == []


def test_one_whose_group_has_gone_first_asks_for_what_that_has_left_behind() -> None:
    machine = in_step()
    assert machine.handle(Deserted(), 100.0) == [Recover(START)]
    assert machine.handle(MeanFetched(START, "m0", False), 100.0) == [Keep(START), Apply(START)]
    assert machine.handle(Due(company=False), 100.0) == [Recover(state_at(1))]
    machine.handle(RecoveryFailed("nobody keeps it"), 100.0)
    assert machine.handle(Deserted(), 100.0) == []
    assert machine.handle(Due(company=False), 100.0) == [StepAlone()]


def test_where_not_all_answer_it_asks_a_few_times_and_no_more() -> None:
    machine = in_step()
    for _ in range(LOOKS_BACK):
        assert machine.handle(Deserted(), 100.0) == [Recover(START)]
        machine.handle(RecoveryFailed("one has not answered", decided=False), 100.0)
    assert machine.handle(Deserted(), 100.0) == []


def test_one_that_has_not_met_the_group_has_missed_nothing_of_it() -> None:
    assert Replica("a", START, 0.0).handle(Deserted(), 100.0) == []


def test_astray_of_a_group_that_has_gone_it_asks_for_no_epoch_to_come() -> None:
    machine = astray(state_at(20))
    machine.handle(FetchFailed("nobody offers it"), 10.0)
    assert machine.handle(Deserted(), 100.0) == [Fetch(21)]


def test_with_company_whose_rounds_fail_it_trains_alone_after_some() -> None:
    machine = in_step()
    for _ in range(FAILED_ROUNDS):
        assert machine.handle(Due(company=True), 1.0) == [Meet()]
        machine.handle(rounds.failed("b was lost"), 1.0)
    assert machine.handle(Due(company=True), 1.0) == [StepAlone()]
    assert machine.reason == f"it trains alone: {FAILED_ROUNDS} rounds in a row failed"


def test_after_a_step_alone_it_has_to_meet_the_group_anew() -> None:
    machine = in_step()
    machine.handle(Due(company=False), 100.0)
    machine.handle(RecoveryFailed("nobody keeps it"), 100.0)
    machine.handle(Due(company=False), 100.0)
    assert machine.handle(SteppedAlone("mine"), 100.0) == []
    assert machine.state.epoch == 1
    assert machine.state != state_at(1)
    assert machine.phase is Phase.MEETING


def test_every_so_often_the_parameters_themselves_are_looked_at() -> None:
    machine = in_step(state_at(CHECK_EVERY - 1))
    group = state_at(CHECK_EVERY - 1)
    assert machine.handle(succeeded(group), 1.0) == [Apply(group), Check()]
    assert machine.handle(Checked("p"), 1.0) == []
    assert machine.state == StateId(CHECK_EVERY, follow(state_at(CHECK_EVERY).lineage, "parameters p"))


def test_a_replay_goes_on_after_a_look_and_finds_drift() -> None:
    before = state_at(CHECK_EVERY - 1)
    checked = StateId(CHECK_EVERY, follow(after(before, f"m{before.epoch}").lineage, "parameters p"))
    for seen, expected in (("p", [Apply(checked)]), ("q", [Fetch(CHECK_EVERY)])):
        machine = astray(before)
        machine.handle(succeeded(checked), 20.0)
        assert machine.handle(ImageFetched(before), 21.0) == [Load(), Apply(before), Check()]
        assert machine.handle(Checked(seen), 21.0) == expected
