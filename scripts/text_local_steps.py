"""Compare ways of local steps on the text example: outer steps by intervals, and codecs by bytes.

All peers of a training live in this process and in virtual time; loops, codecs, error feedback and outer steps are the
program's own. Every peer has a piece of the text that no other has, and makes AdamW steps. Losses are of files that
nobody trains on, in nats a character, after equal numbers of steps.

    scripts/text_local_steps.py grid                        # every 10 to 300 by momentum: decides README's outer step
    scripts/text_local_steps.py codecs --json > codecs.jsonl        # SparseLoCo beside DiLoCo and the reference
    scripts/text_local_steps.py plot codecs.jsonl codecs.png        # loss against bytes

The reference of `codecs` is SparseLoCo with top 64 of 4096 and 2 bits a value (arXiv 2508.15706), computed here: .219
bits a value. Its two magnitudes are the means of the smaller and the larger half of what it sends, and cost nothing.
`bits` are those of payloads that a peer sends, a parameter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from text_data import Batch, Text, Windows, evaluation_batches, piece, read_text
from text_loops import LR
from text_model import TextModel, held_out_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import AdamW

from equipoise.averaging.outer import Nesterov
from equipoise.compression import parse_codec
from equipoise.peer import Run
from equipoise.peer.simulation import SimulatedPeer, simulate
from equipoise.peer.training import DiLoCo, SparseLoCo

SAMPLES, LENGTH = 8, 64
"""Of a batch."""

SIZES = {"width": 48, "layers": 2, "heads": 4}
"""Of a model with some 70,000 parameters: a step takes some milliseconds of a core."""

TOP, OF, TOP_BITS = 64, 4096, 14
"""The reference sends so many values of so many, each with 12 bits of index and 2 of value."""

MARKS = 20
"""Losses of a training, at even distances: each takes as long as ten steps."""


class Setting(NamedTuple):
    """What all ways of a comparison have in common: peers, the steps of each, and the seed."""

    peers: int
    steps: int
    seed: int


class Way(NamedTuple):
    """One way of training: the codec of the run, the steps between exchanges, and what makes the loop from both."""

    codec: str
    every: int
    loop: Callable[[Run, int], DiLoCo]


def nesterov(momentum: float) -> Callable[[Run, int], DiLoCo]:
    """DiLoCo with that outer momentum; without any, an outer step that takes the mean, as LocalSGD does."""
    rate = 0.7 if momentum else 1.0
    return lambda run, every: DiLoCo(run, every, Nesterov(rate, momentum))


def sparse(beta: float) -> Callable[[Run, int], DiLoCo]:
    """SparseLoCo with that decay of the residual."""
    return lambda run, every: SparseLoCo(run, every, beta)


GRID = {
    f"every={every:<3} momentum={momentum}": Way("fp32", every, nesterov(momentum))
    for every in (10, 30, 100, 300)
    for momentum in (0.0, 0.5, 0.9)
}

CODECS: dict[str, Way | None] = {
    "SparseLoCo 64, beta .95": Way("sparse:group=64", 30, sparse(0.95)),
    "SparseLoCo 64, beta 1": Way("sparse:group=64", 30, sparse(1.0)),
    "SparseLoCo 32, beta .95": Way("sparse:group=32", 30, sparse(0.95)),
    "int8 DiLoCo": Way("int8", 30, nesterov(0.5)),
    "nf4 DiLoCo": Way("nf4", 30, nesterov(0.5)),
    "fp32 DiLoCo": Way("fp32", 30, nesterov(0.5)),
    "int8 DiLoCo, every 600": Way("int8", 600, nesterov(0.5)),
    "int8 mean, every 600": Way("int8", 600, nesterov(0.0)),
    "reference: top 64 of 4096": None,
}


@cache
def the_text() -> tuple[Text, list[Batch]]:
    """The text, and the windows by which all are judged."""
    text = read_text()
    return text, evaluation_batches(text, 16, 16, LENGTH)


def judged(model: TextModel) -> float:
    """The model's loss."""
    return held_out_loss(model, the_text()[1])


def batches(setting: Setting, index: int) -> Windows:
    """The batches of one peer."""
    own = piece(the_text()[0].training, index, setting.peers)
    return Windows(own, SAMPLES, LENGTH, 1000 * setting.seed + index)


