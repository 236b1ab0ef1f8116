"""Opens what was sealed (sealed.py): a message is believed, or dropped and counted with what was wrong with it."""

import hmac
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from workers.cluster.dropped import Dropped
from workers.cluster.messages import fault
from workers.cluster.sealed import HEAD, MAC_BYTES, MAGIC, MAX_BYTES, hint_of, mac_of
from workers.config import MAX_WORLD_SIZE

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


class Opener:
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
