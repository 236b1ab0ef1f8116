"""How each kind of message is written: what a rank may say to another, to the type and the range of every field.

A message is a dict with its `kind`; a kind is a record of fields, each with a shape: a function that says whether a
value is right. Nothing else gets past `fault`, so those who read a message need not ask what is in it.
"""

import ipaddress
import re
from collections.abc import Callable
from typing import Any

from workers.cluster.sealed import MAX_TEXT
from workers.config import MAX_WORLD_SIZE

MAX_MEMBERS = 64  # in one message: 10 kB at most
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_GROUPS = 8  # of ranks that hear alike, in one heartbeat

Shape = Callable[[Any], bool]


def whole(low: int = 0, high: int = 2**53) -> Shape:
    """An integer in a range; True and False are none."""
    return lambda value: type(value) is int and low <= value <= high


def number(low: float = 0.0, high: float = 1e12) -> Shape:
    """An integer or a float in a range, of which NaN is in none; one of 400 digits is compared, and is no float."""
    return lambda value: type(value) in (int, float) and low <= value <= high


def text(most: int = MAX_TEXT) -> Shape:
    """A string of so many characters at most, each of which can be written down: no half of a pair of UTF-16."""
    return lambda value: type(value) is str and len(value) <= most and not SURROGATE.search(value)


def flag(value: Any) -> bool:
    """True or False."""
    return type(value) is bool


def maybe(shape: Shape) -> Shape:
    """None, or that."""
    return lambda value: value is None or shape(value)


def items(shape: Shape, most: int) -> Shape:
    """A list of so many at most."""
    return lambda value: type(value) is list and len(value) <= most and all(map(shape, value))


def pair(first: Shape, second: Shape) -> Shape:
    """A list of two."""
    return lambda value: type(value) is list and len(value) == 2 and first(value[0]) and second(value[1])


def table(key: Shape, shape: Shape, most: int) -> Shape:
    """A dict of so many at most."""
    return lambda value: (
        type(value) is dict and len(value) <= most and all(key(name) and shape(each) for name, each in value.items())
    )


def record(**fields: Shape) -> Shape:
    """A dict of exactly these fields."""
    return lambda value: (
        type(value) is dict
        and value.keys() == fields.keys()
        and all(fields[name](each) for name, each in value.items())
    )


def address(value: Any) -> bool:
    """The text of an IP address."""
    try:
        return type(value) is str and len(value) <= 64 and bool(ipaddress.ip_address(value.partition("%")[0]))
    except ValueError:
        return False


def token(value: Any) -> bool:
    """Eight bytes in hexadecimal digits: an audience."""
    return type(value) is str and len(value) == 16 and set(value) <= set("0123456789abcdef")


rank = whole(0, MAX_WORLD_SIZE - 1)
ranks_mask = whole(0, 2**MAX_WORLD_SIZE - 1)
port = whole(1, 65535)
step = whole(-1)
lost = record(rank=rank, step=step, reason=text())
verdict = record(exit_code=whole(0, 255), sentence=text(), lost=items(lost, MAX_WORLD_SIZE))
member = record(rank=rank, host=text(256), ip=address, udp_port=port, pid=whole())
claim = record(
    rank=rank, world_size=whole(1, MAX_WORLD_SIZE), run_mode=text(), version=text(64),
    settings=table(text(128), text(), 128), host=text(256), pid=whole(), uid=text(64),
    outward_ip=lambda value: value == "" or address(value),
)  # fmt: skip

KINDS: dict[str, dict[str, Shape]] = {
    # To the board, and from it.
    "claim": {
        "claim": lambda value: claim(value) and value["rank"] < value["world_size"], "knows": whole(0, MAX_WORLD_SIZE),
    },
    "greet": {"greet": token},
    "wait": {"wait": text()},
    "refuse": {"refuse": text()},
    "sealed": {
        "sealed": record(
            token=token, run_id=text(256), store_port=port, members=items(member, MAX_MEMBERS)
        )
    },
    # Between watches.
    "beat": {
        "rank": rank, "turn": whole(), "calls": whole(-(2**53)), "step": step, "phase": text(),
        "in_phase_s": number(-60), "memory": maybe(number()),
        "accepted": ranks_mask, "bound": ranks_mask, "ended": ranks_mask, "left": ranks_mask,
        "counts": items(whole(), MAX_WORLD_SIZE),
        "hears": items(pair(ranks_mask, items(rank, MAX_WORLD_SIZE)), MAX_GROUPS),
    },
    "verdict": {"verdict": verdict, "stopped": flag},
    "killed": {"rank": rank},
    "written": {"rank": rank},
}  # fmt: skip
_SHAPES = {kind: record(kind=text(32), **fields) for kind, fields in KINDS.items()}


def fault(message: Any) -> str:
    """What is wrong with a message, in words that follow it; empty where nothing is."""
    kind = message.get("kind") if type(message) is dict else None
    if type(kind) is not str or kind not in _SHAPES:
        return "of an unknown kind"
    return "" if _SHAPES[kind](message) else "not as its kind is written"
