"""Values of JSON beside annotations, down to the last entry."""

from typing import Annotated, Any, TypedDict

import pytest

from workers.report.schema import fits


class Known(TypedDict):
    name: str
    ranks: list[int]


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (1, float), (1.5, float), (1, int), (True, bool), (None, int | None), ([], list[int]), ({"a": [1.0]}, dict[str, list[float]]),
        (["a", 1], tuple[str, int]), (["a", 1], Annotated[list[Any], tuple[str, int]]), (object(), Any),
        ({"name": "a", "ranks": [0], "more": 1}, Known), ({"name": "a", "ranks": []}, Known | None), (None, Known | None),
    ],
)  # fmt: skip
def test_what_fits(value: object, annotation: Any) -> None:
    assert fits(value, annotation)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, float), (True, int), (1.0, int), ("1", int), (10**400, float), (10**400, int), (None, int), ([1, "x"], list[int]),
        ({"a": [None]}, dict[str, list[float]]), (["a"], tuple[str, int]), (["a", 1, 1], tuple[str, int]), ("ab", list[str]),
        ([[1, 2]], list[Annotated[list[Any], tuple[str, int]]]), ({"name": "a"}, Known), ({"name": "a", "ranks": ["0"]}, Known),
        ([], Known), ([[]], list[str | float | None]),
    ],
)  # fmt: skip
def test_what_does_not(value: object, annotation: Any) -> None:
    assert not fits(value, annotation)
