"""The state that all peers of a training hold alike, as an image: safetensors bytes that any of them can load.

Donors' images of one state are equal byte for byte, so a newcomer can take ranges from several donors and check all of
them against one digest. An image is untrusted: all of it is compared with the local model before any part is loaded.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
from blake3 import blake3

from equipoise.averaging.outer import OuterStep
from equipoise.averaging.state import MAX_EPOCH, StateId
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.safetensors_io import MAX_HEADER_BYTES, ImageError, header_bytes, pack, unpack
from equipoise.peer.client.tensors import parameters_of, persistent_buffers

FORMAT = 1
"""Version of the format; it grows when an older reader would misread an image."""

STATE_FACTOR = 8
"""Largest ratio of a state to its parameters, which may be fp16: an optimizer keeps two fp32 values for each."""

SPARE_BYTES = 64 * 2**20
"""Bytes allowed for the header, the scheduler, and the user's own parts."""

DIGESTED_BYTES = 16 * 2**20
"""Most bytes of a tensor, but for one row, that are copied at once, from a GPU or out of strides, to be digested."""

EXTRA_HEADER_BYTES = 2**20
"""Bytes that a part of the user's, as a data loader's state, may add to the header beyond twice this peer's own."""

MAX_FROZEN_NAME = 120
"""Most characters of a frozen parameter's name that its line has: what a line shows of a tensor is cut at 256."""

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

FIELDS = ("format", "epoch", "lineage", "plain")
"""What an image's metadata hold."""

log = logging.getLogger(__name__)

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
    """All parts of the state that peers hold alike.

    Attributes:
        model: The part that is the model.
    """

    def __init__(
        self,
        model: ModelPart,
        parts: Mapping[str, Part] = MappingProxyType({}),
        extra: Mapping[str, Stateful] = MappingProxyType({}),
    ) -> None:
        """`parts` by name; the user's code, `extra`, comes first, so that nothing has changed if it raises."""
        self.model = model
        self._parts: dict[str, Part] = {EXTRA + name: UserPart(what) for name, what in extra.items()}
        self._parts |= {**parts, "model": model}

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

    def size(self) -> int:
        """Bytes of the tensors of an image, once all parameters have made a step."""
        tensors, _ = self._outline()
        return sum(one.numel() * one.element_size() for one in tensors.values())

    def digest(self) -> str:
        """BLAKE3 in hex of the parameters, and of the tensors that an optimizer or outer step remembers."""
        tensors: dict[str, torch.Tensor] = {}
        for name in {"optimizer", "outer"} & self._parts.keys():
            split(self._parts[name].tree(), name, tensors)
        return digest({**tensors, **self.model.tensors})

    def read(self, image: torch.Tensor, foreign: bool = False) -> Image:
        """Check all of an image against this state; nothing changes before its `load` is called.

        The image, u8 [bytes], is on the CPU, and does not change before it has been loaded. A `foreign` one, another
        peer's, must have the hyperparameters of the run's terms.

        Raises:
            ImageError: It is damaged, of another model, or holds NaN or Inf; names the first thing that differs.
        """
        try:
            tensors, metadata = unpack(image, self._most_header() if foreign else MAX_HEADER_BYTES)
            about = json.loads(metadata["equipoise"])
            found, state = about["format"], msgspec.convert((about["epoch"], about["lineage"]), StateId)
            if found != FORMAT:
                raise ImageError(f"expected an image of format {FORMAT}, got {found!r}")
            _check_names((*metadata, *about), ("equipoise", *FIELDS), "the fields of an image")
            _check_names(about["plain"], self._parts, "the parts that are here")
            trees = {name: _join(about["plain"][name], tensors) for name in self._parts}
            if foreign:  # A user's own may come with more, as through torch.distributed.checkpoint.
                _check_names(tensors, (), "the tensors that its parts name")
            for name, part in self._parts.items():
                part.check(trees[name], foreign)
                if not name.startswith(EXTRA):
                    _check_finite(trees[name], name)
        except ImageError:
            raise
        except Exception as error:  # Whatever a stranger's bytes lead to, it refuses them, and nothing else.
            told = f"{type(error).__name__}: {str(error)[:120]}"
            raise ImageError(f"expected an image of a training's state, {told}") from None

        def load() -> None:
            for name, part in self._parts.items():
                part.load(trees[name])

        return Image(state, load)

    def _most_header(self) -> int:
        """Longest header of another peer's image: twice that of this peer's state, once it has made a step."""
        tensors, plain = self._outline()
        room = EXTRA_HEADER_BYTES * sum(name.startswith(EXTRA) for name in self._parts)
        return min(
            2 * header_bytes(tensors, {"equipoise": json.dumps(plain)}) + 1024 + room, MAX_HEADER_BYTES
        )

    def _outline(self) -> tuple[dict[str, torch.Tensor], dict[str, Tree]]:
        """The tensors and all else of an image, once all parameters have made a step."""
        tensors: dict[str, torch.Tensor] = {}
        plain = {
            name: split(part.outline() if isinstance(part, OptimizerPart) else part.tree(), name, tensors)
            for name, part in self._parts.items()
        }
        return tensors, plain


