#!/usr/bin/env python
"""Breaks one rule of matchmaking or replication at a time, and runs the default tests of the folders concerned.

Tests that do not notice prove nothing of that rule. Prints each mutant with the first test that fails, and how many of
all were found; exits with 1 below nine of ten, or if a rule's text is gone from its file (mend the table then).
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent

PRELOADED = (
    "hypothesis.strategies",
    "msgspec",
    "numpy",
    "torch",
    "cryptography.hazmat.primitives.asymmetric.rsa",
)
"""Loaded once, before the processes of the mutants are forked."""

LEAST_FOUND = 0.9

GATHERING = ("averaging/matchmaking", "averaging/gossip", "sim/test_federated.py", "sim/test_gossip.py")
DONORS = ("averaging/replication", "averaging/aio/test_transfer*.py", "sim/test_transfers.py")
TRAINING = ("peer/training", "peer/client")

FOLDERS = {
    "averaging/matchmaking": GATHERING,
    "averaging/gossip": GATHERING,
    "averaging/replication": (*DONORS, *TRAINING),
    "peer/training": TRAINING,
}
"""Folder of the product -> patterns of files and folders of tests, the quickest first."""

RULES: dict[str, list[tuple[str, str]]] = {
    "averaging/matchmaking/group_builder.py": [
        ("len(self.parked) >= MAX_PARKED_GROUPS * self._needs.group_size", "False"),
        ("parked.arrived = before.arrived", "pass"),
        ("shift = min(held_up, MAX_SHIFT - self._shifted)", "shift = held_up"),
        (" or now < self._closes_from:", ":"),
        ("arrived[quorum - 1] if", "arrived[0] if"),
        ("if not outlook.missing and not outlook.strangers:", "if not outlook.missing:"),
        ("max(spent[(len(spent) - 1) // 2], latest + GRACE)", "spent[(len(spent) - 1) // 2]"),
        ("return peer not in outlook.owed, ", "return False, "),
        ("lateness = max(lateness, (now - began) / FACTOR)", "pass"),
        ("floor = INITIAL_WAIT if len(self._seen) < FEW else MIN_WAIT", "floor = MIN_WAIT"),
        ("0 < self._needs.least <= join.weight and join.state != self.state", "False"),
    ],
    "averaging/matchmaking/closing.py": [
        ("*(peer for peer in since if peer in able)", "*()"),
        ("len(there) < self._strategy.available", "False"),
        ("return believed is not None and believed > builder.round", "return False"),
        ("return peer in builder.contributors or knew", "return True"),
        ("minimum=max(least, share, len(drawn.peers))", "minimum=max(least, share)"),
    ],
    "averaging/matchmaking/coordinator.py": [
        (" and (ended.ok or ended.peers & beyond.keys())", ""),
        ("default=0) < self._context.needs.quorum", "default=0) < 1"),
        ("self._owed.pop(join.peer, None)", "pass"),
        ("and not ended.peers & parked.keys()", ""),
        ("2 * len(makers & there) <= len(makers) and not waited", "False"),
        ("first and not waited and self._membership.settles(now)", "False"),
        ("if join in closed.formed.manifest.members:", "if False:"),
        (" and peer not in closed.reminded", ""),
        ("self._context.straggler_wait.learn(now - closed.began)", "pass"),
    ],
    "averaging/matchmaking/membership.py": [
        ("SUSPECT_SECONDS * 2.0**other.losses", "SUSPECT_SECONDS"),
        ("others[:MAX_PEERS]", "others"),
        ("heapq.nsmallest(MAX_ASKED,", "heapq.nsmallest(MAX_PEERS,"),
        ("statistics.median_low(mates)", "max(mates)"),
        ("other.misses < misses and other.round <= round", "other.round <= round"),
        ("self._shunned[peer].may_call, False", "(self._shunned[peer].may_call,) * 2"),
        ("if own or epoch >= self._made.epoch:", "if True:"),
        ("*beyond.values()])[-2]", "*beyond.values()])[-1]"),
        ("row = [self.peer, *(alike if company else near)]", "row = [self.peer, *near]"),
    ],
    "averaging/matchmaking/topology.py": [
        ('("row", live & kept), (key, live - kept)', "(key, live), (key, set())"),
        ("row[1:] + row[:1] if min(sizes) == 1 else row", "row"),
        ("in range(round % PERIOD)", "in range(0)"),
    ],
    "averaging/matchmaking/joiner.py": [
        (" and search.hops < wire.MAX_HOPS", ""),
        ("if redirect == peer or in_vain or dead_or_shunned:", "if False:"),
        ("message.redirect is not None and hops < wire.MAX_HOPS", "message.redirect is not None"),
        ("search.anywhere = long_alone and not", "search.anywhere = False and not"),
        ("if search.cost[peer] > limit:", "if False:"),
        ("self.search.hops, self.search.alone = 0, True", "pass"),
        ("may_go and self._is_short(now) and", "may_go and"),
        (" or self._membership.mate_ready(self._round.number, now, but=peer)", ""),
        ("maxlen=JOINS_KEPT", "maxlen=1"),
        ("now >= self.state.act_at", "False"),
    ],
    "averaging/matchmaking/patient.py": [
        ("if self._in_vain:", "if False:"),
        ("return peer == self._membership.coordinator(", "return None != self._membership.coordinator("),
        ("message.standing or self._word.standing", "message.standing"),
    ],
    "averaging/matchmaking/next_round.py": [
        ("self.number = max(self.floor, believed)", "self.number = believed"),
        ("max(self.floor + LEAP, min(near)) if near else", "max(self.floor + LEAP, max(near)) if near else"),
        ("believed is not None and believed < self.floor and", "believed is not None and"),
        ("self.number = self._membership.outrun(self.number, self.ceiling, now)", "pass"),
    ],
    "averaging/matchmaking/context.py": [
        ("if not self._looked_at.admits(peer, now):", "if False:"),
        ("if join.peer != peer or not", "if not"),
    ],
    "averaging/gossip/machine.py": [
        ("for sign in (1, -1)", "for sign in (1,)"),
        ("self._asked == peer and self.context.peer < peer", "self._asked == peer"),
        ("min(2 * self._listens, MAX_LISTEN_SECONDS)", "LISTEN_SECONDS"),
        ("context.out.append(events.Decline(peer, manifest.id))", "pass"),
    ],
    "averaging/replication/snapshot_quorum.py": [
        ("if 2 * offering > len(voters):", "if 2 * offering >= len(voters):"),
        ("2 * sum(self._has_reached(peer, offer) for peer in voters) <= len(voters)", "False"),
        ("if len(voters) - len(moving) <= offering:", "if True:"),
        ("epochs[len(epochs) // 2] if epochs", "epochs[-1] if epochs"),
        ("self._rest = min(2 * self._rest, MAX_REST_SECONDS)", "pass"),
    ],
    "averaging/replication/answers.py": [
        ("if 2 * near <= len(voters):", "if 2 * near < len(voters):"),
        ("voters & self.peers.keys() - self._silent", "voters & self.peers.keys()"),
        ("request.wish.patient and self.behind > 0", "False"),
        (" and one.image.size <= self._request.wish.limit", ""),
    ],
    "averaging/replication/chunks.py": [
        ("self._rest = min(2 * self._rest, MAX_REST_SECONDS)", "pass"),
        ("self.late.update(chunks)", "pass"),
        ("source = self.donors[peer] = self.donors.pop(peer)", "source = self.donors[peer]"),
        ("self._window = max(self._window // 2, 1)", "pass"),
    ],
    "averaging/replication/client.py": [
        ("if not genuine:", "if False:"),
        ("if message.ticket != self._request.ticket:", "if False:"),
        ("self._ask_at = now  # The new ask", "pass  # The new ask"),
    ],
    "averaging/replication/server.py": [
        ("asker is None and len(self._askers) >= MAX_ASKERS", "False"),
        (" if one.image is None or one.image.digest not in read)", ")"),
        ("self._epoch is not None and older[0][0].epoch >= self._epoch", "False"),
        ("worn = len(self._taken) == MAX_SNAPSHOTS and", "worn = False and"),
        ("return after is not None and after != self._exchanging and", "return after is not None and"),
        ('self._now < self._held_until.get(digest, float("-inf"))', "digest in self._held_until"),
    ],
    "averaging/replication/upload_queue.py": [
        ("limit = 1 if self.busy else MAX_SENDING", "limit = MAX_SENDING"),
        ("full = len(line.waiting) + len(line.sending) >= MAX_QUEUED", "full = False"),
        ("self._lines.move_to_end(peer)", "pass"),
    ],
    "averaging/replication/follower.py": [
        ("self._rounds.failures >= FAILED_ROUNDS", "self._rounds.failures >= 1"),
        ("None if self.behind or self.doubts else", "None if self.behind else"),
        ("if self._rounds.late >= LATE_ROUNDS:", "if False:"),
        ("if epoch - state.epoch > MAX_MISSED:", "if False:"),
        ("if self._asked is None or self._asked != outcome.before:", "if self._asked is None:"),
        ("if self._given_up != self.state and 0 <", "if 0 <"),
        ("looks >= LOOKS_BACK", "False"),
        ("len(lasting) < 2 and idle[:1] == [self._name]", "True"),
        ("not missing or met >= MAX_INTRODUCTIONS", "not missing"),
        ("if weight >= MEETING_WEIGHT}", "}"),
        ('max(self.state.epoch - 1, 0), f"interrupted', 'self.state.epoch, f"interrupted'),
    ],
    "averaging/replication/known.py": [
        (
            "self._apart >= ROUNDS_APART and now - self._met_at >= self._patience",
            "self._apart >= ROUNDS_APART",
        ),
        ("(claims.values(), outcome.states.values())", "(claims.values())"),
    ],
    "peer/training/member.py": [
        ("if outcome.ok and moved and of is not None and of.epoch < self.id.epoch:", "if False:"),
        ("or self._follower.claim is None", "or False"),
        ("self._own = None  # These gradients are of the state before.\n        self._whole", "self._whole"),
        ("if self._run.peer not in mean.outcome.givers:", "if False:"),
        ("if mean.outcome.counted(self._run.peer):", "if False:"),
        ("own.merge(self._own)", "pass"),
        ("if was_in_step != self.in_step:", "if False:"),
        ("bool(torch.isfinite(buffer).all())", "True"),
    ],
}
"""File of the product -> its rules: (text that stands in it once, text in its place)."""


class Mutant(NamedTuple):
    """One broken rule."""

    file: str
    old: str
    new: str

    def __str__(self) -> str:
        """The mutant in one line."""
        return f"{self.file}: {' '.join(self.old.split())} -> {self.new or 'nothing'}"

    @property
    def tests(self) -> tuple[str, ...]:
        """The files and folders of tests that should notice it."""
        return next(tests for folder, tests in FOLDERS.items() if self.file.startswith(folder))

    def of(self, source: str) -> str:
        """The source with the rule broken."""
        return source.replace(self.old, self.new)

    def plant(self) -> None:
        """Have this process import the file with the rule broken."""
        path, plain = ROOT / self.file, SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
            if Path(loader.path).resolve() != path:
                return plain(loader, name)
            code: CodeType = compile(self.of(path.read_text()), str(path), "exec")
            return code

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]


class FirstFailure:
    """A plugin of pytest: keeps the name of the first test that fails, and writes it into a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        if report.failed:
            os.write(self._pipe, report.nodeid.encode())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """See pytest."""
        if report.failed:
            os.write(self._pipe, f"{report.nodeid} (does not import)".encode())


