from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from equipoise.dht.clock import FRESH_SECONDS, MAX_OFFSET_SECONDS, MAX_SAMPLES, SwarmClock
from equipoise.dht.protocol import Message, decode, encode, messages
from equipoise.dht.sanitize import Malformed

NOW = 1.8e9
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


def clock_of(*ahead: float) -> SwarmClock:
    """A clock that has met peers whose clocks are so many seconds ahead."""
    made = SwarmClock()
    for number, one in enumerate(ahead):
        made.learn(f"peer {number}", NOW + one, NOW - 0.1, NOW + 0.1)
    return made


@pytest.mark.parametrize("seconds", [MINUTE, 2 * HOUR, DAY])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_peers_of_one_swarm_agree_on_the_time_up_to_a_day(seconds: float, sign: float) -> None:
    off = sign * seconds
    assert off + clock_of(-off).offset == pytest.approx(clock_of(off).offset)
    assert off + clock_of(-off, -off).offset == pytest.approx(clock_of(off, 0.0).offset) == pytest.approx(0.0)


def test_liars_move_the_time_by_a_day_at_most() -> None:
    assert clock_of(*[1e12] * 4).offset == MAX_OFFSET_SECONDS
    assert clock_of(*[-1e12] * 4).offset == -MAX_OFFSET_SECONDS
    assert clock_of(0.0, 0.0, 1e12, 1e12).offset == 0.0
    assert clock_of(*[1e12] * 10, *[0.0] * MAX_SAMPLES).offset == 0.0


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        ((MINUTE,), "1 minute behind that of the other peer; rounds work all the same"),
        ((-2 * HOUR,), "2 hours ahead of that of the other peer; rounds work all the same"),
        ((-2 * HOUR, -2 * HOUR, 0.0), "2 hours ahead of those of most other peers"),
        ((DAY, DAY), "1 day behind those of most other peers; rounds work all the same"),
        (
            (-26.5 * HOUR, -26.5 * HOUR),
            "1 day and 2 hours ahead of those of most other peers; above a day others refuse",
        ),
        ((61.4,), "1 minute behind that"),
        ((45.2,), "50 seconds behind that"),
        ((2 * HOUR + 1.0,), "2 hours behind that"),
    ],
)
def test_the_warning_names_the_amount_and_what_to_do(ahead: tuple[float, ...], words: str) -> None:
    warning = clock_of(*ahead).warning
    assert f"this machine's clock is {words}" in warning
    assert "set the clock that is wrong" in warning


@pytest.mark.parametrize("time", [math.inf, -math.inf, math.nan, 1e308, -1.0])
def test_what_no_clock_shows_is_no_message(time: float) -> None:
    with pytest.raises(Malformed):
        decode(encode(Message(serves=True, time=time)), messages)


@pytest.mark.parametrize("ahead", [(), (3.0,), (-9.0, 8.0), (2 * HOUR, 0.0), (DAY, 0.2, -0.3, 0.0)])
def test_whose_clock_most_others_share_is_not_warned(ahead: tuple[float, ...]) -> None:
    assert clock_of(*ahead).warning == ""


def test_what_a_clock_was_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    met = clock_of(2 * HOUR, 2 * HOUR)
    assert met.warning
    later = time.monotonic() + FRESH_SECONDS + 1
    monkeypatch.setattr("equipoise.dht.clock.time", SimpleNamespace(monotonic=lambda: later))
    assert met.offset == 0.0
    assert met.warning == ""
