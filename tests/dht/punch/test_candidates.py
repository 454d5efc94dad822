"""Messages of strangers, and the places that they name."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from equipoise.dht.punch.candidates import (
    MAX_INSIDE,
    MAX_REASON_CHARACTERS,
    MIN_PORT,
    Candidates,
    End,
    Probe,
    decode,
    encode,
    judge,
    obstacle,
    targets,
)
from equipoise.dht.sanitize import Malformed

HOME = ("192.168.1.2", 5001)
ROUTER = ("44.0.0.1", 5001)


def places(host: str, *inside: str, port: int = 5002) -> Candidates:
    return Candidates((host, port), tuple((one, port) for one in inside))


@pytest.mark.parametrize(
    "message",
    [
        Candidates(ROUTER, (HOME,)),
        Candidates(("2001:4860::1", 65535), (), False),
        Probe(),
        End("x" * MAX_REASON_CHARACTERS),
    ],
)
def test_messages_survive_the_wire(message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "wrong",
    [
        ["offer", ["example.org", 1], []],
        ["offer", ["fe80::1%eth0", 1], []],
        ["offer", ["44.0.0.1", 0], []],
        ["offer", ["44.0.0.1", 1], [["10.0.0.1", 1]] * (MAX_INSIDE + 1)],
        ["echo"],
        ["end", "x" * (MAX_REASON_CHARACTERS + 1)],
        ["stop"],
        {},
    ],
)
def test_a_message_that_breaks_a_bound_is_malformed(wrong) -> None:
    with pytest.raises(Malformed):
        decode(msgspec.msgpack.encode(wrong))


def test_public_peers_that_agree_are_believed() -> None:
    assert judge([ROUTER, ROUTER], [HOME, HOME]) == Candidates(ROUTER, (HOME,))
    # A neighbour knows nothing of what is beyond the router.
    assert judge([HOME, ROUTER], [HOME]) == Candidates(ROUTER, (HOME,))
    assert judge([HOME], [HOME]) == Candidates(HOME, (HOME,))


def test_one_public_peer_that_lies_points_at_nobody() -> None:
    victim = ("44.0.0.9", 8080)
    assert judge([victim, ROUTER, ROUTER], [HOME]) == Candidates(ROUTER, (HOME,))
    with pytest.raises(
        ConnectionError, match=r"do not agree where its connections come from: 44\.0\.0\.1 and 44\.0\.0\.9"
    ):
        judge([victim, ROUTER], [HOME])
    other_port = (ROUTER[0], 8080)
    assert judge([other_port, ROUTER, ROUTER], [HOME]) == Candidates(ROUTER, (HOME,)), "nor at a neighbour"


def test_no_service_of_somebody_else_is_tried() -> None:
    assert targets(Candidates(ROUTER, (HOME,)), places("44.0.0.2", port=443)) == ()
    assert targets(Candidates(ROUTER, (HOME,)), places("44.0.0.2", port=MIN_PORT)) == (
        ("44.0.0.2", MIN_PORT),
    )


def test_a_router_that_draws_ports_is_found_out() -> None:
    drawn = judge([ROUTER, ("44.0.0.1", 777)], [HOME])
    assert drawn == Candidates(ROUTER, (HOME,), steady=False)
    other = places("44.0.0.2")
    # One port at least must be known, except among neighbours.
    assert targets(drawn, other) == (other.outside,)
    assert targets(other, drawn) == (drawn.outside,)
    assert targets(drawn, replace(other, steady=False)) == ()
    neighbour = replace(places("44.0.0.1", "192.168.1.7"), steady=False)
    assert targets(drawn, neighbour) == neighbour.inside
    why = "side's router gives every destination another port"
    assert obstacle(drawn, neighbour) == f"this and the other {why}"
    assert obstacle(drawn, other) == f"this {why}"
    assert obstacle(other, other) == ""


def test_candidates_need_an_answer_of_a_public_peer() -> None:
    with pytest.raises(ConnectionError, match="no public peer"):
        judge([], [HOME])


@pytest.mark.parametrize(
    ("theirs", "tried"),
    [
        (places("44.0.0.2", "192.168.1.7"), ["44.0.0.2"]),
        # Behind the same router they are neighbours.
        (places("44.0.0.1", "192.168.1.7"), ["192.168.1.7", "44.0.0.1"]),
        (places("44.0.0.1", "127.0.0.1", "0.0.0.0"), ["44.0.0.1"]),
        # What nobody outside could have is no place to send packets to.
        (places("192.168.1.7", "192.168.1.7"), []),
        (places("127.0.0.1"), []),
        (places("224.0.0.1"), []),
        (places("2001:4860::1"), []),
        # Itself.
        (places("44.0.0.1", "192.168.1.2", port=5001), []),
    ],
)
def test_only_places_of_the_other_peer_are_tried(theirs: Candidates, tried: list[str]) -> None:
    assert [host for host, _ in targets(Candidates(ROUTER, (HOME,)), theirs)] == tried