def mutants() -> list[Mutant]:
    """All mutants."""
    return [Mutant(file, old, new) for file, rules in RULES.items() for old, new in rules]


def stale(planted: Sequence[Mutant]) -> Iterator[str]:
    """Describe the mutants whose text does not stand in its file just once."""
    for mutant in planted:
        times = (ROOT / mutant.file).read_text().count(mutant.old)
        if times != 1:
            yield f"{mutant.file}: expected the text {mutant.old!r} once, found it {times} times"


def first_failure(mutant: Mutant) -> str:
    """Run a mutant's tests in a process of its own; return the first test that fails, empty if none does."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        mutant.plant()
        tests = [str(path) for name in mutant.tests for path in sorted(ROOT.glob(f"tests/{name}"))]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "60", "--rootdir", str(ROOT)]
        status = pytest.main([*options, *tests], [FirstFailure(writes)])
        os._exit(int(status))
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        failed = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return failed or ("" if status == 0 else f"a process that ended with status {status}")


@click.command(help=__doc__)
@click.option("--only", default="", help="Plant only the mutants whose line fits this regular expression.")
def main(only: str) -> None:
    """Plant each mutant."""
    planted = [mutant for mutant in mutants() if re.search(only, str(mutant))]
    if gone := list(stale(planted)):
        raise SystemExit("\n".join(gone))
    for module in PRELOADED:
        importlib.import_module(module)
    found = 0
    for mutant in planted:
        began = time.monotonic()
        failed = first_failure(mutant)
        found += bool(failed)
        seconds = f"{time.monotonic() - began:.0f} s"
        print(
            f"{'found' if failed else 'SURVIVED'} {mutant}: {failed or 'all tests pass'}, {seconds}",
            flush=True,
        )
    print(f"{found} of {len(planted)} mutants found")
    raise SystemExit(found < LEAST_FOUND * len(planted))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()
