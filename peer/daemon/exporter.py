"""`/metrics` for Prometheus, of the package prometheus-client: one collector over `Status`.

Imported only where the setting `metrics` asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from equipoise.averaging.outcome import Outcome
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.status import RunStatus, Status

ANSWER_SECONDS = 5.0
"""Longest time for the event loop to make a snapshot: Prometheus waits for ten."""

Values = Sequence[tuple[tuple[str, ...], float]]
"""Numbers, each with the values of its labels."""

Look = Callable[[Status], Values]


def _each(labels: Callable[[RunStatus], list[tuple[tuple[str, ...], float]]]) -> Look:
    return lambda status: [value for run in status.runs for value in labels(run)]


def _given(field: str) -> Look:
    return lambda status: [((run,), getattr(given, field)) for run, given in status.given.items()]


def _last(count: Callable[[Outcome], float]) -> Look:
    return _each(lambda run: [((run.name,), count(run.last))] if run.last is not None else [])


def _by_name(numbers: Callable[[Outcome], dict[str, float]]) -> Look:
    def named(run: RunStatus) -> list[tuple[tuple[str, ...], float]]:
        found = {} if run.last is None else numbers(run.last)
        return [((run.name, key), number) for key, number in found.items()]

    return _each(named)


FAMILIES: tuple[tuple[Any, str, str, str, Look], ...] = (
    (Gauge, "up_seconds", "Since the daemon started.", "", lambda status: [((), status.uptime)]),
    (Gauge, "memory_bytes", "Resident, of the daemon.", "", lambda status: [((), status.memory)]),
    (Gauge, "open_files", "Of the daemon.", "", lambda status: [((), status.files)]),
    (Gauge, "peers", "In contact.", "", lambda status: [((), len(status.swarm.connected))]),
    (Gauge, "scripts", "That are connected.", "", lambda status: [((), status.clients)]),
    (Gauge, "warnings", "For a person to solve.", "", lambda status: [((), len(status.warnings))]),
    (Gauge, "state", "1 for the daemon's state.", "state", lambda status: [((status.swarm.state,), 1)]),
    (Counter, "rounds_ok", "Ended here in a mean.", "run", _each(lambda run: [((run.name,), run.rounds_ok)])),
    (Counter, "rounds_failed", "Did not.", "run", _each(lambda run: [((run.name,), run.rounds_failed)])),
    (Counter, "rounds_known", "Of the run, since this peer's first.", "run", _given("rounds")),
    (Counter, "rounds_counted", "With this peer's contribution in the mean.", "run", _given("counted")),
    (Counter, "samples", "Weights of this peer that counted.", "run", _given("samples")),
    (Counter, "contributed_bytes", "Encoded, of what counted.", "run", _given("bytes")),
    (Gauge, "group_size", "Of the last round.", "run", _last(lambda last: len(last.group))),
    (Gauge, "sent_bytes", "In the last round.", "run", _last(lambda last: last.bytes_sent)),
    (Gauge, "received_bytes", "In the last round.", "run", _last(lambda last: last.bytes_received)),
    (Gauge, "seconds", "Of the last round.", "run phase", _by_name(lambda last: last.seconds)),
    (Gauge, "metric", "Reported for the last round, averaged.", "run name", _by_name(lambda last: last.metrics)),
)  # fmt: skip


class Collector:
    """Makes Prometheus' families of the daemon's `Status`, at each scrape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        """The families of one scrape."""
        status = self._status()
        for kind, name, told, labels, look in FAMILIES:
            family = kind(f"equipoise_{name}", told, labels=labels.split())
            for values, number in look(status):
                family.add_metric(values, number)
            yield family


def export(address: str, status: Callable[[], Status]) -> Callable[[], None]:
    """Answer Prometheus at `HOST:PORT`, in threads; returns what ends that. Call it in the loop that makes `status`.

    Raises:
        EquipoiseError: The address cannot be used.
    """
    loop = asyncio.get_running_loop()

    async def snapshot() -> Status:
        return status()

    def ask() -> Status:
        return asyncio.run_coroutine_threadsafe(snapshot(), loop).result(ANSWER_SECONDS)

    registry, (host, _, port) = CollectorRegistry(), address.rpartition(":")
    registry.register(Collector(ask))
    try:
        server, _ = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        why = f"metrics: cannot listen on {address}: {error.strerror}"
        raise EquipoiseError(why, "name another address in the setting metrics") from error

    def end() -> None:
        server.shutdown()
        server.server_close()

    return end
