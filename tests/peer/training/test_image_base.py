"""`base=`: peers whose frozen tensors are in other dtypes, and adapters that they train together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from torch import nn

from equipoise.averaging.spec import SpecError
from equipoise.peer import Refused
from equipoise.peer.training import DiLoCo, image
from fakes.adapted import Adapted
from fakes.trainers import Trainer, assert_alike
from fakes.world import World
from oracles.training import difference


class Tuner(Trainer):
    form, base = "fp32", "tiny"

    def join(self) -> None:
        self.model = Adapted(self.form)
        self.run = self.swarm.join(self.name, "text", self.model, base=self.base)
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.opt = self.run.optimizer(self.make(parameters), **self.options)


def tuners(world: World, **options: Any) -> list[Tuner]:
    made = [Tuner(world, index, 4, target_batch_size=24, **options) for index in range(3)]
    for tuner, form in zip(made, ("bf16", "fp32", "4 bit"), strict=True):
        tuner.form = form
    return made


def test_peers_that_hold_a_base_in_other_dtypes_train_one_adapter(world: World) -> None:
    made = tuners(world)
    world.run(*made)
    assert_alike(made)
    assert made[2].last.contributors.keys() == {"peer0", "peer1", "peer2"}
    adapters = [dict(tuner.model.adapter.named_parameters()) for tuner in made]
    assert difference(adapters[0], adapters[2]) == 0
    assert difference(adapters[0], dict(Adapted("fp32").adapter.named_parameters())) > 1e-3
    assert [one.name for one in made[0].run.core.request.tensors.tensors] == [
        "adapter.weight",
        "adapter.bias",
    ]


@pytest.mark.parametrize("local", [False, True])
def test_without_a_base_the_refusal_names_the_first_tensor_that_differs_with_both_dtypes(local: bool) -> None:
    world = World()
    world.named = frozenset({"peer0"})
    lines: list[str] = []

    def work(index: int) -> None:
        model = Adapted("bf16" if index == 0 else "4 bit")
        run = world.join(f"peer{index}", "text", model)
        world.compute(float(index))
        try:
            if local:
                DiLoCo(run, every=2)
            else:
                run.optimizer(torch.optim.SGD(model.adapter.parameters(), 0.1), target_batch_size=8)
            world.compute(3.0)
        except Refused as refused:
            lines.append(str(refused))

    world.each(2, work)
    (line,) = lines
    expected = (
        r"another spec: tensor 2: here 'base\.weight' uint8 \[256, 1\], frozen, values \w{16}, "
        r"there 'base\.weight' bfloat16 \[64, 8\], frozen, values \w{16}; give the same"
    )
    assert re.search(expected, line), line


def test_a_base_of_another_name_is_another_spec(world: World) -> None:
    named = [world.join(f"peer{at}", "text", Adapted("bf16"), base=base) for at, base in enumerate("ab")]
    assert [run.options.base for run in named] == ["a", "b"]
    with pytest.raises(
        SpecError, match="expected as name of the base at most 64 characters of printable ASCII, got"
    ):
        world.join("peer2", "text", Adapted("bf16"), base="smollm2\n")


@pytest.mark.parametrize("turned", [False, True])
def test_a_base_in_a_file_is_digested_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turned: bool
) -> None:
    values = torch.from_file(str(tmp_path / "base"), shared=True, size=64 << 20, dtype=torch.bfloat16)
    model, held = nn.Module(), list[int]()
    weight = values.view(4096, -1)
    model.weight = nn.Parameter(weight.t() if turned else weight, requires_grad=False)

    class Watched:
        AUTO = blake3.AUTO

        def __init__(self, max_threads: int) -> None:
            self.inner = blake3(max_threads=max_threads)

        def update(self, data: Any) -> None:
            self.inner.update(data)
            held.append(private())

        def hexdigest(self) -> str:
            return self.inner.hexdigest()

    monkeypatch.setattr(image, "blake3", Watched)
    image.frozen_of(model)  # Also loads what it needs.
    held.clear()
    before = private()
    assert image.frozen_of(model)[0].startswith("'weight' bfloat16 [")
    assert max(held) - before < 64 << 20, "the tensor has 128 MiB"


def private() -> int:
    """The bytes that this process has in memory of its own, without those of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])  # type: ignore[index]
