"""The state that all peers of a training hold alike, as an image: safetensors bytes that any of them can load.

Donors' images of one state are equal byte for byte, so a newcomer can take ranges from several donors and check all of
them against one digest. An image is untrusted: all of it is compared with the local model before any part is loaded.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
from blake3 import blake3

from equipoise.averaging.outer import OuterStep
from equipoise.averaging.state import MAX_EPOCH, StateId
from equipoise.peer.tensors import parameters_of
from equipoise.peer.training.safetensors_io import ImageError, pack, unpack

FORMAT = 1
"""Version of the format; it grows when an older reader would misread an image."""

STATE_FACTOR = 8
"""Largest ratio of a state to its parameters, which may be fp16: an optimizer keeps two fp32 values for each."""

SPARE_BYTES = 64 * 2**20
"""Bytes allowed for the header, the scheduler, and the user's own parts."""

MAX_DEPTH = 16
"""Deepest nesting in a state: an optimizer's state has four levels."""

SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""Hyperparameters that torch's schedulers change from epoch to epoch; all others stay as the run's terms say."""

SETTINGS = re.compile(
    r"base_lrs|gamma|step_size|T_(0|max|mult)|eta_min|(start_|end_)?factor|total_(iters|steps)|power"
)
"""Names of the fields of torch's schedulers that never change."""

EXTRA = "extra "
"""Prefix of the names of the user's own parts, whose values are not checked."""

Kind = TypeVar("Kind")

Tree = Any
"""None, bool, int, float, str, tensors, and dicts, lists and tuples of those."""


class Stateful(Protocol):
    """A scheduler, a data loader, or any other object whose state newcomers should get."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings, tensors, and dicts, lists and tuples of those."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take on the state that another peer's `state_dict` returned."""


class Part(Protocol):
    """A part of the state."""

    def tree(self) -> Tree:
        """The part as it is now; its tensors are not copies."""

    def check(self, tree: Tree, foreign: bool = False) -> None:
        """Raise ImageError unless `load` takes it; a `foreign` tree, another peer's, must keep to the run's terms."""

    def load(self, tree: Tree) -> None:
        """Take on the state of `tree`."""


class Image(NamedTuple):
    """An image that was checked against the state that read it: the id of its state, and a function to take it on."""

    id: StateId
    load: Callable[[], None]


class TrainingState:
    """All parts of the state that peers hold alike."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """`parts` by name; the user's code comes first, so that nothing has changed if it raises."""
        self._parts = dict(parts)

    def require_writable(self) -> None:
        """Raise ImageError now, not at a newcomer's request, if the user's part holds an unwritable value."""
        for name, part in self._parts.items():
            split(part.tree(), name, {})

    def image(self, state: StateId) -> torch.Tensor:
        """Copy the state, whose id is `state`, to an image: u8 [bytes], on the CPU.

        Raises:
            ImageError: The user's part holds a value that cannot be written; names it.
        """
        tensors: dict[str, torch.Tensor] = {}
        plain = {name: split(part.tree(), name, tensors) for name, part in self._parts.items()}
        about = {"format": FORMAT, "epoch": state.epoch, "lineage": state.lineage, "plain": plain}
        return pack(tensors, {"equipoise": json.dumps(about, sort_keys=True, separators=(",", ":"))})

    def digest(self) -> str:
        """BLAKE3 in hex of the parameters, and of the tensors that an optimizer or outer step remembers."""
        model, tensors = self._parts["model"], dict[str, torch.Tensor]()
        for name in {"optimizer", "outer"} & self._parts.keys():
            split(self._parts[name].tree(), name, tensors)
        return digest({**tensors, **(model.tensors if isinstance(model, ModelPart) else {})})

    def read(self, image: torch.Tensor, foreign: bool = False) -> Image:
        """Check all of an image against this state; nothing changes before its `load` is called.

        The image, u8 [bytes], is on the CPU, and does not change before it has been loaded. A `foreign` one, another
        peer's, must have the hyperparameters of the run's terms.

        Raises:
            ImageError: It is damaged, of another model, or holds NaN or Inf; names the first thing that differs.
        """
        tensors, metadata = unpack(image)
        try:
            about = json.loads(metadata["equipoise"])
            found, state = about["format"], msgspec.convert((about["epoch"], about["lineage"]), StateId)
            trees = {name: _join(about["plain"][name], tensors) for name in self._parts}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            told = f"{type(error).__name__}: {str(error)[:120]}"
            raise ImageError(f"expected an image of a training's state, {told}") from None
        if found != FORMAT:
            raise ImageError(f"expected an image of format {FORMAT}, got {found!r}")
        for name, part in self._parts.items():
            part.check(trees[name], foreign)
            if not name.startswith(EXTRA):
                _check_finite(trees[name], name)

        def load() -> None:
            for name, part in self._parts.items():
                part.load(trees[name])

        return Image(state, load)


