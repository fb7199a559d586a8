"""Quantities are read by Kubernetes' grammar, to the last digit, and nothing else is."""

from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_api.text.quantity import (
    format_bytes,
    format_parameters,
    parameter_count,
    parse_quantity,
    quantity_bytes,
)

SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
"""https://pkg.go.dev/k8s.io/apimachinery/pkg/api/resource#Quantity."""

DIGITS = st.text("0123456789", min_size=1, max_size=12)
EXPONENTS = st.builds(
    lambda letter, sign, power: (
        f"{letter}{sign}{power}",
        Fraction(10) ** (-power if sign == "-" else power),
    ),
    st.sampled_from("eE"),
    st.sampled_from(["", "+", "-"]),
    st.integers(0, 99),
)


@given(
    sign=st.sampled_from(["", "+", "-"]),
    whole=st.one_of(st.just(""), DIGITS),
    part=st.one_of(st.none(), st.just(""), DIGITS),
    suffix=st.one_of(st.sampled_from(sorted(SUFFIXES.items())), EXPONENTS),
)
def test_what_the_grammar_makes_is_read_exactly(
    sign: str, whole: str, part: str | None, suffix: tuple[str, Fraction]
) -> None:
    text = f"{sign}{whole}{'' if part is None else f'.{part}'}{suffix[0]}"
    if not whole and not part:
        with pytest.raises(ValueError, match="is not a quantity"):
            parse_quantity(text)
        return
    value = Fraction(int(whole or "0")) + Fraction(int(part or "0"), 10 ** len(part or ""))
    assert parse_quantity(text) == (-value if sign == "-" else value) * suffix[1]


@given(st.text("0123456789.+-eEkKmMgGiI n\u0663\n", max_size=70))
def test_any_text_is_a_quantity_or_rejected(text: str) -> None:
    with suppress(ValueError):
        assert isinstance(parse_quantity(text), Fraction)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("1.", Fraction(1)),
        ("1E", Fraction(10**18)),
        ("1E3", Fraction(1000)),
        ("1e-3", Fraction(1, 1000)),
        ("+1.5Gi", Fraction(3 << 29)),
        ("-1", Fraction(-1)),
        ("9007199254740993", Fraction(9007199254740993)),
        (2, Fraction(2)),
    ],
)
def test_known_quantities(text: str | int, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize(
    "text", ["", ".", "m", "1 Gi", "1gi", "1K", "1Mib", "0x1", "1e", "1e999", "a lot", "1\n"]
)
def test_what_kubernetes_does_not_read_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity; write it as"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16Gi", 16 << 30), ("80G", 80 * 10**9), ("0.5k", 500), ("12", 12), ("1m", 1), ("0.1Ki", 103)],
)
def test_bytes_are_rounded_up(text: str, size: int) -> None:
    assert quantity_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "count", "shortest"),
    [
        ("77K", 77_000, "77K"),
        ("1.24B", 1_240_000_000, "1.24B"),
        ("1240000000", 1_240_000_000, "1.24B"),
        ("12", 12, "12"),
        ("1000000", 1_000_000, "1M"),
    ],
)
def test_parameter_counts(text: str, count: int, shortest: str) -> None:
    assert parameter_count(text) == count
    assert format_parameters(count) == shortest


@pytest.mark.parametrize("read", [parameter_count, quantity_bytes])
def test_nonsense_is_rejected_with_the_right_way_to_write_it(read: Any) -> None:
    with pytest.raises(ValueError, match="write it as"):
        read("a lot")


@given(st.integers(1, 10**16))
def test_counts_for_people_have_three_digits_and_no_exponent(count: int) -> None:
    shown = format_parameters(count)
    assert abs(parameter_count(shown) - count) <= count * 0.0051
    number, _ = format_bytes(count).split()
    assert "e" not in shown + number
