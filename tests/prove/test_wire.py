"""What a proof counts as the file's own bytes, by counters made up here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from distlab.prove.proof import Wire

pytestmark = pytest.mark.timeout(60)
ENDS = ("a", 1000), ("b", 2000)


class Told:
    """A Telling, a Recorder and a Waits."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.bytes: int | None = 0
        self.depth = 0

    def say(self, *values: Any) -> None:
        self.said.append(values)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def hidden(self) -> bool:
        return self.depth > 0

    def sent(self) -> dict[Any, int]:
        return {} if self.bytes is None else {ENDS: self.bytes}


def test_the_bytes_of_steps_count_and_the_proofs_own_do_not() -> None:
    told = Told()
    wire = Wire(told, told, told)  # type: ignore[arg-type]
    assert told.bytes is not None
    told.bytes += 1  # before the first step
    for _ in range(2):
        with wire.step():
            told.bytes += 100
            with wire.unseen():
                told.bytes += 10
                with wire.unseen():  # taken away once
                    told.bytes += 20
        with wire.unseen():
            told.bytes += 1000  # between two steps
    wire.tell()
    assert told.said[-1] == ("wire", 2, [(*ENDS, 200)])
    assert [values for values in told.said if values[0] == "counting"] == [
        ("counting", False), *[("counting", True), ("counting", False)] * 2
    ]  # fmt: skip


def test_no_counters_are_no_bytes() -> None:
    told = Told()
    told.bytes = None
    wire = Wire(told, told, told)  # type: ignore[arg-type]
    with wire.step():
        pass
    wire.tell()
    assert told.said[-1] == ("wire", 1, [])
