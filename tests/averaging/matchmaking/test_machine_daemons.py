"""Whole runs of daemons in virtual time: full groups in calm, one round each in any storm, strangers that lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from random import Random

import pytest
from msgspec import structs

from equipoise.averaging.manifest import MAX_ROUND
from equipoise.averaging.matchmaking.joiner import LONELY_SECONDS
from equipoise.averaging.matchmaking.messages import GroupFormed, JoinRequest
from equipoise.averaging.state import StateId
from equipoise.averaging.timing import HOLD_SECONDS, INITIAL_WAIT, REPLY_SECONDS, SILENCE_SECONDS
from equipoise.dht.records import TTL_SECONDS
from equipoise.limits import Candidate
from fakes import daemons
from fakes.daemons import Daemons
from fakes.seeds import few_and_many
from fakes.specs import spec

LATENCY = 0.002
"""Seconds that a message takes in good weather."""

MET_SECONDS = 3.0
"""After this time all daemons that have begun together know each other."""

ROUND_SECONDS = 2 * SILENCE_SECONDS
"""Longest exchange with a member that is gone."""

RECOVERY_SECONDS = 120.0
"""By then every view is right again after a storm, and one round has had the time to form."""


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    while daemons.made:
        daemons.made.pop().close()


def names(count: int) -> list[str]:
    return [f"peer{index:02}" for index in range(count)]


def run_of(peers: Collection[str], group_size: int, seed: int = 0, **weather: float) -> Daemons:
    return Daemons(spec({"w": (4,)}, group_size=group_size), list(peers), seed, **weather)


def warm(count: int, group_size: int, seed: int = 0) -> Daemons:
    """A run whose peers know each other."""
    world = run_of(names(count), group_size, seed)
    world.run(MET_SECONDS)
    return world


def together(world: Daemons, peers: Collection[str], within: float = 0.0) -> None:
    for name in peers:
        world.ready(name, after=world.chance.uniform(0, within))


def again(world: Daemons, peers: Collection[str], least: float, most: float) -> None:
    for name in peers:
        world.each_round(name, lambda: world.chance.uniform(least, most))


def groups(world: Daemons, since: float = 0.0) -> list[tuple[str, ...]]:
    """The groups that have formed since, each once."""
    found = {(one.number, one.group) for rounds in world.rounds.values() for one in rounds if one.at >= since}
    return [group for _, group in sorted(found)]


def formed(world: Daemons, peers: Collection[str], since: float = 0.0) -> Callable[[], bool]:
    """Whether each of these has had a round since."""
    return lambda: all(world.rounds[name] and world.rounds[name][-1].at >= since for name in peers)


def check_safety(world: Daemons) -> None:
    for name, rounds in world.rounds.items():
        numbers = [one.number for one in rounds]
        assert len(rounds) <= world.called[name]
        assert numbers == sorted(set(numbers))
        assert all(name in one.group for one in rounds)


def at_message(world: Daemons, number: int, act: Callable[[], None]) -> None:
    """Have something happen when so many more messages of matchmaking were sent."""
    due = len(world.sent) + number

    def passes(*_: object) -> bool:
        if len(world.sent) == due:
            world.soon(act)
        return True

    world.passes = passes


# ---- calm ----


@pytest.mark.parametrize("count", [2, 4, 16, pytest.param(40, marks=pytest.mark.slow)])
def test_a_group_forms_within_two_messages_of_the_last_one_ready(count: int) -> None:
    world = warm(count, 64, seed=count)
    together(world, names(count), within=0.2)
    last = world.now + 0.2
    assert world.run(5.0, formed(world, names(count)))
    assert max(rounds[0].at for rounds in world.rounds.values()) <= last + 2 * LATENCY
    assert groups(world) == [tuple(names(count))]


@pytest.mark.parametrize(
    ("count", "group_size"),
    [
        (3, 2),
        (5, 4),
        (17, 4),
        *(pytest.param(*large, marks=pytest.mark.slow) for large in ((23, 8), (40, 16))),
    ],
)
def test_any_number_takes_part_round_after_round(count: int, group_size: int) -> None:
    world = warm(count, group_size, seed=1)
    again(world, names(count), 0.2, 0.4)
    world.run(40.0 if count == 3 else 12.0)
    taken = [len(rounds) for rounds in world.rounds.values()]
    # Of three in pairs, one sits out in turn.
    assert min(taken) >= 0.85 * max(taken)
    assert min(taken) >= 12
    check_safety(world)


def call(world: Daemons, peers: Collection[str]) -> list[int]:
    """All average once, and give up after a while; returns how many members each group had."""
    began = world.now
    together(world, peers, within=0.2)
    world.run(30.0, lambda: world.now > began + 0.2 and formed(world, peers, began)())
    for name in peers:
        world.withdraw(name)
    world.run(0.2)
    return sorted(map(len, groups(world, began)))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_peers_that_are_rounds_ahead_are_in_full_groups_with_the_others_after_three_calls(seed: int) -> None:
    world = warm(16, 4, seed)
    assert [call(world, names(16)) for _ in range(2)] == 2 * [4 * [4]]
    ahead = world.chance.sample(names(16), 3)
    for _ in range(2):
        call(world, ahead)
    for _ in range(3):
        call(world, names(16))
    calls = [call(world, names(16)) for _ in range(3)]
    assert calls.count(4 * [4]) >= 2
    assert min(map(min, calls)) >= 3, "a call now and then leaves one out"
    check_safety(world)


def test_a_usual_straggler_is_learnt_and_waited_for() -> None:
    world = warm(4, 8, seed=2)
    again(world, names(3), 1.0, 1.1)
    again(world, ["peer03"], 2.5, 2.6)
    world.run(120.0)
    late = groups(world)[4:]
    assert sum("peer03" in group for group in late) >= 0.95 * len(late)


def test_an_idle_daemon_costs_two_waits_and_is_in_the_next_rounds_once_it_begins() -> None:
    world = warm(4, 8, seed=2)
    again(world, names(3), 0.5, 0.5)
    world.run(20.0)
    assert len(world.rounds["peer00"]) > 20
    again(world, ["peer03"], 0.5, 0.5)
    world.run(10.0)
    assert len(world.rounds["peer03"]) > 10
    assert all(len(one.group) == 4 for one in world.rounds["peer03"][-8:])


def test_two_that_are_ready_in_a_large_idle_run_find_each_other() -> None:
    for seed in range(3):
        world = warm(16, 4, seed)
        pair = world.chance.sample(names(16), 2)
        together(world, pair)
        assert world.run(2 * (LONELY_SECONDS + INITIAL_WAIT) + 10.0, formed(world, pair)), seed


@pytest.mark.parametrize(("group_size", "public"), [(4, [2]), (2, [0]), (3, [0, 3])])
def test_client_mode_peers_meet_at_those_that_can_be_dialled_and_take_turns(
    group_size: int, public: list[int]
) -> None:
    world = run_of([], group_size, seed=1)
    for index, name in enumerate(names(4)):
        world.add(name, dialable=index in public)
    again(world, names(4), 0.2, 0.3)
    world.run(MET_SECONDS + 1.0 if group_size == 4 else 40.0)
    assert min(len(world.rounds[name]) for name in names(4)) >= (2 if group_size == 4 else 5)
    check_safety(world)


def test_a_record_of_nobody_holds_up_only_the_first_group() -> None:
    world = run_of(names(3), 8, seed=1, lag=0.0)
    world.net.records["run"]["ghost"] = Candidate(
        peer="ghost", state="joined", spec=world.runs["peer00"].spec.hash
    )
    world.run(MET_SECONDS)
    for _ in range(3):
        together(world, names(3))
        assert world.run(10.0, formed(world, names(3), world.now))
    held_up, *others = [one.at for one in world.rounds["peer00"]]
    assert held_up <= MET_SECONDS + INITIAL_WAIT + 2 * LATENCY
    assert max(others) <= held_up + 1.0


@pytest.mark.parametrize("dialable", [True, False])
def test_an_honest_coordinator_that_is_ready_late_holds_nobody(dialable: bool) -> None:
    after = HOLD_SECONDS + 8.0
    for seed in range(3):
        world = run_of(["a"], 4, seed)
        for name in ("b", "c"):
            world.add(name, dialable=dialable)
        world.run(MET_SECONDS)
        coordinator = world.coordinator_of("b")
        trainer, observer = (name for name in ("a", "b", "c") if name != coordinator)
        assert coordinator == "a" or dialable
        world.ready(trainer)
        world.ready(observer, weight=0.0)
        world.ready(coordinator, after=after)
        assert world.run(after + 5.0, formed(world, ["a", "b", "c"])), seed


# ---- faults, one at a time ----


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("count", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_if_a_peer_dies_or_stops_at_any_step_the_others_form_a_group(count: int, fault: str) -> None:
    for victim, step in itertools.product(names(count), range(0, 4 * count, 2)):
        world = warm(count, 8, seed=step)
        again(world, names(count), 0.0, 0.01)
        at_message(world, 1 + step, lambda w=world, v=victim: getattr(w, fault)(v))
        survivors = tuple(name for name in names(count) if name != victim)
        bound = 2 * (INITIAL_WAIT + REPLY_SECONDS) + ROUND_SECONDS
        assert world.run(bound, lambda w=world, s=survivors: groups(w)[-1:] == [s]), (victim, step)
        world.on_idle.clear()
        world.resume(victim)
        world.run(5.0)
        check_safety(world)


def test_a_coordinator_that_stops_while_it_gathers_holds_nobody_for_long() -> None:
    for seed in range(6):
        world = warm(4, 8, seed)
        coordinator = world.coordinator_of("peer00")
        late, *parked = [name for name in names(4) if name != coordinator]
        together(world, [coordinator, *parked], within=0.1)
        world.run(0.2 + 0.15 * seed)
        world.stop(coordinator)
        stopped, asked = world.now, len(world.sent)
        world.run(2.5)
        sent = world.sent[asked:]
        heirs = {to for _, name, to, one in sent if name in parked and isinstance(one, JoinRequest)}
        assert heirs - {coordinator} == heirs != set(), "those that were parked have gone elsewhere"
        world.ready(late)
        assert world.run(REPLY_SECONDS + 0.2, formed(world, [late, *parked], stopped)), seed


FOUND_OUT_SECONDS = 2.1
"""From a stop to the group without it: the 2.5 s in which survivors are to be done, less what a round takes."""


@pytest.mark.parametrize("taught", [0.03, 4.0])
def test_a_peer_that_stops_while_a_group_is_sought_holds_nobody_for_long(taught: float) -> None:
    for seed, victim in itertools.product(range(0, 8, 2), names(4)):
        world = warm(4, 4, seed)
        teach(world, taught)
        survivors = [name for name in names(4) if name != victim]
        together(world, names(4), within=0.03)
        world.run(0.005 * seed)
        world.stop(victim)
        stopped = world.now
        assert world.run(FOUND_OUT_SECONDS + ROUND_SECONDS, formed(world, survivors)), (seed, victim)
        assert max(world.rounds[name][0].at for name in survivors) <= stopped + FOUND_OUT_SECONDS
        assert len(groups(world)) == 1


def teach(world: Daemons, seconds: float) -> None:
    """Have all know from eight rounds how late the last was; all have just heard of each other."""
    for run in world.runs.values():
        for _ in range(8):
            run.search.machine.context.straggler_wait.learn(seconds)
        for other in world.runs:
            run.search.membership.hear(other, world.now)


@pytest.mark.parametrize("pause", [0.6, 1.5])
def test_a_coordinator_that_pauses_splits_no_group(pause: float) -> None:
    for seed in range(0, 20, 2):
        world = warm(4, 4, seed)
        coordinator = world.coordinator_of("peer00")
        teach(world, 0.03)
        together(world, names(4), within=0.03)
        world.run(0.0015 * seed)
        world.stop(coordinator)
        world.run(pause)
        world.resume(coordinator)
        assert world.run(1.0, formed(world, names(4))), seed
        assert len(groups(world)) == 1, seed


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("told", [1, 2])
def test_a_coordinator_that_is_lost_having_told_some_leaves_nobody_out(told: int, fault: str) -> None:
    for seed in range(3):
        world = warm(4, 4, seed)
        coordinator = world.coordinator_of("peer00")
        survivors = [name for name in names(4) if name != coordinator]
        heard: list[str] = []

        def passes(sender: str, to: str, message: object, heard=heard, world=world, by=coordinator) -> bool:
            if sender != by or not isinstance(message, GroupFormed):
                return True
            heard.append(to)
            if len(heard) == told:
                world.soon(lambda: getattr(world, fault)(by))
            return len(heard) <= told

        world.passes = passes
        together(world, names(4), within=0.03)
        assert world.run(0.5 + ROUND_SECONDS, formed(world, survivors)), seed
        assert max(world.rounds[name][0].at for name in survivors) <= MET_SECONDS + 0.5
        assert len(groups(world)) == 1


# ---- storms ----


def trouble(world: Daemons, draw: Random) -> None:
    """One fault, drawn at random; the first peer lives, so that somebody can be dialled."""
    name, fault = draw.choice(list(world.runs)[1:]), draw.random()
    if name not in world.living:
        world.add(name)
        again(world, [name], 0.2, 0.8)
    elif fault < 0.25 and len(world.living) > 3:
        world.kill(name)
    elif fault < 0.45:
        world.stop(name) if draw.random() < 0.5 else world.resume(name)
    elif fault < 0.65:
        world.withdraw(name)
    elif fault < 0.85:
        world.sever(*draw.sample(world.living, 2))
    else:
        world.net.blind[name] = set(draw.sample(list(world.runs), len(world.runs) // 2)) - {name}


@few_and_many(4, 60)
def test_no_storm_puts_a_peer_into_two_rounds_and_after_it_all_take_part(seeds: range) -> None:
    for seed in seeds:
        draw = Random(f"storm {seed}")
        latency, lag = draw.choice([0.001, 0.1, 0.25]), draw.choice([0.03, 2.0])
        world = run_of([], draw.choice([2, 3, 4, 8, 16]), seed, latency=latency, lag=lag)
        world.net.loss = draw.choice([0.0, 0.002, 0.02])
        for name in names(draw.randint(2, 12)):
            world.add(name, dialable=name == "peer00" or draw.random() < 0.85)
        again(world, list(world.runs), 0.2, 0.8)
        for _ in range(draw.randint(0, 12)):
            world.run(draw.uniform(0, 3))
            trouble(world, draw)
        world.net.loss = 0.0
        world.net.blind.clear()
        for name in world.runs:
            world.resume(name)
        calm_at = world.now
        assert world.run(RECOVERY_SECONDS, formed(world, world.living, calm_at + 10.0)), seed
        check_safety(world)


# ---- strangers that have taken part in a round: they lie about it, or hold another state ----


@pytest.mark.parametrize("slow", [False, True], ids=["in step", "one slow"])
@pytest.mark.parametrize("ahead", [None, 1000, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("honest", "liars"), [(2, 2), pytest.param(3, 6, marks=pytest.mark.slow)])
def test_mates_that_lie_stop_no_peer(honest: int, liars: int, ahead: int | None, slow: bool) -> None:
    ours, strangers = [f"honest{at}" for at in range(honest)], [f"liar{at}" for at in range(liars)]
    world = run_of([*ours, *strangers], 16)
    again(world, world.runs, 0.2, 0.4)
    assert world.run(60.0, lambda: set(groups(world)[-1:]) == {(*ours, *strangers)})
    world.net.frozen |= set(strangers)
    for name in strangers:
        world.on_idle.pop(name)
    if slow:
        again(world, ours[:1], 10.0, 20.0)
    since, seconds = world.now, 60.0
    while world.now < since + seconds:
        world.run(0.25)
        highest = max(world.runs[name].round for name in ours)
        for name in strangers:
            told = {"state": "ready", "round": MAX_ROUND if ahead is None else highest + ahead}
            records = world.net.records["run"]
            records[name] = structs.replace(records[name], **told)
    full = [group for group in groups(world, since) if set(group).issuperset(ours)]
    assert len(full) >= seconds / (30.0 if slow else 1.0)


OURS, THEIRS = StateId(7, "a" * 64), StateId(2**40, "b" * 64)
HONEST, STRANGERS = ("honest0", "honest1", "honest2"), tuple(f"stranger{index}" for index in range(4))


def two_states() -> Daemons:
    """Three fast peers that hold one state, and four that hold another and take a second for a step."""
    world = run_of([*HONEST, *STRANGERS], 16)
    world.claims.update(dict.fromkeys(HONEST, OURS) | dict.fromkeys(STRANGERS, THEIRS))
    again(world, HONEST, 0.2, 0.3)
    world.run(5.0)
    again(world, STRANGERS, 1.0, 1.2)
    return world


def test_nobody_waits_for_slow_peers_that_hold_another_state_until_it_is_the_last_of_its_own() -> None:
    world = two_states()
    before = len(world.rounds[HONEST[0]])
    world.run(5.0)
    since = world.now
    world.run(5.0)
    assert len([one for one in world.rounds[HONEST[0]] if one.at >= since]) >= 0.8 * before
    assert {one.group for one in world.rounds[HONEST[0]] if one.at >= since} == {HONEST}
    assert STRANGERS in groups(world, since)
    for name in HONEST[1:]:
        world.kill(name)
    since = world.now
    assert world.run(
        TTL_SECONDS + 10.0,
        lambda: any(set(one.group) & set(STRANGERS) for one in world.rounds[HONEST[0]] if one.at > since),
    )


def test_peers_that_take_over_the_others_state_are_in_their_groups_again() -> None:
    world = two_states()
    world.run(5.0)
    again(world, STRANGERS, 0.2, 0.3)
    for name in STRANGERS:
        world.claims[name] = OURS
        world.withdraw(name)
        world.ready(name, weight=0.0)
    since = world.now
    assert world.run(30.0, lambda: groups(world, since)[-3:] == [(*HONEST, *STRANGERS)] * 3)