def stepping(model: TextModel, source: Iterator[Batch]) -> Callable[[], None]:
    """Return a call that makes one inner step; its optimizer keeps its state."""
    optimizer = AdamW(model.parameters(), lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        model(next(source)).backward()
        optimizer.step()

    return step


def marks(steps: int, every: int) -> set[int]:
    """The numbers of the exchanges after which a training is judged; the last is one of them."""
    exchanges = steps // every
    return {exchanges * (at + 1) // MARKS for at in range(MARKS)} - {0}


def trained(way: Way, setting: Setting) -> dict[int, float]:
    """The losses of the agreed model, by number of exchanges."""
    found: dict[int, float] = {}
    wanted = marks(setting.steps, way.every)

    def work(peer: SimulatedPeer, index: int) -> None:
        model = TextModel(**SIZES)
        with peer.join("text", model, codec=way.codec) as run, way.loop(run, way.every) as group:
            step = stepping(model, batches(setting, index))
            while group.steps < setting.steps:
                peer.compute(1.0)
                step()
                if index == 0 and group.epoch in wanted - found.keys():
                    found[group.epoch] = judged(model)

    simulate(work, setting.peers, seed=setting.seed)
    return found


def reference(setting: Setting, every: int = 30, beta: float = 0.95) -> dict[int, float]:
    """The losses of SparseLoCo with top 64 of 4096, by its own loop."""
    models = [TextModel(**SIZES) for _ in range(setting.peers)]
    steps = [stepping(model, batches(setting, index)) for index, model in enumerate(models)]
    agreed = parameters_to_vector(models[0].parameters()).detach()
    residuals, found = [torch.zeros_like(agreed) for _ in models], {}
    for exchange in range(1, setting.steps // every + 1):
        mean = torch.zeros_like(agreed)
        for model, step, residual in zip(models, steps, residuals, strict=True):
            for _ in range(every):
                step()
            residual.mul_(beta).add_(agreed - parameters_to_vector(model.parameters()).detach())
            sent = torch.cat([top(chunk) for chunk in torch.split(residual, OF)])
            residual.sub_(sent)
            mean.add_(sent, alpha=1 / setting.peers)
        agreed = agreed - mean
        for model in models:
            vector_to_parameters(agreed.clone(), model.parameters())
        if exchange in marks(setting.steps, every):
            found[exchange] = judged(models[0])
    return found


def top(values: torch.Tensor) -> torch.Tensor:
    """One in 64 of the values, the largest, f32 [n], at the mean magnitudes of their lower and upper halves."""
    found = torch.zeros_like(values)
    sizes, chosen = values.abs().topk(max(1, TOP * values.numel() // OF))
    upper = sizes > (sizes[0] + sizes[-1]) / 2
    for half in (upper, ~upper):
        found[chosen[half]] = sizes[half].mean() * values[chosen[half]].sign()
    return found


def bits(way: Way | None, setting: Setting) -> float:
    """Bits that a peer sends in an exchange, a parameter: its contribution, and its share of the mean to the others."""
    parts = 1 - 1 / setting.peers
    if way is None:
        return TOP_BITS * TOP / OF * (1 + setting.peers) * parts
    codec, values = parse_codec(way.codec), 1 << 20
    return 8 * (codec.encoded_size(values) + codec.mean_size(values, setting.peers)) * parts / values


def compared(ways: Mapping[str, Way | None], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each way."""
    settings = [Setting(options.peers, options.steps, seed) for seed in range(options.seeds)]
    for name, way in ways.items():
        if not name.startswith(options.only):
            continue
        began = time.monotonic()
        found = [reference(one) if way is None else trained(way, one) for one in settings]
        curve = [[at, statistics.mean(one[at] for one in found)] for at in found[0]]
        once, last = bits(way, settings[0]), max(found[0])
        row = {"way": name, "losses": [one[last] for one in found], "bits": round(once * last, 2)}
        yield row | {"curve": [[once * at, loss] for at, loss in curve], "seconds": time.monotonic() - began}


def plot(rows: Path, picture: Path) -> None:
    """Draw loss against bits, a line for each way of `rows`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in map(json.loads, rows.read_text().splitlines()):
        axes.plot(*zip(*row["curve"], strict=True), label=row["way"], marker=".")
    axes.set(
        xscale="log",
        xlabel="bits that a peer has sent, a parameter",
        ylabel="held-out loss, nats a character",
    )
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Compare, and print a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["grid", "codecs", "plot"])
    parser.add_argument("files", nargs="*", type=Path, help="of `plot`: the lines of --json, and the picture")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1200, help="of each peer (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="ways whose names begin so")
    parser.add_argument("--json", action="store_true", help="one line a way")
    options = parser.parse_args()
    if options.what == "plot":
        plot(*options.files)
        return
    torch.set_num_threads(1)
    for row in compared(GRID if options.what == "grid" else CODECS, options):
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        loss, shown = statistics.mean(row["losses"]), " ".join(f"{one:.4f}" for one in row["losses"])
        told = f"{row['bits']:8.2f} bits  {row['seconds']:.0f} s"
        print(f"{row['way']:28} {loss:.4f}  ({shown})  {told}", flush=True)


if __name__ == "__main__":
    main()
