"""Embeddings of a knowledge graph in shared tables: TransE on UMLS or Kinships, as PyKEEN's package ships them.

A triple (head, relation, tail) is true where head + relation is near tail. Each peer holds some rows of the embeddings
for all, and trains on its share of the triples: it pulls the rows of a batch, and pushes their gradients. Hits@10
and MRR judge the triples of the test by the ranks of their heads and tails among all that are not known to be true.

    python transe.py --peers 3 --small              # a whole swarm on this machine
    python transe.py --of 3                         # the first of three machines; it prints its address
    python transe.py --of 3 --index 1 --join ADDRESS
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from local_swarm import Curve, Result, Train, answer, children, main, trained_together
from torch.nn.functional import normalize

from equipoise.peer import Peer
from equipoise.peer.training import Shared

WIDTH, BATCH, MARGIN, LR = 50, 256, 1.0, 0.1
"""Values of a row, triples of all peers in a step each, the loss's margin, and the learning rate."""


@dataclass(frozen=True)
class Graph:
    """Triples, i64 [n, 3] of (head, relation, tail): those that train, those of the test, and all that are known."""

    training: torch.Tensor
    test: torch.Tensor
    known: torch.Tensor
    entities: int
    relations: int


@dataclass(frozen=True)
class Ranked(Result):
    """What came of it.

    Attributes:
        hits: Share of the heads and tails of the test that rank among the first ten.
        mrr: Mean of 1 / rank.
    """

    hits: float
    mrr: float


def graph(name: str) -> Graph:
    """Read a graph of PyKEEN's package, without importing that, or one of a folder with files of the same names."""
    folder, found = Path(name), importlib.util.find_spec("pykeen")
    if found is not None and found.origin is not None and not folder.is_dir():
        folder = Path(found.origin).parent / "datasets" / name
    if not folder.is_dir():
        raise SystemExit(f"expected umls, kinships (pip install pykeen) or a folder, got {name}")
    parts = [[line.split("\t") for line in (folder / f"{part}.txt").read_text().splitlines()]
             for part in ("train", "valid", "test")]  # fmt: skip
    ends = sorted({one for part in parts for head, _, tail in part for one in (head, tail)})
    links = sorted({relation for part in parts for _, relation, _ in part})
    entity, relation = ({one: at for at, one in enumerate(names)} for names in (ends, links))
    training, valid, test = (
        torch.tensor([(entity[head], relation[link], entity[tail]) for head, link, tail in part])
        for part in parts
    )
    return Graph(training, test, torch.cat([training, valid, test]), len(ends), len(links))


def distance(heads: torch.Tensor, relations: torch.Tensor, tails: torch.Tensor) -> torch.Tensor:
    """The L1 distance of head + relation from tail, whose entities have the length 1: [..., width] to [...]."""
    return (normalize(heads, dim=-1) + relations - normalize(tails, dim=-1)).abs().sum(-1)


def corrupted(triples: torch.Tensor, entities: int) -> torch.Tensor:
    """Put a random entity in the place of the head of every other triple, and of the tail of the rest."""
    wrong, half = triples.clone(), torch.arange(len(triples)) % 2 == 0
    drawn = torch.randint(entities, (len(triples),))
    wrong[half, 0], wrong[~half, 2] = drawn[half], drawn[~half]
    return wrong


def batch_loss(ends: torch.Tensor, links: torch.Tensor, count: int) -> torch.Tensor:
    """The margin ranking loss (Bordes 2013) of `count` triples, of their heads, tails, and those of wrong triples."""
    heads, tails, wrong_heads, wrong_tails = torch.split(ends, count)
    true, wrong = distance(heads, links, tails), distance(wrong_heads, links, wrong_tails)
    return (MARGIN + true - wrong).relu().mean()


@torch.no_grad()
def ranks(entities: torch.Tensor, relations: torch.Tensor, found: Graph) -> torch.Tensor:
    """The filtered ranks of heads and tails of the test, f32 [2 n]; equal distances share the mean of their ranks."""
    known: dict[tuple[str, int, int], list[int]] = {}
    for head, link, tail in found.known.tolist():
        known.setdefault(("tail", head, link), []).append(tail)
        known.setdefault(("head", tail, link), []).append(head)
    places = []
    for head, link, tail in found.test.tolist():
        for side, given, right in (("tail", head, tail), ("head", tail, head)):
            one, every = entities[given], entities
            ends = (one, every) if side == "tail" else (every, one)
            far = distance(ends[0], relations[link], ends[1])
            mine = far[right].clone()
            far[known[side, given, link]] = torch.inf
            places.append(1 + float((far < mine).sum()) + float((far == mine).sum()) / 2)
    return torch.tensor(places)


