"""What people see of the peers of a run."""

from __future__ import annotations

from types import SimpleNamespace

from equipoise.averaging.ledger import Given
from equipoise.dht.gate import Gate
from equipoise.dht.state import ReachStatus
from equipoise.limits import Candidate
from equipoise.peer.daemon.run_view import _row


def test_a_name_that_a_peer_gives_itself_is_fit_for_a_terminal() -> None:
    swarm = SimpleNamespace(
        peer="me", gate=Gate(), reach=lambda peer: ReachStatus("direct", "as the test says")
    )
    comparison = SimpleNamespace(difference=lambda peer: "")
    machine = SimpleNamespace(context=SimpleNamespace(deeds=SimpleNamespace(told=lambda peer: "")))
    driver = SimpleNamespace(search=SimpleNamespace(comparison=comparison, machine=machine))
    found = Candidate(peer="other", state="ready", name="gpu \u202e box")
    row = _row(SimpleNamespace(name="digits", hash="ab"), driver, swarm, found, Given())
    assert (row.name, row.role, row.banned) == ("gpu \\u202e box", "trainer", False)
