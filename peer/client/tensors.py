"""The `tensors` and `gradients` of a user as named tensors, and the tensors that a run was joined with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch

from equipoise.averaging.layout import EXACT, Layout
from equipoise.averaging.schema import Schema, SchemaError, TensorSpec, tensors_by_name
from equipoise.compression import Codec
from equipoise.peer.client.accumulate import Accumulator
from equipoise.peer.client.encoding import Encoded, Encoder
from equipoise.peer.client.lanes import linked, prepare

Tensors = torch.nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
Gradients = torch.nn.Module | Mapping[str, torch.Tensor | None] | Sequence[torch.Tensor | None]

COUNTERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
"""The dtypes of counters and flags."""

MAX_COUNTERS = 1024
"""Most values of an integer or bool buffer that travels. Longer ones are constants, such as positions or masks."""

CACHE_LINE = 64
"""Bytes to whose multiples a run's encoded vectors are aligned: compiled kernels take no scales across words."""

WRAPPED_AS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names under which the wrappers of torch.compile, activation checkpoints and FSDP hold the module within."""


class Binding:
    """The user's tensors, compared before each round with the schema of the run.

    Attributes:
        source: The tensors, or the module without wrappers.
        carrier: What the buffers are of: of a branch, the tensors of the run that it is a part of.
        schema: Schema of the tensors that `average` exchanges.
        gradients: Schema of the gradients that `step` exchanges.
        buffers: Schema of the buffers that travel behind them.
        shadows: Copies of the integer and bool buffers, fp32, by name, that are averaged in place of those.
        averages: Encodes the contribution of `average`, and decodes its mean.
        steps: Encodes and decodes those of `step`.
        sparse: Names of the parameters whose `.grad` is sparse.
        devices: The GPUs that encode and decode, as the tensors lay at first.
    """

    def __init__(
        self,
        tensors: Tensors,
        codec: Codec,
        carrier: Tensors | None = None,
        group_size: int = 1,
        base: str = "",
    ) -> None:
        """Bind the tensors of a run; those of a branch with the tensors of its run, the `carrier`.

        Means are of up to `group_size` contributors. With a `base`, frozen parameters and buffers are left alone.

        Raises:
            SchemaError: There are no tensors, or one cannot be averaged; names it.
        """
        self.source: Tensors = unwrapped(tensors)
        self._group_size = group_size
        tensors = self.source
        self.carrier = tensors if carrier is None else carrier
        self._named = stepped_tensors if base else named_tensors
        buffers = persistent_buffers(tensors) if isinstance(tensors, torch.nn.Module) else ()
        self.schema = Schema.of(self._named(tensors), buffers)
        self.gradients = fp32_schema(stepped_tensors(tensors))
        self.buffers = Schema(())
        self.shadows: dict[str, torch.Tensor] = {}
        self.averages = Encoder(Layout(self.schema, codec))
        self.steps = Encoder(Layout(self.gradients, codec))
        self.sparse = sparse_gradients(tensors) if isinstance(tensors, torch.nn.Module) else frozenset()
        self.devices = frozenset(filter(None, map(linked, self._named(tensors).values())))
        self._lost: dict[str, torch.Tensor] = {}

    @property
    def size(self) -> int:
        """Bytes of the longest encoded vector or mean, with all buffers that may travel, in whole cache lines."""
        carried = _buffers_of(self.averaged_buffers())
        steps = Layout(Schema((*self.gradients.tensors, *carried.tensors)), self.steps.layout.codec)
        longer = max(one.mean_size(self._group_size) for one in (self.averages.layout, steps))
        return longer + -longer % CACHE_LINE

    def prepare(self) -> None:
        """Encode for the first time, which loads kernels and takes a second: the first round must not wait for that."""
        for device in (torch.device("cpu"), *self.devices):
            for codec in (self.averages.layout.codec, EXACT):
                prepare(codec, device)

    def settle(self) -> None:
        """Wait until no device reads any more from a mean that was decoded: the next round may overwrite it."""
        self.averages.settle()
        self.steps.settle()

    def buffer_schema(self) -> Schema:
        """The schema of the module's buffers, for `carry`.

        Raises:
            SchemaError: The run was not joined with a module.
        """
        if isinstance(self.carrier, torch.nn.Module):
            return _buffers_of(self.averaged_buffers())
        kind = type(self.carrier).__name__
        raise SchemaError(
            f"expected an nn.Module, whose buffers are known, got {kind}: agree without buffers"
        )

    def carry(self, buffers: Schema) -> None:
        """Let these buffers travel behind the gradients from now on."""
        self.buffers = buffers
        both = Schema((*self.gradients.tensors, *buffers.tensors))
        self.steps = Encoder(Layout(both, self.steps.layout.codec))

    def carried(self) -> dict[str, torch.Tensor]:
        """The present buffers that travel behind the gradients.

        Raises:
            SchemaError: The buffers' names, shapes or dtypes have changed.
        """
        if not self.buffers.tensors:
            return {}
        named = self.averaged_buffers()
        _require_unchanged("buffers", self.buffers, _buffers_of(named))
        return named

    @property
    def counters(self) -> dict[str, torch.Tensor]:
        """The module's counters, whose shadows are among the averaged buffers."""
        return counters_of(self.carrier) if isinstance(self.carrier, torch.nn.Module) else {}

    def averaged_buffers(self) -> dict[str, torch.Tensor]:
        """The module's floating-point buffers, and the shadows of its counters as those are now."""
        if not isinstance(self.carrier, torch.nn.Module):
            return {}
        counters = self.counters
        for name, counter in counters.items():
            if name not in self.shadows or self.shadows[name].shape != counter.shape:
                self.shadows[name] = uninitialised(counter.shape, counter.device)
            self.shadows[name].copy_(counter)
        return {**persistent_buffers(self.carrier), **{name: self.shadows[name] for name in counters}}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The present tensors.

        Raises:
            SchemaError: They no longer fit the schema.
        """
        named = self._named(self.source)
        self.schema.check(named)
        return named

    def stepped(self) -> dict[str, torch.Tensor]:
        """The present tensors whose gradients are exchanged.

        Raises:
            SchemaError: No tensor requires a gradient, or the tensors have changed.
        """
        named = stepped_tensors(self.source)
        if not named:
            raise SchemaError("the module has no parameter that requires gradients: there is nothing to step")
        _require_unchanged("parameters that require gradients", self.gradients, fp32_schema(named))
        return named

    def unrounded(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the tensors, fp32, with what rounding to half precision took from them in the last `shift`."""
        return copies_of({name: self._exact(name, tensor) for name, tensor in tensors.items()})

    def _exact(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self._lost[name].to(tensor.device) if name in self._lost else tensor

    def shift(
        self, mean: memoryview, tensors: Mapping[str, torch.Tensor], copies: dict[str, torch.Tensor]
    ) -> None:
        """Move the tensors, in place, by the difference of a mean, u8 [`size`], from their `unrounded` copies.

        Overwrites those. Tensors of half precision are rounded once, and `unrounded` has what that took from them.
        """
        with torch.no_grad():
            for name, tensor in tensors.items():
                # The steps since; a second model would take memory.
                torch.sub(self._exact(name, tensor), copies[name], out=copies[name])
            half = {name: tensor for name, tensor in tensors.items() if tensor.element_size() < 4}
            self._lost = {name: uninitialised(one.shape, one.device) for name, one in half.items()}
            self.averages.decode(mean, {**tensors, **self._lost})
            for name, tensor in tensors.items():
                if name in half:
                    tensor.copy_(self._lost[name].add_(copies[name]))
                    self._lost[name] -= tensor
                else:
                    tensor.add_(copies[name])

    @property
    def mean_size(self) -> int:
        """Bytes of the longest encoded mean of `step`."""
        return self.steps.layout.mean_size(self._group_size)

    def write_step(self, accumulated: Accumulator, contribution: memoryview) -> Encoded:
        """Encode the contribution of `step`, u8 [`size`]: mean gradients, then buffers.

        Raises:
            SchemaError: A buffer has changed since join, or is not finite.
        """
        tensors = {**accumulated.sums, **self.carried()}
        return self.steps.encode(tensors, contribution, accumulated.weight)

    def decoded(self, contribution: memoryview, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values of an encoded contribution of `step`: by name, fp32, on the devices of the tensors `like`."""
        found = {name: uninitialised(one.shape, one.device) for name, one in like.items()}
        host = torch.device("cpu")
        buffers = {one.name: uninitialised(one.shape, host) for one in self.buffers.tensors}
        self.steps.decode(contribution, {**found, **buffers})
        self.steps.settle()
        return found

    def read_step(
        self,
        result: memoryview,
        stepped: Mapping[str, torch.Tensor],
        mean: dict[str, torch.Tensor],
        hand_back: bool = True,
        shares: Sequence[float] = (1.0,),
    ) -> None:
        """Decode the result of a step, u8 [`size`], into `mean`: by name, fp32, on the tensors' devices.

        `shares` are the contributors', in member order.

        The gradients were those of the tensors `stepped`; `hand_back` overwrites the `.grad` of a module's parameters.

        Raises:
            SchemaError: A buffer has changed since join; nothing was written.
        """
        carried = self.carried()
        for name, tensor in stepped.items():
            if name not in mean or mean[name].device != tensor.device:
                mean[name] = uninitialised(tensor.shape, tensor.device)
        self.steps.decode(result, {**mean, **carried}, shares)
        if hand_back and isinstance(self.source, torch.nn.Module):
            for name, tensor in stepped.items():
                _hand_back(tensor, mean[name], name in self.sparse)


def unwrapped(tensors: Any) -> Any:
    """The module in wrappers of `torch.compile` and data parallelism: peers without a wrapper have the same names."""
    while isinstance(tensors, torch.nn.Module) and (within := _within(tensors)):
        tensors = tensors.get_submodule(within)
    return tensors


def parameters_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's parameters, each once, by the names that they have without wrappers of any part."""
    return _without_wrappers(module, dict(module.named_parameters()))


def named_tensors(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors that `average` exchanges: of a module its floating-point parameters and persistent buffers.

    A tensor that stands under several names, as tied weights in a `state_dict`, is there once, under the first.

    Raises:
        SchemaError: The argument has another type, a tensor cannot be written in place, or two share memory.
    """
    if isinstance(tensors, torch.nn.Module):
        floating = {name: one for name, one in parameters_of(tensors).items() if one.is_floating_point()}
        named = {**floating, **persistent_buffers(tensors)}
    elif isinstance(tensors, Mapping | Sequence) and not isinstance(tensors, str | bytes):
        named = tensors_by_name(tensors)
    else:
        raise _neither("tensors", tensors)
    for name, tensor in named.items():
        if isinstance(tensor, torch.Tensor):
            _require_writable(name, tensor)
    return _distinct(named)


def copies_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the tensors as they are now, fp32, on their devices."""
    return {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in tensors.items()}


def stepped_tensors(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors whose gradients `step` exchanges: of a module the parameters that require gradients, else all."""
    if isinstance(tensors, torch.nn.Module):
        return {name: one for name, one in parameters_of(tensors).items() if one.requires_grad}
    return named_tensors(tensors)


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The floating-point buffers in the module's state_dict, such as BatchNorm's statistics; no counters."""
    return {name: one for name, one in _kept_buffers(module).items() if one.is_floating_point()}


def counters_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The short integer and bool buffers in the module's state_dict, such as BatchNorm's `num_batches_tracked`."""
    kept = _kept_buffers(module).items()
    return {name: one for name, one in kept if one.dtype in COUNTERS and 0 < one.numel() <= MAX_COUNTERS}


def _kept_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    # Hooks of wrappers rename its entries.
    kept = {id(one) for one in module.state_dict(keep_vars=True).values()}
    return _without_wrappers(module, {name: one for name, one in module.named_buffers() if id(one) in kept})


def sparse_gradients(module: torch.nn.Module) -> frozenset[str]:
    """Names of parameters whose `.grad` is sparse on every peer: weights of sparse embeddings that nothing else uses.

    The names follow from the module alone: peers whose gradients differ in layout would not step alike.
    """
    found = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
    }
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    ours = parameters_of(module).items()
    return frozenset(name for name, one in ours if id(one) in found and uses[id(one)] == 1)


def named_gradients(gradients: Gradients) -> dict[str, torch.Tensor | None]:
    """Gradients by the names of their tensors: of a module the `.grad` of `stepped_tensors`.

    Raises:
        SchemaError: The argument has another type.
    """
    gradients = unwrapped(gradients)
    if isinstance(gradients, torch.nn.Module):
        return {name: parameter.grad for name, parameter in stepped_tensors(gradients).items()}
    if isinstance(gradients, Mapping):
        return dict(gradients)
    if isinstance(gradients, Sequence) and not isinstance(gradients, str | bytes):
        return {str(index): gradient for index, gradient in enumerate(gradients)}
    raise _neither("gradients", gradients)


def fp32_schema(tensors: Mapping[str, torch.Tensor]) -> Schema:
    """The schema of the gradients that `step` exchanges: in fp32, for tensors of any dtype."""
    return Schema(tuple(TensorSpec(name, tuple(one.shape), "float32") for name, one in tensors.items()))


def _buffers_of(named: Mapping[str, torch.Tensor]) -> Schema:
    return Schema.of(named, named) if named else Schema(())


def uninitialised(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Uninitialised fp32 values that may be changed later, also if this call is made in inference mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=torch.float32, device=device)


def _neither(what: str, given: object) -> SchemaError:
    kinds = f"an nn.Module, a mapping of names to {what} or a list of {what}"
    return SchemaError(f"expected {kinds}, got {type(given).__name__}")


def _require_writable(name: str, tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        raise SchemaError(
            f"tensor {name!r} has no shape yet (a lazy module): run the model forward once before join"
        )
    if hasattr(tensor, "full_tensor"):
        raise SchemaError(f"tensor {name!r} is one process's shard (DTensor): join with whole tensors")
    if tensor.is_meta:
        raise SchemaError(f"tensor {name!r} has no values (device meta): materialise it first")
    if tensor.layout is not torch.strided:
        return  # `Schema.of` refuses it.
    expanded = any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if expanded or tensor.numel() > _reach(tensor):
        told = f"tensor {name!r} is expanded, so it cannot be written in place: pass a .clone() of it"
        raise SchemaError(told)


def _within(module: torch.nn.Module) -> str:
    """The name under which a wrapper holds its module; empty if `module` is no wrapper."""
    if isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        return "module"
    return next((name for name in WRAPPED_AS if name in module._modules), "")


def _without_wrappers(module: torch.nn.Module, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The module's tensors by their names, but for the parts of a name by which wrappers hold what is within them."""
    if not any("module." in name or "_orig_mod." in name for name in named):
        return named  # Mostly; this is asked at each step.
    paths, within = {"": ""}, {"": _within(module)}
    for path, part in module.named_modules():
        parent, _, name = path.rpartition(".")
        if path:
            own = (paths[parent],) if name == within[parent] else (paths[parent], name)
            paths[path], within[path] = ".".join(filter(None, own)), _within(part)
    parts = ((name.rpartition("."), tensor) for name, tensor in named.items())
    return {".".join(filter(None, (paths[path], own))): tensor for (path, _, own), tensor in parts}


def _distinct(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without those that are an earlier one again: what is done to each tensor would be done to it twice.

    Raises:
        SchemaError: Two tensors share a part of their memory, or are two parameters in one memory; names both.
    """
    stored: dict[tuple[torch.device, int], dict[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel():
            place = tensor.device, tensor.untyped_storage().data_ptr()
            stored.setdefault(place, {})[name] = tensor
    again: set[str] = set()
    for held in (one for one in stored.values() if len(one) > 1):
        first: dict[object, str] = {}
        for name, one in held.items():
            earlier = first.setdefault((one.storage_offset(), one.dtype, one.shape, one.stride()), name)
            if held[earlier] is not one and (one.requires_grad or held[earlier].requires_grad):
                told = f"{earlier!r} and {name!r} are two parameters that share memory"
                raise SchemaError(f"{told}: tie them, so that both are one parameter")
        _require_apart({name: held[name] for name in first.values()})
        again |= held.keys() - set(first.values())
    return {name: tensor for name, tensor in named.items() if name not in again} if again else named


def _require_apart(held: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors of one storage that share a value; those of a flat buffer, or of a matrix's columns, do not."""
    starts = [(one.storage_offset() * one.element_size(), one) for one in held.values()]
    spans = sorted((start, start + one.element_size() * _reach(one)) for start, one in starts)
    if all(end <= start for (_, end), (start, _) in pairwise(spans)):
        return
    unit = min(one.element_size() for one in held.values())
    owners = torch.full((max(spans, key=itemgetter(1))[1] // unit,), -1, dtype=torch.int32, device="cpu")
    for at, (name, one) in enumerate(held.items()):
        wide = one.element_size() // unit
        steps = (*(step * wide for step in one.stride()), 1)
        places = owners.as_strided((*one.shape, wide), steps, one.storage_offset() * wide)
        if (other := int(places.max())) >= 0:
            raise SchemaError(f"{list(held)[other]!r} and {name!r} share memory: leave one of them out")
        places.fill_(at)


def _reach(tensor: torch.Tensor) -> int:
    """Number of places from a strided tensor's first value to its last."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _hand_back(tensor: torch.Tensor, mean: torch.Tensor, sparse: bool) -> None:
    """Make the mean, fp32, the parameter's `.grad`, in its dtype; `sparse` leaves out rows of zeros."""
    with torch.inference_mode(False), torch.no_grad():  # It outlives this call.
        if sparse:
            tensor.grad = mean.to_sparse(1).to(tensor.dtype)
            return
        if tensor.grad is None or tensor.grad.layout is not torch.strided:
            tensor.grad = torch.empty_like(tensor)
    tensor.grad.copy_(mean)


def _require_unchanged(what: str, before: Schema, now: Schema) -> None:
    if now == before:
        return
    both = (*now.tensors, *before.tensors)
    changed = next((one.name for one in both if both.count(one) == 1), "their order")
    raise SchemaError(f"the {what} have changed since join: {changed}; join again")
