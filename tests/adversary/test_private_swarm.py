"""Private swarms of real daemons: who gets in, what a role allows, and who is out again."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.fleet import Fleet, normal
from e2e.swarm import DaemonProcess, Swarm, eventually
from equipoise.dht.admission import Link
from equipoise.dht.identity import public_key_of
from equipoise.dht.membership import Membership
from equipoise.peer import Peer, connect
from equipoise.peer.errors import NoDaemon, Refused

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]
SEED = bytes([9]) * 32


def founder(swarm: Swarm) -> DaemonProcess:
    home = swarm.folder / "founder"
    assert swarm.command("swarm", "create", "friends", "--home", str(home)).wait() == 0
    return swarm.daemon("founder", args=["--swarm", "friends", *LISTEN])


def line_of(member: DaemonProcess, *args: str) -> str:
    done = member.cli("swarm", "invite", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def guest(swarm: Swarm, name: str, line: str) -> DaemonProcess:
    return swarm.daemon(name, args=["--invite", line, *LISTEN])


def connected(home: Path) -> Any:
    def attempt() -> Any:
        try:
            return connect(home)
        except NoDaemon:
            return None

    return eventually(attempt, f"a daemon on {home}")


def test_join_line_on_a_fresh_home_is_in_a_round(swarm: Swarm) -> None:
    first = founder(swarm)
    line = line_of(first)
    home, began = swarm.folder / "fresh", time.monotonic()
    swarm.command("join", line, "--home", str(home), *LISTEN)
    with connect(first.home) as one, connected(home) as other:
        runs = [
            client.join("digits", {"w": value})
            for client, value in zip((one, other), normal(2, 10), strict=True)
        ]
        pending = [run.average(timeout=60.0, wait=False) for run in runs]
        assert all(result.result().ok for result in pending)
        print(f"in a round {time.monotonic() - began:.1f} s after the command")
        told = first.json("status")["swarm"]
        assert (told["name"], told["role"], told["members"]) == ("friends", "trainer", [other.peer_id])
        assert {row["role"] for row in first.json("peers")} == {"trainer"}
    with Peer(invite=line_of(first, "--role", "relay"), listen=LISTEN[1:]) as peer:
        eventually(
            lambda: first.json("status")["swarm"]["peer"] in peer.status().swarm.members, "its admission"
        )
        assert peer.status().swarm.role == "relay"


def test_an_invitation_that_is_no_good_is_told_in_one_line(swarm: Swarm) -> None:
    first = founder(swarm)
    line = line_of(first)
    owner = Membership.load(first.home, "friends", time.time())
    past = owner.invite(Link(bytes(32), "trainer", 1_000_000), SEED, ()).line
    cases = {
        line[:40] + ("A" if line[40] != "A" else "B") + line[41:]: ("damaged", "copy the whole line again"),
        past: ("ended at 1970-01-12", "ask for a new one"),
        line_of(first, "--for", first.json("status")["peer_id"]): ("is for", "not for"),
    }
    for number, (given, words) in enumerate(cases.items()):
        refused = swarm.command("join", given, "--home", str(swarm.folder / f"home{number}"))
        assert refused.wait() == 5
        assert refused.errors.count("\n") == 1, refused.errors
        assert all(word in refused.errors for word in words), refused.errors
    first.stop()
    alone = guest(swarm, "alone", line)
    eventually(lambda: "nobody listens" in alone.output, "the reason")
    assert "trying again; start the daemon there" in alone.output


def test_roles_hold(swarm: Swarm) -> None:
    first = founder(swarm)
    second = guest(swarm, "second", line_of(first))
    observer = guest(swarm, "observer", line_of(first, "--role", "observer"))
    relay = guest(swarm, "relay", line_of(first, "--role", "relay"))
    with Fleet([first, second, observer], normal(3, 1000), codec="fp32") as fleet:
        outcomes = fleet.whole([1.0, 2.0, 5.0])
        assert set(outcomes[0].contributors) == {client.peer_id for client in fleet.clients[:2]}
        fleet.check(dict(enumerate(outcomes)), 1e-6)
        assert any("invited as an observer" in line for line in observer.json("status")["warnings"])
        assert {row["role"] for row in first.json("peers")} == {"trainer", "observer"}
    with connect(relay.home) as client, pytest.raises(Refused, match="invited as a relay"):
        client.join("fleet", {"w": normal(1, 1000)[0]})


@pytest.mark.slow
def test_a_banned_peer_is_in_no_group_with_this_daemon(swarm: Swarm) -> None:
    first, second, third = swarm.daemons(3, LISTEN)
    with Fleet([first, second, third], normal(3, 1000), codec="fp32") as fleet:
        assert all(fleet.whole([1.0] * 3))
        banned, other = (client.peer_id for client in fleet.clients[1:])
        assert first.cli("ban", banned, "--reason", "noise").returncode == 0
        rows = {row["peer"]: row for row in first.json("peers")}
        assert (rows[banned]["banned"], rows[banned]["why"]) == (True, "banned here: noise")
        assert (rows[other]["banned"], rows[other]["role"]) == (False, "trainer")
        # The third takes whom it knows, so this daemon declines some of its groups.
        runs = [fleet.runs[0], fleet.runs[2]]
        pending = [run.average(timeout=60.0, wait=False) for run in runs]
        assert all(set(one.result().contributors) == {fleet.clients[0].peer_id, other} for one in pending)
        assert first.cli("allow", banned).returncode == 0
        assert first.cli("allow", banned).stderr.count("\n") == 1
        eventually(
            lambda: len(first.json("peers")) == 3 and not any(row["banned"] for row in first.json("peers")),
            "it",
        )
        assert all(fleet.whole([1.0] * 3))


@pytest.mark.slow
def test_a_member_revoked_during_rounds_is_out_everywhere_and_stays_out(swarm: Swarm) -> None:
    first = founder(swarm)
    lines = [line_of(first) for _ in range(7)]
    others = [guest(swarm, f"guest{number}", line) for number, line in enumerate(lines)]
    members = [first, *others]
    bad = others[-1]
    with Fleet(members, normal(8, 100_000), codec="fp32") as fleet:
        assert all(fleet.whole([1.0] * 8))
        name = fleet.clients[-1].peer_id
        going = fleet.start([1.0] * 8, timeout=30.0)
        began = time.monotonic()
        assert first.cli("swarm", "revoke", name).returncode == 0
        for member in members[:-1]:
            eventually(
                lambda member=member: name not in member.json("status")["swarm"]["members"], "it is out"
            )
        print(f"out at all of 8 after {time.monotonic() - began:.1f} s, as seven commands in a row tell")
        outcomes = [pending.result() for pending in going]
        again = [run.average(timeout=60.0, wait=False) for run in fleet.runs[:-1]]
        for outcome in (pending.result() for pending in again):
            assert outcome.ok, outcomes
            assert name not in outcome.contributors
    back = guest(swarm, "back", lines[-1])
    eventually(lambda: "was revoked" in back.output, "its refusal")
    assert bad.json("status")["swarm"]["connected"] == []


class Wire:
    """Listens to all that crosses loopback, in a thread, until the context ends."""

    def __init__(self) -> None:
        self.heard = bytearray()

    def __enter__(self) -> Wire:
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
        except (AttributeError, PermissionError):
            pytest.skip("to listen on a wire takes Linux and the right to")
        self._socket.bind(("lo", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**26)
        self._socket.settimeout(0.2)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                self.heard += self._socket.recv(2**16)


def told(heard: bytes, secrets: dict[str, list[bytes]]) -> set[str]:
    """The kinds of secrets of which one was heard."""
    return {kind for kind, words in secrets.items() if any(word in heard for word in words)}


@pytest.mark.slow
@pytest.mark.parametrize("private", [True, False], ids=["private", "open"])
def test_the_wire_and_a_foreign_node_learn_nothing_of_the_swarm(swarm: Swarm, private: bool) -> None:
    """In an open swarm wire and node learn what the test looks for: it would notice."""
    with Wire() as wire:
        first = founder(swarm) if private else swarm.daemon("founder", args=LISTEN)
        second = (
            guest(swarm, "second", line_of(first))
            if private
            else swarm.daemon("second", [first.address], args=LISTEN)
        )
        outsider = swarm.daemon("outsider", [first.address], args=LISTEN)
        with connect(first.home) as one, connect(second.home) as two, connect(outsider.home) as foreign:
            runs = [client.join("hidden-run", {"w": normal(1, 1000)[0]}) for client in (one, two)]
            assert all(
                result.result().ok for result in [run.average(timeout=60.0, wait=False) for run in runs]
            )
            other, places = two.peer_id, second.json("status")["swarm"]["addresses"]
            # It takes part in a run of that name, and so asks everybody that it knows for the records.
            foreign.join("hidden-run", {"w": normal(1, 1000)[0]}).average(timeout=10.0)
    secrets = {
        "run": [b"hidden-run"],
        "address": [place.partition("/p2p/")[0].encode() for place in places],
        "PeerID": [other.encode(), public_key_of(other)],
    }
    assert told(bytes(wire.heard), secrets) == (set() if private else {"PeerID"}), (
        "direct channels name peers"
    )
    known = (outsider.home / "swarm.json").read_bytes() + outsider.cli(
        "status", "--all", "--json"
    ).stdout.encode()
    learned = told(known, {kind: secrets[kind] for kind in ("address", "PeerID")})
    assert learned == (set() if private else {"address", "PeerID"})
