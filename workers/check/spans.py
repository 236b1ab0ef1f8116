"""The timeline of a rank: its calls from their begin to their end, and the waits between, from what its script told."""

import json
from collections.abc import Iterable
from typing import Any

MOST = 400  # calls of a rank that are drawn
# What each operation is drawn as; the label tells it apart.
KINDS = {
    "all_reduce": "all_reduce", "reduce": "all_reduce", "broadcast": "all_gather", "all_gather": "all_gather",
    "gather": "all_gather", "reduce_scatter": "reduce_scatter", "scatter": "reduce_scatter", "send": "send",
    "all_to_all": "reduce_scatter", "recv": "receive", "barrier": "wait", "monitored_barrier": "wait",
}  # fmt: skip

Span = tuple[str, str, float, float]  # kind, label, start and end in seconds


def spans_of(lines: Iterable[bytes]) -> tuple[list[Span], int]:
    """The first calls as spans, and how many more there were."""
    places: dict[int, str] = {}
    kinds: dict[int, str] = {}
    begun: dict[int, tuple[str, str, float]] = {}
    found: list[Span] = []
    more = 0
    for line in lines:
        told: list[Any] = json.loads(line)
        if told[0] == "place":
            places[told[1]] = told[2] or told[3]
        elif told[0] == "kind":
            kinds[told[1]] = told[2]
        elif told[0] == "call":
            op = kinds[told[4]]
            begun[told[1]] = KINDS[op], f"{op} {places[told[2]]}", told[7]
        elif told[0] in ("end", "waited") and told[1] in begun:
            if len(found) < MOST:
                found.append((*begun.pop(told[1]), told[-1]))
            else:
                del begun[told[1]]
                more += 1
    last = max((end for *_, end in found), default=0.0)
    found += [(*each, max(last, each[2])) for each in begun.values() if len(found) < MOST]  # under way at the end
    return sorted(found, key=lambda span: span[2]), more
