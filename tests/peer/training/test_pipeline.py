"""The tensors of a pipeline's messages: targets travel exactly, small gradients are not lost, the rest is refused."""

from __future__ import annotations

import pytest
import torch

from equipoise.averaging.pipeline import Backward, Forward
from equipoise.peer.client.safetensors_io import DTYPES
from equipoise.peer.training.pipeline import Pipeline, _content, _micro_batch

FORWARD = Forward(0, "a/0", 3, 1)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("shape", [(3,), (3, 5)], ids=["a label each", "several"])
def test_targets_of_every_dtype_travel_as_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    target = torch.randint(0, 2, shape).to(torch.float32).to(dtype)
    sent = _content(FORWARD, {"out": torch.ones(3, 2), "target": target})
    assert [one for one in sent.values() if one.is_floating_point()] == [sent["out"]], "a codec leaves others"
    found = _micro_batch(sent, 3)
    assert found["in"] is sent["out"]
    assert (found["target"].dtype, found["target"].shape) == (dtype, shape)
    assert torch.equal(found["target"].view(torch.uint8), target.view(torch.uint8))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 0.0])
def test_gradients_travel_without_their_exponent(scale: float) -> None:
    gradient = torch.tensor([[1.0, -0.25], [0.5, 0.0]]) * scale
    sent = _content(Backward(0, "a/0", 1.0), {"gradient": gradient})
    assert 0.5 <= float(sent["gradient"].abs().max()) < 1 or not scale
    assert torch.equal(torch.ldexp(sent["gradient"], sent["exponent"]), gradient)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"target F32": torch.zeros(3)},
        {"target F32": torch.zeros(3, 3, dtype=torch.uint8)},
        {"target F32": torch.tensor(1, dtype=torch.uint8)},
        {"target float99": torch.zeros(3, 4, dtype=torch.uint8)},
        {"target F32": torch.zeros(2, 4, dtype=torch.uint8)},
    ],
    ids=["none", "no bytes", "part of a value", "no samples", "no dtype", "too few"],
)
def test_what_is_no_micro_batch_is_not_taken(tensors: dict[str, torch.Tensor]) -> None:
    assert _micro_batch({"out": torch.ones(3, 2), **tensors}, 3) == {}
    whole = {"out": torch.ones(2, 2), "target F32": torch.zeros(3, 4, dtype=torch.uint8)}
    assert _micro_batch(whole, 3) == {}


@pytest.mark.parametrize(
    "wrong", [{"stage": 2}, {"stage": "last"}, {"schedule": "zb"}, {"micro_batches": 0}, {"stages": 1}]
)
def test_arguments_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    stages = [torch.nn.Linear(2, 2)] * int(str(wrong.pop("stages", 2)))
    with pytest.raises(ValueError, match=r"expected 2 to 64 stages|expected 'gpipe' or '1f1b'"):
        Pipeline(None, stages, **wrong)  # type: ignore[arg-type]
