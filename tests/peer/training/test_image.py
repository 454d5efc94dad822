"""States as safetensors bytes: the same everywhere, checked before anything is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn

from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.outer import OuterStep, parse_outer
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.state import StateId
from equipoise.peer.client.safetensors_io import DTYPES, MAX_HEADER_BYTES, ImageError, pack, unpack
from equipoise.peer.training.downloads import Downloads
from equipoise.peer.training.image import (
    ModelPart,
    OptimizerPart,
    OuterPart,
    SchedulerPart,
    TrainingState,
    UserPart,
)
from oracles.training import batch_of, loss_of, network

ID = StateId(3, "a" * 64)

MAKERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


class Notes:
    def __init__(self, **kept: Any) -> None:
        self.kept: dict[str, Any] = kept

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict


class Trained:
    def __init__(self, make: Any = MAKERS["AdamW"], seed: int = 0, **notes: Any) -> None:
        self.model = network(seed=seed)
        self.optimizer = make(self.model.parameters())
        self.notes = Notes(**notes)
        named = dict(self.model.named_parameters())
        parts = {"optimizer": OptimizerPart(self.optimizer, named)}
        self.state = TrainingState(ModelPart(named, {}), parts, {"notes": self.notes})

    def train(self, steps: int, first: int = 0) -> Trained:
        for at in range(first, first + steps):
            self.optimizer.zero_grad()
            loss_of(self.model, batch_of(0, at, 8)).backward()
            self.optimizer.step()
        return self


@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_as_if_nothing_had_happened(name: str) -> None:
    whole = Trained(MAKERS[name]).train(6)
    first = Trained(MAKERS[name]).train(3)
    second = Trained(MAKERS[name], seed=9)
    read = second.state.read(first.state.image(ID))
    assert read.id == ID
    read.load()
    second.train(3, first=3)
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(second.state.image(ID), whole.state.image(ID))


def test_images_of_equal_states_are_equal_bytes_in_any_order() -> None:
    tensors = {
        "b": torch.ones(3),
        "a": torch.zeros(2, dtype=torch.int64),
        "c": torch.ones(1, dtype=torch.bool),
    }
    turned = dict(reversed(tensors.items()))
    assert torch.equal(pack(tensors, {"x": "1", "y": "2"}), pack(turned, {"y": "2", "x": "1"}))


@pytest.mark.parametrize("name", sorted(DTYPES.keys() - {"C128"}))
def test_the_library_reads_what_is_written_and_the_other_way_round(name: str) -> None:
    dtype = DTYPES[name]
    tensors = {
        "one": torch.arange(7).to(dtype),
        "none": torch.zeros(0, 3, dtype=dtype),
        "s": torch.ones((), dtype=dtype),
    }
    ours, theirs = bytes(pack(tensors, {"k": "v"}).numpy()), save_safetensors(tensors, {"k": "v"})
    for found in (load_safetensors(ours), unpack(torch.frombuffer(bytearray(theirs), dtype=torch.uint8))[0]):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], one) and found[key].dtype == dtype for key, one in tensors.items())


def test_what_users_keep_survives() -> None:
    kept = {
        "a": [1, 2.5, None, True, "x"],
        "b": ({"n": torch.arange(3)}, float("inf")),
        "c": {1: "one", "1": "text"},
    }
    state, other = Trained(**kept), Trained(seed=1)
    other.state.read(state.state.image(ID)).load()
    found = other.notes.kept
    assert found["a"] == kept["a"]
    assert isinstance(found["b"], tuple)
    assert found["b"][0]["n"].tolist() == [0, 1, 2]
    assert found["b"][1] == float("inf")
    assert found["c"] == kept["c"]


@pytest.mark.parametrize(
    "what", [{"x": object()}, {"x": {1.5: "float key"}}, {"x": torch.ones(2).to_sparse()}]
)
def test_what_cannot_be_written_is_named(what: dict[str, Any]) -> None:
    with pytest.raises(ImageError, match="notes/x"):
        Trained(**what).state.image(ID)


def test_what_nests_too_deep_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(30):
        nested = {"x": nested}
    with pytest.raises(ImageError, match="nested deeper"):
        Trained(**nested).state.image(ID)


def test_nothing_is_loaded_of_an_image_that_does_not_fit() -> None:
    theirs = Trained(seed=2).train(2)
    small = nn.Linear(2, 2)
    named = dict(small.named_parameters())
    optimizer = torch.optim.AdamW(small.parameters())
    parts = {"optimizer": OptimizerPart(optimizer, named)}
    ours = TrainingState(ModelPart(named, {}), parts, {"notes": Notes()})
    before = small.weight.detach().clone()
    with pytest.raises(ImageError, match="groups"):
        ours.read(theirs.state.image(ID))
    with pytest.raises(ImageError, match=r"only in the image|only here"):
        TrainingState(ModelPart(named, {})).read(theirs.state.image(ID))
    assert torch.equal(small.weight, before)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_a_truncated_image_is_refused(cut: int) -> None:
    image = Trained().train(1).state.image(ID)
    with pytest.raises(ImageError):
        Trained().state.read(image[:cut])


def test_flipped_bytes_in_the_header_never_load_something_else_silently() -> None:
    state = Trained().train(1)
    image = state.state.image(ID)
    size = int.from_bytes(bytes(image[:8].tolist()), "little")
    chance = torch.Generator().manual_seed(0)
    for _ in range(300):
        broken = image.clone()
        at = int(torch.randint(0, 8 + size, (1,), generator=chance))
        broken[at] ^= 1 << int(torch.randint(0, 8, (1,), generator=chance))
        try:
            Trained().state.read(broken)
        except ImageError:
            continue
        except Exception as error:
            pytest.fail(f"byte {at}: {type(error).__name__}: {error}")


@pytest.mark.parametrize(
    "header",
    [
        {"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
        {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {
            "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        },
        {"x": {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]}},
        {"x": {"dtype": "F32", "shape": [0, *[2**40] * 9], "data_offsets": [0, 0]}},
        {"x": {"dtype": "F32", "shape": [10**3000] * 2, "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}},
        {"x": 7},
        [],
        {"__metadata__": {"a": 1}},
    ],
    ids=lambda header: str(header)[:80],
)
def test_headers_that_lie_are_refused(header: Any) -> None:
    text = json.dumps(header).encode()
    data = bytearray(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(ImageError):
        unpack(torch.frombuffer(data, dtype=torch.uint8))


def test_a_tensor_is_there_once_however_often_an_image_names_it() -> None:
    state = Trained().train(1)
    tensors, metadata = unpack(state.state.image(ID))
    about = json.loads(metadata["equipoise"])
    ((_, of_all),) = [pair for pair in about["plain"]["optimizer"]["dict"] if pair[0] == "state"]
    kept = of_all["dict"][0][1]["dict"]
    kept += [[f"again {time}", dict(kept[0][1])] for time in range(3)]
    with pytest.raises(ImageError, match="expected an image of a training's state"):
        Trained().state.read(pack(tensors, {"equipoise": json.dumps(about)}))


def test_what_nobody_could_read_is_not_written() -> None:
    with pytest.raises(ImageError, match="keep large lists of numbers as tensors"):
        pack({}, {"equipoise": "x" * MAX_HEADER_BYTES})


def test_where_a_users_part_raises_nothing_else_has_changed() -> None:
    class Picky(Notes):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise RuntimeError("not this one")

    theirs, ours = Trained().train(2), Trained(seed=4)
    parts = {"optimizer": OptimizerPart(ours.optimizer, dict(ours.model.named_parameters()))}
    picky = TrainingState(ours.state.model, parts, {"notes": Picky()})
    before = [one.detach().clone() for one in ours.model.parameters()]
    read = picky.read(theirs.state.image(ID))
    with pytest.raises(RuntimeError, match="not this one"):
        read.load()
    assert all(torch.equal(one, old) for one, old in zip(ours.model.parameters(), before, strict=True))


def refused(theirs: Trained, ours: Trained | None = None) -> str:
    """Why an image of another peer is refused, one line; nothing has changed."""
    ours = ours or Trained(seed=4)
    before = ours.state.image(ID)
    with pytest.raises(ImageError) as error:
        ours.state.read(theirs.state.image(ID), foreign=True)
    assert torch.equal(ours.state.image(ID), before)
    assert "\n" not in str(error.value)
    return str(error.value)


def hostile(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> torch.Tensor:
    """The image of a peer that has changed its tensors and its metadata."""
    tensors, metadata = unpack(Trained().train(2).state.image(ID))
    about = json.loads(metadata["equipoise"])
    change(tensors, about)
    return pack(tensors, {"equipoise": json.dumps(about)})


def state_of(about: dict[str, Any]) -> Any:
    """What the optimizer remembers, in an image's metadata: pairs of a parameter's name and its pairs."""
    return dict(about["plain"]["optimizer"]["dict"])["state"]["dict"]


HOSTILE: dict[str, tuple[Any, str]] = {
    "a field": (lambda tensors, about: about.update(more=1), "'more' is only in the image"),
    "a part": (lambda tensors, about: about["plain"].update(more=1), "'more' is only in the image"),
    "no part": (lambda tensors, about: about["plain"].pop("model"), "'model' is only here"),
    "a tensor": (lambda tensors, about: tensors.update(more=torch.ones(1)), "'more' is only in the image"),
    "a key": (lambda t, about: about["plain"]["model"]["dict"].append([None, 1]), "a key that is neither"),
    "a name": (lambda t, about: state_of(about).append([7, {"dict": []}]), "what an optimizer remembers"),
    "a list": (lambda t, about: about["plain"].update(model=[1, 2]), "a list that no peer writes"),
    "unknown": (
        lambda t, about: state_of(about)[0][1]["dict"].append(["zzz", 1]),
        "'zzz' of '0.bias' is only",
    ),
    "missing": (
        lambda tensors, about: tensors.pop(state_of(about)[0][1]["dict"].pop()[1]["tensor"]),
        "'step' of '0.bias' is only here",
    ),
    "text": (lambda t, about: state_of(about)[0].__setitem__(1, {"dict": [["step", "x"]]}), "is only"),
    "a bomb": (
        lambda t, about: about.update(more="[" * 2**23),
        "expected a safetensors file with a header of",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_peer_of_the_run_writes_is_refused_before_the_first_step(what: str) -> None:
    change, told = HOSTILE[what]
    with pytest.raises(ImageError, match=re.escape(told)):
        Trained(seed=4).state.read(hostile(change), foreign=True)


def test_donors_of_an_image_that_does_not_fit_are_left_out_of_the_next_download() -> None:
    """A key that is no string used to end the newcomer's script by a TypeError."""
    images = {
        "liar": hostile(lambda tensors, about: state_of(about).append([7, 8])),
        "peer": Trained().train(2).state.image(ID),
    }
    asked: list[frozenset[str]] = []

    def fetch(wish: Wish, timeout: float) -> Any:
        asked.append(wish.barred)
        left = [name for name in images if name not in wish.barred]
        found = FetchOutcome(ok=bool(left), reason="", state=ID, sources=dict.fromkeys(left[:1], 1))
        content = images[left[0]].numpy().data if left else memoryview(b"")
        return SimpleNamespace(done=lambda: True, result=lambda: found, content=content)

    run: Any = SimpleNamespace(core=SimpleNamespace(fetch=fetch))
    downloads = Downloads(run, Trained(seed=4).state)
    ends = []
    for _ in range(3):
        downloads.begin(Wish(0, 10**9), 60.0)
        ended = downloads.ended()
        assert ended is not None
        ends.append(ended.outcome.ok)
    assert asked == [frozenset(), {"liar"}, frozenset()]
    assert ends == [False, True, False]


