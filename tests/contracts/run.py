"""What a `Run` promises, whichever face it came from and whatever swarm is behind it."""

from __future__ import annotations

import concurrent.futures
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from e2e.swarm import eventually
from equipoise.averaging.outcome import Exchanging, Gathering, Idle, NoPeers
from equipoise.averaging.schema import SchemaError
from equipoise.averaging.spec import SpecError
from equipoise.compression import CodecError
from equipoise.peer import Client, DaemonLost, Refused, RoundPending

T = TypeVar("T")

Peers = Callable[[int], list[Client]]

OPTIONS: dict[str, Any] = {"codec": "fp32", "group_size": 4}

SOON = 60.0
"""Seconds for rounds that should succeed; they take milliseconds on an idle machine."""


def together(*calls: Callable[[], T]) -> list[T]:
    """Run calls at the same time, each in a thread of its own; their results in order."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def join_all(peers: list[Client], tensors: list[Any], name: str = "digits", **options: Any) -> list[Any]:
    """One run per peer, once each knows of all the others."""
    runs = [peer.join(name, own, **{**OPTIONS, **options}) for peer, own in zip(peers, tensors, strict=True)]
    others = len(peers) - 1
    for run in runs:
        eventually(lambda run=run: run.state == Idle(peers=others), f"{others} other peers", 60.0)
    return runs


class RunContract:
    """Tests that ask for `peers(n)`: clients of n daemons of one swarm."""

    def test_average_replaces_the_tensors_by_the_weighted_mean(self, peers: Peers) -> None:
        tensors = [{"a": torch.full((2, 3), float(i)), "b": torch.full((4,), 10.0 * i)} for i in (1, 4)]
        runs = join_all(peers(2), tensors)

        first, second = together(lambda: runs[0].average(1, SOON), lambda: runs[1].average(3, SOON))

        assert first.ok, first.reason
        assert second.ok, second.reason
        assert sorted(first.contributors.values()) == [1.0, 3.0]
        assert first.contributors == second.contributors
        for own in tensors:
            torch.testing.assert_close(own["a"], torch.full((2, 3), 3.25))
            torch.testing.assert_close(own["b"], torch.full((4,), 32.5))

    def test_modules_lists_and_dtypes(self, peers: Peers) -> None:
        models: list[Any] = [
            torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)) for _ in range(2)
        ]
        expected = (models[0][1].running_mean + models[1][1].running_mean) / 2
        weight = (models[0][0].weight + models[1][0].weight) / 2
        halves = [[torch.full((5,), float(i), dtype=torch.bfloat16)] for i in range(2)]
        clients = peers(2)
        runs = join_all(clients, models)
        others = join_all(clients, halves, "halves")

        outcomes = together(*(lambda run=run: run.average(timeout=SOON) for run in [*runs, *others]))

        assert all(outcome.ok for outcome in outcomes), outcomes
        for model in models:
            torch.testing.assert_close(model[0].weight.detach(), weight.detach())
            torch.testing.assert_close(model[1].running_mean, expected)
        assert [float(half[0][0]) for half in halves] == [0.5, 0.5]

    def test_alone_a_round_fails_in_time_and_changes_nothing(self, peers: Peers) -> None:
        (peer,) = peers(1)
        tensor = torch.ones(3)
        run = peer.join("digits", [tensor], **OPTIONS)
        assert isinstance(run.state, NoPeers)

        outcome = run.average(timeout=0.3)

        assert not outcome.ok
        assert outcome.reason
        assert torch.equal(tensor, torch.ones(3))

    def test_step_exchanges_what_was_accumulated(self, peers: Peers) -> None:
        models = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
        runs = join_all(peers(2), models)
        before = [model.weight.detach().clone() for model in models]
        runs[0].accumulate({"weight": torch.tensor([[1.0, 2.0]])}, weight=2)
        runs[0].accumulate({"weight": torch.tensor([[4.0, 2.0]])}, weight=1)
        runs[1].accumulate({"weight": None}, weight=1)
        assert runs[0].accumulated == 3.0
        eventually(lambda: all(run.progress().swarm == 4.0 for run in runs), "each other's progress")

        outcomes = together(*(lambda run=run: run.step(timeout=SOON) for run in runs))

        assert all(outcome.ok for outcome in outcomes), outcomes
        for run, model, old in zip(runs, models, before, strict=True):
            torch.testing.assert_close(run.mean["weight"], torch.tensor([[1.5, 1.5]]))
            torch.testing.assert_close(model.weight.grad, torch.tensor([[1.5, 1.5]]))
            assert torch.equal(model.weight.detach(), old), "step leaves the parameters to the optimiser"
            assert run.accumulated == 0.0

    def test_a_failed_step_keeps_what_was_accumulated(self, peers: Peers) -> None:
        (peer,) = peers(1)
        model = torch.nn.Linear(2, 1)
        run = peer.join("digits", model, **OPTIONS)
        model(torch.ones(1, 2)).sum().backward()
        run.accumulate(model, weight=5)

        outcome = run.step(timeout=0.2)

        assert not outcome.ok
        assert run.accumulated == 5.0
        assert run.progress().local == 5.0
        assert run.mean == {}

    def test_a_peer_that_averages_never_meets_one_that_steps(self, peers: Peers) -> None:
        tensors = [[torch.ones(2)], [torch.ones(2)]]
        runs = join_all(peers(2), tensors)
        runs[1].accumulate([torch.ones(2)], weight=1)

        outcomes = together(lambda: runs[0].average(timeout=0.5), lambda: runs[1].step(timeout=0.5))

        assert not any(outcome.ok for outcome in outcomes)

    def test_without_waiting_tensors_change_when_the_result_is_asked_for(self, peers: Peers) -> None:
        tensors = [[torch.zeros(2)], [torch.ones(2)]]
        runs = join_all(peers(2), tensors)

        futures = [run.average(timeout=SOON, wait=False) for run in runs]
        eventually(lambda: all(future.done() for future in futures), "both rounds")
        assert torch.equal(tensors[0][0], torch.zeros(2))
        with pytest.raises(RoundPending, match=r"result\(\)"):
            runs[0].average()

        assert all(future.result().ok for future in futures)
        assert futures[0].result() is futures[0].result()
        assert torch.equal(tensors[0][0], torch.full((2,), 0.5))
        assert runs[0].pending is None

    def test_gradients_accumulated_during_a_step_belong_to_the_next(self, peers: Peers) -> None:
        runs = join_all(peers(2), [[torch.zeros(2)], [torch.zeros(2)]])
        runs[0].accumulate([torch.ones(2)], weight=1)
        pending = runs[0].step(timeout=SOON, wait=False)

        runs[0].accumulate([torch.full((2,), 3.0)], weight=7)
        runs[1].accumulate([torch.full((2,), 2.0)], weight=1)
        assert runs[1].step(timeout=SOON).ok

        assert pending.result().ok
        torch.testing.assert_close(runs[0].mean["0"], torch.full((2,), 1.5))
        assert runs[0].accumulated == 7.0

    def test_a_step_that_failed_meanwhile_is_added_to_what_came_since(self, peers: Peers) -> None:
        (peer,) = peers(1)
        run = peer.join("digits", [torch.zeros(2)], **OPTIONS)
        run.accumulate([torch.ones(2)], weight=1)
        pending = run.step(timeout=0.2, wait=False)
        run.accumulate([torch.ones(2)], weight=2)

        assert not pending.result().ok
        assert run.accumulated == 3.0

    def test_an_observer_receives_and_adds_nothing(self, peers: Peers) -> None:
        tensors = [[torch.full((2,), math.nan)], [torch.ones(2)], [torch.full((2,), 3.0)]]
        runs = join_all(peers(3), tensors)

        outcomes = together(
            lambda: runs[0].average(0, SOON),
            lambda: runs[1].average(1, SOON),
            lambda: runs[2].average(1, SOON),
        )

        assert all(outcome.ok for outcome in outcomes), outcomes
        assert sum(weight > 0 for weight in outcomes[0].contributors.values()) == 2
        assert torch.equal(tensors[0][0], torch.full((2,), 2.0))

    def test_state_says_where_the_round_stands(self, peers: Peers) -> None:
        runs = join_all(peers(2), [[torch.zeros(2)], [torch.zeros(2)]])
        pending = runs[0].average(timeout=SOON, wait=False)

        eventually(lambda: isinstance(runs[0].state, Gathering), "that it gathers")
        seen = runs[0].state
        assert isinstance(seen, Gathering | Exchanging)
        assert runs[1].average(timeout=SOON).ok
        assert pending.result().ok
        eventually(lambda: isinstance(runs[0].state, Idle), "that it is idle again")

    def test_runs_do_not_wait_for_each_other(self, peers: Peers) -> None:
        clients = peers(2)
        lone = clients[0].join("lone", [torch.zeros(3)], **OPTIONS)
        pending = lone.average(timeout=SOON, wait=False)
        runs = join_all(clients, [[torch.zeros(2)], [torch.ones(2)]])

        outcomes = together(*(lambda run=run: run.average(timeout=SOON) for run in runs))

        assert all(outcome.ok for outcome in outcomes), outcomes
        assert not pending.done()
        lone.leave()
        assert not pending.result().ok

    def test_nan_in_a_tensor_is_named_and_nothing_is_lost(self, peers: Peers) -> None:
        (peer,) = peers(1)
        model = torch.nn.Linear(2, 2)
        run = peer.join("digits", model, **OPTIONS)
        with torch.no_grad():
            model.bias[1] = math.nan
        run.accumulate({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, weight=1)

        with pytest.raises(SchemaError, match="'bias' holds nan"):
            run.average()
        with pytest.raises(SchemaError, match="'weight' holds inf"):
            run.accumulate({"weight": torch.full((2, 2), math.inf), "bias": None}, weight=1)
        assert run.accumulated == 1.0
        assert isinstance(run.state, NoPeers)

    @pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "3", True])
    def test_a_bad_weight_is_refused(self, peers: Peers, weight: Any) -> None:
        (peer,) = peers(1)
        run = peer.join("digits", [torch.zeros(1)], **OPTIONS)

        for call in (lambda: run.average(weight), lambda: run.accumulate([torch.zeros(1)], weight)):
            with pytest.raises(ValueError, match="finite number >= 0"):
                call()

    @pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, None])
    def test_a_bad_timeout_is_refused(self, peers: Peers, timeout: Any) -> None:
        (peer,) = peers(1)
        run = peer.join("digits", [torch.zeros(1)], **OPTIONS)

        with pytest.raises(ValueError, match="timeout of more than 0"):
            run.average(timeout=timeout)

    def test_tensors_that_no_longer_fit_are_named(self, peers: Peers) -> None:
        (peer,) = peers(1)
        tensors = {"a": torch.zeros(2), "b": torch.zeros(3)}
        run = peer.join("digits", tensors, **OPTIONS)

        for changed, said in [
            ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"'b': expected shape \[3\], got \[4\]"),
            ({"a": torch.zeros(2), "b": torch.zeros(3).double()}, "'b': expected dtype float32, got float64"),
            ({"a": torch.zeros(2)}, "'b' is missing"),
            ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "'c' is not part of the run"),
        ]:
            tensors.clear()
            tensors.update(changed)
            with pytest.raises(SchemaError, match=said):
                run.average(timeout=1)

    def test_gradients_that_do_not_fit_are_named(self, peers: Peers) -> None:
        (peer,) = peers(1)
        run = peer.join("digits", {"a": torch.zeros(2)}, **OPTIONS)

        for gradients, said in [
            ({}, "'a' is missing"),
            ({"a": torch.zeros(3)}, r"'a': expected shape \[2\], got \[3\]"),
            ({"a": torch.zeros(2, dtype=torch.int64)}, "'a': expected floating-point"),
            ({"a": None, "b": None}, "'b' is not part"),
            (7, "expected an nn.Module"),
        ]:
            with pytest.raises(SchemaError, match=said):
                run.accumulate(gradients, weight=1)

    def test_a_join_that_cannot_be_says_why(self, peers: Peers) -> None:
        (peer,) = peers(1)
        good = [torch.zeros(2)]
        for arguments, options, error, said in [
            (("digits", []), {}, SchemaError, "at least one tensor"),
            (("digits", [torch.zeros(2, dtype=torch.int64)]), {}, SchemaError, "'0': expected dtype"),
            (("digits", [torch.zeros(1).expand(2)]), {}, SchemaError, "'0' is expanded"),
            (("digits", "tensors"), {}, SchemaError, "expected an nn.Module"),
            (("", good), {}, SpecError, "run name"),
            (("digits/step", good), {}, SpecError, "run name"),
            (("digits", good), {"codec": "int7"}, CodecError, "int7"),
            (("digits", good), {"group_size": 1}, SpecError, "group size"),
            (("digits", good), {"strategy": "magic"}, ValueError, "magic"),
        ]:
            with pytest.raises(error, match=said):
                peer.join(*arguments, **options)  # type: ignore[arg-type]

    def test_joining_again_replaces_the_earlier_handle(
        self, peers: Peers, caplog: pytest.LogCaptureFixture
    ) -> None:
        (peer,) = peers(1)
        earlier = peer.join("digits", [torch.zeros(2)])
        pending = earlier.average(timeout=60.0, wait=False)
        caplog.clear()

        again = peer.join("digits", [torch.zeros(2)])

        (said,) = [message for message in caplog.messages if "joins it again" in message]
        assert said == "run digits: this process joins it again, and leaves it by its earlier handle"
        assert pending.result().ok is False
        with pytest.raises(Refused, match="was left"):
            earlier.average()
        assert isinstance(again.state, NoPeers)

    def test_a_run_that_was_left_says_so_and_can_be_joined_again(self, peers: Peers) -> None:
        (peer,) = peers(1)
        with peer.join("digits", [torch.zeros(2)], **OPTIONS) as run:
            assert isinstance(run.state, NoPeers)

        with pytest.raises(Refused, match="was left"):
            run.average()
        again = peer.join("digits", [torch.zeros(2)], **OPTIONS)
        assert isinstance(again.state, NoPeers)

    def test_closing_ends_a_round_that_is_going_on(self, peers: Peers) -> None:
        (peer,) = peers(1)
        tensor = torch.zeros(2)
        run = peer.join("digits", [tensor], **OPTIONS)
        pending = run.average(timeout=SOON, wait=False)
        waiter = threading.Thread(target=pending.result)
        waiter.start()

        peer.close()

        waiter.join(SOON)
        assert pending.done()
        assert torch.equal(tensor, torch.zeros(2))
        with pytest.raises(DaemonLost, match="connect again"):
            peer.status()

    def test_lines_that_a_script_tells_are_in_the_status(self, peers: Peers) -> None:
        (client,) = peers(1)
        run = client.join("digits", [torch.zeros(2)])
        run.core.tell("training", "first")
        run.core.tell("checkpoints", "epoch 10 is on the disk")
        run.core.tell("training", "in step " * 1000)

        (found,) = client.status().runs

        assert found.told == {
            "checkpoints": "epoch 10 is on the disk",
            "training": ("in step " * 1000)[:4096],
        }

    def test_status_peers_and_rounds(self, peers: Peers) -> None:
        clients = peers(2)
        runs = join_all(clients, [[torch.zeros(2)], [torch.ones(2)]])
        outcomes = together(*(lambda run=run: run.average(timeout=SOON) for run in runs))

        status = clients[0].status()

        assert status.peer_id == clients[0].peer_id
        assert status.swarm.addresses == clients[0].addresses
        (run,) = status.runs
        assert (run.name, run.purpose, run.values, run.codec) == ("digits", "average", 2, "fp32")
        assert run.last is not None
        assert (run.rounds_ok, run.rounds_failed, run.last.digest) == (1, 0, outcomes[0].digest)
        assert status.swarm.direct.channels >= 1, "the round travels on a direct channel"
        assert status.kernels.reason
        assert {setting.key: setting.origin for setting in status.settings}["log_level"] == "default"
        rows = clients[0].peers()
        assert {row.peer for row in rows} == {client.peer_id for client in clients}
        assert [row.peer for row in rows if row.me] == [clients[0].peer_id]
        # A daemon remembers the rounds of scripts that have ended, too.
        assert clients[0].rounds()[-1] == run.last
        here = {"encode", "decode"}  # The script alone knows what these took.
        assert outcomes[0].seconds.keys() - run.last.seconds.keys() == here
        assert msgspec.structs.replace(outcomes[0], seconds=run.last.seconds) == run.last
