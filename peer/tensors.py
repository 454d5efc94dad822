"""What a user calls `tensors` and `gradients`: a module, a mapping or a list, as named tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from equipoise.averaging.schema import Schema, SchemaError, TensorSpec, tensors_by_name

Tensors = torch.nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
Gradients = torch.nn.Module | Mapping[str, torch.Tensor | None] | Sequence[torch.Tensor | None]


def named_tensors(tensors: Tensors) -> dict[str, torch.Tensor]:
    """What `average` exchanges: of a module all parameters and its persistent floating-point buffers.

    Raises:
        SchemaError: It is none of these things, or a tensor cannot be written in place.
    """
    if isinstance(tensors, torch.nn.Module):
        named = _module_state(tensors)
    elif isinstance(tensors, Mapping | Sequence) and not isinstance(tensors, str | bytes):
        named = tensors_by_name(tensors)
    else:
        kind = type(tensors).__name__
        raise SchemaError(
            f"expected an nn.Module, a mapping of names to tensors or a list of tensors, got {kind}"
        )
    for name, tensor in named.items():
        if isinstance(tensor, torch.Tensor):
            _require_writable(name, tensor)
    return named


def stepped_tensors(tensors: Tensors) -> dict[str, torch.Tensor]:
    """What `step` exchanges gradients of: of a module its parameters that require gradients, else all tensors."""
    if isinstance(tensors, torch.nn.Module):
        return {name: parameter for name, parameter in tensors.named_parameters() if parameter.requires_grad}
    return named_tensors(tensors)


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's floating-point buffers that its state_dict holds, as BatchNorm's statistics; no counters."""
    kept = module.state_dict(keep_vars=True)
    floating = ((name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point())
    return {name: buffer for name, buffer in floating if name in kept}


def sparse_gradients(module: torch.nn.Module) -> frozenset[str]:
    """Names of parameters whose `.grad` is sparse on every peer: weights of sparse embeddings that nothing else uses.

    It follows from the module alone: peers whose gradients differ in layout would not step alike.
    """
    found = {
        f"{path}.weight" if path else "weight"
        for path, part in module.named_modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
    }
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    return frozenset(
        name for name, parameter in module.named_parameters() if name in found and uses[id(parameter)] == 1
    )


def named_gradients(gradients: Gradients) -> dict[str, torch.Tensor | None]:
    """Gradients by the names of what they belong to: of a module the `.grad` of `stepped_tensors`.

    Raises:
        SchemaError: It is none of these things.
    """
    if isinstance(gradients, torch.nn.Module):
        return {name: parameter.grad for name, parameter in stepped_tensors(gradients).items()}
    if isinstance(gradients, Mapping):
        return dict(gradients)
    if isinstance(gradients, Sequence) and not isinstance(gradients, str | bytes):
        return {str(index): gradient for index, gradient in enumerate(gradients)}
    kind = type(gradients).__name__
    raise SchemaError(
        f"expected an nn.Module, a mapping of names to gradients or a list of gradients, got {kind}"
    )


def gradient_schema(tensors: Mapping[str, torch.Tensor]) -> Schema:
    """The schema of the gradients of `tensors`: they are summed and exchanged in fp32, whatever the tensors are."""
    return Schema(tuple(TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()))


def buffer_schema(module: torch.nn.Module) -> Schema:
    """The schema of a module's buffers as `step` averages them: in fp32, whatever they are."""
    named = persistent_buffers(module)
    return Schema(
        tuple(TensorSpec(name, tuple(tensor.shape), "float32", True) for name, tensor in named.items())
    )


def tensor_schema(tensors: Tensors) -> Schema:
    """The schema of what `average` exchanges.

    Raises:
        SchemaError: There are no tensors, or one cannot be averaged; names it.
    """
    buffers = persistent_buffers(tensors) if isinstance(tensors, torch.nn.Module) else ()
    return Schema.of(named_tensors(tensors), buffers)


def _module_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **persistent_buffers(module)}


def _require_writable(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise SchemaError(f"tensor {name!r} has no values (device meta): materialise it first")
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise SchemaError(
            f"tensor {name!r} is expanded, so it cannot be written in place: pass a .clone() of it"
        )
