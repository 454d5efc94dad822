"""Which state a group says is its own."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import MAX_EPOCH, StateId, group_state

LINEAGES = tuple(character * 64 for character in "0af")

states = st.builds(StateId, st.integers(0, 3), st.sampled_from(LINEAGES))


@given(st.lists(states, max_size=8), st.randoms())
def test_all_choose_alike_and_none_has_more_heads(held: list[StateId], random: object) -> None:
    chosen = group_state(held)
    assert (chosen is None) == (not held)
    if chosen is None:
        return
    shuffled = list(held)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert group_state(shuffled) == chosen
    counts = Counter(held)
    for other, count in counts.items():
        ours = (chosen.epoch > 0, counts[chosen], chosen.epoch, chosen.lineage)
        assert ours >= (other.epoch > 0, count, other.epoch, other.lineage)


def test_heads_come_before_epochs_and_epochs_before_lineages() -> None:
    zero, a, f = LINEAGES
    assert group_state([StateId(5, zero), StateId(5, zero), StateId(9, f)]) == StateId(5, zero)
    assert group_state([StateId(5, f), StateId(6, zero)]) == StateId(6, zero)
    assert group_state([StateId(5, zero), StateId(5, a)]) == StateId(5, a)


def test_newcomers_outvote_nobody() -> None:
    zero, a, f = LINEAGES
    assert group_state([StateId(0, f), StateId(0, f), StateId(1, zero)]) == StateId(1, zero)
    assert group_state([StateId(0, zero), StateId(0, zero), StateId(0, a)]) == StateId(0, zero)


def test_an_outcome_says_its_groups_state() -> None:
    held = {"a": StateId(4, LINEAGES[0]), "b": StateId(4, LINEAGES[0]), "c": StateId(3, LINEAGES[1])}
    assert Outcome(ok=False, reason="", states=held).state == StateId(4, LINEAGES[0])
    assert Outcome(ok=True, reason="").state is None


@given(states)
def test_a_state_id_survives_the_wire(state: StateId) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=StateId) == state


EPOCHS = [-1, MAX_EPOCH + 1, 1.5, True, "1", None]
HEX = ["", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n", "g" * 64, None, b"0" * 64]


@pytest.mark.parametrize(
    "wire", [*([epoch, "0" * 64] for epoch in EPOCHS), *([1, text] for text in HEX), [1]]
)
def test_a_state_id_out_of_range_does_not_decode(wire: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=StateId)