class ModelPart:
    """The parameters, and the buffers that the peers average.

    Attributes:
        tensors: The parameters.
        limit: Most bytes of an image of such a model.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`loaded` is called after each `load`."""
        self.tensors = dict(tensors)
        self._buffers = dict(buffers)
        self._loaded = loaded
        self._settled = {name: buffer.clone() for name, buffer in buffers.items()}
        held = sum(tensor.numel() * tensor.element_size() for tensor in {**tensors, **buffers}.values())
        self.limit = STATE_FACTOR * held + SPARE_BYTES

    def settle(self) -> None:
        """Note that the buffers are now the group's; forward passes change them until the next round."""
        for name, buffer in self._buffers.items():
            self._settled[name].copy_(buffer)

    def digest(self) -> str:
        """BLAKE3 in hex over names, dtypes, shapes and values of all parameters."""
        return digest(self.tensors)

    def tree(self) -> Tree:
        """See `Part`."""
        return {**self.tensors, **self._settled}

    def check(self, tree: Tree, foreign: bool = False) -> None:
        """See `Part`."""
        _check_like(tree, self.tree())

    def load(self, tree: Tree) -> None:
        """See `Part`."""
        with torch.no_grad():
            for name, tensor in {**self.tensors, **self._buffers}.items():
                tensor.copy_(tree[name])
        self.settle()
        self._loaded()


class OptimizerPart:
    """The state of an optimizer, and its hyperparameters, by the names of the parameters."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor], scheduled: bool = False
    ) -> None:
        """`names` are the parameters' by name; `scheduled` says whether a scheduler changes hyperparameters."""
        self._optimizer = optimizer
        self._terms = [_told_terms(group, scheduled) for group in optimizer.param_groups]
        self._scheduled = scheduled
        self._parameters = dict(names)
        self._names = {id(parameter): name for name, parameter in names.items()}

    @property
    def _is_elementwise(self) -> bool:
        """True for torch's own optimizers: the shapes of their state are known before the first step."""
        own = type(self._optimizer).step.__module__.startswith("torch.optim.")
        return own and not isinstance(self._optimizer, torch.optim.LBFGS)

    def tree(self) -> Tree:
        """See `Part`."""
        names, groups = self._names, self._optimizer.param_groups
        kept = self._optimizer.state.items()
        state = {names[id(p)]: dict(remembered) for p, remembered in kept if id(p) in names}
        # A parameter that is frozen is the optimizer's, perhaps, but not the run's.
        held = [[names[id(p)] for p in group["params"] if id(p) in names] for group in groups]
        groups = [{**group, "params": params} for group, params in zip(groups, held, strict=True)]
        return {"state": state, "groups": groups}

    def check(self, tree: Tree, foreign: bool = False) -> None:
        """See `Part`."""
        ours = self.tree()
        if not isinstance(tree, dict) or set(tree) != {"state", "groups"}:
            raise ImageError("expected an optimizer's state and groups, got neither")
        held = [_as(dict, one).get("params") for one in _as(list, tree["groups"])]
        if held != [one["params"] for one in ours["groups"]]:
            expected = "the optimizer's groups to hold the parameters that they hold here"
            raise ImageError(f"expected {expected}, they differ")
        if foreign:
            for group, terms in zip(tree["groups"], self._terms, strict=True):
                _check_terms(_told_terms(group, self._scheduled), terms)
        for name, kept in _as(dict, tree["state"]).items():
            if name not in self._parameters:
                told = f"expected what an optimizer remembers of the run's parameters, got {name[:80]!r}"
                raise ImageError(told)
            for key, value in _as(dict, kept).items():
                if self._is_elementwise and isinstance(value, torch.Tensor):
                    _check_spread(f"{key[:80]!r} of {name!r}", value, self._parameters[name])
                known = ours["state"].get(name, {}).get(key)
                if isinstance(known, torch.Tensor) and known.dim():
                    _check_like({key: value}, {key: known}, f"of {name!r} ")

    def load(self, tree: Tree) -> None:
        """See `Part`."""
        for ours, theirs in zip(self._optimizer.param_groups, tree["groups"], strict=True):
            ours.update({key: copy.deepcopy(value) for key, value in theirs.items() if key != "params"})
        for group in self._optimizer.param_groups:
            for parameter in (one for one in group["params"] if id(one) in self._names):
                kept = tree["state"].get(self._names[id(parameter)])
                self._optimizer.state.pop(parameter, None)
                if kept is not None:
                    self._optimizer.state[parameter] = {
                        key: _placed(key, value, parameter, group) for key, value in kept.items()
                    }


