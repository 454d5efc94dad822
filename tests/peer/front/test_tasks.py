"""The driver that runs every machine."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Sequence

import pytest

from equipoise import tasks as module
from equipoise.tasks import Driver, Failures, TaskSet, failures


class Echo:
    """Answers a word with its letters, and WOKE with nothing."""

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.woken_at: list[float] = []

    def handle(self, event: str, now: float) -> Sequence[str]:
        if event == "WOKE":
            self.deadline = math.inf
            self.woken_at.append(now)
            return "w"
        return event


async def test_actions_that_an_action_leads_to_come_before_those_behind_it() -> None:
    done: list[str] = []

    def perform(action: str) -> None:
        done.append(action)
        if action == "b":
            driver.tell("xy")

    driver = Driver(Echo(), perform)
    driver.tell("abc")
    assert done == ["a", "b", "x", "y", "c"]


async def test_a_machine_is_woken_once_and_not_before_its_deadline() -> None:
    loop = asyncio.get_running_loop()
    machine, woken = Echo(loop.time()), asyncio.Event()
    deadline = machine.deadline
    driver = Driver(machine, lambda action: woken.set(), lambda: "WOKE")
    driver.perform("")
    await woken.wait()
    assert len(machine.woken_at) == 1
    assert machine.woken_at[0] >= deadline


async def test_a_deadline_that_moves_later_is_not_missed() -> None:
    loop = asyncio.get_running_loop()
    machine, woken = Echo(loop.time()), asyncio.Event()
    driver = Driver(machine, lambda action: woken.set() if action == "w" else None, lambda: "WOKE")
    driver.tell("a")
    machine.deadline = later = loop.time() + 0.01
    driver.tell("b")
    await woken.wait()
    assert machine.woken_at[0] >= later


async def test_a_driver_that_has_stopped_tells_nothing_and_does_not_wake() -> None:
    loop = asyncio.get_running_loop()
    machine, done = Echo(loop.time()), []
    driver = Driver(machine, done.append, lambda: "WOKE")
    driver.perform("")
    driver.stop()
    driver.tell("a")
    passed = asyncio.Event()
    loop.call_later(0, passed.set)
    await passed.wait()
    assert not done
    assert not machine.woken_at


async def test_the_owner_of_a_stopped_driver_is_freed_at_once() -> None:
    class Owner:
        def __init__(self) -> None:
            self.driver = Driver(Echo(), self.perform, self.wake)

        def perform(self, action: str) -> None:
            self.driver.stop()

        def wake(self) -> str:
            return "WOKE"

    owner = Owner()
    gone = weakref.ref(owner)
    owner.driver.tell("ab")
    del owner
    assert gone() is None


async def test_a_task_that_fails_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def faulty() -> None:
        raise RuntimeError("a bug")

    tasks = TaskSet()
    tasks.spawn(faulty())
    await tasks.join()
    assert not len(tasks)
    assert "faulty" in caplog.text
    assert "a bug" in caplog.text


async def test_a_task_that_is_kept_is_started_again_and_its_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_RESTART_SECONDS", 0.0)
    noted = Failures()
    failures.set(noted)
    tasks, begun, again = TaskSet(), [], asyncio.Event()

    async def work() -> None:
        begun.append(len(begun))
        if len(begun) < 3:
            raise OSError(24, "Too many open files")
        again.set()
        await asyncio.Event().wait()

    tasks.keep(work)
    await again.wait()
    assert len(tasks) == 1
    await tasks.stop()

    (warning,) = noted.warnings()
    assert warning.startswith("the task test_a_task_that_is_kept")
    assert warning.endswith("failed (OSError: [Errno 24] Too many open files); see the log")
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    monkeypatch.setattr(module, "SHOWN_SECONDS", -1.0)
    assert noted.warnings() == ()
