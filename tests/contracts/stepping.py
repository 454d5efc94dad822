"""What a `Run` promises those who train with it: terms, states, buffers, and gradients of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contracts.run import OPTIONS, SOON, Peers, join_all, together
from e2e.swarm import eventually
from equipoise.averaging.outcome import NoPeers
from equipoise.averaging.schema import SchemaError
from equipoise.averaging.spec import SpecError
from equipoise.averaging.state import StateId
from equipoise.peer import Refused


class _Mixed(torch.nn.Module):
    """A sparse embedding, another that a layer is tied to, bf16 parameters, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(5, 2, sparse=True)
        self.tied = torch.nn.Embedding(5, 2, sparse=True)
        self.frozen = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.narrow = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        self.out = torch.nn.Linear(2, 5, bias=False)
        self.out.weight = self.tied.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.words(tokens) + self.tied(tokens))
        return self.out(self.narrow(hidden.bfloat16()).float())


LEFT_OUT = 2.0
"""Seconds for one that brings nothing: those who do may well have met without it, and nobody is left for it to meet."""


class SteppingContract:
    """Tests that ask for `peers(n)`: clients of n daemons of one swarm."""

    def test_metrics_are_averaged_by_the_weights_that_counted(self, peers: Peers) -> None:
        clients = peers(3)
        runs = join_all(clients, [[torch.zeros(1)] for _ in clients])
        weights, scored = (1.0, 3.0, 6.0), (10.0, 20.0, 70.0)
        for run, weight in zip(runs, weights, strict=True):
            run.accumulate([torch.ones(1)], weight=weight)
        eventually(lambda: all(run.progress().swarm == 10.0 for run in runs), "each other's progress")

        outcomes = together(
            *(
                lambda run=run, index=index: run.step(
                    SOON,
                    metrics={"loss": 0.1 * (index + 1), **({"only": 7} if index == 0 else {})},
                    evaluation=(scored[index], {"accuracy": index / 3}),
                )
                for index, run in enumerate(runs)
            )
        )

        for outcome in outcomes:
            assert outcome.ok, outcome.reason
            assert outcome.metrics == {
                "loss": pytest.approx((0.1 + 3 * 0.2 + 6 * 0.3) / 10, rel=1e-12),
                "only": 7.0,
            }
            assert outcome.evaluation == {"accuracy": pytest.approx((20 / 3 + 140 / 3) / 100, rel=1e-12)}
            assert (outcome.metrics, outcome.evaluation) == (outcomes[0].metrics, outcomes[0].evaluation)

    def test_a_metric_that_is_not_valid_begins_no_round(self, peers: Peers) -> None:
        (client,) = peers(1)
        run = client.join("digits", [torch.zeros(1)], **OPTIONS)
        with pytest.raises(ValueError, match="metric 'loss' as a finite number, got nan"):
            run.step(SOON, metrics={"loss": float("nan")})
        with pytest.raises(ValueError, match="weight of metrics"):
            run.step(SOON, evaluation=(-1.0, {"loss": 1.0}))
        assert run.pending is None

    def test_members_say_which_state_they_hold(self, peers: Peers) -> None:
        clients = peers(3)
        runs = join_all(clients, [[torch.zeros(1)] for _ in clients])
        held = [StateId(7, "a" * 64), StateId(8, "b" * 64), None]
        for run in runs[:2]:
            run.accumulate([torch.ones(1)], weight=1)
        eventually(lambda: all(run.progress().swarm == 2.0 for run in runs), "each other's progress")

        outcomes = together(
            *(
                lambda run=run, state=state: run.step(SOON if state else LEFT_OUT, state=state)
                for run, state in zip(runs, held, strict=True)
            )
        )

        ok = [outcome for outcome in outcomes if outcome.ok]
        assert len(ok) >= 2, outcomes
        for outcome in ok:
            assert outcome.states == {
                c.peer_id: s for c, s in zip(clients, held, strict=True) if s is not None
            }
            assert outcome.state == held[1], "of equally many the higher epoch"
        assert runs[0].mean["0"] == 1.0

    def test_buffers_travel_behind_the_gradients(self, peers: Peers) -> None:
        models: list[Any] = [
            torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(2)
        ]
        runs = join_all(peers(2), models)
        for index, (run, model) in enumerate(zip(runs, models, strict=True)):
            run.agree({"clip": "1.0"}, buffers=True)
            model(torch.randn(4, 2)).sum().backward()
            run.accumulate(model, weight=1 + 2 * index)
            model[1].running_mean.fill_(
                4.0 * index
            )  # As it is at step time, not when gradients were accumulated.
            model[1].num_batches_tracked.fill_(index)
        eventually(lambda: all(run.progress().swarm == 4.0 for run in runs), "each other's progress")

        outcomes = together(*(lambda run=run: run.step(SOON) for run in runs))

        assert all(outcome.ok for outcome in outcomes), outcomes
        for index, (run, model) in enumerate(zip(runs, models, strict=True)):
            assert torch.equal(model[1].running_mean, torch.full((2,), 3.0))
            assert int(model[1].num_batches_tracked) == index, "a counter stays an integer of its own"
            assert sorted(run.mean) == sorted(dict(model.named_parameters()))
        assert torch.equal(models[0][0].weight.grad, models[1][0].weight.grad)

    def test_a_buffer_that_has_changed_is_told_before_the_round_to_an_observer_too(
        self, peers: Peers
    ) -> None:
        model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        run = peers(1)[0].join("digits", model, **OPTIONS)
        run.agree({}, buffers=True)
        model[1].running_mean = torch.zeros(3)
        with pytest.raises(SchemaError, match="running_mean"):
            run.step(timeout=0.1)
        assert run.pending is None

    def test_an_error_of_a_result_is_raised_again_and_the_round_is_settled_once(self, peers: Peers) -> None:
        tensors = [[torch.full((4,), float(index))] for index in range(2)]
        runs = join_all(peers(2), tensors)
        pending = [run.average(timeout=SOON, wait=False) for run in runs]
        assert pending[1].result()
        tensors[0][0].resize_(5)
        for _ in range(2):
            with pytest.raises(SchemaError):
                pending[0].result()
        assert runs[0].rounds_ok == 1

    def test_only_those_of_equal_terms_meet(self, peers: Peers) -> None:
        runs = join_all(peers(3), [[torch.zeros(1)] for _ in range(3)])
        for run in runs[:2]:
            run.agree({"target batch size": "4096"})
            run.accumulate([torch.ones(1)], weight=1)
        runs[2].accumulate([torch.full((1,), 100.0)], weight=1)
        eventually(lambda: all(run.progress().swarm == 2.0 for run in runs[:2]), "each other's progress")

        outcomes = together(lambda: runs[0].step(SOON), lambda: runs[1].step(SOON), lambda: runs[2].step(1.0))

        assert [outcome.ok for outcome in outcomes] == [True, True, False]
        assert runs[0].mean["0"] == 1.0

    def test_terms_are_agreed_on_before_anything_else(self, peers: Peers) -> None:
        (peer,) = peers(1)
        run = peer.join("digits", [torch.zeros(1)], **OPTIONS)
        run.agree({"clip": "1.0"})
        run.agree({"clip": "1.0"})
        for terms, options, error, said in [
            ({"clip": "\n"}, {}, SpecError, "'clip': expected at most 256 characters of printable ASCII"),
            ({"clip": "1.0"}, {"buffers": True}, SchemaError, "expected an nn.Module, .* got list"),
        ]:
            with pytest.raises(error, match=said):
                run.agree(terms, **options)  # type: ignore[arg-type]
        run.accumulate([torch.ones(1)], weight=1)
        with pytest.raises(Refused, match="has accumulated or stepped already"):
            run.agree({"clip": "1.0"})
        run.leave()
        with pytest.raises(Refused, match="was left"):
            run.agree({})

    def test_a_peer_with_other_terms_hears_which_and_turns_no_other_away(self, peers: Peers) -> None:
        clients = peers(2)
        first, second = join_all(clients, [[torch.zeros(1)] for _ in range(2)])
        first.agree({"target batch size": "4096", "clip": "1.0"})
        second.leave()
        said = "another spec: target batch size: here 2048, there 4096; give the same, or use another name"

        def refusal() -> str:
            # Joins anew each time: who came first is whom the first look shows, and its record may be on its way.
            run = clients[1].join("digits", [torch.zeros(1)], **OPTIONS)
            try:
                run.agree({"target batch size": "2048", "clip": "1.0"})
            except Refused as error:
                return str(error)
            finally:
                run.leave()
            return ""

        assert said in eventually(refusal, "that the terms differ")
        runs = [first, clients[1].join("digits", [torch.zeros(1)], **OPTIONS)]
        for run in runs:
            run.agree({"target batch size": "4096", "clip": "1.0"})
        for run in runs:
            run.accumulate([torch.ones(1)], weight=1)
        assert all(outcome.ok for outcome in together(*(lambda run=run: run.step(SOON) for run in runs)))

    def test_alone_among_others_it_says_what_differs(self, peers: Peers) -> None:
        clients = peers(2)
        run = clients[0].join("digits", {"a": torch.zeros(2), "b": torch.zeros(2)}, **OPTIONS)
        clients[1].join("digits", {"a": torch.zeros(2), "b": torch.zeros(2, 3)}, **OPTIONS)
        said = "tensor 1: here 'b' float32 [2], there 'b' float32 [2, 3]; model: here 4 values in 2 tensors, "

        def reason() -> str:
            state = run.state
            return state.reason if isinstance(state, NoPeers) else ""

        eventually(lambda: said in reason(), said, SOON)
        (row,) = [row for row in clients[0].peers() if not row.me]
        assert not row.same_spec
        assert said in row.differs

    def test_gradients_come_back_in_the_parameters_own_dtype_and_layout(self, peers: Peers) -> None:
        models: list[Any] = [_Mixed() for _ in range(2)]
        runs = join_all(peers(2), models)
        for index, (run, model) in enumerate(zip(runs, models, strict=True)):
            model(torch.tensor([index, index, 3])).sum().backward()
            assert model.words.weight.grad.is_sparse
            run.accumulate(model, weight=1)
        eventually(lambda: all(run.progress().swarm == 2.0 for run in runs), "each other's progress")

        outcomes = together(*(lambda run=run: run.step(SOON) for run in runs))

        assert all(outcome.ok for outcome in outcomes), outcomes
        for run, model in zip(runs, models, strict=True):
            assert sorted(run.mean) == ["narrow.weight", "tied.weight", "words.weight"]
            assert model.narrow.weight.grad.dtype == torch.bfloat16
            assert model.frozen.weight.grad is None
            assert model.words.weight.grad.coalesce().indices().tolist() == [[0, 1, 3]]
            assert torch.equal(model.words.weight.grad.to_dense(), run.mean["words.weight"])
            assert not model.tied.weight.grad.is_sparse
            torch.optim.SparseAdam([model.words.weight]).step()
        assert torch.equal(models[0].words.weight, models[1].words.weight)
        assert torch.equal(models[0].narrow.weight.grad, models[1].narrow.weight.grad)
