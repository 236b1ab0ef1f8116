"""Whether a value, as JSON gives it, is what an annotation says, down to its last entry.

A number that is not finite is a float; one whose integer fits into no float is none, nor is True. Where Python's type
says less than its reader needs, as of a list whose entries differ, `Annotated[list[Any], tuple[str, float]]` says the
rest: a list of two. `Annotated[int, range(1, 5)]` is a number of these.
"""

from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

Fits = Callable[[Any], bool]
LARGEST_BITS = 1023  # of an integer that is a float too


def fits(value: Any, annotation: Any) -> bool:
    """Whether it is; keys that a TypedDict does not name are allowed."""
    return _test(annotation)(value)


@cache
def _test(annotation: Any) -> Fits:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return lambda _: True
    if isinstance(annotation, range):
        return lambda value: type(value) is int and value in annotation
    if origin is Literal:
        return lambda value: type(value) is str and value in inner
    if origin is Annotated:
        return _test(inner[1])
    if origin in (UnionType, Union):
        parts = [_test(part) for part in inner]
        return lambda value: any(part(value) for part in parts)
    if is_typeddict(annotation):
        needed = {name: _test(part) for name, part in get_type_hints(annotation, include_extras=True).items()}
        return lambda value: (
            isinstance(value, dict) and all(name in value and part(value[name]) for name, part in needed.items())
        )
    if origin in (list, dict, tuple):
        return _test_of_entries(origin, [_test(part) for part in inner])
    return _scalar(annotation)


def _test_of_entries(kind: type, parts: list[Fits]) -> Fits:
    if kind is list:
        return lambda value: isinstance(value, list) and all(map(parts[0], value))
    if kind is dict:
        return lambda value: isinstance(value, dict) and all(map(parts[1], value.values()))
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(parts)
        and all(part(entry) for part, entry in zip(parts, value, strict=True))
    )


def _scalar(kind: Any) -> Fits:
    if kind is None or kind is NoneType:
        return lambda value: value is None
    if kind is float:
        return lambda value: type(value) is float or (type(value) is int and value.bit_length() <= LARGEST_BITS)
    if kind is int:
        return lambda value: type(value) is int and value.bit_length() <= LARGEST_BITS
    return lambda value: type(value) is kind
