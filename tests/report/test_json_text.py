"""JSON of a run's files: valid for every reader, and a ValueError for whatever is none."""

import json
import math

import pytest

from distlab.report.reading import from_json, from_line, to_json, to_line
from distlab.report.records import Check, Losses


@pytest.mark.parametrize("value", [math.inf, -math.inf, [1, {"x": [math.inf]}], (1, math.inf), {"float": "nan"}])
def test_a_number_that_is_not_finite_is_valid_json_and_comes_back(value: object) -> None:
    line = to_json(value)
    json.loads(line, parse_constant=pytest.fail)
    if value != {"float": "nan"}:
        assert from_json(line) == (list(value) if isinstance(value, tuple) else value)


def test_a_record_with_nan_is_valid_json_and_files_of_before_are_read() -> None:
    for line in (to_line(Check("flat", "weights", math.nan, 0.0)), to_line(Losses("flat", [1.0, math.nan, None]))):
        json.loads(line, parse_constant=pytest.fail)
    old = from_line('{"record": "losses", "variant": "flat", "values": [1.0, NaN, -Infinity]}')
    new = from_line(to_line(Losses("flat", [1.0, math.nan, -math.inf])))
    for record in (old, new):
        assert isinstance(record, Losses)
        assert record.numbers[0] == 1.0 and math.isnan(record.numbers[1]) and record.numbers[2] == -math.inf


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 50_000, b"\xed\xa0\x80", b"\xff", b"", b"1" * 5000, b"1" * 400]
)
def test_what_is_no_json_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_json(content)


def test_half_of_a_pair_is_read_as_text_that_can_be_printed() -> None:
    assert from_json(b'{"\\ud800": ["\\uDFFF a", "\\ud83d\\ude00"]}') == {"?": ["? a", "\U0001f600"]}
