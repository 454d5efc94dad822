"""The tensors of a run, bound to its encoded vectors."""

from __future__ import annotations

import torch

from equipoise.compression import parse_codec
from equipoise.peer.tensors import Binding, copies_of


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


def test_preparing_encodes_and_decodes_with_the_codec_and_in_fp32() -> None:
    Binding(tensors(), parse_codec("int8")).prepare()
