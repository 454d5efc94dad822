"""Rows of shards: the optimizers beside torch's, what is refused, and messages."""

from __future__ import annotations

import json
from functools import partial
from random import Random

import pytest
import torch

from equipoise.averaging.shared.messages import SHARDS, Ask, Copy
from equipoise.averaging.shared.rows import OPTIMIZERS, RowStore, packed, unpacked
from equipoise.peer.client import message_content


@pytest.mark.parametrize(
    ("spec", "theirs"),
    [
        ("sgd:lr=0.5", partial(torch.optim.SGD, lr=0.5)),
        ("adagrad:lr=0.1", partial(torch.optim.Adagrad, lr=0.1)),
        ("adam:lr=0.01,beta1=0.8", partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.999))),
    ],
)
def test_each_row_moves_as_torch_moves_it(spec: str, theirs) -> None:
    torch.manual_seed(0)
    table = torch.randn(5 * SHARDS, 3)
    rows = [torch.nn.Parameter(one.clone()) for one in table[7::SHARDS]]
    store, each = RowStore({"x": table}, 7, OPTIMIZERS.parse(spec)), [theirs([row]) for row in rows]
    for step in range(20):
        ids = torch.tensor([0, 2, 3]) if step % 3 else torch.tensor([1, 2])
        gradients = torch.randn(len(ids), 3)
        store.apply({"ids/x": ids, "gradients/x": gradients})
        for at, gradient in zip(ids.tolist(), gradients, strict=True):
            rows[at].grad = gradient
            each[at].step()
    found = store.read({"ids/x": torch.arange(5)})["rows/x"]
    assert torch.allclose(found, torch.stack([one.detach() for one in rows]), atol=1e-6)


def test_a_state_that_was_loaded_goes_on_as_the_other_one() -> None:
    table = torch.randn(40, 2)
    one, other = (
        RowStore({"x": start}, 3, OPTIMIZERS.parse("adam")) for start in (table, torch.zeros(40, 2))
    )
    push = {"ids/x": torch.tensor([0, 1]), "gradients/x": torch.ones(2, 2)}
    one.apply(push)
    state = one.dump()
    other.load(state)
    one.apply(push)
    other.apply(push)
    assert all(torch.equal(mine, other.dump()[name]) for name, mine in one.dump().items())
    assert not torch.equal(state["rows/x"], one.dump()["rows/x"]), "a state is a copy"


@pytest.mark.parametrize(
    ("push", "told"),
    [
        ({"ids/x": torch.tensor([1, 0])}, "rising ids"),
        ({"ids/x": torch.tensor([1, 1])}, "rising ids"),
        ({"ids/x": torch.tensor([0], dtype=torch.int32)}, "rising ids"),
        ({"ids/x": torch.tensor([3])}, "ids of table 'x' below 3"),
        ({"ids/x": torch.tensor([-1])}, "ids of table 'x' below 3"),
        ({"ids/x": torch.tensor([0])}, "nothing else"),
        ({"gradients/x": torch.ones(1, 2)}, "nothing else"),
        ({"ids/x": torch.tensor([0]), "gradients/x": torch.ones(1, 2), "y": torch.ones(1)}, "nothing else"),
        ({"ids/x": torch.tensor([0]), "gradients/x": torch.ones(1, 3)}, r"gradients \[1, 2\]"),
        ({"ids/x": torch.tensor([0]), "gradients/x": torch.ones(1, 2).double()}, "fp32"),
        ({"ids/x": torch.tensor([0]), "gradients/x": torch.full((1, 2), torch.inf)}, "finite gradients"),
    ],
)
def test_what_does_not_fit_changes_nothing(push: dict[str, torch.Tensor], told: str) -> None:
    store = RowStore({"x": torch.zeros(3 * SHARDS, 2)}, 0, OPTIMIZERS.parse("sgd"))
    with pytest.raises(ValueError, match=told):
        store.apply(push)
    with pytest.raises(ValueError, match="shape"):
        store.load({"rows/x": torch.zeros(4, 2)})
    assert not store.dump()["rows/x"].any()


def test_a_push_that_would_leave_a_row_infinite_changes_no_table() -> None:
    store = RowStore({"x": torch.ones(16, 2), "y": torch.ones(16, 2)}, 0, OPTIMIZERS.parse("adagrad"))
    ids = {"ids/x": torch.tensor([0]), "ids/y": torch.tensor([0])}
    with pytest.raises(ValueError, match="finite gradients of table 'y'"):
        store.apply(ids | {"gradients/x": torch.ones(1, 2), "gradients/y": torch.full((1, 2), 1e30)})
    assert (store.dump()["rows/x"] == 1.0).all()


def test_items_come_out_of_a_message_as_they_went_in() -> None:
    sends = [
        (Ask(3, 7, -1), {"ids/x": torch.tensor([1, 2])}),
        (Copy(4, 9), {}),
        (Ask(5, 8, 2), {"ids/x": torch.tensor([0]), "gradients/x": torch.ones(1, 4)}),
    ]
    tensors, codec, fields = packed("3.01234567", sends)
    view, items = unpacked(tensors, json.loads(json.dumps(fields)))
    assert (view, codec) == ("3.01234567", "raw")
    assert [one for one, _ in items] == [one for one, _ in sends]
    for (_, got), (_, gave) in zip(items, sends, strict=True):
        assert got.keys() == gave.keys()
        assert all(torch.equal(got[name], one) for name, one in gave.items())


@pytest.mark.parametrize("name", ["x", "-1 x", "2 x", " x", "1_0 x", "9" * 5000 + " x"])
def test_tensors_of_no_item_are_refused(name: str) -> None:
    _, _, fields = packed("3.01234567", [(Copy(0, 1), {}), (Copy(1, 1), {})])
    with pytest.raises(ValueError, match=r"expected tensors of 2 items|digits"):
        unpacked({name: torch.zeros(3)}, fields)


def test_a_push_has_at_most_a_fifth_more_bytes_than_its_rows() -> None:
    chance, width = Random(1), 32
    ids = sorted(chance.sample(range(20_000), 512))
    shards = {at: torch.tensor([one // SHARDS for one in ids if one % SHARDS == at]) for at in range(SHARDS)}
    sends = [
        (Ask(at, 100_000, 9_999), {"ids/entities": rows, "gradients/entities": torch.ones(len(rows), width)})
        for at, rows in shards.items()
    ]
    rooms: list[torch.Tensor] = []

    def room(size: int) -> torch.Tensor:
        rooms.append(torch.empty(size, dtype=torch.uint8))
        return rooms[-1]

    for owner in range(4):  # Four owners, four shards each.
        tensors, codec, fields = packed("1000.0123abcd", sends[4 * owner : 4 * owner + 4])
        message_content.encode(tensors, fields, codec, room)
    sent, least = sum(map(len, rooms)), 512 * width * 4
    print(f"{sent} bytes for rows of {least}: {sent / least:.3f} times")
    assert sent <= 1.2 * least
