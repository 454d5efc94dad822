"""Both sides of one attempt over a relayed stream, and one side against whatever a stranger may say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from equipoise.dht.punch import puncher
from equipoise.dht.punch.candidates import Candidates, End, Go, Probe, decode, encode
from equipoise.dht.punch.puncher import MAX_LEAD_SECONDS, MAX_TRIES, TRY_SECONDS, Attempt, SharedPort
from equipoise.dht.streams import Stream, receive_message, send_message

PLACES = (
    Candidates(("44.0.0.1", 5001), (("192.168.1.2", 5001),)),
    Candidates(("44.0.0.2", 5002), (("192.168.1.2", 5002),)),
)


class Opened:
    """A channel, as far as an attempt knows one."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Meeting:
    """Both sides, whose tries open a channel from the try `opens_at` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, opens_at: int, places: tuple = PLACES) -> None:
        monkeypatch.setattr(puncher, "TRY_SECONDS", 0.02)
        self.streams = [Stream(one) for one in socket.socketpair()]
        self.sides = [
            self._side(side, begins, own, opens_at)
            for side, (begins, own) in enumerate(zip((True, False), places, strict=True))
        ]

    def _side(self, number: int, begins: bool, own: Candidates | None, opens_at: int) -> Attempt:
        async def opens(port: SharedPort, place: tuple[str, int]) -> Opened:
            if side.tries < opens_at:
                await asyncio.Event().wait()
            return Opened()

        async def measure(mirrors: object) -> Candidates:
            if own is None:
                raise ConnectionError("no mirror")
            return own

        side = Attempt(self.streams[number], begins, [], opens)  # type: ignore[arg-type]
        side._port.measure = measure  # type: ignore[method-assign]
        return side

    async def run(self) -> list[str]:
        """Return why each side has no channel."""
        return await asyncio.gather(*(self._run(side) for side in self.sides))

    async def _run(self, side: Attempt) -> str:
        reason = await side.run()
        side._stream.close()
        return reason


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Stream, Stream]]:
    one, other = (Stream(one) for one in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def attempt(stream: Stream, begins: bool, opens=None) -> Attempt:
    """The side of `PLACES[not begins]`, which reaches nobody."""

    async def refused(port: SharedPort, place: tuple[str, int]) -> None:
        raise ConnectionRefusedError("it speaks SSH")

    async def measure(mirrors: object) -> Candidates:
        return PLACES[not begins]

    side = Attempt(stream, begins, [], opens or refused)
    side._port.measure = measure  # type: ignore[method-assign]
    return side


async def heard(stream: Stream) -> object:
    return decode(await receive_message(stream))


@pytest.mark.parametrize("needed", range(1, MAX_TRIES + 1))
async def test_a_later_try_is_as_good(monkeypatch, needed: int) -> None:
    meeting = Meeting(monkeypatch, needed)
    assert await meeting.run() == ["", ""]
    assert [side.tries for side in meeting.sides] == [needed, needed]
    assert all(isinstance(side.channel, Opened) and not side.channel.closed for side in meeting.sides)


async def test_after_some_tries_both_give_up_and_say_why(monkeypatch) -> None:
    meeting = Meeting(monkeypatch, MAX_TRIES + 1)
    assert await meeting.run() == [
        f"nobody answered at 44.0.0.2 port 5002, in {MAX_TRIES} tries",
        f"nobody answered at 44.0.0.1 port 5001, in {MAX_TRIES} tries",
    ]


@pytest.mark.parametrize("blind", [0, 1])
async def test_a_side_that_cannot_tell_where_it_is_says_so(monkeypatch, blind: int) -> None:
    places = tuple(None if side == blind else PLACES[side] for side in (0, 1))
    reasons = await Meeting(monkeypatch, 1, places).run()
    assert reasons[blind] == "no mirror"
    assert reasons[1 - blind] == "the other side gave up: no mirror"


async def test_sides_without_a_kind_of_address_in_common_do_not_try(monkeypatch) -> None:
    meeting = Meeting(monkeypatch, 1, (PLACES[0], Candidates(("2001:4860::1", 5002))))
    assert all("no kind of address in common" in reason for reason in await meeting.run())
    assert [side.tries for side in meeting.sides] == [0, 0]


async def test_the_routers_behaviour_is_in_the_reason(monkeypatch) -> None:
    drawn = replace(PLACES[0], steady=False)
    [reason, _] = await Meeting(monkeypatch, MAX_TRIES + 1, (drawn, PLACES[1])).run()
    assert reason.endswith("tries; this side's router gives every destination another port")
    both = Meeting(monkeypatch, 1, (drawn, replace(PLACES[1], steady=False)))
    assert "this and the other side's router" in (await both.run())[1]
    assert [side.tries for side in both.sides] == [0, 0]


@pytest.mark.parametrize(("round_trip", "lead"), [(0.6, 0.3), (7.0, MAX_LEAD_SECONDS)])
async def test_both_try_at_once_however_slow_the_relay_is(pair, monkeypatch, round_trip, lead) -> None:
    clock, waits, wait = iter([10.0, 10.0 + round_trip]), [], asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await wait(0)

    monkeypatch.setattr("equipoise.dht.punch.puncher.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    own, other = pair
    for message in (PLACES[1], Probe()):
        await send_message(other, encode(message))
    side = attempt(own, True)
    await side._agree()
    await side._get_in_step()
    assert waits == [pytest.approx(lead)]
    assert [await heard(other) for _ in range(3)] == [PLACES[0], Probe(), Go()]


async def test_the_answer_of_a_place_is_hidden_from_the_other_side_in_words_and_time(
    pair, monkeypatch
) -> None:
    waits = []

    async def sleep_until(event: asyncio.Event, seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(puncher, "sleep_until", sleep_until)
    own, other = pair
    for message in (PLACES[0], *(Probe(), Go()) * MAX_TRIES):
        await send_message(other, encode(message))
    side = attempt(own, False)
    assert "speaks SSH" in await side.run()
    assert waits == [TRY_SECONDS] * MAX_TRIES
    own.close()
    assert [await heard(other) for _ in range(1 + MAX_TRIES)] == [PLACES[1], *[Probe()] * MAX_TRIES]
    with pytest.raises(ConnectionError):
        await heard(other)


@pytest.mark.parametrize("message", [Go(), PLACES[0]])
async def test_a_message_out_of_turn_ends_the_attempt(pair, message) -> None:
    own, other = pair
    for said in (PLACES[0], message):
        await send_message(other, encode(said))
    side = attempt(own, False)
    reason = await side.run()
    assert "out of turn" in reason
    assert [await heard(other) for _ in range(2)] == [PLACES[1], End(reason)]
    assert side.tries == 0


places = st.sampled_from([("44.0.0.9", 1), ("fe80::1", 2), ("0.0.0.0", 3)])
words = st.one_of(
    st.sampled_from([Probe(), Go(), End(""), End("no\nway")]),
    st.builds(Candidates, places, st.lists(places, max_size=2).map(tuple)),
)


@settings(deadline=None, max_examples=80)
@given(st.booleans(), st.lists(words, max_size=12))
def test_an_attempt_ends_and_is_bounded_whatever_the_other_side_says(begins: bool, said: list) -> None:
    async def play() -> Attempt:
        own, other = (Stream(one) for one in socket.socketpair())
        for message in said:
            await send_message(other, encode(message))
        side = attempt(own, begins)
        reason = await side.run()
        own.close()
        other.close()
        assert reason
        assert "\n" not in reason
        return side

    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRY_SECONDS", "ANSWER_SECONDS", "MAX_LEAD_SECONDS"):
            patch.setattr(puncher, name, 0.001)
        side = asyncio.run(play())
    assert side.tries <= MAX_TRIES
    assert not side._trying


async def test_silence_ends_the_attempt(pair, monkeypatch) -> None:
    monkeypatch.setattr(puncher, "ANSWER_SECONDS", 0.01)
    assert "does not answer" in await attempt(pair[0], False).run()


async def test_of_two_channels_one_is_kept(pair, monkeypatch) -> None:
    monkeypatch.setattr(puncher, "TRY_SECONDS", 0.01)
    made = []

    async def opens(port: SharedPort, place: tuple[str, int]) -> Opened:
        made.append(Opened())
        return made[-1]

    own, other = pair
    neighbour = Candidates(PLACES[1].outside, (("192.168.1.7", 5003),))
    for message in (replace(neighbour, outside=("44.0.0.2", 5009)), Probe(), Go()):
        await send_message(other, encode(message))
    side = attempt(own, False, opens)
    assert await side.run() == ""
    assert len(made) == 2
    assert [channel.closed for channel in made] == [False, True]
    assert side.channel is made[0]
