"""A line that is no record of the lab is refused, down to the last entry of what it holds."""

import json
from typing import Any

import pytest

from distlab.report.reading import BrokenRecord, from_line, to_line
from distlab.report.records import Called, Check, Left, MemoryLine, Start, Table, Timeline

START: dict[str, Any] = {
    "record": "start", "rank": 0, "run_id": "a", "run_mode": "dp", "world_size": 2, "host": "h", "config": {}, "repeat": {},
    "versions": {},
}  # fmt: skip
SPANS: dict[str, Any] = {"record": "timeline", "variant": "flat", "step": 1}
CHART: dict[str, Any] = {"record": "chart", "title": "a", "x_label": "x", "y_label": "y"}


@pytest.mark.parametrize(
    "values",
    [
        START | {"rank": True}, START | {"rank": 1.0}, START | {"rank": "1"}, START | {"world_size": 0},
        START | {"world_size": 10**12}, START | {"rank": 10**400}, START | {"config": {"a": [[["b"]]]}},
        START | {"by_torch": [1]}, START | {"repeat": {"a": None}}, START | {"more": 1}, {"rank": 1}, [],
        SPANS | {"spans": [["forward", "0", 0.0]]}, SPANS | {"spans": [["forward", "0", 0.0, 1.0, 1.0]]},
        SPANS | {"spans": [["forward", "0", 0.0, True]]}, CHART | {"series": {"a": [[1]]}}, CHART | {"series": {"a": [["x"], [1]]}},
        {"record": "table", "title": "a", "columns": ["b"], "rows": [[[]]]},
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_refused(values: object) -> None:
    with pytest.raises(BrokenRecord, match="is not a record of the lab"):
        from_line(json.dumps(values))


@pytest.mark.parametrize(
    "record",
    [
        Start(0, "a", "dp", 2, "h", {"LAB_A": [["b", 1], {"c": None}], "LAB_B": True}, {}, {}), Left(2, 7, "gone", back=True),
        Called("flat", "all_reduce", "", 1, 2.5, 5), Timeline("flat", 1, [["forward", "0", 0.0, 1.5]]),
        Table("a", ["b"], [[1, 2.5, "c", None, True]]), MemoryLine("flat", 0.5, {"weights": [1, 2]}), Check("", "a", 0.1, 1e-12),
    ],
)  # fmt: skip
def test_what_is_written_is_read(record: Any) -> None:
    line = to_line(record)
    assert json.loads(line)["record"] == type(record).__name__.lower()
    assert from_line(line) == record
    assert to_line(from_line(line)).replace(".0", "") == line.replace(".0", "")
