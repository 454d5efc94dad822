"""Peers that say what they should not, at every moment: the others neither crash, nor hang, nor differ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.averaging.aio import round_driver
from equipoise.averaging.aio.donor import TRANSFER_FRAME
from equipoise.averaging.aio.round_driver import ROUND_FRAME
from equipoise.averaging.aio.router import Router
from equipoise.averaging.aio.search_driver import MATCHMAKING_FRAME
from equipoise.averaging.aio.sessions import MAX_CHANNELS
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.layout import Vectors
from equipoise.averaging.manifest import Join, Manifest
from equipoise.averaging.matchmaking.messages import GroupFormed, Invitation, LeaveRequest, encode
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from fakes.hostile import Frame, TappedTransport, run_at_once
from fakes.memory import FakeIdentity, Net
from fakes.speaker import Speaker
from fakes.vectors import averaged, decoded, encoded

HONEST = ["a", "b", "c"]
HOSTILE = "m"
EVERYONE = [*HONEST, HOSTILE]
SIZE = 2000
TIMEOUT = 30.0

Tap = Callable[[str, bytes, bytes], list[Frame]]


def spec_of(size: int = SIZE, codec: str = "fp32") -> RunSpec:
    return RunSpec.create(
        "run", Schema.of({"w": torch.zeros(size)}), RunOptions(codec=codec, part_values=256)
    )


def honest(_: str, header: bytes, body: bytes) -> list[Frame]:
    return [(header, body)]


async def settled() -> None:
    """Let every task do what it can without waiting."""
    for _ in range(50):
        await asyncio.sleep(0)


class Scene:
    """Honest members, and one that is tapped."""

    def __init__(self, tap: Tap = honest, hostile: bool = True) -> None:
        self.net = Net()
        self.routers = {name: Router(*self.net.peer(name), FakeIdentity(name)) for name in HONEST}
        if hostile:
            transport, directory = self.net.peer(HOSTILE)
            self.routers[HOSTILE] = Router(TappedTransport(transport, tap), directory, FakeIdentity(HOSTILE))
        self.values = {
            name: torch.randn(SIZE, generator=torch.Generator().manual_seed(at))
            for at, name in enumerate(self.routers)
        }
        self.results = {name: torch.full((SIZE,), -7.0) for name in self.routers}
        self.outcomes: dict[str, Outcome] = {}

    async def average(self, codec: str = "fp32") -> dict[str, Outcome]:
        """One round of all; only the honest outcomes count."""
        before = {name: values.clone() for name, values in self.values.items()}
        spec = spec_of(codec=codec)
        began = asyncio.get_running_loop().time()
        runs = {name: await router.join(spec) for name, router in self.routers.items()}
        work = {
            name: asyncio.create_task(averaged(run, self.values[name], self.results[name], 1.0, TIMEOUT))
            for name, run in runs.items()
        }
        await asyncio.wait(work.values())
        assert asyncio.get_running_loop().time() - began <= TIMEOUT + 1
        self.outcomes = {name: work[name].result() for name in HONEST}
        assert all(torch.equal(self.values[name], before[name]) for name in HONEST)
        return self.outcomes

    async def stop(self) -> None:
        """Stop, and see that nothing is left."""
        await asyncio.gather(*(router.stop() for router in self.routers.values()))
        await settled()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not any(router._rounds.open or router._runs for router in self.routers.values())

    def check(self, exact: bool = True) -> None:
        """The honest who succeeded have one mean, of those it names."""
        good = [name for name in HONEST if self.outcomes[name].ok]
        for name in HONEST:
            if name not in good:
                continue
            outcome, first = self.outcomes[name], self.outcomes[good[0]]
            assert (outcome.digest, outcome.contributors) == (first.digest, first.contributors)
            assert torch.equal(self.results[name], self.results[good[0]])
            if exact:
                share = 1.0 / sum(outcome.contributors.values())
                mean = sum(self.values[one].double() * share for one in outcome.contributors)
                torch.testing.assert_close(self.results[name].double(), mean, rtol=1e-5, atol=1e-6)


def play(tap: Tap = honest, *, exact: bool = True, codec: str = "fp32") -> Scene:
    """One round with a tapped member, checked."""
    scenes: list[Scene] = []

    async def act() -> None:
        scenes.append(Scene(tap))
        await scenes[0].average(codec)
        scenes[0].check(exact)
        await scenes[0].stop()

    assert run_at_once(act()) == []
    return scenes[0]


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    yield
    assert [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []


# ---- everything at every moment ----

SMALL = st.integers(0, 8)
BALLOTS = st.one_of(SMALL, st.sampled_from([wire.MAX_BALLOT, wire.MAX_BALLOT - 3, 2**16, 2**20]))
MASKS = st.one_of(st.integers(0, 15), st.sampled_from([16, 2**63, 2**64 - 1]))
DECISIONS = st.builds(wire.Decision, MASKS, MASKS)
DIGESTS = st.sampled_from([bytes(32), b"x" * 32])
PARTS = st.one_of(st.integers(0, 8), st.just(65535))
CONTROL = st.one_of(
    st.builds(wire.Prepare, BALLOTS),
    st.builds(wire.Promise, BALLOTS, st.none() | BALLOTS, st.none() | DECISIONS),
    st.builds(wire.Refuse, BALLOTS),
    st.builds(wire.Plan, BALLOTS, BALLOTS, MASKS),
    st.builds(wire.Report, BALLOTS, BALLOTS, MASKS),
    st.builds(wire.Propose, BALLOTS, DECISIONS, MASKS),
    st.builds(wire.Votes, st.builds(wire.Vote, BALLOTS, DECISIONS, DIGESTS), MASKS),
    st.builds(wire.Fetch, MASKS, st.binary(max_size=4) | st.just(b"\xff" * 8192)),
    st.builds(wire.GiveUp, st.text(max_size=20)),
    st.just(wire.Heartbeat()),
)
BULK = st.one_of(st.builds(wire.Contribution, PARTS), st.builds(wire.Mean, PARTS, MASKS))
BODIES = st.sampled_from([b"", b"\0", bytes(256 * 4), bytes(255 * 4), b"\xff" * 1024, bytes(70_000)])
RAW = st.one_of(st.binary(max_size=40), st.binary(max_size=20).map(lambda rest: MATCHMAKING_FRAME + rest))


def packed(message: wire.RoundMessage, body: bytes = b"") -> Callable[[bytes], Frame]:
    return lambda round_id: (ROUND_FRAME + round_id + wire.encode(message), body)


FRAMES = st.one_of(
    CONTROL.map(packed),
    st.builds(packed, CONTROL, BODIES),
    st.builds(packed, BULK, BODIES),
    CONTROL.map(lambda message: lambda _: (ROUND_FRAME + b"?" * 16 + wire.encode(message), b"")),
    st.builds(lambda raw, body: lambda _: (raw, body), RAW, BODIES),
    st.builds(lambda raw: lambda round_id: (ROUND_FRAME + round_id + raw, b""), st.binary(max_size=30)),
)
SCRIPTS = st.dictionaries(
    st.integers(0, 60), st.tuples(st.lists(FRAMES, max_size=6), st.booleans(), st.integers(1, 3)), max_size=12
)
"""By the number of the frame that leaves: what else leaves, whether the frame itself does, and how often."""


def tap_of(script: dict[int, tuple[list[Callable[[bytes], Frame]], bool, int]]) -> Tap:
    count = -1

    def tap(_: str, header: bytes, body: bytes) -> list[Frame]:
        nonlocal count
        if header[:1] != ROUND_FRAME:
            return [(header, body)]
        count += 1
        extra, pass_on, times = script.get(count, ([], True, 1))
        return [make(header[1:17]) for make in extra] * times + [(header, body)] * (pass_on * times)

    return tap


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SCRIPTS)
def test_no_member_can_make_the_others_crash_hang_or_differ(script) -> None:
    # What it sends as values is its own affair, and so is its share of the mean as an owner.
    play(tap_of(script), exact=False)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.integers(0, 60), st.tuples(st.lists(CONTROL.map(packed), max_size=6), st.booleans(), st.just(1))
    )
)
def test_no_word_of_a_member_makes_the_others_mean_inexact(script) -> None:
    play(tap_of(script))


# ---- attacks made by hand ----


def once(inject: Callable[[bytes], list[Frame]], at: int = 0) -> Tap:
    """Send these frames too, to everyone, when the `at`-th frame of a round leaves for it."""
    counts: dict[str, int] = {}

    def tap(peer: str, header: bytes, body: bytes) -> list[Frame]:
        if header[:1] != ROUND_FRAME:
            return [(header, body)]
        counts[peer] = counts.get(peer, -1) + 1
        extra = inject(header[1:17]) if counts[peer] == at else []
        return [*extra, (header, body)]

    return tap


def control(round_id: bytes, *messages: wire.RoundMessage) -> list[Frame]:
    return [packed(message)(round_id) for message in messages]


DECISION = wire.Decision(0b1111, 0b1111)
STORMS = {
    "prepare": lambda id: control(id, *(wire.Prepare(ballot) for ballot in range(3, 4000, 4))),
    "prepare far ahead": lambda id: control(id, *(wire.Prepare(7 * 2**k + 3) for k in range(38))),
    "refuse": lambda id: control(id, *(wire.Refuse(ballot) for ballot in range(500))),
    "give up": lambda id: control(id, *[wire.GiveUp("\x1b[2J" * 20)] * 500),
    "fetch": lambda id: control(id, *[wire.Fetch(0b1111, b"\xff" * 8192)] * 200),
    "fetch nobody's": lambda id: control(id, *[wire.Fetch(0, b"\xff" * 8192)] * 200),
    "votes": lambda id: control(
        id,
        *(
            wire.Votes(wire.Vote(ballot, DECISION, bytes([ballot % 256]) * 32), 0b1000, ((3, b"forged"),))
            for ballot in range(1000)
        ),
    ),
    "plans": lambda id: control(id, *(wire.Plan(3, sequence, 8) for sequence in range(300))),
}


@pytest.mark.parametrize("name", STORMS)
@pytest.mark.parametrize("at", [0, 5])
def test_storms_leave_the_others_with_their_exact_mean(name: str, at: int) -> None:
    scene = play(once(STORMS[name], at))
    assert all(outcome.ok for outcome in scene.outcomes.values()), scene.outcomes


@pytest.mark.parametrize(
    "frame",
    [
        b"\x82\xa4type\xa6GiveUp\xa6reason\xa2\xff\xfe",
        b"\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * 60_000 + b"\x01",
        b"",
        b"\xc1",
    ],
)
@pytest.mark.parametrize("at", [0, 4])
def test_bytes_that_are_no_message_cost_only_their_sender(frame: bytes, at: int) -> None:
    scene = play(once(lambda id: [(ROUND_FRAME + id + frame, b"")], at))
    assert all(outcome.ok for outcome in scene.outcomes.values()), scene.outcomes


REFUSED: dict[str, Callable[[bytes], Frame]] = {
    "a message of a round": lambda id: (ROUND_FRAME + id + b"\xc1", b""),
    "bytes for part": lambda id: packed(wire.Contribution(0), b"no such body")(id),
    "no body of": lambda id: packed(wire.GiveUp("of no use"), b"no such body")(id),
    "a matchmaking message": lambda id: (MATCHMAKING_FRAME + b"\xc1", b""),
    "a body only in frames": lambda id: (MATCHMAKING_FRAME + encode(Invitation("run", 0)), bytes(100_000)),
    "a message of a transfer": lambda id: (TRANSFER_FRAME + b"\xc1", b""),
    "got kind": lambda id: (b"X" + id, b""),
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_frame_that_breaks_a_rule_of_the_wire_costs_its_sender_the_channel(
    said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    scene = play(once(lambda id: [REFUSED[said](id)], at=5))
    told = [line for line in caplog.messages if line.startswith(f"dropped {HOSTILE}: ")]
    assert len(told) >= len(HONEST)
    assert all(said in line for line in told)
    assert all(outcome.ok for outcome in scene.outcomes.values()), scene.outcomes


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_values_that_are_not_finite_are_left_out(codec: str) -> None:
    def tap(_: str, header: bytes, body: bytes) -> list[Frame]:
        return [(header, b"\xff" * len(body))]

    scene = play(tap, codec=codec, exact=codec == "fp32")
    assert all(outcome.ok for outcome in scene.outcomes.values()), scene.outcomes
    assert all(torch.isfinite(result).all() for name, result in scene.results.items() if name in HONEST)


def test_a_forged_digest_or_commit_changes_nobodys_mean() -> None:
    def lies(id: bytes) -> list[Frame]:
        proofs = tuple((member, b"signed, everyone") for member in range(4))
        chosen = [wire.Vote(ballot, DECISION, b"x" * 32) for ballot in range(4)]
        own = [wire.Vote(ballot, DECISION, b"y" * 32) for ballot in range(4)]
        forged = [wire.Votes(vote, 0b1111, proofs) for vote in chosen]
        return control(id, *forged, *(wire.Votes(vote, 0b1000, proofs[3:]) for vote in own))

    scene = play(once(lies, 1))
    assert all(outcome.ok for outcome in scene.outcomes.values()), scene.outcomes


def test_a_forged_group_is_not_joined() -> None:
    def tap(peer: str, header: bytes, body: bytes) -> list[Frame]:
        if header[:1] != MATCHMAKING_FRAME:
            return [(header, body)]
        joins = [
            Join(one, spec_of().hash, 0, 1.0, 0.0, True, bytes(16), b"", None, b"forged")
            for one in (peer, HOSTILE)
        ]
        forged = encode(GroupFormed("run", Manifest.of(HOSTILE, joins), 0.0))
        noise = [encode(Invitation("run", 2**53)), encode(LeaveRequest("run", bytes(8)))]
        return [(MATCHMAKING_FRAME + one, b"") for one in [forged, *noise]] + [(header, body)]

    scene = play(tap)
    assert all(outcome.ok for outcome in scene.outcomes.values()), scene.outcomes


# ---- what is kept ----


async def test_frames_kept_of_unknown_rounds_are_bounded_for_each_peer() -> None:
    scene = Scene(hostile=False)
    router = scene.routers["a"]
    good = b"g" * 16
    router.frame("b", ROUND_FRAME + good)
    for number in range(3000):
        router.frame("m", ROUND_FRAME + number.to_bytes(16, "big") + b"x" * 500)
        router.frame("m", ROUND_FRAME + good + b"x" * 500)
    for stranger in range(1000):
        router.frame("b", ROUND_FRAME + good)
        router.frame(f"s{stranger}", ROUND_FRAME + good)
    assert len(router._rounds._early) <= round_driver.MAX_EARLY_PEERS
    assert len(router._rounds._early.get("m", ())) <= round_driver.MAX_EARLY_FRAMES
    assert len(router._rounds._early["b"]) == round_driver.MAX_EARLY_FRAMES
    await scene.stop()


async def test_a_body_that_began_before_its_round_is_kept_by_nobody() -> None:
    scene = Scene(hostile=False)
    router = scene.routers["a"]
    header = ROUND_FRAME + bytes(16) + wire.encode(wire.Contribution(0))
    (memory, take), (again, _) = (router.place("b", header, 1024) for _ in range(2))
    take(memory)
    assert again.obj is memory.obj, "the next body is received over it"
    assert not router._rounds._early
    await scene.stop()


async def test_channels_of_one_peer_are_bounded_and_the_newest_is_written_to() -> None:
    scene = Scene(hostile=False)
    transport, _ = scene.net.peer("m")
    channels = []
    speaker = None
    for _ in range(MAX_CHANNELS + 3):
        channels.append(await transport.open("a"))
        speaker = Speaker(channels[-1], speaker)
        await speaker.greet()
    await settled()
    assert len(scene.routers["a"]._sessions._peers["m"].channels) == MAX_CHANNELS
    for channel in channels[:3]:
        with pytest.raises(ConnectionError):
            await channel.receive(lambda _, size: memoryview(bytearray(size)))
    scene.routers["a"]._sessions.post("m", b"hello")
    newest, older = Speaker(channels[-1], speaker), Speaker(channels[-2], speaker)
    assert (await newest.receive())[0] == b"hello"
    channels[-1].close()
    await settled()
    scene.routers["a"]._sessions.post("m", b"again")
    heard = [(await older.receive())[0] for _ in range(2)]
    assert heard == [b"hello", b"again"], "what was not acknowledged is written again"
    for channel in channels:
        channel.close()
    await scene.stop()


# ---- giving up at every moment ----


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 8, 12, 18, 25, 35, 50, 70, 100, 150])
@pytest.mark.parametrize("how", ["cancel", "leave", "stop"])
def test_a_peer_that_gives_up_at_any_moment_has_its_memory_to_itself(step: int, how: str) -> None:
    async def act() -> None:
        scene = Scene(hostile=False)
        runs = {name: await router.join(spec_of()) for name, router in scene.routers.items()}
        size = spec_of().layout.encoded_size
        vectors = {
            name: Vectors(encoded(spec_of().layout, scene.values[name]), memoryview(bytearray(size)))
            for name in runs
        }
        work = {
            name: asyncio.create_task(run.average(vectors[name], 1.0, TIMEOUT)) for name, run in runs.items()
        }
        for _ in range(step):
            await asyncio.sleep(0)
        if how == "cancel":
            work["c"].cancel()
        elif how == "leave":
            await scene.routers["c"].leave(runs["c"], "left the run")
        else:
            await scene.routers["c"].stop()
        await asyncio.wait([work["c"]])
        quit = work["c"]
        assert quit.cancelled() if how == "cancel" and not quit.done() else True
        over = quit.cancelled() or not quit.result().ok
        if over:
            vectors["c"].mean[:] = b"c" * size
            vectors["c"].contribution[:] = b"\xff" * size
        await asyncio.wait(work.values())
        assert not over or vectors["c"].mean == b"c" * size
        assert work["a"].result().ok
        assert work["b"].result().ok
        assert vectors["a"].mean == vectors["b"].mean
        assert torch.isfinite(decoded(spec_of().layout, vectors["a"].mean)).all()
        await scene.stop()

    assert run_at_once(act()) == []


def test_public_members_wait_for_clients_to_speak_first() -> None:
    async def act() -> None:
        net = Net()
        names = ["client1", "client2", "client3", "public1", "public2"]
        routers = [Router(*net.peer(name, name.startswith("public")), FakeIdentity(name)) for name in names]
        runs = [await router.join(spec_of()) for router in routers]
        results = [torch.zeros(SIZE) for _ in routers]
        outcomes = await asyncio.gather(
            *(
                averaged(run, torch.ones(SIZE), result, 1.0, TIMEOUT)
                for run, result in zip(runs, results, strict=True)
            )
        )
        for outcome in outcomes:
            assert len(outcome.contributors) == len(names), outcome
            assert not outcome.events
        await asyncio.gather(*(router.stop() for router in routers))

    assert run_at_once(act()) == []


def test_noise_before_its_round_costs_only_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tap(_: str, header: bytes, body: bytes) -> list[Frame]:
        return [(header, body)] if header[:1] == MATCHMAKING_FRAME else []

    async def act() -> None:
        scene = Scene(tap)
        began = scene.routers["a"]._rounds.begin

        def begin(task, keep):
            scene.routers["a"].frame(HOSTILE, ROUND_FRAME + task.manifest.id + b"\xc1")
            return began(task, keep)

        monkeypatch.setattr(scene.routers["a"]._rounds, "begin", begin)
        await scene.average()
        assert all(outcome.ok for outcome in scene.outcomes.values()), scene.outcomes
        scene.check()
        await scene.stop()

    assert run_at_once(act()) == []
