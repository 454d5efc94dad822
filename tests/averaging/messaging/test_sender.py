"""Messages between scripts, through both machines, in virtual time: cuts, daemons and scripts that start again."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from random import Random

import pytest

from equipoise.averaging.messaging import receiver as to
from equipoise.averaging.messaging import sender as of
from equipoise.averaging.messaging.messages import Open, Part, Receipt, Refusal

PIECE, ROOM, ROOM_BYTES = 4, 5, 40
"""Bytes of a part; messages and bytes that a receiver has room for."""


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(to, "MAX_WAITING", ROOM)
    monkeypatch.setattr(to, "MAX_WAITING_BYTES", ROOM_BYTES)


class Script:
    """What a sending script knows of its messages."""

    def __init__(self, name: str) -> None:
        self.name, self.id = name, name.encode().ljust(8)
        self.met = b""
        self.sizes: dict[int, int] = {}
        self.kept: dict[int, bool] = {}
        self.told: defaultdict[int, list[str]] = defaultdict(list)


class World:
    """Senders a and b with a script each, and one receiver; frames to and fro keep their order, until a cut."""

    def __init__(self, seed: int) -> None:
        self.chance, self.now = Random(seed), 0.0
        self.scripts = {name: Script(name) for name in "ab"}
        self.senders = {name: of.Sender("r") for name in "ab"}
        self.up: dict[str, deque] = {name: deque() for name in "ab"}
        self.down: dict[str, deque] = {name: deque() for name in "ab"}
        self.started = 0
        self.read: list[tuple[str, str, int]] = []
        self.start_script()

    # ---- the sending end ----

    def send(self, name: str) -> None:
        script = self.scripts[name]
        number = max(script.sizes, default=0) + 1
        script.sizes[number], script.kept[number] = self.chance.randint(1, 20), False
        self.tell(name, of.Added(number))

    def tell(self, name: str, event: of.SenderEvent) -> None:
        script = self.scripts[name]
        for action in self.senders[name].handle(event, self.now):
            match action:
                case of.SendOpen():
                    self.up[name].append(Open("run", script.id))
                case of.SendParts(number, bare):
                    turn = self.senders[name].turn
                    size = script.sizes[number]
                    for offset in range(0, 1 if bare else size, PIECE):
                        topic = "even" if number % 2 == 0 else "odd"
                        length = 0 if bare else min(PIECE, size - offset)
                        self.up[name].append(
                            (Part("run", script.id, turn, number, topic, size, offset), length)
                        )
                case of.Notice(_, 0, "met", receiver):
                    script.met = bytes.fromhex(receiver)
                case of.Notice(_, number, how):
                    assert number in script.kept
                    script.told[number].append(how)
                    script.kept[number] = True
                    if how != "acknowledged":
                        del script.kept[number]

    def restart_sender(self, name: str) -> None:
        """Its daemon dies; the next one is given what the script keeps."""
        self.cut(name)
        self.senders[name] = of.Sender("r")
        for number, acknowledged in list(self.scripts[name].kept.items()):
            self.tell(name, of.Added(number, acknowledged, again=True, receiver=self.scripts[name].met))

    # ---- the receiving end ----

    def start_script(self) -> None:
        """The receiver's script is another one."""
        self.started += 1
        self.past: dict[str, to.Past] = {}
        self.start_receiver()

    def start_receiver(self) -> None:
        """The receiver's daemon is another one, with the same script."""
        for name in "ab":
            self.cut(name, tells_receiver=False)
        self.script = b"%08d" % self.started
        self.receiver = to.Receiver(to.Mailbox(self.script, tuple(self.past.values())))
        self.queue: dict[str, deque[tuple[str, Part]]] = {"even": deque(), "odd": deque()}

    def hear(self, event: to.ReceiverEvent) -> None:
        for action in self.receiver.handle(event, self.now):
            match action:
                case to.Tell(peer):
                    self.down[peer].append(self.receiver.receipt("run", peer))
                case to.Deliver(peer, part):
                    self.queue[part.topic].append((peer, part))
        held = [part.size for waiting in self.queue.values() for _, part in waiting]
        growing = [one.growing.size for one in self.receiver._sources.values() if one.growing]
        assert len(held) + len(growing) <= ROOM
        assert sum(held) + sum(growing) <= ROOM_BYTES

    def take(self, topic: str) -> bool:
        if not self.queue[topic]:
            return False
        peer, part = self.queue[topic].popleft()
        self.read.append((self.script.decode(), peer, part.number))
        self.hear(to.Took(peer, part))
        self.past[peer] = self.receiver.past(peer)
        return True

    # ---- between ----

    def cut(self, name: str, tells_receiver: bool = True) -> None:
        """The session ends: what is under way is lost, and both ends hear of it; or only an end that had sent some."""
        up, down = self.up[name], self.down[name]
        one_sided = self.chance.random() < 0.5 and tells_receiver
        both = not one_sided or bool(up and down)
        tells_receiver, tells_sender = tells_receiver and (both or bool(down)), both or bool(up)
        up.clear()
        down.clear()
        if tells_receiver:
            self.hear(to.PeerLost(name))
        if tells_sender:
            self.tell(name, of.Closed("cut"))

    def carry(self, name: str) -> bool:
        ways = [way for way in (self.up[name], self.down[name]) if way]
        if not ways:
            return False
        frame = self.chance.choice(ways).popleft()
        match frame:
            case Open(_, script):
                self.hear(to.Opened(name, script))
            case Receipt():
                self.tell(name, of.Received(frame))
            case Refusal():
                self.tell(name, of.Closed(frame.reason, frame.final))
            case part, length:
                self.hear(to.PartBegan(name, part, bare=not length))
                if length and self.receiver.expects(name, part):
                    self.hear(to.PartTaken(name, part, length))
        return True

    def settle(self) -> None:
        """Carry and read all there is."""
        for _ in range(100_000):
            busy = self.carry("a") | self.carry("b") | self.take("even") | self.take("odd")
            if not busy:
                due = min(self.receiver.deadline, *(one.deadline for one in self.senders.values()))
                if due == math.inf:
                    return
                self.now = max(self.now, due)
                self.hear(to.Woke())
                for name in "ab":
                    self.tell(name, of.Woke())
        raise AssertionError("it never ends")