def test_kinds_of_what_is_remembered_and_of_hyperparameters_are_compared() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    part = OptimizerPart(optimizer, {"w": parameter}, scheduled=True)
    tree = part.outline()
    part.check(tree, foreign=True)
    with pytest.raises(ImageError, match=r"expected 'step' of 'w' to be like tensor.*, got x"):
        part.check({**tree, "state": {"w": {**tree["state"]["w"], "step": "x"}}}, foreign=True)
    for betas in ("x", (0.9,), (0.9, None)):
        with pytest.raises(ImageError, match="expected 'betas' to be like"):
            part.check({**tree, "groups": [{**tree["groups"][0], "betas": betas}]}, foreign=True)
    scheduler = SchedulerPart(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    with pytest.raises(ImageError, match="expected 'last_epoch' to be like 0, got x"):
        scheduler.check({**scheduler.tree(), "last_epoch": "x"}, foreign=True)


@pytest.mark.parametrize("name", [*MAKERS, "SparseAdam", "ASGD", "Muon"])
def test_a_newcomer_knows_what_its_optimizer_will_remember(name: str) -> None:
    make = MAKERS.get(name) or (lambda p: getattr(torch.optim, name)(p, lr=1e-2))
    parameter = nn.Parameter(torch.ones(3, 4))
    optimizer, named = make([parameter]), {"w": parameter}
    part = OptimizerPart(optimizer, named)
    outline = part.outline()["state"]["w"]
    parameter.grad = torch.ones(3, 4).to_sparse() if name == "SparseAdam" else torch.ones(3, 4)
    assert torch.equal(parameter, torch.ones(3, 4))
    optimizer.step()
    found = part.tree()["state"]["w"]
    assert {key: getattr(one, "shape", None) for key, one in outline.items()} == {
        key: getattr(one, "shape", None) for key, one in found.items()
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    theirs = Trained().train(2)
    with torch.no_grad():
        next(theirs.model.parameters())[0, 0] = value
    assert refused(theirs) == "expected finite values, 'model/0.weight' holds NaN or Inf"
    theirs = Trained().train(2)
    next(iter(theirs.optimizer.state.values()))["exp_avg"][0, 0] = value
    assert refused(theirs) == "expected finite values, 'optimizer/state/0.weight/exp_avg' holds NaN or Inf"
    theirs = Trained().train(2)
    theirs.optimizer.param_groups[0]["lr"] = value
    with pytest.raises(ImageError, match="expected finite values"):
        Trained().state.read(theirs.state.image(ID))


def test_hyperparameters_other_than_the_runs_terms_are_refused_from_another_peer() -> None:
    theirs = Trained(lambda p: torch.optim.AdamW(p, lr=100.0, amsgrad=True)).train(1)
    assert refused(theirs) == "expected lr = 0.01, as the run's terms say, got 100.0"
    own = Trained(seed=4)
    own.state.read(theirs.state.image(ID)).load()
    assert own.optimizer.param_groups[0]["lr"] == 100.0, "what the user loads is the user's affair"
    theirs = Trained(lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, weight_decay=1.0)).train(1)
    assert refused(theirs) == "expected weight_decay = 0.01, as the run's terms say, got 1.0"


def test_a_schedule_may_change_the_learning_rate_but_not_where_it_begins() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    part = OptimizerPart(optimizer, {"w": parameter}, scheduled=True)
    tree = part.tree()
    part.check({**tree, "groups": [{**tree["groups"][0], "lr": 0.01}]}, foreign=True)
    for key in ("initial_lr", "weight_decay"):
        with pytest.raises(ImageError, match=f"expected {key} = "):
            part.check({**tree, "groups": [{**tree["groups"][0], key: 7.0}]}, foreign=True)
    paced = SchedulerPart(scheduler)
    paced.check({**paced.tree(), "last_epoch": 9}, foreign=True)
    for key, value in {"base_lrs": [100.0], "gamma": 1e6}.items():
        with pytest.raises(ImageError, match=f"expected {key} = "):
            paced.check({**paced.tree(), key: value}, foreign=True)


@pytest.mark.parametrize("shape", [[4, 2], [3], [2, 4, 1]])
def test_shapes_are_checked_for_an_optimizer_that_remembers_nothing_yet(shape: list[int]) -> None:
    parameter = nn.Parameter(torch.ones(2, 4))
    part = OptimizerPart(torch.optim.AdamW([parameter]), {"w": parameter})
    tree = part.tree()
    tree["state"] = {"w": {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 4)}}
    part.check(tree)
    tree["state"]["w"]["exp_avg"] = torch.zeros(shape)
    with pytest.raises(ImageError, match="'exp_avg' of 'w' has shape"):
        part.check(tree)