class UserPart:
    """Anything with `state_dict` and `load_state_dict`."""

    def __init__(self, what: Stateful) -> None:
        self._what = what

    def tree(self) -> Tree:
        """See `Part`."""
        return self._what.state_dict()

    def check(self, tree: Tree, foreign: bool = False) -> None:
        """See `Part`."""
        _as(dict, tree)

    def load(self, tree: Tree) -> None:
        """See `Part`."""
        self._what.load_state_dict(copy.deepcopy(tree))  # Which does not share the image's memory.


class OuterPart(UserPart):
    """An outer step. It remembers moments of each parameter, and counts of steps."""

    def __init__(self, outer: OuterStep, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors` are the agreed parameters by name."""
        super().__init__(outer)
        self._tensors = tensors

    def check(self, tree: Tree, foreign: bool = False) -> None:
        """See `Part`."""
        super().check(tree)
        for key, ours in self.tree().items():
            theirs = tree.get(key)
            if isinstance(ours, dict):
                known = {name: one for name, one in self._tensors.items() if name in _as(dict, theirs)}
                _check_like(theirs, known, f"of the outer step's {key!r} ")
            elif type(theirs) is not int or not 0 <= theirs <= MAX_EPOCH:
                raise ImageError(f"expected a count of the outer step's {key!r}, got {str(theirs)[:80]!r}")


class SchedulerPart(UserPart):
    """A learning-rate scheduler."""

    def check(self, tree: Tree, foreign: bool = False) -> None:
        """See `Part`."""
        super().check(tree)
        if foreign:
            _check_terms(_settings(tree), _settings(self.tree()))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """BLAKE3 in hex over names, dtypes, shapes and values of tensors, on any device."""
    content = blake3()
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        content.update(values.numpy().data)
    return content.hexdigest()


def frozen_term(module: object) -> dict[str, str]:
    """The terms of a run by which its peers have equal parameters where a module trains none, if there are any."""
    named = parameters_of(module) if isinstance(module, torch.nn.Module) else {}
    frozen = {name: one for name, one in named.items() if not one.requires_grad}
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in frozen.values()})
    count = f"{len(frozen)} frozen tensor{'s' if len(frozen) > 1 else ''}"
    return {count: " and ".join(dtypes), "frozen values": digest(frozen)[:16]} if frozen else {}


def _placed(key: str, value: Tree, parameter: torch.Tensor, group: Mapping[str, Any]) -> Tree:
    """A value on the device, and with the strides, that torch's optimizers expect: the parameter's, except for steps
    that no kernel reads."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value.clone()
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value.to(parameter.device, copy=True)


def _check_like(tree: Tree, like: Mapping[str, torch.Tensor], of: str = "") -> None:
    found = _as(dict, tree)
    for name in sorted(set(like) ^ set(found)):
        where = "here" if name in like else "in the image"
        raise ImageError(f"expected the tensors that are here: {name[:80]!r} {of}is only {where}")
    for name, tensor in like.items():
        got = found[name]
        if not isinstance(got, torch.Tensor) or got.dtype != tensor.dtype:
            raise ImageError(f"{name!r} {of}is {tensor.dtype} here, got {getattr(got, 'dtype', 'none')}")
        if got.shape != tensor.shape:
            raise ImageError(f"{name!r} {of}has shape {list(tensor.shape)} here, got {list(got.shape)}")


def _told_terms(group: Mapping[str, Any], scheduled: bool) -> dict[str, str]:
    """The constant hyperparameters of a group, as text."""
    leave = {"params"} | (SCHEDULED if scheduled else set())
    return {str(key): str(value) for key, value in group.items() if key not in leave}


def _settings(state: Mapping[str, Any]) -> dict[str, str]:
    """The settings in a scheduler's state, as text."""
    return {key: str(value) for key, value in state.items() if SETTINGS.fullmatch(key)}


def _check_terms(found: Mapping[str, str], terms: Mapping[str, str]) -> None:
    for key, value in terms.items():
        if found.get(key) != value:
            got = found.get(key, "none")
            raise ImageError(f"expected {key} = {value[:80]}, as the run's terms say, got {got[:80]}")


def _check_finite(tree: Tree, path: str) -> None:
    if isinstance(tree, torch.Tensor) and tree.is_floating_point():
        # torch has no comparison for floats of one byte.
        values = tree.float() if tree.element_size() == 1 else tree
        if not bool(torch.isfinite(values).all()):
            raise ImageError(f"expected finite values, {path[:80]!r} holds NaN or Inf")
    elif isinstance(tree, float) and not math.isfinite(tree):
        raise ImageError(f"expected finite values, {path[:80]!r} is {tree}")
    elif isinstance(tree, dict):
        for key, value in tree.items():
            _check_finite(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for value in tree:
            _check_finite(value, path)


def _check_spread(what: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    """Check that there is one value for each of the parameter's values, or each row, or each column, or for all."""
    pairs = zip(value.shape, parameter.shape, strict=False)
    if value.dim() and (value.dim() != parameter.dim() or any(one not in (1, whole) for one, whole in pairs)):
        raise ImageError(f"{what} has shape {list(value.shape)}, expected one for {list(parameter.shape)}")


def _as(kind: type[Kind], tree: Tree) -> Kind:
    if not isinstance(tree, kind):
        raise ImageError(f"expected a {kind.__name__} in the image, got {type(tree).__name__}")
    return tree


def split(tree: Tree, path: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """The tree in JSON's terms; its tensors, by their paths, go into `tensors`."""
    if depth > MAX_DEPTH:
        raise ImageError(f"{path[:120]!r} is nested deeper than {MAX_DEPTH}")
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree.detach()
        return {"tensor": path}
    if isinstance(tree, Mapping):
        for key in tree:
            if not isinstance(key, str | int):
                raise ImageError(f"{path!r} has the key {key!r}: expected strings or integers")
        items = sorted(tree.items(), key=lambda item: (isinstance(item[0], str), item[0]))
        return {"dict": [[key, split(one, f"{path}/{key}", tensors, depth + 1)] for key, one in items]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [split(value, f"{path}/{at}", tensors, depth + 1) for at, value in enumerate(tree)]}
    raise ImageError(
        f"{path!r} is a {type(tree).__name__}: expected numbers, strings, tensors, and dicts, lists, tuples of those"
    )


def _join(plain: Any, tensors: dict[str, torch.Tensor]) -> Tree:
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors.pop(content)  # Each tensor once: a small image must not become a large state.
    if kind == "dict":
        return {key: _join(value, tensors) for key, value in content}
    values = [_join(value, tensors) for value in content]
    return tuple(values) if kind == "tuple" else values
