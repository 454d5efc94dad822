"""Carries out one attempt: the machine decides, this sends, connects and keeps the time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from equipoise.dht.direct.channel import DirectChannel
from equipoise.dht.direct.dialling import said, shown
from equipoise.dht.punch.machine import (
    Action,
    Broke,
    Event,
    Finish,
    Heard,
    Measure,
    Measured,
    Missed,
    Opened,
    Punch,
    Say,
    Tick,
    Try,
)
from equipoise.dht.punch.messages import MAX_MESSAGE_BYTES, Malformed, decode, encode
from equipoise.dht.punch.places import NoPlace, Place
from equipoise.dht.punch.port import SharedPort
from equipoise.dht.streams import Stream, StreamClosed, receive_message, send_message

MAX_EVENTS = 8
"""That wait to be handled; whoever sends faster waits too."""

OpenChannel = Callable[[SharedPort, Place], Awaitable[DirectChannel]]
"""Connects from a port to a place and shakes hands there, until it is cancelled; raises OSError if that fails."""


class Coordination:
    """One side of one attempt.

    Attributes:
        channel: What came of it; None before, and if nothing did.
        tries: How many tries it took.
    """

    def __init__(self, stream: Stream, begins: bool, mirrors: Sequence[Place], opens: OpenChannel) -> None:
        """`mirrors` are direct listeners of public peers; `begins` for the side that speaks first on `stream`."""
        self.channel: DirectChannel | None = None
        self._stream = stream
        self._machine = Punch(begins)
        self._mirrors = mirrors
        self._opens = opens
        self._port = SharedPort()
        self._events: asyncio.Queue[Event] = asyncio.Queue(MAX_EVENTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._trying: asyncio.Task[None] | None = None

    @property
    def tries(self) -> int:
        """How many tries were begun."""
        return self._machine.tries

    async def run(self) -> str:
        """Return why there is no channel; empty if there is one."""
        try:
            self._spawn(self._listen())
            reason = await self._go_on()
        except StreamClosed as error:
            reason = f"the relayed stream has ended: {error}"
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._port.close()
        # One that was opened at the last moment is as good.
        return "" if self.channel is not None else reason

    async def _go_on(self) -> str:
        loop = asyncio.get_running_loop()
        actions = self._machine.start(loop.time())
        while True:
            for action in actions:
                if isinstance(action, Finish):
                    return action.reason
                await self._perform(action)
            actions = self._machine.handle(await self._next(), loop.time())

    async def _next(self) -> Event:
        try:
            async with asyncio.timeout_at(self._machine.deadline):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    async def _perform(self, action: Action) -> None:
        match action:
            case Say(message):
                await send_message(self._stream, encode(message))
            case Measure():
                self._spawn(self._measure())
            case Try(targets):
                if self._trying is not None:
                    self._trying.cancel()
                self._trying = self._spawn(self._try(targets))

    async def _listen(self) -> None:
        try:
            while True:
                await self._stream.wait_readable()
                data = await receive_message(self._stream, MAX_MESSAGE_BYTES)
                await self._events.put(Heard(decode(data)))
        except (StreamClosed, Malformed) as error:
            await self._events.put(Broke(str(error)))

    async def _measure(self) -> None:
        try:
            places = await self._port.measure(self._mirrors)
        except (NoPlace, OSError) as error:
            await self._events.put(Measured(None, said(error)))
        else:
            await self._events.put(Measured(places))

    async def _try(self, targets: Sequence[Place]) -> None:
        failures = await asyncio.gather(*(self._try_one(place) for place in targets))
        if self.channel is None:
            await self._events.put(Missed("; ".join(failures)))

    async def _try_one(self, place: Place) -> str:
        try:
            channel = await self._opens(self._port, place)
        except OSError as error:
            return f"{shown(place)}: {said(error)}"
        if self.channel is not None:
            channel.close()
            return ""
        self.channel = channel
        await self._events.put(Opened())
        return ""

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