class ModelPart:
    """The parameters, and the buffers that the peers average.

    Attributes:
        tensors: The parameters.
        buffers: The buffers.
        limit: Most bytes of an image of such a model.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        loaded: Callable[[], None] = lambda: None,
        counters: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """`loaded` is called after each `load`. Of `counters`, `buffers` has shadows, or none."""
        self.tensors = dict(tensors)
        self.buffers = dict(buffers)
        self._counters = {name: one for name, one in counters.items() if name in buffers}
        self._loaded = loaded
        self._settled = {name: buffer.clone() for name, buffer in buffers.items()}
        held = sum(tensor.numel() * tensor.element_size() for tensor in {**tensors, **buffers}.values())
        self.limit = STATE_FACTOR * held + SPARE_BYTES

    def settle(self) -> None:
        """Note that the buffers are now the group's; forward passes change them until the next round."""
        for name, buffer in self.buffers.items():
            self._settled[name].copy_(buffer)

    def restore(self) -> None:
        """Make the buffers the group's again."""
        for name, buffer in self.buffers.items():
            buffer.copy_(self._settled[name])

    def count(self) -> None:
        """Note the counters of a peer that trains alone; beside others, a round does."""
        for name, counter in self._counters.items():
            self.buffers[name].copy_(counter)

    def adopt(self) -> None:
        """Make the counters the group's, rounded: beside the group's statistics, a newcomer's count of 0 would let its
        first batch replace them. The mean in fp32 of large constants is off by a little: those stay."""
        for name, counter in self._counters.items():
            agreed = self._settled[name]
            same = torch.isclose(agreed, counter.float(), rtol=1e-6, atol=0)
            counter.copy_(torch.where(same, counter, agreed.round().to(counter.dtype)))

    def tree(self) -> Tree:
        """See `Part`."""
        return {**self.tensors, **self._settled}

    def check(self, tree: Tree, foreign: bool = False) -> None:
        """See `Part`."""
        _check_like(tree, self.tree())

    def load(self, tree: Tree) -> None:
        """See `Part`."""
        with torch.no_grad():
            for name, tensor in {**self.tensors, **self.buffers}.items():
                tensor.copy_(tree[name])
        self.settle()
        self.adopt()
        self._loaded()


class OptimizerPart:
    """The state of an optimizer, and its hyperparameters, by the names of the parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[str, torch.Tensor],
        scheduled: bool = False,
        stepped: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """`names` are the parameters by name, `stepped` are their masters, if they have some; `scheduled` says whether
        a scheduler changes hyperparameters."""
        self._optimizer = optimizer
        self._stepped = names if stepped is None else stepped
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

    def outline(self) -> Tree:
        """The part as it is once all parameters have made a step; what is not there yet has no values.

        Of another optimizer than torch's own, only what is there.
        """
        tree = self.tree()
        if self._is_elementwise and len(tree["state"]) < len(self._parameters):
            twins = remembered(self._optimizer, self._parameters, self._stepped, _small)
            tree["state"] = {
                name: {key: _grown(value, self._parameters[name]) for key, value in kept.items()}
                for name, kept in twins.items()
            } | tree["state"]
        return tree

    def check(self, tree: Tree, foreign: bool = False) -> None:
        """See `Part`."""
        ours = self.outline()
        if not isinstance(tree, dict) or set(tree) != {"state", "groups"}:
            raise ImageError("expected an optimizer's state and groups, got neither")
        held = [_as(dict, one).get("params") for one in _as(list, tree["groups"])]
        if held != [one["params"] for one in ours["groups"]]:
            expected = "the optimizer's groups to hold the parameters that they hold here"
            raise ImageError(f"expected {expected}, they differ")
        for group, own, terms in zip(tree["groups"], ours["groups"], self._terms, strict=True):
            if foreign:
                _check_terms(_told_terms(group, self._scheduled), terms)
                _check_kinds(group, own)
        for name, kept in _as(dict, tree["state"]).items():
            if name not in self._parameters:
                told = f"expected what an optimizer remembers of the run's parameters, got {str(name)[:80]!r}"
                raise ImageError(told)
            of, own = f"of {name!r} ", ours["state"].get(name, {})
            if foreign and (self._is_elementwise or own):
                _check_kinds(_as(dict, kept), own, of)
            for key, value in _as(dict, kept).items():
                if isinstance(own.get(key), torch.Tensor) and own[key].dim():
                    _check_like({key: value}, {key: own[key]}, of)

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
            if type(self._what).__module__.startswith("torch.optim."):
                _check_kinds(tree, self.tree())
            _check_terms(_settings(tree), _settings(self.tree()))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """BLAKE3 in hex over names, dtypes, shapes and values of tensors, on any device; of meta tensors without values."""
    content = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        rows = tensor.detach().reshape(tensor.shape or (1,))
        several = max(DIGESTED_BYTES * len(rows) // max(rows.numel() * rows.element_size(), 1), 1)
        for part in torch.split(rows, several) if not tensor.is_meta else ():
            content.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()


def averaged_buffers(run: JoinedRun, averaged: bool = True) -> dict[str, torch.Tensor]:
    """The buffers that travel with a run's steps; one line says so if the model has some, and they do not."""
    if averaged:
        return run.core.binding.averaged_buffers()
    source = run.core.binding.source
    found = persistent_buffers(source) if isinstance(source, torch.nn.Module) else {}
    if found:
        told = "run %s: each peer keeps its own buffers (%d, such as %r): buffers=True averages them"
        log.warning(told, run.name, len(found), next(iter(found)))
    return {}


