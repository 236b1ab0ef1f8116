"""JSON as the files of a run have it: valid for every reader, and read however it was damaged.

JSON has no word for a number that is not finite, so one is written as {"float": "nan"}, "inf" or "-inf"; what Python
itself writes for them, a bare NaN, is still read: files from before had it.
"""

import json
from typing import Any

FLOAT, NOT_FINITE = "float", ("nan", "inf", "-inf")
LARGEST_BITS = 1023  # of an integer that is a float too


def to_json(value: Any) -> str:
    """`value` as JSON on one line."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_worded(value), allow_nan=False)


def from_json(content: str | bytes) -> Any:
    """What `to_json` was given; half of a surrogate pair is read as "?". Raises ValueError for all that is no JSON."""
    try:
        text = content if isinstance(content, str) else content.decode()
        value = json.loads(text, object_hook=_number, parse_int=_whole)
        if "\\ud" in text.lower():  # else whoever prints it meets an error of its own
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _worded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _worded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_worded(entry) for entry in value]
    return {FLOAT: str(value)} if isinstance(value, float) and value - value != 0 else value


def _whole(digits: str) -> int:
    number = int(digits)
    if number.bit_length() > LARGEST_BITS:
        raise ValueError(f"an integer of {len(digits)} digits, which no float holds")
    return number


def _number(found: dict[str, Any]) -> Any:
    return float(found[FLOAT]) if found.keys() == {FLOAT} and found[FLOAT] in NOT_FINITE else found
