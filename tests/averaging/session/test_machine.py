"""Sessions without channels: every frame is delivered once and in order, whatever breaks, or the session is over."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.session.machine import ACKNOWLEDGE_EVERY, Hello, Session

FRAMES = 12


class End:
    """One end: posts its frames in order, and takes note of what is delivered."""

    def __init__(self, name: bytes) -> None:
        self.session: Session[int] = Session(name)
        self.posted = 0
        self.heard: list[int] = []

    def write(self) -> tuple[int, int, int | None] | None:
        """Return the next frame to be written: its number, an acknowledgement, its content."""
        if again := self.session.again():
            return (again[0], self.session.acknowledgement(), again[1])
        if self.posted == FRAMES:
            return None
        self.posted += 1
        content = self.posted
        return (self.session.number(b"", lambda: content), self.session.acknowledgement(), content)

    def read(self, frame: tuple[int, int, int | None]) -> None:
        number, acknowledged, content = frame
        if self.session.take(number, acknowledged):
            assert content is not None
            self.heard.append(content)


class Channel:
    """What is on its way in both directions between two ends."""

    def __init__(self, ends: Sequence[End]) -> None:
        self.ends = ends
        self.ways: list[deque[tuple[int, int, int | None]]] = [deque(), deque()]
        dialler, other = ends
        assert other.session.greet(dialler.session.hello())
        assert dialler.session.greet(other.session.hello())
        for end in ends:
            end.session.rewind()

    def write(self, side: int) -> bool:
        if frame := self.ends[side].write():
            self.ways[side].append(frame)
        return frame is not None

    def read(self, side: int) -> bool:
        if self.ways[1 - side]:
            self.ends[side].read(self.ways[1 - side].popleft())
            return True
        return False


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["write 0", "write 1", "read 0", "read 1", "break", "beside"]), max_size=80))
def test_every_frame_is_delivered_once_and_in_order(steps: list[str]) -> None:
    ends = [End(b"0" * 8), End(b"1" * 8)]
    channels = [Channel(ends)]
    for step in steps:
        if step in ("break", "beside"):
            # A new channel: the one before is gone, or what is on its way there still arrives.
            channels = [*channels[-2:], Channel(ends)] if step == "beside" else [Channel(ends)]
            continue
        act, side = step.split()
        if act == "write":
            channels[-1].write(int(side))
        else:
            for channel in channels:
                channel.read(int(side))
    channel = Channel(ends)
    while any(channel.write(side) | channel.read(side) for side in (0, 1)):
        pass
    for end in ends:
        assert end.heard == list(range(1, FRAMES + 1))


class Daemon(End):
    """An end whose process may be started again.

    Attributes:
        first: Content of the first frame of its present session.
    """

    ids = itertools.count()

    def __init__(self) -> None:
        super().__init__(next(self.ids).to_bytes(8, "little"))
        self.first = 1

    def begin_anew(self) -> None:
        """Give up its session: the frames that it keeps may be lost."""
        self.session = Session(next(self.ids).to_bytes(8, "little"))
        self.first = self.posted + 1

    def restart(self) -> None:
        """Forget all, as another process does."""
        self.begin_anew()
        self.heard.clear()


def reconnected(ends: list[Daemon]) -> Channel:
    """Open a channel as the daemons do: an end whose session is over begins another, and they dial again."""
    dialler, other = ends
    if not other.session.greet(dialler.session.hello()):
        other.begin_anew()
        assert other.session.greet(dialler.session.hello())
    if not dialler.session.greet(other.session.hello()):
        dialler.begin_anew()
    return Channel(ends)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["write 0", "write 1", "read 0", "read 1", "break", "restart 0", "restart 1"]),
        max_size=80,
    )
)
def test_where_an_end_is_started_again_no_frame_is_repeated_and_none_of_the_next_session_is_lost(
    steps: list[str],
) -> None:
    ends = [Daemon(), Daemon()]
    channel = reconnected(ends)
    for step in steps:
        act, _, side = step.partition(" ")
        if act == "restart":
            ends[int(side)].restart()
        if act in ("break", "restart"):
            channel = reconnected(ends)
        else:
            (channel.write if act == "write" else channel.read)(int(side))
    while any(channel.write(side) | channel.read(side) for side in (0, 1)):
        pass
    for end, other in (ends, ends[::-1]):
        assert end.heard == sorted(set(end.heard)), "each once, and in order"
        begun = list(range(other.first, FRAMES + 1))
        assert end.heard[len(end.heard) - len(begun) :] == begun


def paired() -> tuple[End, End]:
    ends = [End(b"a" * 8), End(b"b" * 8)]
    Channel(ends)
    return ends[0], ends[1]


def test_an_end_that_lost_its_memory_ends_the_session_and_one_that_did_not_goes_on() -> None:
    one, _ = paired()
    assert one.session.greet(Hello(b"c" * 8, b"a" * 8, 0)), "nothing was sent: nothing is lost"
    one.write()
    assert one.session.greet(Hello(b"c" * 8, b"", 0))
    assert one.session.unacknowledged == 1
    assert one.session.greet(Hello(b"c" * 8, b"a" * 8, 1))
    assert one.session.unacknowledged == 0
    assert not one.session.greet(Hello(b"d" * 8, b"", 0))
    _, two = paired()
    assert two.session.take(1, 0)
    assert not two.session.greet(Hello(b"d" * 8, b"", 0)), "it has heard the one before"


def test_a_frame_that_nobody_wants_any_more_is_written_empty() -> None:
    one, two = paired()
    one.session.number(b"round", lambda: 1, bulk=True)
    one.session.number(b"round", lambda: 2)
    one.session.number(b"other", lambda: 3)
    one.session.forget(b"round")
    one.session.rewind()
    assert [one.session.again() for _ in range(4)] == [(1, None), (2, 2), (3, 3), None]
    one.session.forget_all_but({b"other"})
    one.session.rewind()
    assert [one.session.again() for _ in range(4)] == [(1, None), (2, None), (3, 3), None]
    assert two.session.take(1, 0)


def test_an_acknowledgement_is_due_by_itself_after_many_frames() -> None:
    one, two = paired()
    for number in range(1, ACKNOWLEDGE_EVERY + 1):
        assert not two.session.acknowledges
        frame = one.session.number(b"", lambda: 0)
        assert frame == number
        assert two.session.take(frame, 0)
    assert two.session.acknowledges
    assert not one.session.take(0, two.session.acknowledgement()) or not one.session.unacknowledged
    assert not two.session.acknowledges


@pytest.mark.parametrize(("number", "acknowledged"), [(2, 0), (2**64 - 1, 0), (1, 1), (0, 2**63)])
def test_a_gap_and_an_acknowledgement_of_what_was_never_sent_are_faults(
    number: int, acknowledged: int
) -> None:
    one, _ = paired()
    with pytest.raises(FrameRefused):
        one.session.take(number, acknowledged)
    with pytest.raises(FrameRefused):
        one.session.greet(Hello(b"b" * 8, b"a" * 8, 1))
