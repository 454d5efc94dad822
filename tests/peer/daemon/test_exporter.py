"""`/metrics`: what Prometheus reads, and that the dashboard asks for nothing else."""

from __future__ import annotations

import re
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from architecture.sources import ROOT
from contracts.run import SOON, join_all, together
from equipoise.peer.config import load
from equipoise.peer.embedded import DaemonThread, Peer
from equipoise.peer.errors import ConfigError, EquipoiseError
from fakes.daemon import FakeNetwork


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_what_prometheus_reads_passes_its_parser_and_the_dashboard_asks_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeNetwork().install(monkeypatch)
    address = free_address()
    with Peer(metrics=address) as first, Peer() as second:
        runs = join_all([first, second], [[torch.zeros(3)], [torch.ones(3)]])
        assert all(together(*(lambda run=run: run.average(timeout=SOON) for run in runs)))
        name = runs[0].name
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            families = {one.name: one for one in text_string_to_metric_families(answer.read().decode())}
        with pytest.raises(EquipoiseError, match="Address already in use; name another address"):
            DaemonThread(
                load({"home": first.status().log.replace("daemon.log", "2"), "metrics": address}, {})
            )
    samples = {
        (one.name.removeprefix("equipoise_"), *sorted(one.labels.values())): one.value
        for family in families.values()
        for one in family.samples
    }
    assert (samples["rounds_ok_total", name], samples["rounds_failed_total", name]) == (1.0, 0.0)
    assert samples["rounds_counted_total", name] == samples["samples_total", name] == 1.0
    assert samples["group_size", name] == 2.0
    assert samples["memory_bytes",] > 1e6
    told = {name for family in families.values() for name in (family.name, f"{family.name}_total")}
    asked = set(re.findall(r"equipoise_\w+", (ROOT / "scripts" / "grafana.json").read_text()))
    assert asked <= told
    assert len(asked) >= 10


def test_only_an_address_of_this_machine_is_taken(tmp_path: Path) -> None:
    for wrong in ("0.0.0.0:9464", "9464", "example.org:9464", "127.0.0.1:"):
        with pytest.raises(ConfigError, match="expected an address of this machine alone"):
            load({"home": tmp_path, "metrics": wrong}, {})
    assert load({"home": tmp_path, "metrics": "[::1]:9464"}, {}).config.metrics


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeNetwork().install(monkeypatch)
    monkeypatch.delitem(sys.modules, "equipoise.peer.daemon.exporter", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'equipoise\[metrics\]'"):
        DaemonThread(load({"home": tmp_path, "metrics": "127.0.0.1:9464"}, {}))
