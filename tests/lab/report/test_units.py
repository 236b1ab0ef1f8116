"""Numbers as people read them."""

import math

import pytest

from distlab.lab.report.units import (
    counted,
    difference,
    duration,
    human_bits,
    human_bytes,
    milliseconds,
    quantity,
    three_digits,
)


@pytest.mark.parametrize(
    ("value", "written"),
    [(None, "-"), (0, "0 B"), (577, "577 B"), (999.4, "999 B"), (999.6, "1.00 kB"), (9_600_000, "9.60 MB"),
     (12_800_000, "12.8 MB"), (999_900_000, "1.00 GB"), (3e15, "3000 TB"), (math.nan, "nan")],
)  # fmt: skip
def test_bytes_have_three_digits_and_a_decimal_unit(value: float | None, written: str) -> None:
    assert human_bytes(value) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0"), (81.23, "81.2"), (9.996, "10.0"), (1.6, "1.60"), (0.99, "0.990"), (2e-5, "2.0e-05"), (1234.5, "1234")],
)  # fmt: skip
def test_three_digits(value: float, written: str) -> None:
    assert three_digits(value) == written


def test_only_an_exact_zero_is_written_as_zero() -> None:
    assert [difference(value) for value in (0.0, 1e-300, 2.81e-17, math.inf)] == ["0", "1.0e-300", "2.8e-17", "inf"]


def test_quantities_keep_their_unit() -> None:
    assert [quantity(0.0812, "s"), quantity(9.6e6, "B"), quantity(0.2727, ""), quantity(3, "calls"), quantity(98.2e6, "bit/s")] == [
        "81.2 ms", "9.60 MB", "0.2727", "3 calls", "98.2 Mbit/s",
    ]  # fmt: skip
    assert milliseconds(None) == "-"


def test_rates_of_a_link_are_in_bits() -> None:
    assert [human_bits(value) for value in (0, 5e5, 999_600, 1e9, 2.5e10)] == [
        "0 bit/s", "500 kbit/s", "1.00 Mbit/s", "1.00 Gbit/s", "25.0 Gbit/s",
    ]  # fmt: skip


def test_a_duration_has_a_suitable_unit() -> None:
    assert [duration(value) for value in (0.4, 41, 99.4, 99.5, 900, 5969, 12_240)] == [
        "0 s", "41 s", "99 s", "1.7 min", "15.0 min", "99.5 min", "3.4 h",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "what", "text"),
    [
        (1, "calls", "1 call"), (2, "calls", "2 calls"), (0, "calls", "0 calls"), (1.0, "buckets", "1 bucket"),
        (1, "microbatches", "1 microbatch"), (1, "epsilons of bfloat16", "1 epsilon of bfloat16"),
        (1.0, "samples/s", "1 samples/s"), (1.5, "", "1.5"), (12345, "ranks", "12345 ranks"),
    ],
)  # fmt: skip
def test_one_has_the_singular(number: float, what: str, text: str) -> None:
    assert counted(number, what) == text
