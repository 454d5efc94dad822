"""Two machines against each other over a relay of any delay, and one against whatever a stranger may say."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from equipoise.dht.punch.machine import (
    ANSWER_SECONDS,
    MAX_LEAD_SECONDS,
    MAX_TRIES,
    MEASURE_SECONDS,
    TRY_SECONDS,
    Action,
    Broke,
    Candidates,
    Echo,
    End,
    Event,
    Finish,
    Go,
    Heard,
    Measure,
    Measured,
    Missed,
    Opened,
    Probe,
    Punch,
    Say,
    Tick,
    Try,
)

PLACES = (
    Candidates(("44.0.0.1", 5001), (("192.168.1.2", 5001),)),
    Candidates(("44.0.0.2", 5002), (("192.168.1.2", 5002),)),
)

Network = Callable[[list[float], list[float]], bool]
"""Given when either side has tried, whether the latest tries have led to a connection."""


class Meeting:
    """Both sides of one attempt, in a time of their own."""

    def __init__(self, network: Network, delays: tuple[float, float], places: tuple = PLACES) -> None:
        self.machines = Punch(True), Punch(False)
        self.tried: tuple[list[float], list[float]] = ([], [])
        self.reasons: dict[int, str] = {}
        self.now = 0.0
        self._network = network
        self._delays = delays
        self._places = places
        self._due: list[tuple[float, int, int, Event]] = []
        self._serial = itertools.count()

    def run(self) -> dict[int, str]:
        """Return why each side has no channel; empty if it has."""
        for side, machine in enumerate(self.machines):
            self._perform(side, machine.start(0.0))
        while len(self.reasons) < 2:
            assert self.now < 120.0, "it goes on for ever"
            side, machine = min(enumerate(self.machines), key=lambda one: one[1].deadline)
            if self._due and self._due[0][0] <= machine.deadline:
                self.now, _, side, event = heapq.heappop(self._due)
            else:
                self.now, event = machine.deadline, Tick()
            if self.machines[side].deadline < float("inf"):
                self._perform(side, self.machines[side].handle(event, self.now))
        return self.reasons

    def _perform(self, side: int, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Measure():
                    self._later(0.1, side, Measured(self._places[side], "no mirror"))
                case Say(message):
                    self._later(self._delays[side], 1 - side, Heard(message))
                case Try(targets):
                    assert targets
                    self.tried[side].append(self.now)
                    if all(self.tried) and self._network(*self.tried):
                        for one in (0, 1):
                            self._later(0.05, one, Opened())
                case Finish(reason):
                    self.reasons[side] = reason
                    self._later(self._delays[side], 1 - side, Broke("closed by the other end"))

    def _later(self, seconds: float, side: int, event: Event) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._serial), side, event))


def over(actions: list[Action]) -> str:
    """Why it is over."""
    (reason,) = (action.reason for action in actions if isinstance(action, Finish))
    return reason


def always(first: list[float], second: list[float]) -> bool:
    return True


def never(first: list[float], second: list[float]) -> bool:
    return False


@given(st.floats(0.0, 0.9), st.floats(0.0, 0.9))
def test_both_try_at_once_however_slow_the_relay_is(there: float, back: float) -> None:
    meeting = Meeting(always, (there, back))
    assert meeting.run() == {0: "", 1: ""}
    # Half the way there and back; what is left is by how much one way is longer than the other.
    (first,), (second,) = meeting.tried
    assert abs(first - second) == pytest.approx(abs(there - back) / 2, abs=1e-9)


@pytest.mark.parametrize("needed", range(1, MAX_TRIES + 1))
def test_a_later_try_is_as_good(needed: int) -> None:
    meeting = Meeting(lambda first, second: len(first) == len(second) == needed, (0.1, 0.1))
    assert meeting.run() == {0: "", 1: ""}
    assert [machine.tries for machine in meeting.machines] == [needed, needed]


def test_after_some_tries_both_give_up_and_say_why() -> None:
    meeting = Meeting(never, (0.05, 0.05))
    reasons = meeting.run()
    assert reasons[0] == f"nobody answered at 44.0.0.2 port 5002, in {MAX_TRIES} tries"
    here = "here: nobody answered at 44.0.0.1 port 5001"
    assert reasons[1] == f"the other side gave up: no connection in {MAX_TRIES} tries; {here}"
    assert [len(tried) for tried in meeting.tried] == [MAX_TRIES, MAX_TRIES]
    assert meeting.now < MAX_TRIES * (TRY_SECONDS + 1.0)


@pytest.mark.parametrize("blind", [0, 1])
def test_who_cannot_tell_where_it_is_says_so(blind: int) -> None:
    places = tuple(None if side == blind else PLACES[side] for side in (0, 1))
    reasons = Meeting(always, (0.1, 0.1), places).run()
    assert reasons[blind] == "no mirror"
    assert reasons[1 - blind] == "the other side gave up: no mirror"


def test_who_have_no_kind_of_address_in_common_do_not_try() -> None:
    meeting = Meeting(always, (0.1, 0.1), (PLACES[0], Candidates(("2001:4860::1", 5002))))
    assert "no kind of address in common" in meeting.run()[0]
    assert meeting.tried == ([], [])


def test_what_a_router_does_is_told() -> None:
    drawn = replace(PLACES[0], steady=False)
    meeting = Meeting(never, (0.05, 0.05), (drawn, PLACES[1]))
    assert meeting.run()[0].endswith("tries; this side's router gives every destination another port")
    both = Meeting(never, (0.05, 0.05), (drawn, replace(PLACES[1], steady=False)))
    assert "this and the other side's router" in both.run()[1]
    assert both.tried == ([], [])


def begun() -> Punch:
    """The side that begins, in the midst of its first try."""
    machine = Punch(True)
    machine.start(0.0)
    machine.handle(Measured(PLACES[0]), 0.0)
    machine.handle(Heard(Candidates(PLACES[1].outside)), 0.1)
    machine.handle(Heard(Echo(1)), 0.3)
    assert machine.handle(Tick(), 0.4) == [Try((PLACES[1].outside,))]
    return machine


def test_a_slow_relay_is_not_waited_for_without_end() -> None:
    machine = Punch(True)
    machine.start(0.0)
    machine.handle(Measured(PLACES[0]), 0.0)
    machine.handle(Heard(Candidates(PLACES[1].outside)), 0.0)
    machine.handle(Heard(Echo(1)), 7.0)
    assert machine.deadline == 7.0 + MAX_LEAD_SECONDS


def test_what_a_place_answers_here_the_other_side_learns_neither_by_words_nor_by_time() -> None:
    machine = begun()
    for number in range(1, MAX_TRIES + 1):
        at = machine.deadline
        assert machine.handle(Missed("192.168.1.7 port 22 speaks SSH"), at - 1.9) == []
        said = machine.handle(Tick(), at)
        if number < MAX_TRIES:
            assert said == [Say(Probe(number + 1))]
            machine.handle(Heard(Echo(number + 1)), at)
            machine.handle(Tick(), machine.deadline)
    told, ended = said
    assert told == Say(End(f"no connection in {MAX_TRIES} tries"))
    assert isinstance(ended, Finish)
    assert "speaks SSH" in ended.reason


def test_news_of_a_channel_counts_while_the_next_try_is_agreed_on() -> None:
    machine = begun()
    machine.handle(Tick(), machine.deadline)
    assert machine.handle(Missed("no route"), 3.0) == []
    assert machine.handle(Opened(), 3.1) == [Say(End("")), Finish("")]


def test_the_answering_side_waits_until_both_have_a_channel() -> None:
    for order in ([Opened(), Heard(End(""))], [Heard(End("")), Opened()], [Opened(), Broke("gone")]):
        machine = answering()
        assert machine.handle(order[0], 1.0) == []
        assert machine.handle(order[1], 1.1) == [Finish("")]
    machine = answering()
    machine.handle(Heard(End("")), 1.0)
    assert machine.handle(Broke("gone"), 1.1) == []
    assert machine.deadline == 1.0 + TRY_SECONDS
    assert machine.handle(Tick(), machine.deadline) == [
        Finish("the other side has a channel, this one has not")
    ]


def answering() -> Punch:
    machine = Punch(False)
    assert machine.start(0.0) == []
    machine.handle(Heard(Candidates(PLACES[0].outside)), 0.0)
    machine.handle(Measured(PLACES[1]), 0.1)
    machine.handle(Heard(Probe(1)), 0.2)
    assert machine.handle(Heard(Go(1)), 0.3) == [Try((PLACES[0].outside,))]
    return machine


@pytest.mark.parametrize("message", [Go(1), Echo(2), Candidates(("44.0.0.3", 1)), Probe(1)])
def test_what_is_said_out_of_turn_ends_it(message) -> None:
    machine = begun()
    actions = machine.handle(Heard(message), 0.5)
    reason = over(actions)
    assert "out of turn" in reason
    assert actions == [Say(End(reason)), Finish(reason)]


def test_a_try_cannot_be_asked_for_twice() -> None:
    machine = answering()
    assert "another try" in over(machine.handle(Heard(Probe(1)), 0.5))
    assert machine.deadline == float("inf")


numbers = st.integers(1, MAX_TRIES)
events = st.one_of(
    st.builds(Heard, st.builds(Probe, numbers) | st.builds(Echo, numbers) | st.builds(Go, numbers)),
    st.builds(Heard, st.builds(End, st.sampled_from(["", "no\nway"]))),
    st.builds(
        Heard, st.builds(Candidates, st.sampled_from([("44.0.0.9", 1), ("fe80::1", 2), ("0.0.0.0", 3)]))
    ),
    st.sampled_from([Measured(PLACES[0]), Measured(None, "why"), Opened(), Missed("x"), Broke("x"), Tick()]),
)


@given(st.booleans(), st.lists(events, max_size=40))
def test_whatever_comes_it_ends_and_tries_no_more_than_it_may(begins: bool, said: list[Event]) -> None:
    machine, now, tries = Punch(begins), 0.0, 0
    actions = machine.start(now)
    for event in itertools.chain(said, itertools.repeat(Tick())):
        tries += sum(isinstance(action, Try) for action in actions)
        if machine.deadline == float("inf"):
            break
        if event == Tick():
            assert machine.deadline - now <= max(ANSWER_SECONDS, MEASURE_SECONDS)
            now = machine.deadline
        actions = machine.handle(event, now)
    assert tries <= MAX_TRIES
    assert "\n" not in over(actions)