def test_what_other_optimizers_remember_may_have_shapes_of_its_own() -> None:
    class Blockwise(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    parameter = nn.Parameter(torch.ones(2, 4))
    part = OptimizerPart(Blockwise([parameter], lr=0.1), {"w": parameter})
    part.check({**part.tree(), "state": {"w": {"absmax": torch.zeros(3)}}})


def outer_state(outer: OuterStep) -> tuple[TrainingState, dict[str, torch.Tensor]]:
    agreed = {"w": torch.ones(3, 2), "b": torch.ones(2)}
    return TrainingState(ModelPart(agreed, {}), {"outer": OuterPart(outer, agreed)}), agreed


@pytest.mark.parametrize("spec", ["nesterov", "fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_an_outer_step_goes_on_from_an_image_with_moments_and_counts(spec: str) -> None:
    first, second = parse_outer(spec), parse_outer(spec)
    (here, agreed), (there, copied) = outer_state(first), outer_state(second)
    mean = {name: torch.full_like(one, 0.1) for name, one in agreed.items()}
    first.step(agreed, mean)
    there.read(here.image(ID), foreign=True).load()
    for _ in range(2):
        first.step(agreed, mean)
        second.step(copied, mean)
    assert torch.equal(here.image(ID), there.image(ID))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"m": None}, "expected a dict in the image, got NoneType"),
        (
            {"v": {"w": torch.ones(2, 3)}},
            r"'w' of the outer step's 'v' has shape \[3, 2\] here, got \[2, 3\]",
        ),
        ({"v": {"w": torch.ones(3, 2).int()}}, "'w' of the outer step's 'v' is torch.float32 here"),
        ({"v": {"x": torch.ones(2)}}, "'x' of the outer step's 'v' is only in the image"),
        ({"steps": -1}, "expected a count of the outer step's 'steps', got '-1'"),
        ({"steps": True}, "expected a count"),
        ({"steps": 10**400}, "expected a count"),
    ],
)
def test_an_outer_state_that_does_not_fit_is_refused(changed: dict[str, Any], said: str) -> None:
    here, agreed = outer_state(parse_outer("fedadam"))
    told = Notes(**{**parse_outer("fedadam").state_dict(), **changed})
    lies = TrainingState(ModelPart(agreed, {}), {"outer": UserPart(told)})
    with pytest.raises(ImageError, match=said):
        here.read(lies.image(ID))
