"""Who is in: processes that agree, again and again, on the next *view*, a numbered list of members.

    the group breaks, or somebody asks to be let in
      -> the first member that lives calls all who live           {"kind": "call"}
      -> each leaves its group and says what it has               {"kind": "here"}
      -> once all who live have come, the first decides a view    {"kind": "view"}
      -> all make a group of the view's members; should that fail, or one more die, they meet again

Nobody is left out but who is known to be gone: its line has ended, which is the end of its process, or it was parted
from by a majority that heard it no more (`part`). So there are no two views of one number that both stand. Members are
in the order in which they came: all agree who is first, even where one knows of a newcomer and another does not yet.
"""

import queue
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from distlab.elastic.peer_connections import ENDED, Lines, Message

# What one process has heard of the others: who asks, who calls, who has come, which views were decided, who is gone.
#
# Words come over the lines at any time and are kept here until someone looks, so that none is lost between two
# meetings.

Report = dict[str, Any]
BEGIN = "begin"  # in front of why all are called: to something new
MEET = "meet"  # why members are called: one is gone or asks
POLL_S = 0.05


class Member(NamedTuple):
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


Decide = Callable[[list[Member], dict[Member, Report]], Report]


class GivenUp(Exception):
    """The others go on without this process."""


class Membership:
    """What one process knows of who is in, and agrees on with the others, each wait for them at most `timeout_s`. Used
    by the main thread alone, but for `part`."""

    def __init__(self, lines: Lines, world: Iterable[int], timeout_s: float) -> None:
        self.lines, self.world, self.timeout_s = lines, set(world), timeout_s
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
        while not self.lines.heard.empty():
            self._listen(0)

    def begun(self) -> str:
        """What all are called to that is new; nothing where nobody has called."""
        return next((why for _, why in self._calls.values() if why.startswith(BEGIN)), "")

    def _over(self) -> bool:
        """Whether the view has come to its end: somebody says so, or calls all to something new."""
        return self._done >= self.view.number > 0 or bool(self.begun())

    def _listen(self, timeout_s: float) -> None:
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
            raise GivenUp("the other ranks declared this rank dead, and continue without it")
        elif kind == "too late":
            raise GivenUp("the other ranks finished the run without this rank")

    # --- to meet ---

    def meet(self, report: Report, decide: Decide) -> View | None:
        """Agree on the next view with all members who live; None where this one has come to its end meanwhile."""
        return self._agree(MEET, report, decide, lambda: [each for each in self.view.members if self.lives(each)])

    def assemble(self, why: str, report: Report, decide: Decide) -> View | None:
        """Agree on a view with all ranks of the world that were not parted from; those that went are waited for.

        All give the same `why`, another each time; BEGIN in front of it begins something new, and is never over. Else
        None where the view has come to its end meanwhile.
        """

        def expected() -> list[Member]:
            lives = self.lines.open() | {self.me.rank: self.me.life}
            outside = set() if why.startswith(BEGIN) else {member.rank for member in self.asking}
            return [Member(rank, lives.get(rank, 0)) for rank in sorted(self.world - self.parted - outside)]

        return self._agree(why, report, decide, expected)

    def ask(self, wish: Message, report: Report) -> View | None:
        """Wait outside until a view takes this process in; None once the training has come to its end without it.

        Raises TimeoutError once nobody has been left for long who could let it in, since who lives waits outside too;
        at once where all others have ended.
        """
        asked: set[int] = set()
        hopeful_at = time.monotonic()
        while not self._over():
            if set(self.lines.open()) > {member.rank for member in self.asking}:
                hopeful_at = time.monotonic()
            if asked and not self.lines.open():  # who comes from now on has nothing either
                raise TimeoutError(f"all others have ended before rank {self.me.rank} could join")
            if time.monotonic() - hopeful_at > self.timeout_s:
                raise TimeoutError(
                    f"for {self.timeout_s:g} s no member was left that could let rank {self.me.rank} join"
                )
            for rank, life in self.lines.open().items():
                if life not in asked:
                    self.lines.send(rank, {"kind": "ask", **wish})
                    asked.add(life)
            self._listen(POLL_S)
            for lead in [] if self._over() else list(self._calls):
                self._answer(lead, MEET, report)
            views, self._views = self._views, []
            for view in views:
                if self.me in view.members:
                    return self._taken(view)
        return None

    def finish(self) -> None:
        """All members have come to the end: whoever still meets about this view need not."""
        self._done = self.view.number
        self.lines.tell(self.lines.open(), {"kind": "done", "number": self.view.number})

    def _agree(self, why: str, report: Report, decide: Decide, expected: Callable[[], list[Member]]) -> View | None:
        self._here = {}
        self._call += 1
        called: set[Member] = set()
        deadline = time.monotonic() + self.timeout_s
        while True:
            self._listen(POLL_S)
            if not why.startswith(BEGIN) and self._over():
                return None
            view = self._newest()
            if view is not None:
                return view
            there = expected()
            if there[0] == self.me:
                view = self._lead(why, there, called, report, decide)
                if view is not None:
                    return view
            else:
                self._answer(there[0], why, report)
            if time.monotonic() > deadline:
                missing = [each.rank for each in there if each != self.me and each not in self._here]
                raise TimeoutError(
                    f"timed out waiting for ranks {missing} to agree on the members, after {self.timeout_s:g} s"
                )

    def _lead(self, why: str, there: list[Member], called: set[Member], report: Report, decide: Decide) -> View | None:
        newest = max(self._here.values(), key=lambda here: int(here["number"]), default=None)
        if newest is not None and newest["number"] > self.view.number:  # it knows of members that this one does not
            known = [Member(*each) for each in newest["members"]]
            there = there + [each for each in known if each not in there and self.lives(each)]
        for member in there:
            if member not in called and member != self.me:
                self.lines.send(member.rank, {"kind": "call", "call": self._call, "why": why})
                called.add(member)
        if any(member != self.me and member not in self._here for member in there):
            return None
        reports = {member: here["report"] for member, here in self._here.items() if member in there}
        reports[self.me] = report
        number = max([self.view.number, *(int(here["number"]) for here in self._here.values())]) + 1
        view = View(number, tuple(there), {})
        plan = decide(list(view.members), reports)
        members = tuple(Member(*each) for each in plan.pop("members"))
        view = View(number, members, plan)
        words = {"kind": "view", "number": number, "members": members, "plan": plan}
        self.lines.tell({member.rank for member in (*there, *members)} - {self.me.rank}, words)
        return self._taken(view)

    def _answer(self, lead: Member, why: str, report: Report) -> None:
        """Say what this process has, if `lead` has called for just that."""
        call, called_for = self._calls.get(lead, (0, ""))
        if called_for == why:
            del self._calls[lead]
            words = {"kind": "here", "call": call, "number": self.view.number, "members": self.view.members}
            self.lines.send(lead.rank, words | {"report": report})

    def _newest(self) -> View | None:
        views, self._views = self._views, []
        newest = max(views, key=lambda view: view.number, default=None)
        return self._taken(newest) if newest is not None and newest.number > self.view.number else None

    def _taken(self, view: View) -> View:
        self.view = view
        for member in view.members:
            self.asking.pop(member, None)
        return view
