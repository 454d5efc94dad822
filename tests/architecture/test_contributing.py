"""What CONTRIBUTING shows of new codecs, rules, outer steps and strategies: each needs no change to another file."""

from __future__ import annotations

import asyncio
import re

import torch

from architecture.sources import ROOT
from equipoise.averaging.aio.router import Router
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outer import parse_outer
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from fakes.cluster import company
from fakes.memory import FakeIdentity, Net
from fakes.vectors import averaged

MAX_LINES = 30
"""Most lines of each that are not blank, imports and the line that registers it included."""

VALUES = 1000


async def test_a_codec_a_rule_an_outer_step_and_a_strategy_of_thirty_lines_work_together() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    assert len(blocks) == 5  # tests/e2e/test_channels.py runs that of elastic averaging.
    for block in blocks:
        assert sum(bool(line.strip()) for line in block.splitlines()) <= MAX_LINES
        exec(compile(block, "CONTRIBUTING.md", "exec"), {})
    options = RunOptions(strategy="full", rule="midrange", codec="hundredths", part_values=256)
    spec = RunSpec.create("run", Schema.of({"w": torch.zeros(VALUES)}), options)
    assert (spec.options.strategy, spec.options.rule) == ("full:members=3", "midrange")
    net, names = Net(), ["a", "b", "c"]
    routers = []
    for name in names:
        transport, directory = net.peer(name)
        routers.append(Router(transport, directory, FakeIdentity(name)))
    runs = [await router.join(spec) for router in routers]
    await net.acquainted(spec.name, names)
    await company(runs)
    given = [torch.full((VALUES,), value) for value in (1.0, 2.0, 5.0)]
    results = [torch.empty(VALUES) for _ in runs]
    averaging = [
        averaged(run, own, out, 1.0, 20.0) for run, own, out in zip(runs, given, results, strict=True)
    ]
    outcomes = await asyncio.gather(*averaging)
    assert all(outcome.ok for outcome in outcomes), outcomes[0].reason
    assert len({outcome.digest for outcome in outcomes}) == 1
    assert all(torch.equal(out, torch.full((VALUES,), 3.0)) for out in results)
    await asyncio.gather(*(router.stop() for router in routers))
    agreed, step = {"w": torch.ones(3)}, parse_outer("signs:eta=0.5")
    step.step(agreed, {"w": torch.tensor([2.0, 0.0, -0.1])})
    assert agreed["w"].tolist() == [0.5, 1.0, 1.5]
    assert str(step) == "signs:eta=0.5,beta=0.9"