def play(seed: int, steps: int, faults: tuple[str, ...]) -> World:
    world = World(seed)
    for _ in range(steps):
        name = world.chance.choice("ab")
        match world.chance.choices(("send", "carry", "take", "fault"), (4, 12, 4, 0.4 if faults else 0))[0]:
            case "send" if len(world.scripts[name].kept) < 2 * ROOM:
                world.send(name)
            case "carry":
                world.carry(name)
            case "take":
                world.take(world.chance.choice(("even", "odd")))
            case "fault":
                match world.chance.choice(faults):
                    case "cut":
                        world.cut(name)
                    case "sender":
                        world.restart_sender(name)
                    case "receiver":
                        world.start_receiver()
                    case "script":
                        world.start_script()
    world.settle()
    return world


def read_by(world: World, name: str) -> list[int]:
    return [number for _, peer, number in world.read if peer == name]


@pytest.mark.parametrize("seed", range(60))
def test_all_are_read_once_and_in_order_whatever_is_cut_and_whichever_daemon_dies(seed: int) -> None:
    world = play(seed, 600, ("cut", "sender", "receiver"))
    for name, script in world.scripts.items():
        read = read_by(world, name)
        assert sorted(read) == list(script.sizes), "each once"
        for parity in (0, 1):
            of_topic = [number for number in read if number % 2 == parity]
            assert of_topic == sorted(of_topic)
        assert not script.kept
        assert all(
            told in (["acknowledged", "read"], ["acknowledged"], ["read"]) for told in script.told.values()
        )


@pytest.mark.parametrize("seed", range(60))
def test_a_receiving_script_that_starts_again_loses_nothing_without_a_word(seed: int) -> None:
    world = play(seed, 600, ("cut", "sender", "receiver", "script", "script"))
    for name, script in world.scripts.items():
        read = read_by(world, name)
        assert len(read) == len(set(read)), "none twice"
        unread = script.sizes.keys() - set(read)
        assert all(script.told[number][-1] == "lost" for number in unread)
        assert not script.kept


def test_a_receiver_that_reads_nothing_pushes_back_and_goes_on() -> None:
    world = World(1)
    for _ in range(20):
        world.send("a")
    while world.carry("a"):
        pass
    told = world.scripts["a"].told
    acknowledged = [number for number, how in told.items() if how == ["acknowledged"]]
    assert acknowledged == list(range(1, len(acknowledged) + 1))
    assert 1 < len(acknowledged) <= ROOM
    assert world.senders["a"].deadline == math.inf, "it waits for a word, however long"
    world.settle()
    assert set(read_by(world, "a")) == set(range(1, 21))


def test_room_goes_to_each_sender_in_turn() -> None:
    world = World(2)
    for name in "ab":
        for _ in range(10):
            world.send(name)
    while world.carry("a") | world.carry("b"):
        pass
    for _ in range(16):
        assert world.take("odd") or world.take("even")
        while world.carry("a") | world.carry("b"):
            pass
    assert min(len(read_by(world, name)) for name in "ab") >= 5


def test_a_receiver_that_is_silent_for_long_loses_what_it_has_not_acknowledged() -> None:
    world = World(3)
    world.send("a")
    while world.carry("a"):
        pass
    assert world.scripts["a"].told[1] == ["acknowledged"]
    world.send("a")
    world.cut("a")
    sender = world.senders["a"]
    while world.now < of.LOST_SECONDS + of.MAX_RETRY_SECONDS:
        world.now = sender.deadline
        world.tell("a", of.Woke())
        world.up["a"].clear()
    assert world.scripts["a"].told[2] == ["lost"]
    assert list(world.scripts["a"].kept) == [1], "it may still be read"
    world.settle()
    assert read_by(world, "a") == [1]


def test_a_peer_that_is_not_in_the_run_is_refused_but_not_by_a_daemon_that_has_just_begun() -> None:
    sender = of.Sender("r")
    sender.handle(of.Added(1, again=True), 0.0)
    assert sender.handle(of.Added(2), 0.0) == []
    assert sender.handle(of.Unknown("who?"), 0.0) == [of.Notice("r", 2, "refused", "who?")]
    assert sender.deadline < math.inf


def test_a_script_that_has_left_reads_nothing_more() -> None:
    world = World(4)
    for _ in range(9):
        world.send("a")
    while world.carry("a"):
        pass
    world.tell("a", of.Closed("its script has left", True))
    told = world.scripts["a"].told
    assert len(told) == 9
    assert all(how[-1] == "lost" for how in told.values())
    assert world.senders["a"].deadline == math.inf
