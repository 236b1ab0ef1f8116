"""What one process has heard of the others: who asks, who calls, who has come, which views were decided, who is gone.

Words come over the lines at any time and are kept here until someone looks, so that none is lost between two meetings.
"""

import queue
from collections.abc import Iterable
from typing import Any, NamedTuple

from workers.parallel.line import Message
from workers.parallel.lines import ENDED, Lines

Report = dict[str, Any]
BEGIN = "begin"  # in front of why all are called: to something new


class Member(NamedTuple):
    """One process: a rank that comes back is another."""

    rank: int
    life: int


class View(NamedTuple):
    """Who is in, from `plan` on; `plan` is what `decide` made of all reports."""

    number: int
    members: tuple[Member, ...]
    plan: Report

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)


class GivenUp(RuntimeError):
    """The others go on without this process."""


class Heard:
    """Used by the main thread alone, but for `part`."""

    def __init__(self, lines: Lines, world: Iterable[int]) -> None:
        self.lines, self.world = lines, set(world)
        self.view = View(0, (), {})
        self.asking: dict[Member, Message] = {}  # who wants to be let in
        self.parted: set[int] = set()
        self._ended: set[Member] = set()
        self._here: dict[Member, Message] = {}  # the answers to this process's last call
        self._calls: dict[Member, tuple[int, str]] = {}  # unanswered, the newest of each member, and why
        self._views: list[View] = []
        self._done = -1  # the number of the last view that came to its end
        self._call = 0  # the number of this process's last call

    @property
    def me(self) -> Member:
        return Member(self.lines.rank, self.lines.life)

    def part(self, rank: int) -> None:
        """From any thread: `rank` was given up by a majority, and is told so should it still be there."""
        self.lines.send(rank, {"kind": "given up"})
        self.parted.add(rank)

    def lives(self, member: Member) -> bool:
        return member == self.me or (member not in self._ended and member.rank not in self.parted)

    def forget(self) -> None:
        """This process begins another life: what was said to the one before counts no more."""
        self.asking, self._here, self._calls, self._views = {}, {}, {}, []

    def news(self) -> None:
        """Take in what has come, without a wait."""
        while not self.lines.heard.empty():
            self._listen(0)

    def begun(self) -> str:
        """What all are called to that is new; nothing where nobody has called."""
        return next((why for _, why in self._calls.values() if why.startswith(BEGIN)), "")

    def _over(self) -> bool:
        """Whether the view has come to its end: somebody says so, or calls all to something new."""
        return self._done >= self.view.number > 0 or bool(self.begun())

    def _listen(self, timeout_s: float) -> None:
        """Take in all that has come, or what comes within `timeout_s`."""
        wait_s = timeout_s
        while True:
            try:
                rank, life, message = self.lines.heard.get(timeout=wait_s) if wait_s else self.lines.heard.get_nowait()
            except queue.Empty:
                return
            self._take(Member(rank, life), message)
            wait_s = 0

    def _take(self, sender: Member, message: Message) -> None:
        kind = message.get("kind")
        if kind == ENDED:
            self._ended.add(sender)
            self.asking.pop(sender, None)
            self._here.pop(sender, None)
            self._calls.pop(sender, None)
        elif kind == "ask":
            self.asking[sender] = message
            if self._done >= self.view.number > 0:  # it was away when that was said
                self.lines.send(sender.rank, {"kind": "done", "number": self._done})
        elif kind == "call":
            self._calls[sender] = int(message["call"]), str(message["why"])  # kept until this process meets, too
        elif kind == "here" and message["call"] == self._call:
            self._here[sender] = message
        elif kind == "view":
            members = tuple(Member(*each) for each in message["members"])
            self._views.append(View(int(message["number"]), members, message["plan"]))
        elif kind == "done":
            self._done = max(self._done, int(message["number"]))
        elif kind == "given up":
            raise GivenUp("the others have parted from this rank, and go on without it")
        elif kind == "too late":
            raise GivenUp("the others have come to the end of the run without this rank")