def train(peer: Peer | None, options: argparse.Namespace) -> Ranked:
    """Train on this peer's share of the triples, or alone on all of them."""
    found = graph(options.graph)
    torch.manual_seed(options.seed)
    entities, relations = torch.empty(found.entities, WIDTH), torch.empty(found.relations, WIDTH)
    for one in (entities, relations):
        torch.nn.init.xavier_uniform_(one)
    torch.manual_seed(1 + options.index + 100 * options.seed)
    mine = found.training[options.index :: options.of]

    def judged() -> float:
        return float(1 - (ranks(entities, relations, found) <= 10).float().mean())

    curve = Curve(judged)
    with contextlib.ExitStack() as leaving:
        tables = {"entities": entities, "relations": relations}
        spec = f"shared:staleness={options.staleness}"
        run = leaving.enter_context(peer.join(options.graph, tables, strategy=spec)) if peer else None
        shared = Shared(run, f"adagrad:lr={LR}") if run else None
        inner = None if shared else torch.optim.Adagrad([entities, relations], LR)
        if run:
            run.wait_for(options.of - 1)
        curve.add(run)
        for _ in range(epochs(options)):
            for triples in torch.split(mine[torch.randperm(len(mine))], BATCH // options.of):
                wrong = corrupted(triples, found.entities)
                ends = torch.cat([triples[:, 0], triples[:, 2], wrong[:, 0], wrong[:, 2]])
                if shared:
                    rows = shared.pull(entities=ends, relations=triples[:, 1])
                    batch_loss(rows["entities"], rows["relations"], len(triples)).backward()  # type: ignore[no-untyped-call]
                    shared.push()
                    shared.clock()
                elif inner:
                    for one in (entities, relations):
                        one.requires_grad_().grad = None
                    batch_loss(entities[ends], relations[triples[:, 1]], len(triples)).backward()  # type: ignore[no-untyped-call]
                    inner.step()
        if shared:
            shared.pull()  # All rows, into the tensors.
        curve.add(run)
        places = ranks(entities, relations, found)
    points = curve.result([]).points
    return Ranked(points, "", float((places <= 10).float().mean()), float((1 / places).mean()))


def epochs(options: argparse.Namespace) -> int:
    return options.epochs or (5 if options.small else 100)


def by_pykeen(options: argparse.Namespace) -> tuple[float, float] | None:
    """Hits@10 and MRR of PyKEEN's own TransE with the same settings, in one process; None where it is not installed."""
    try:
        from pykeen.pipeline import pipeline  # It brings much that nothing else needs.
    except ImportError:
        return None
    found = pipeline(
        dataset=options.graph,
        model="TransE",
        model_kwargs={"embedding_dim": WIDTH, "scoring_fct_norm": 1},
        loss="marginranking",
        loss_kwargs={"margin": MARGIN},
        optimizer="adagrad",
        optimizer_kwargs={"lr": LR},
        training_kwargs={"num_epochs": epochs(options), "batch_size": BATCH, "use_tqdm": False},
        evaluation_kwargs={"use_tqdm": False},
        random_seed=options.seed,
        device="cpu",
    )
    hits, mrr = ("both.realistic.hits_at_10", "both.realistic.inverse_harmonic_mean_rank")
    return found.get_metric(hits), found.get_metric(mrr)


def run_tables(train: Train, options: argparse.Namespace) -> int:
    """Run a swarm on this machine, and beside it one process with all triples, and PyKEEN's own."""
    with children(train, options) as start:
        together = trained_together(start, options.peers)
        alone: Any = answer(start(alone=True))
    first, known = together[0], options.graph in ("umls", "kinships")
    theirs = by_pykeen(options) if known else None
    found = {"hits": first.hits, "mrr": first.mrr, "hits_alone": alone.hits, "mrr_alone": alone.mrr}
    found |= {"seconds": max(one.end.seconds for one in together)}
    rows = {
        f"{options.peers} peers together": (first.hits, first.mrr),
        "one process": (alone.hits, alone.mrr),
    }
    if theirs is not None:
        found |= {"hits_pykeen": theirs[0], "mrr_pykeen": theirs[1]}
        rows["PyKEEN, one process"] = theirs
    told = [f"{name:20} Hits@10 {hits:.3f}  MRR {mrr:.3f}" for name, (hits, mrr) in rows.items()]
    print(json.dumps(found) if options.json else "\n".join(told))
    return 0


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--graph", default="umls", help="umls, kinships, or a folder with train.txt, valid.txt, test.txt"
    )
    parser.add_argument(
        "--staleness", default="4", help="clocks by which a peer may be ahead; inf never waits"
    )
    parser.add_argument("--epochs", type=int, help="times that all triples are trained on")


if __name__ == "__main__":
    main(train, __doc__, add, run_tables)
