"""How each kind of message is written: what a rank may say to another, to the type and the range of every field.

A message is a dict with its `kind`; a kind is a record of fields, each with a shape: a function that says whether a
value is right. Nothing else gets past `fault`, so those who read a message need not ask what is in it.
"""

import hashlib
import hmac
import ipaddress
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distlab.cluster.message_signer import (
    HEAD,
    MAC_BYTES,
    MAGIC,
    MAX_BYTES,
    MAX_TEXT,
    hint_of,
    mac_of,
)
from distlab.config import MAX_WORLD_SIZE, Config, ConfigError
from distlab.config.settings import MIN_KEY, read_key

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


# What came and was not believed: counted by what was wrong with it and by where it came from, and said a few times.
#
# Anybody may send to a port. So a line is said once for each fault, MAX_LINES at most, and sources are counted one by
# one up to MAX_SOURCES: what is sent can fill neither a log nor the memory.

MAX_LINES = 6
MAX_SOURCES = 16
OTHERS = "others"
ADVICE = {
    "sealed with another key": "is LAB_KEY the same on all ranks, or does another run use this port?",
    "of another run": "does another run use this port?",
    "not as its kind is written": "is it of another version of the code?",
    "of an unknown kind": "is it of another version of the code?",
}


class Dropped:
    """The count of one process; safe to use from several threads."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.by_fault: Counter[str] = Counter()
        self.by_source: Counter[str] = Counter()
        self.last_source: dict[str, str] = {}  # by fault: the address
        self._say, self._lines = say, 0
        self._lock = threading.Lock()

    def add(self, fault: str, source: tuple[str, int], what: str = "a message") -> None:
        """Count one message from `source`, an address and a port, and say so if its fault is a new one."""
        with self._lock:
            self.by_fault[fault] += 1
            self.last_source[fault] = source[0]
            known = source[0] in self.by_source or len(self.by_source) < MAX_SOURCES
            self.by_source[source[0] if known else OTHERS] += 1
            says = self.by_fault[fault] == 1 and self._lines < MAX_LINES
            self._lines += says
        if says:
            advice = f": {ADVICE[fault]}" if fault in ADVICE else ""
            self._say(f"dropped    {what} {fault}, from {source[0]} port {source[1]}{advice}; more are only counted")

    def turned_away(self, fault: str, source: tuple[str, int]) -> None:
        """Count a connection of who has not the key."""
        self.add(fault, source, "a connection")

    @property
    def total(self) -> int:
        return sum(self.by_fault.values())


# Opens what was sealed (message_signer.py): a message is believed, or dropped and counted with what was wrong with it.

WINDOW = 8  # beats come four times a second: one that was held back for longer than 2 s is no sign of life any more
STRANGE = "of another run"
UNFORESEEN = "that cannot be read"
# Of which numbers are kept; only who has the key comes to be one: a rank, its helper, its last words, a board.
MAX_SENDERS = 4 * MAX_WORLD_SIZE


@dataclass
class Numbers:
    """Which numbers of one sender have come: the newest, and of those before it a bit each."""

    newest: int = 0
    before: int = 0

    def take(self, number: int) -> bool:
        """Whether `number` comes for the first time, and in time."""
        ahead = number - self.newest
        if ahead > 0:
            self.before = ((self.before << 1 | 1) << (ahead - 1)) & ((1 << WINDOW) - 1) if ahead <= WINDOW else 0
            self.newest = number
            return True
        bit = 1 << (-ahead - 1) if ahead else 0
        if not bit or -ahead > WINDOW or self.before & bit:
            return False
        self.before |= bit
        return True


class Opened(NamedTuple):
    """A message that is believed."""

    message: dict[str, Any]
    sender: bytes
    audience: bytes


class MessageVerifier:
    """Opens what comes to one socket; what is wrong is counted in `dropped` and gives None."""

    def __init__(self, key: bytes, audience: bytes, dropped: Dropped) -> None:
        self.key, self.dropped = key, dropped
        self.audiences = {audience}
        self.knows_run = False  # until then what is for another audience may be for the run that begins
        self._hint = hint_of(key)
        self._numbers: dict[bytes, Numbers] = {}

    def know_run(self, token: bytes) -> None:
        """From now on the messages of the run are for this socket, and those of any other are wrong."""
        self.audiences.add(token)
        self.knows_run = True

    def open(self, datagram: bytes, source: tuple[str, int]) -> Opened | None:
        """The message of a datagram from `source`, an address and a port."""
        try:
            found = self._fault_of_seal(datagram) or self._read(datagram)
        except Exception:  # of what nobody foresaw: the thread that reads for this rank goes on
            found = UNFORESEEN
        if isinstance(found, Opened):
            return found
        if self.knows_run or found != STRANGE:
            self.dropped.add(found, source)
        return None

    def _fault_of_seal(self, datagram: bytes) -> str:
        """What is wrong with a datagram that nobody need read to see it."""
        if len(datagram) > MAX_BYTES:
            return "too long"
        if len(datagram) < HEAD.size + MAC_BYTES or not datagram.startswith(MAGIC):
            return "not sealed"
        if datagram[4:8] != self._hint:
            return "sealed with another key"
        own = hmac.compare_digest(datagram[HEAD.size : HEAD.size + MAC_BYTES], mac_of(self.key, datagram))
        return "" if own else "altered on the way"

    def _read(self, datagram: bytes) -> Opened | str:
        """The message of a datagram that is sealed with the key, or what is wrong with it."""
        _, _, sender, audience, number = HEAD.unpack_from(datagram)
        if audience not in self.audiences:
            return STRANGE
        if sender not in self._numbers and len(self._numbers) >= MAX_SENDERS:
            self._numbers.pop(next(iter(self._numbers)))
        if not self._numbers.setdefault(sender, Numbers()).take(number):
            return "come twice or late"
        try:
            message = json.loads(datagram[HEAD.size + MAC_BYTES :], parse_constant=_no_number)
        except (ValueError, RecursionError):
            return "no JSON"
        return fault(message) or Opened(message, sender, audience)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


# The key of a run, which every message between ranks is sealed with, and where it comes from.
#
# LAB_KEY, or what is in the file that LAB_KEY_FILE names; if neither is set, one that the launcher draws for local
# ranks and `./run` for containers. Else the secret that Compose or an orchestrator mounts. Else it is derived from
# what all ranks of a run share, which keeps strangers' words apart by accident alone: rank 0 says so.

SECRET = Path("/run/secrets/lab_key")  # where Compose, Swarm and Kubernetes put a secret of this name by custom
DERIVED = (
    "key        derived from MASTER_PORT and no secret: whoever reaches this network can speak as a rank. Set LAB_KEY"
    " alike on all ranks"
)


class Key(NamedTuple):
    """32 bytes, and whether anybody could have derived them."""

    secret: bytes
    derived: bool


def key_of(config: Config, agent_run: str = "", secret: Path = SECRET) -> Key:
    """The key of the run that these settings are of; `agent_run` tells runs of one torchrun port apart.

    Raises ConfigError where there is a secret that cannot be read.
    """
    words = config.key.get_secret_value() if config.key is not None else _read(config.key_file or secret)
    what = f"given\0{words}" if words else f"derived\0{config.master_port}\0{agent_run}"
    return Key(hashlib.sha256(b"distlab key of a run\0" + what.encode("utf-8", "surrogateescape")).digest(), not words)


def _read(secret: Path) -> str:
    """Its words; empty where there is no such file, or an empty one."""
    try:
        words = read_key(secret) if secret.is_file() else ""
    except OSError as error:
        raise ConfigError([f"{secret}, the key of this run, cannot be read: {error.strerror}"]) from None
    if words and len(words) < MIN_KEY:
        raise ConfigError(
            [f"{secret}, the key of this run, holds {len(words)} characters: expected {MIN_KEY} and more, or none"]
        )
    return words
