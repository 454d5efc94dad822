"""The tensors of a run, bound to its encoded vectors."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from equipoise.averaging.rules import parse_rule
from equipoise.averaging.schema import SchemaError
from equipoise.compression import parse_codec
from equipoise.compression.device_reduce import DeviceReducer
from equipoise.peer.client.accumulate import Accumulator
from equipoise.peer.client.safetensors_io import pack
from equipoise.peer.client.tensors import Binding, copies_of, named_gradients
from equipoise.peer.training.image import frozen_of

INT8 = parse_codec("int8")


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "bias": torch.tensor([7.0, 8.0], dtype=torch.float64),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
    }


def test_shift_moves_tensors_by_a_difference_and_keeps_what_was_added_meanwhile() -> None:
    named = tensors()
    binding, copies = Binding(named, parse_codec("int8")), copies_of(named)
    mean = memoryview(bytearray(binding.size))
    binding.averages.encode({name: 3 * tensor for name, tensor in tensors().items()}, mean)
    for tensor in named.values():
        tensor.add_(1.0)
    binding.shift(mean, named, copies)
    for name, tensor in tensors().items():
        assert torch.equal(named[name], 3 * tensor + 1), name
        assert named[name].dtype == tensor.dtype


def test_a_mean_that_was_read_in_inference_mode_is_read_into_again_outside_of_it() -> None:
    model = torch.nn.Linear(3, 2)
    binding, mean = Binding(model, parse_codec("fp32")), {}
    result = memoryview(bytearray(binding.size))
    binding.steps.encode({name: torch.ones_like(one) for name, one in model.named_parameters()}, result)
    with torch.inference_mode():
        binding.read_step(result, binding.stepped(), mean)
    binding.read_step(result, binding.stepped(), mean)
    for name, parameter in model.named_parameters():
        assert torch.equal(mean[name], torch.ones_like(parameter))
        assert parameter.grad is not None
        parameter.grad.add_(1.0)


def test_wrappers_of_a_module_leave_names_as_they_are() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    codec, plain = parse_codec("fp32"), Binding(model, parse_codec("fp32"))
    compiled: Any = torch.compile(model)
    for wrapped in (compiled, torch.nn.DataParallel(model), torch.nn.DataParallel(compiled)):
        binding = Binding(wrapped, codec)
        assert binding.schema == plain.schema
        assert binding.gradients == plain.gradients
        assert binding.buffer_schema() == plain.buffer_schema()
        assert named_gradients(wrapped).keys() == named_gradients(model).keys()


def test_wrappers_of_parts_of_a_module_leave_names_as_they_are() -> None:
    def model(*wraps: Any) -> Any:
        first, embedding, last = (wrap(part) for wrap, part in zip(wraps, parts(), strict=True))
        return nn.ModuleDict({"module": nn.Sequential(first, last), "embedding": embedding})

    def parts() -> tuple[nn.Module, ...]:
        torch.manual_seed(0)
        embedding = nn.Embedding(5, 3, sparse=True)
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), embedding, nn.Linear(3, 1)

    codec, bare = parse_codec("fp32"), model(*(lambda part: part,) * 3)
    expected = Binding(bare, codec)
    assert expected.sparse == {"embedding.weight"}
    assert "module.0.1.running_mean" in [tensor.name for tensor in expected.buffer_schema().tensors]
    for wraps in (
        (checkpoint_wrapper, nn.DataParallel, torch.compile),
        (nn.DataParallel, checkpoint_wrapper, lambda part: checkpoint_wrapper(torch.compile(part))),
    ):
        wrapped = model(*wraps)
        binding = Binding(wrapped, codec)
        assert binding.schema == expected.schema
        assert binding.gradients == expected.gradients
        assert binding.buffer_schema() == expected.buffer_schema()
        assert binding.sparse == expected.sparse
        assert named_gradients(wrapped).keys() == named_gradients(bare).keys()
        wrapped["module"][1].requires_grad_(False)
        bare["module"][1].requires_grad_(False)
        assert frozen_of(wrapped) == frozen_of(bare) != ()
        bare["module"][1].requires_grad_(True)


def test_tied_weights_in_a_mapping_are_one_tensor_that_moves_once() -> None:
    """Two peers hold 1 and 3 and make local steps of 10 while they exchange: 2 + 10, not 2 + 10 + 10."""
    tied = nn.ModuleDict({"embedding": nn.Embedding(300, 1), "head": nn.Linear(1, 300, bias=False)})
    tied["head"].weight = tied["embedding"].weight
    shared: Any = tied["head"].weight
    nn.init.ones_(shared)
    for named in (tied.state_dict(), dict(tied.named_parameters(remove_duplicate=False))):
        assert list(named) == ["embedding.weight", "head.weight"]
        binding = Binding(named, parse_codec("fp32"))
        assert binding.schema == Binding(tied, parse_codec("fp32")).schema
        here, mean = binding.tensors(), memoryview(bytearray(binding.size))
        with torch.no_grad():
            here["embedding.weight"].fill_(1.0)
        copies = copies_of(here)
        binding.averages.encode({name: 2 * torch.ones_like(one) for name, one in here.items()}, mean)
        with torch.no_grad():
            shared.add_(10.0)
        binding.shift(mean, here, copies)
        assert torch.equal(shared, torch.full((300, 1), 12.0))


def shared_memory() -> list[tuple[dict[str, torch.Tensor], str]]:
    whole, matrix = torch.zeros(1000), torch.zeros(30, 40)
    again = nn.Parameter(whole[:300])
    return [
        ({"all": whole, "part": whole[:300]}, "'all' and 'part' share memory: leave one of them out"),
        ({"part": whole[:300], "all": whole}, "'part' and 'all' share memory"),
        ({"w": matrix, "t": matrix.t()}, "'w' and 't' share memory"),
        ({"even": whole[::2], "odd": whole[1::2], "some": whole[6:9]}, "'odd' and 'some' share memory"),
        ({"bytes": whole[:10], "short": whole.view(torch.float16)[18:30]}, "'bytes' and 'short' share"),
        ({"one": nn.Parameter(whole[:300]), "two": again}, "'one' and 'two' are two parameters that share"),
        ({"steps": whole.unfold(0, 3, 1)}, "'steps' is expanded"),
    ]


@pytest.mark.parametrize(("named", "told"), shared_memory())
def test_tensors_that_share_a_part_of_their_memory_are_refused_by_name(
    named: dict[str, torch.Tensor], told: str
) -> None:
    with pytest.raises(SchemaError, match=told):
        Binding(named, parse_codec("fp32"))


def test_parts_of_one_memory_that_do_not_meet_are_tensors_like_others() -> None:
    flat, matrix = torch.zeros(1000), torch.zeros(30, 40)
    named = {
        "a": flat[:300],
        "b": flat[300:],
        "left": matrix[:, :10],
        "right": matrix[:, 10:],
        "none": flat[5:5],
    }
    assert [tensor.name for tensor in Binding(named, parse_codec("fp32")).schema.tensors] == list(named)
    assert len(Binding(nn.LSTM(3, 4), parse_codec("fp32")).schema.tensors) == 4


def test_each_frozen_parameter_has_a_line() -> None:
    model = nn.Linear(2, 3)
    assert frozen_of(model) == ()
    model.weight.requires_grad_(False)
    (line,) = frozen_of(model)
    assert re.fullmatch(r"'weight' float32 \[3, 2\], frozen, values [0-9a-f]{16}", line)
    assert frozen_of(model, base="tiny") == ()
    model.weight.data = model.weight.data.t().contiguous().t()
    assert frozen_of(model) == (line,), "strides do not matter"
    model.weight.data[0, 0] += 1
    assert frozen_of(model) != (line,)
    assert frozen_of(model.to("meta"))[0].startswith("'weight' float32 [3, 2], frozen")


def test_parameters_that_hold_no_whole_tensor_are_refused_with_a_way_out() -> None:
    class Shard(torch.Tensor):
        def full_tensor(self) -> None: ...

    with pytest.raises(
        SchemaError, match=r"'weight' has no shape yet \(a lazy module\): run the model forward once"
    ):
        Binding(torch.nn.LazyLinear(3), parse_codec("fp32"))
    with pytest.raises(SchemaError, match=r"'w' is one process's shard \(DTensor\): join with whole tensors"):
        Binding({"w": torch.zeros(3).as_subclass(Shard)}, parse_codec("fp32"))
    with pytest.raises(SchemaError, match="got int64; join with a mapping that leaves it out"):
        Binding({"w": torch.zeros(3, dtype=torch.int64)}, parse_codec("fp32"))


def test_preparing_encodes_and_decodes_with_the_codec_and_in_fp32() -> None:
    Binding(tensors(), parse_codec("int8")).prepare()


def test_a_scripts_defaults_for_new_tensors_change_nothing() -> None:
    """Scripts have torch make tensors on a GPU, or in bf16, where they say nothing else."""

    def everything() -> list[torch.Tensor]:
        model = torch.nn.Linear(300, 70, dtype=torch.float32, device="cpu")
        binding, accumulator = (
            Binding(model, parse_codec("int8")),
            Accumulator(dict(model.named_parameters())),
        )
        binding.prepare()
        named = {name: torch.full_like(one, 0.25) for name, one in model.named_parameters()}
        accumulator.add(named, 2.0)
        stored = memoryview(bytearray(binding.size))
        binding.write_step(accumulator, stored)
        gradients: dict[str, torch.Tensor] = {}
        binding.read_step(stored, binding.stepped(), gradients)
        binding.averages.encode(named, stored)
        binding.averages.decode(stored, named)
        image = pack({**named, **gradients}, {})
        payloads, mean = [stored[: INT8.encoded_size(512)]] * 3, bytearray(INT8.encoded_size(512))
        DeviceReducer(torch.device("cpu")).reduce(
            INT8, payloads, [0.2, 0.3, 0.5], np.empty(512, np.float32), mean
        )
        median = parse_rule("median").reduce(
            torch.stack([image[8:].float()] * 3), torch.ones(3, device="cpu")
        )
        return [
            *named.values(),
            *gradients.values(),
            image,
            torch.frombuffer(mean, dtype=torch.uint8),
            median.values,
        ]

    def with_defaults() -> list[torch.Tensor]:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")  # Of this thread alone.
        return everything()

    expected = everything()
    try:
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(with_defaults).result()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert {one.dtype for one in found[:4]} == {torch.float32}
