"""One machine that compares specs: whom it asks, what it makes of the answers, and when it objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from equipoise.averaging.matchmaking.events import CandidatesSeen, MessageReceived, PeerLost, Send
from equipoise.averaging.matchmaking.messages import SpecAnswer, SpecQuestion
from equipoise.averaging.matchmaking.spec_diff import (
    ANSWER_SECONDS,
    ANSWERS_SECONDS,
    ASK_AGAIN_SECONDS,
    MAX_ANSWERS,
    MAX_QUESTIONS,
    MAX_STRANGERS,
    SpecDiff,
    answer_of,
)
from equipoise.averaging.spec import RunSpec
from fakes.matchmaking import record_of
from fakes.specs import spec

OWN = spec(terms={"target batch size": "4096"})
OTHER = spec(terms={"target batch size": "2048"})
SHAPE = spec({"a": (2,), "b": (4, 4), "c": (5,)}, terms={"target batch size": "4096"})
SAID = "target batch size: here 4096, there 2048"


def comparing(now: float = 0.0) -> SpecDiff:
    return SpecDiff(OWN, "me", now)


def seen(**specs: RunSpec) -> CandidatesSeen:
    return CandidatesSeen([record_of(peer, spec=one.hash) for peer, one in sorted(specs.items())])


def answer(peer: str, theirs: RunSpec, seconds: float = 100.0, **changes: Any) -> MessageReceived:
    told = answer_of(theirs, OWN.marks, seconds)
    return MessageReceived(peer, msgspec.structs.replace(told, **changes))


def asked(sent: Sequence[Send]) -> list[str]:
    return [each.peer for each in sent if isinstance(each.message, SpecQuestion)]


def test_those_of_another_spec_are_asked_and_the_line_says_what_they_told() -> None:
    one = comparing()
    sent = one.handle(seen(me=OWN, friend=OWN, bob=OTHER), 1.0)
    assert asked(sent) == ["bob"]
    assert not one.settled(1.0)
    assert one.reason == "1 peer of this name has another spec: how it differs has not been said"

    assert asked(one.handle(answer("bob", OTHER), 1.1)) == []
    assert one.settled(1.1)
    assert one.reason == f"1 peer of this name has another spec: {SAID}"
    assert one.difference("bob") == SAID
    assert one.difference("friend") == one.difference("nobody") == ""


def test_a_peer_that_does_not_answer_is_asked_again_and_not_for_ever() -> None:
    one, now, questions = comparing(), 1.0, 0
    while now <= 1.0 + MAX_QUESTIONS * (ANSWER_SECONDS + ASK_AGAIN_SECONDS):
        questions += len(one.handle(seen(bob=OTHER), now))
        one.named = one.trained = {"bob"}
        assert one.objection() == "", "the dead have no say"
        now += 0.25
    assert questions == MAX_QUESTIONS
    assert one.settled(now)


def test_a_peer_that_cannot_be_reached_is_not_waited_for() -> None:
    one = comparing()
    one.handle(seen(bob=OTHER), 1.0)
    one.handle(PeerLost("bob"), 1.1)
    assert one.settled(1.1)


def test_a_peer_that_cannot_be_dialled_is_asked_by_the_channel_it_came_by() -> None:
    one = comparing()
    hidden = CandidatesSeen([record_of("bob", spec=OTHER.hash, dialable=False)])
    assert one.handle(hidden, 1.0) == []
    assert one.settled(1.0)
    sent = one.handle(MessageReceived("bob", SpecQuestion("run", OTHER.hash, OTHER.marks)), 1.1)
    assert [type(each.message) for each in sent] == [SpecAnswer, SpecQuestion]


def test_answers_that_nobody_asked_for_say_nothing() -> None:
    one = comparing()
    one.handle(answer("bob", OTHER), 1.0)
    assert one.reason == ""
    one.handle(seen(bob=OTHER), 1.0)
    one.handle(answer("carol", OTHER), 1.1)
    one.handle(answer("bob", SHAPE), 1.1)
    assert "has not been said" in one.reason
    one.handle(answer("bob", OTHER), 1.2)
    one.handle(answer("bob", OTHER, table=(("codec", "fp16"),)), 1.3)
    assert one.difference("bob") == SAID


def test_a_flood_of_questions_is_answered_so_many_times_a_second() -> None:
    one = comparing()
    question = SpecQuestion("run", OTHER.hash, OTHER.marks)
    flood = [MessageReceived(f"p{at % 100}", question) for at in range(1000)]
    assert sum(len(one.handle(each, 1.0)) for each in flood) == MAX_ANSWERS
    assert sum(len(one.handle(flood[0], 1.0 + ANSWERS_SECONDS)) for _ in range(2)) == 1
    assert one.handle(MessageReceived("bob", SpecQuestion("run", OWN.hash, OWN.marks)), 9.0) == []


def test_of_many_strangers_some_are_asked_and_not_the_same_by_all() -> None:
    crowd = CandidatesSeen([record_of(f"p{index:03}", spec=OTHER.hash) for index in range(200)])
    first, second = (asked(SpecDiff(OWN, me, 0.0).handle(crowd, 1.0)) for me in ("me", "you"))
    assert len(first) == len(second) == MAX_STRANGERS
    assert first != second


def test_a_peer_that_changes_its_spec_or_goes_is_looked_at_anew() -> None:
    one = comparing()
    one.handle(seen(bob=OTHER), 1.0)
    one.handle(answer("bob", OTHER), 1.1)
    assert asked(one.handle(seen(bob=SHAPE), 2.0)) == ["bob"]
    one.handle(seen(bob=OWN), 3.0)
    assert one.reason == ""
    assert one.settled(3.0)


def objection(named: str = "", trained: Sequence[str] = (), **others: tuple[RunSpec, float]) -> str:
    """What a peer that came at 10 s says, where the others have been there for so long."""
    one = comparing(10.0)
    one.named, one.trained = {named}, set(trained)
    one.handle(seen(me=OWN, friend=OWN, **{peer: theirs for peer, (theirs, _) in others.items()}), 10.0)
    for peer, (theirs, seconds) in others.items():
        one.handle(answer(peer, theirs, seconds), 10.1)
    return one.objection()


def test_only_peers_that_the_user_named_or_that_it_trained_with_turn_a_peer_away() -> None:
    strangers = {f"p{index:02}": (OTHER, 5.0) for index in range(2 * MAX_STRANGERS)}
    assert objection(named="friend", trained=["friend"], **strangers) == ""
    assert objection(named="bob", bob=(OTHER, 0.0)) == "", "it came later"
    told = f"..bob, which this daemon was told to join by, has another spec: {SAID}"
    assert objection(named="bob", bob=(OTHER, 5.0), **strangers) == told, "it is asked before all strangers"
    assert objection(trained=["bob", "friend"], bob=(OTHER, 5.0), **strangers) == ""
    most = objection(trained=["bob", "carol", "friend"], bob=(OTHER, 5.0), carol=(OTHER, 5.0), **strangers)
    assert most == f"2 of 3 peers that this peer has trained with have another spec: {SAID}"


def test_nobody_turns_away_the_first_by_saying_that_it_was_there_before() -> None:
    one = comparing(10.0)
    one.named = one.trained = {"mallory"}
    one.handle(seen(me=OWN), 10.1)
    one.handle(seen(me=OWN, mallory=OTHER), 10.5)
    one.handle(answer("mallory", OTHER, seconds=1e9), 10.6)
    assert one.objection() == ""
    assert SAID in one.reason


def test_nobody_who_was_there_turns_away_by_changing_its_spec() -> None:
    one = comparing(10.0)
    one.named = one.trained = {"mallory"}
    one.handle(seen(me=OWN, mallory=OWN), 10.1)
    one.handle(seen(me=OWN, mallory=OTHER), 10.5)
    one.handle(answer("mallory", OTHER, seconds=1e9), 10.6)
    assert one.objection() == ""