def frozen_of(module: object, base: str = "") -> tuple[str, ...]:
    """A line for each parameter that a module does not train, for `Run.agree`; none if a `base` names them."""
    named = parameters_of(module) if isinstance(module, torch.nn.Module) and not base else {}
    return tuple(
        f"{ascii(name)[:MAX_FROZEN_NAME]} {str(one.dtype).removeprefix('torch.')} {list(one.shape)}, frozen, "
        f"values {digest({name: one})[:16]}"
        for name, one in named.items()
        if not one.requires_grad
    )


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


def remembered(
    inner: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    stepped: Mapping[str, torch.Tensor],
    like: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
) -> dict[str, dict[str, Any]]:
    """What an optimizer will remember of each parameter after a step with zeros; `like` makes the twins of `stepped`.

    The twins step at a rate of zero, as in torch's own `get_optimizer_state_dict`, but without touching the original.
    """
    twins = {id(one): like(stepped[name]).requires_grad_() for name, one in parameters.items()}
    for one in twins.values():
        zeros = torch.zeros_like(one)
        one.grad = zeros.to_sparse() if isinstance(inner, torch.optim.SparseAdam) else zeros
    plain = {"lr": 0.0, "fused": None, "capturable": False}
    groups = [
        {**group, **{key: value for key, value in plain.items() if key in group}, "params": own}
        for group in inner.param_groups
        if (own := [twins[id(one)] for one in group["params"] if id(one) in twins])
    ]
    twin = object.__new__(type(inner))
    # Hooks, and a scheduler's wrapper of `step`, belong to the original.
    kept = {key: value for key, value in vars(inner).items() if key != "step" and "hooks" not in key}
    twin.__setstate__({**kept, "state": defaultdict(dict), "param_groups": groups})
    twin.step()
    return {name: dict(twin.state[twins[id(one)]]) for name, one in parameters.items()}


def _small(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros of as many dimensions, and of at most two values in each."""
    return torch.zeros([min(size, 2) for size in parameter.shape], dtype=parameter.dtype, device="cpu")


def _grown(value: Any, parameter: torch.Tensor) -> Any:
    """What is remembered of a parameter, without values, from what was remembered of its small twin."""
    if not isinstance(value, torch.Tensor) or value.dim() != parameter.dim():
        return value
    pairs = zip(value.shape, parameter.shape, strict=True)
    shape = [whole if small == min(whole, 2) else small for small, whole in pairs]
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _check_names(found: Iterable[Any], ours: Iterable[Any], what: str, of: str = "") -> None:
    here = set(ours)
    for name in sorted(here.symmetric_difference(found), key=repr):
        where = "here" if name in here else "in the image"
        raise ImageError(f"expected {what}: {str(name)[:80]!r} {of}is only {where}")


def _check_kinds(found: Mapping[Any, Any], ours: Mapping[Any, Any], of: str = "") -> None:
    """Check that the names are ours, and the values of our kinds."""
    _check_names(found, ours, "the values that are here", of)
    for name, value in ours.items():
        if value is not None and _kind(found[name]) != _kind(value):
            raise ImageError(
                f"expected {name!r} {of}to be like {str(value)[:80]}, got {str(found[name])[:80]}"
            )


def _kind(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_kind(one) for one in value]
    return next(
        (kind for kind in (int | float | torch.Tensor, Mapping) if isinstance(value, kind)), type(value)
    )


def _check_like(tree: Tree, like: Mapping[str, torch.Tensor], of: str = "") -> None:
    found = _as(dict, tree)
    _check_names(found, like, "the tensors that are here", of)
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
    if isinstance(plain, list):
        raise ValueError("a list that no peer writes")
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors.pop(content)  # Each tensor once: a small image must not become a large state.
    if kind == "dict":
        if not all(type(key) in (str, int) for key, _ in content):
            raise ValueError("a key that is neither a string nor an integer")
        return {key: _join(value, tensors) for key, value in content}
    values = [_join(value, tensors) for value in content]
    return {"list": list, "tuple": tuple}[kind](values)
