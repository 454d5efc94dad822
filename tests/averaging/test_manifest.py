"""Joins and manifests: what is signed, what is hashed, and everything that is refused."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec
import pytest

from equipoise.averaging.aio.round_driver import group_of
from equipoise.averaging.aio.search_driver import MATCHMAKING_FRAME
from equipoise.averaging.manifest import (
    MAX_PEER_CHARS,
    MAX_ROUND,
    MAX_SIGNATURE_BYTES,
    NONCE_BYTES,
    ROUND_ID_BYTES,
    SKETCH_BYTES,
    Join,
    Manifest,
    ManifestError,
    shortfall,
)
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.messages import GroupFormed, JoinRequest, decode, encode
from equipoise.averaging.metrics import MAX_METRICS, MAX_NAME_CHARS, Report
from equipoise.averaging.options import MAX_GROUP_SIZE, Needs
from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.state import MAX_EPOCH, StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT, MAX_WEIGHT
from equipoise.limits import MAX_BANDWIDTH, MAX_CREDENTIAL_BYTES, MAX_HEADER_BYTES
from fakes.matchmaking import SPEC, signer, verify
from fakes.specs import spec

OTHER_SPEC = "0" * 64
LARGEST_VALUES = {f"{index:>{MAX_NAME_CHARS}}": math.pi for index in range(MAX_METRICS)}


def join(peer: str, **changes: Any) -> Join:
    fields: dict[str, Any] = {
        "spec": SPEC,
        "round": 7,
        "weight": 32.0,
        "bandwidth": 1e8,
        "dialable": True,
        "nonce": hashlib.sha256(peer.encode()).digest()[:NONCE_BYTES],
        "credential": b"",
        "state": None,
        "signature": b"",
    }
    return Join(peer=peer, **{**fields, **changes}).signed(signer(peer))


def manifest(*joins: Join) -> Manifest:
    return Manifest.of("coordinator", list(joins))


def check(one: Manifest, own: Join | None = None, group_size: int = 4) -> None:
    one.check(verify, spec=SPEC, needs=Needs(group_size), own=own)


def test_members_are_sorted_and_found_by_their_peer() -> None:
    one = manifest(join("c"), join("a"), join("b"))
    assert one.peers == ("a", "b", "c")
    check(one, own=join("b"))


@pytest.mark.parametrize(
    ("role", "changes", "why"),
    [
        ("trainer", {}, ""),
        ("observer", {"weight": 0.0, "dialable": False}, ""),
        ("observer", {"dialable": False}, "invited as an observer, with weight 0 and no share; it claims 32"),
        ("observer", {"weight": 0.0}, "invited as an observer, with weight 0 and no share; it claims 0"),
        ("relay", {"weight": 0.0, "dialable": False}, "invited as a relay, which joins no run"),
        ("banned", {}, "banned by this daemon"),
    ],
)
def test_roles_are_held_in_manifests_and_joins(role: str, changes: dict[str, Any], why: str) -> None:
    one, context = (
        manifest(join("a"), join("b"), join("c", **changes)),
        Context(
            "run",
            SPEC,
            "a",
            Needs(4),
            signer("a"),
            verify,
            {"a": "trainer", "b": "trainer", "c": role}.__getitem__,
        ),
    )
    told = why and f"c {'is' if role == 'banned' else 'was'} {why}"
    assert context.objection("c", join("c", **changes), 0.0) == told
    known = {"spec": SPEC, "needs": Needs(4), "own": None, "role": context.role}
    if why:
        with pytest.raises(ManifestError, match=why):
            one.check(verify, **known)
    else:
        one.check(verify, **known)


def test_members_with_nearly_equal_contributions_are_told_in_pairs() -> None:
    marks = {"a": 4096, "b": -4096, "c": 4000, "d": None, "e": None, "f": 4096, "g": 3850}
    given = {peer: one and one.to_bytes(2, "little", signed=True) + bytes(30) for peer, one in marks.items()}
    norms = {"f": 2.0}
    one = manifest(
        *(join(peer, sketch=mark or b"", norm=norms.get(peer, 1.0)) for peer, mark in given.items())
    )
    assert one.twins == {("a", "c"), ("c", "g")}
    check(one, own=join("c", sketch=given["c"], norm=1.0), group_size=7)
    assert join("c", sketch=given["c"]).content != join("c").content, "a sketch is signed"


def test_contributions_to_one_state_alone_count() -> None:
    ours, far = StateId(3, "a" * 64), StateId(2**40, "b" * 64)
    crowd = [join(peer, state=far, weight=ATTENDANCE_LIMIT) for peer in "xyz"]
    one = manifest(join("a", state=ours), join("b", state=ours), join("c", state=far), join("d"), *crowd)
    assert one.before == ours, "peers that only attend stop nobody's mean"
    assert one.weights == (32.0, 32.0, 0.0, 0.0, *[ATTENDANCE_LIMIT] * 3)
    assert manifest(join("a"), *crowd).before == far
    pair = manifest(join("a", state=ours), join("c", state=far))
    group = group_of(spec({"w": (4000,)}), pair)
    assert (group.contributors, group.quorum) == (0b10, 1), "a has nothing that fits, and observes"
    assert manifest(join("a"), join("b"), *crowd).weights[:2] == (32.0, 32.0), "nobody's is to a state"


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ((0.25, 0.75), ""),
        ((0.25, 0.75, 2.0**-30), ""),
        ((2.0**-30, 2.0**-30), ""),
        ((0.25, 0.5), "expected weights that sum to 1, they sum to 0.75"),
        ((0.25, 0.75, 0.25), "expected weights that sum to 1, they sum to 1.25"),
    ],
    ids=["whole", "one attends", "all attend", "less", "more"],
)
def test_with_a_total_a_group_has_that_weight_and_counts_all_or_none(
    weights: tuple[float, ...], why: str
) -> None:
    joins = [join(peer, weight=weight) for peer, weight in zip("abc", weights, strict=False)]
    assert shortfall(joins, Needs(4, total=1.0)) == why
    assert shortfall(joins, Needs(4)) == ""
    run = spec({"w": (4000,)}, strategy="allreduce:total=1")
    assert run.needs.total == 1
    assert group_of(run, manifest(*joins)).quorum == len(weights)
    joins[0] = join("a", weight=weights[0], state=StateId(3, "a" * 64))
    joins[1] = join("b", weight=weights[1], state=StateId(4, "b" * 64))
    assert group_of(run, manifest(*joins)).quorum == len(weights), "also those that fit no common state"


def test_the_id_follows_from_the_content_alone() -> None:
    one, same = manifest(join("a"), join("b")), manifest(join("b"), join("a"))
    assert one.id == same.id
    assert len(one.id) == ROUND_ID_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 33.0},
        {"round": 8},
        {"bandwidth": 2e8},
        {"dialable": False},
        {"nonce": b"x" * NONCE_BYTES},
        {"credential": b"c"},
        {"state": StateId(7, "0" * 64)},
        {"fit": {"loss": 1.0}},
        {"evaluation": Report(5.0, {"loss": 1.0})},
    ],
)
def test_any_change_of_a_join_changes_id_and_ticket(change: dict[str, Any]) -> None:
    changed = join("a", **change)
    assert changed.ticket != join("a").ticket
    assert msgspec.structs.replace(manifest(join("a"), join("b")), members=(changed, join("b"))).id != (
        manifest(join("a"), join("b")).id
    )


def test_id_survives_the_wire() -> None:
    formed = GroupFormed("run", manifest(join("a"), join("b", weight=0.5)), 0.1)
    received = decode(encode(formed))
    assert received == formed
    assert isinstance(received, GroupFormed)
    assert received.manifest.id == formed.manifest.id


def test_the_largest_manifest_fits_a_header() -> None:
    peers = [f"{index:0{MAX_PEER_CHARS}}" for index in range(MAX_GROUP_SIZE)]
    extremes = {
        "round": MAX_ROUND,
        "weight": MAX_WEIGHT,
        "bandwidth": MAX_BANDWIDTH,
        "credential": b"c" * MAX_CREDENTIAL_BYTES,
        "state": StateId(MAX_EPOCH, "f" * 64),
        "fit": LARGEST_VALUES,
        "evaluation": Report(MAX_WEIGHT, LARGEST_VALUES),
        "sketch": bytes(SKETCH_BYTES),
    }
    signature = b"s" * MAX_SIGNATURE_BYTES
    joins = [msgspec.structs.replace(join(peer, **extremes), signature=signature) for peer in peers]
    formed = GroupFormed(
        "\N{OLD ITALIC LETTER A}" * 64,
        Manifest.of(peers[0], joins, tuple(peers)),
        1.0,
        tuple(peers),
        "x" * 200,
    )
    assert len(MATCHMAKING_FRAME + encode(formed)) <= MAX_HEADER_BYTES
    assert decode(encode(formed)) == formed


def test_a_peer_that_is_drawn_twice_is_refused() -> None:
    with pytest.raises(ManifestError, match="each drawn peer once"):
        check(Manifest.of("coordinator", [join("a"), join("b")], ("a", "a")))


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([join("a")], "2 to 4 members, got 1"),
        ([join(peer) for peer in "abcde"], "2 to 4 members, got 5"),
        ([join("b"), join("a")], "sorted"),
        ([join("a"), join("a")], "sorted"),
        ([join("a"), join("b", round=8)], "b's differs"),
        ([join("a"), join("b", spec=OTHER_SPEC)], "b's differs"),
        ([join("a"), join("b", weight=0)], "at least 2 members with a weight above 0, there is 1"),
        (
            [join("a", dialable=False), join("b", dialable=False)],
            "at least 1 member that the others can dial",
        ),
        ([join("a"), msgspec.structs.replace(join("b"), weight=1e6)], "signed by b"),
        ([join("a"), msgspec.structs.replace(join("b"), state=StateId(1, "0" * 64))], "signed by b"),
        ([join("a"), msgspec.structs.replace(join("b"), fit={"loss": 1.0})], "signed by b"),
        ([join("a"), msgspec.structs.replace(join("b"), signature=join("a").signature)], "signed by b"),
    ],
)
def test_a_manifest_that_must_not_be_acted_on_is_refused(members: list[Join], says: str) -> None:
    one = Manifest(SPEC, 7, "coordinator", tuple(members))
    with pytest.raises(ManifestError, match=says):
        check(one)


def test_another_spec_is_refused() -> None:
    one = Manifest.of("coordinator", [join("a", spec=OTHER_SPEC), join("b", spec=OTHER_SPEC)])
    with pytest.raises(ManifestError, match="expected the spec"):
        check(one)


def test_the_order_of_metrics_is_a_part_of_a_join() -> None:
    own = join("a", fit={"f1": 1.0, "f2": 2.0})
    changed = msgspec.structs.replace(own, fit={"f2": 2.0, "f1": 1.0})
    with pytest.raises(ManifestError, match="signed by a"):
        check(manifest(changed, join("b")), own)


@pytest.mark.parametrize("own", [join("c"), join("a", weight=1), join("a", nonce=b"y" * NONCE_BYTES)])
def test_the_own_join_must_be_there_unaltered(own: Join) -> None:
    with pytest.raises(ManifestError, match="own join of round 7"):
        check(manifest(join("a"), join("b")), own=own)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, MAX_WEIGHT * 2])
def test_no_join_is_signed_or_parsed_with_an_absurd_weight(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        join("a", weight=weight)
    forged = msgspec.structs.replace(join("a"), weight=weight)
    with pytest.raises(FrameRefused):
        decode(encode(JoinRequest("run", forged)))


@pytest.mark.parametrize(
    "change",
    [
        {"peer": ""},
        {"peer": "p" * 65},
        {"spec": "x" * 64},
        {"spec": "a" * 63},
        {"spec": "a" * 64 + "\n"},
        {"round": -1},
        {"round": MAX_ROUND + 1},
        {"bandwidth": math.nan},
        {"nonce": b"short"},
        {"signature": b""},
        {"signature": b"s" * 513},
        {"fit": {"loss": math.nan}},
        {"fit": {"": 1.0}},
        {"fit": {"l" * 25: 1.0}},
        {"fit": {str(index): 1.0 for index in range(9)}},
    ],
)
def test_no_join_is_parsed_out_of_bounds(change: dict[str, Any]) -> None:
    forged = msgspec.structs.replace(join("a"), **change)
    with pytest.raises(FrameRefused):
        decode(encode(JoinRequest("run", forged)))


def test_a_metric_that_is_named_twice_counts_once_and_breaks_the_signature() -> None:
    good = encode(JoinRequest("run", join("a", fit={"f1": 1.0, "f2": 2.0})))
    bent = decode(good.replace(b"f2", b"f1"))
    assert isinstance(bent, JoinRequest)
    assert bent.join.fit == {"f1": 2.0}
    assert not bent.join.genuine(verify)
