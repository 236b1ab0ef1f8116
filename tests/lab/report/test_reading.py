"""A line that is not a valid record is refused, whichever entry is wrong."""

import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distlab.lab.report.reading import BrokenRecord, from_json, from_line, read_regular, to_json, to_line
from distlab.lab.report.records import Called, Check, Left, Losses, MemoryLine, Start, Table, Timeline

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


# What is read is a regular file of a bounded size, whatever else is there.


def test_a_file_is_read_and_so_is_one_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "file", 3) == read_regular(tmp_path / "link", 3) == b"abc"


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # without a block of it on the disk


KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pipe": (os.mkfifo, "it is not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    "a folder": (Path.mkdir, "it is not a regular file"),
    "a socket": (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "it is not a regular file"),
    "a huge file": (huge, "it has 1099511627776 bytes"),
    "a loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", KINDS)
def test_any_other_kind_of_file_is_refused_at_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    make, sentence = KINDS[kind]
    make(Path("other"))
    with pytest.raises(OSError, match=sentence):
        read_regular(Path("other"), 1000)


# JSON of a run's files: valid for every reader, and a ValueError for whatever is none.


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
