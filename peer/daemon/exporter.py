"""`/metrics` for Prometheus: one collector over `Status`. Imported only where the setting `metrics` asks for it.

It needs the package prometheus-client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from equipoise.averaging.outcome import Outcome
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.status import Status

ANSWER_SECONDS = 5.0
"""Longest time for the event loop to make a snapshot: Prometheus waits for ten."""

PREFIX = "equipoise_"

Values = Sequence[tuple[tuple[str, ...], float]]
"""Numbers, each with the values of its labels."""

DAEMON: dict[str, tuple[str, Callable[[Status], float]]] = {
    "up_seconds": ("Seconds since the daemon started.", lambda status: status.uptime),
    "memory_bytes": ("Resident bytes of the daemon.", lambda status: status.memory),
    "open_files": ("Open descriptors of the daemon.", lambda status: status.files),
    "peers": ("Peers in contact.", lambda status: len(status.swarm.connected)),
    "scripts": ("Scripts that are connected.", lambda status: status.clients),
    "warnings": ("Problems for a person to solve.", lambda status: len(status.warnings)),
}
"""Gauges of the daemon."""

GIVEN = {
    "rounds_known": ("Rounds since this peer's first.", "rounds"),
    "rounds_counted": ("Rounds in whose mean this peer's contribution counts.", "counted"),
    "samples": ("Weights of this peer that counted.", "samples"),
    "contributed_bytes": ("Encoded bytes of the contributions that counted.", "bytes"),
}
"""Counters of a run, by fields of `Given`."""

LAST: dict[str, tuple[str, Callable[[Outcome], float]]] = {
    "group_size": ("Members of the last group.", lambda last: len(last.group)),
    "sent_bytes": ("Bytes that the last round sent.", lambda last: last.bytes_sent),
    "received_bytes": ("Bytes that the last round received.", lambda last: last.bytes_received),
}
"""Gauges of a run's last round."""


class Collector:
    """Makes Prometheus' families of the daemon's `Status`, at each scrape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        """The families of one scrape."""

        def family(kind: Any, name: str, told: str, labels: tuple[str, ...], values: Values) -> Any:
            made = kind(PREFIX + name, told, labels=labels)
            for label, value in values:
                made.add_metric(label, value)
            return made

        status = self._status()
        for name, (told, of) in DAEMON.items():
            yield family(GaugeMetricFamily, name, told, (), [((), of(status))])
        yield family(GaugeMetricFamily, "state", "1 for the state.", ("state",), [((status.swarm.state,), 1)])
        ended = [((run.name, "ok"), run.rounds_ok) for run in status.runs]
        ended += [((run.name, "failed"), run.rounds_failed) for run in status.runs]
        yield family(CounterMetricFamily, "rounds", "Rounds that have ended here.", ("run", "result"), ended)
        for name, (told, field) in GIVEN.items():
            values = [((run,), getattr(given, field)) for run, given in status.given.items()]
            yield family(CounterMetricFamily, name, told, ("run",), values)
        lasts = {run.name: run.last for run in status.runs if run.last is not None}
        for name, (told, count) in LAST.items():
            yield family(
                GaugeMetricFamily, name, told, ("run",), [((r,), count(o)) for r, o in lasts.items()]
            )
        seconds = [((run, phase), took) for run, one in lasts.items() for phase, took in one.seconds.items()]
        yield family(GaugeMetricFamily, "seconds", "Of the last round, by phase.", ("run", "phase"), seconds)
        told = "What peers reported for the last round, averaged."
        metrics = [((run, name), value) for run, one in lasts.items() for name, value in one.metrics.items()]
        yield family(GaugeMetricFamily, "metric", told, ("run", "name"), metrics)


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
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        why = f"metrics: cannot listen on {address}: {error.strerror}"
        raise EquipoiseError(why, "name another address in the setting metrics") from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end
