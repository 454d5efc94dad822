"""The kinds of options of a spec: what they read, their one canonical form, and what they refuse."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.compression.grammar import (
    MAX_DECIMAL,
    MIN_DECIMAL,
    Value,
    canonical,
    choice,
    decimal,
    whole,
    words,
)
from equipoise.compression.registry import Registry


class Made:
    """Whatever a spec gives."""

    def __init__(self, **options: Value) -> None:
        self.options = options
        self.spec = canonical("thing", options)


THINGS: Registry[Made] = Registry("thing", "things", "thing", 200)
THINGS.register("thing", Made, share=decimal(0.5), many=whole(2), late=choice("drop", "next"), tags=words())


def spec_of(options: str) -> str:
    return THINGS.parse(f"thing:{options}").spec


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("0.2", "0.2"),
        (".2", "0.2"),
        ("0.20", "0.2"),
        ("000.2", "0.2"),
        ("2e-1", "0.2"),
        ("1", "1"),
        ("1.", "1"),
        ("1.0", "1"),
        ("0", "0"),
        ("0.0", "0"),
        ("0e9", "0"),
        ("600", "600"),
        ("1e3", "1000"),
        ("0.001", "0.001"),
        ("0.00001", "1e-5"),
        ("1e-09", "1e-9"),
        ("1e22", "1e22"),
        ("0.12345678901234567890", "0.12345678901234568"),
    ],
)
def test_a_decimal_number_has_one_form(text: str, form: str) -> None:
    assert spec_of(f"share={text}") == f"thing:share={form},many=2,late=drop"
    assert spec_of(f"share={form}") == f"thing:share={form},many=2,late=drop"


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "+1", "-1", "nan", "inf", "1e", "e1", "1E3", "1e+3", "1e100", "1e-99", "9e30", "1e-31"),
        *("1_0", " 1", "1 ", "0x1", "٠.٢", "1.2.3", "0." + "1" * 23, "1\n", "1e999999999"),
    ],
)
def test_other_texts_are_no_decimal_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"\Athing: share is a decimal number such as 0\.5, not .*\Z"):
        spec_of(f"share={text}")


@given(st.floats(min_value=MIN_DECIMAL, max_value=MAX_DECIMAL))
def test_a_float_survives_its_canonical_form(value: float) -> None:
    assert THINGS.parse(Made(share=value).spec).options["share"] == value


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("gpu", "gpu"),
        ("b+a", "a+b"),
        ("a.b+A_b-9+0", "0+A_b-9+a.b"),
        ("+".join("hgfedcba"), "a+b+c+d+e+f+g+h"),
    ],
)
def test_words_are_sorted(text: str, form: str) -> None:
    made = THINGS.parse(f"thing:tags={text}")
    assert made.options["tags"] == tuple(form.split("+"))
    assert made.spec == f"thing:share=0.5,many=2,late=drop,tags={form}"
    assert THINGS.parse(made.spec).spec == made.spec


@pytest.mark.parametrize(
    "text", ["", "+", "a+", "+a", "a+a", "a b", "a=b", "ä", "x" * 25, "+".join("abcdefghi"), "a\n"]
)
def test_other_texts_are_no_list_of_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"\Athing: tags is 1 to 8 different words .* not .*\Z"):
        spec_of(f"tags={text}")


def test_the_first_choice_is_the_default_and_others_are_refused() -> None:
    assert spec_of("late=next") == "thing:share=0.5,many=2,late=next"
    with pytest.raises(ValueError, match="late is one of drop, next, not 'later'"):
        spec_of("late=later")


@given(st.from_regex(r"\A(share|tags|many)=[0-9a-e.+_-]*\Z"))
def test_any_option_is_canonical_at_once_or_refused_in_a_line(option: str) -> None:
    spec, error = canonical_or_error(option)
    assert THINGS.parse(spec).spec == spec if spec else len(error.splitlines()) == 1


def canonical_or_error(option: str) -> tuple[str, str]:
    try:
        return spec_of(option), ""
    except ValueError as error:
        return "", str(error)


def test_a_number_of_any_length_is_refused_before_it_is_read() -> None:
    things: Registry[Made] = Registry("thing", "things", "thing", sys.maxsize)
    things.register("thing", Made, share=decimal(1.0))
    with pytest.raises(ValueError, match="decimal number such as 1, not"):
        things.parse("thing:share=" + "1" * 100_000)
