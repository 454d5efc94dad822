"""Who can be dialled: judged from what others found."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from equipoise.dht.autonat import TRUSTED_SECONDS, UNANSWERED_SECONDS, Answer, Reachability

YES = Answer(reached=("/ip4/44.0.0.1/tcp/4001",))
NO = Answer(failed="nobody answers")


def test_reachability_is_unknown_until_a_peer_has_tried() -> None:
    found = Reachability()
    assert found.verdict == "unknown"
    assert found.hear("a", YES, 0.0)
    assert (found.verdict, found.reason) == ("direct", "1 of 1 peer reached it at /ip4/44.0.0.1/tcp/4001")
    assert found.addresses == ("/ip4/44.0.0.1/tcp/4001",)
    assert not found.hear("a", YES, 1.0)


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ([NO], "private"),
        ([YES, NO], "private"),
        ([YES, YES, NO], "direct"),
        ([NO, YES, NO], "private"),
        ([YES, NO, YES], "direct"),
    ],
)
def test_the_majority_decides_and_a_neighbour_alone_does_not(said: list[Answer], verdict: str) -> None:
    found = Reachability()
    for peer, finding in enumerate(said):
        found.hear(str(peer), finding, 0.0)
    assert found.verdict == verdict
    assert ("nobody answers" in found.reason) == (verdict == "private")


def test_three_peers_are_asked_and_silent_and_old_answers_again() -> None:
    found = Reachability()
    assert found.whom("abcd", 0.0) == ["a", "b", "c"]
    assert found.whom("abcd", 1.0) == ["d"]
    for peer in "bcd":
        found.hear(peer, YES, 1.0)
    assert found.whom("abcd", UNANSWERED_SECONDS + 2) == []
    assert found.whom("abcd", TRUSTED_SECONDS + 2) == ["a", "b", "c"]
    found.doubt()
    assert found.whom("dcba", TRUSTED_SECONDS + 3) == ["d", "c", "b"]


def test_where_witnesses_have_direct_listeners_is_kept_while_they_are_believed() -> None:
    found = Reachability()
    found.hear("a", replace(NO, direct=5001), 0.0)
    found.hear("b", NO, 0.0)
    assert found.direct_ports == {"a": 5001}
    found.whom("", TRUSTED_SECONDS + 1)
    assert found.direct_ports == {}


def test_a_direct_port_that_some_cannot_open_is_told_of() -> None:
    found = Reachability()
    found.hear("a", replace(YES, blocked="44.0.0.1:4002: no answer"), 0.0)
    found.hear("b", NO, 0.0)
    found.hear("c", YES, 0.0)
    assert found.verdict == "direct"
    assert found.reason.endswith("; 1 cannot open a direct channel to it: 44.0.0.1:4002: no answer")


def test_a_peer_in_client_mode_asks_no_peer() -> None:
    found = Reachability("it was started in client mode")
    assert (found.verdict, found.reason) == ("private", "it was started in client mode")
    assert found.whom("abc", 0.0) == []
