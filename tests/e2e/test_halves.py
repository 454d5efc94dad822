"""Peers with half precision and frozen bases in other dtypes, on real daemons."""

from __future__ import annotations

import copy

import pytest
import torch

from e2e.swarm import DaemonProcess
from e2e.threads import together
from equipoise.peer import connect
from fakes.adapted import Adapted
from oracles.training import Batch, batch_of, loss_of, network

pytestmark = pytest.mark.slow

PEERS, SAMPLES, STEPS = 2, 4, 10


def train(
    place: DaemonProcess, at: int, name: str, model: torch.nn.Module, base: str, masters: bool
) -> dict[str, torch.Tensor]:
    """What this peer's optimizer has stepped, by name."""
    trained = [one for one in model.parameters() if one.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-5)
    with connect(place.home) as peer, peer.join(name, model, codec="fp32", base=base) as run:
        optimizer = run.optimizer(adamw, target_batch_size=1, batch_size=SAMPLES, wait_for=1, masters=masters)
        for step in range(STEPS):
            inputs, targets = batch_of(at, step, SAMPLES)
            optimizer.zero_grad()
            kind = trained[0].dtype
            loss_of(model, Batch(inputs.to(kind), targets.to(kind))).backward()
            optimizer.step()
        assert optimizer.in_step, optimizer.reason
        return {key: one.detach().clone() for key, one in optimizer.masters.tensors.items()}


@pytest.mark.parametrize("forms", [("bf16", "4 bit"), ("fp32", "bf16")])
def test_peers_whose_bases_differ_in_dtype_meet_by_its_name(
    places: list[DaemonProcess], forms: tuple[str, str]
) -> None:
    models = [Adapted(form) for form in forms]
    before = copy.deepcopy(dict(models[0].adapter.named_parameters()))
    same = [" ".join(forms)] * PEERS, models, ["tiny"] * PEERS, [False] * PEERS
    first, second = together(train, places, range(PEERS), *same)
    assert first.keys() == second.keys() == {"adapter.weight", "adapter.bias"}
    assert all(torch.equal(one, second[key]) for key, one in first.items())
    assert not torch.equal(first["adapter.weight"], before["weight"])


def test_masters_in_bf16_are_those_of_a_peer_in_fp32(places: list[DaemonProcess]) -> None:
    models = [network().bfloat16(), network().bfloat16().float()]
    values = ["masters"] * PEERS, models, [""] * PEERS, [True] * PEERS
    first, second = together(train, places, range(PEERS), *values)
    assert all(torch.equal(one, second[key]) for key, one in first.items())
    assert all(torch.equal(one, first[key].bfloat16()) for key, one in models[0].named_parameters())
    start = network().bfloat16().float().state_dict()
    assert all(float((one - start[key]).abs().max()) > 0 for key, one in first.items())
