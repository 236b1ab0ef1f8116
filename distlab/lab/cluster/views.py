"""Numbered views of a run whose ranks come and go: the members, decided once all living ranks have met.

    a member's group breaks, or somebody asks to be taken in
      -> it leaves the group and meets         Meet, with what it has
      -> all others see that, and meet too     Living
      -> once all have, the first decides      Decide, Plan: who is in, and from where all go on
      -> all make a group of the view          View; should that fail, or one more die, they meet again

Pure: the server passes in the messages, and `tell` sends. A server that takes over begins with only the known lives:
ranks that wait for it repeat what they wait for.
"""

from collections.abc import Callable, Iterable

from distlab.lab.cluster.messages import AboutViews, Ask, Decide, Done, Living, Meet, Plan, Reborn, View
from distlab.techniques.transport.store_server import Message

BEGIN = "begin"  # prefix of a meeting's reason: all ranks meet, for something new
END = f"{BEGIN} the end"  # of the training: ranks that return later are too late
AGAIN = "meet"  # why members meet: one is gone or asks
Tell = Callable[[Iterable[int], Message], None]


class Views:
    """The living ranks, and their progress towards the next view."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.lives: dict[int, int] = {}
        self.asking: dict[int, bytes] = {}
        self._met: dict[int, Meet] = {}
        self._done = 0
        self._decides: tuple[int, list[int], str] | None = None  # the number of the view, its ranks, and why
        self.ended = False  # the view of the end is decided

    def joined(self, rank: int, life: int) -> None:
        """Record that a process is rank `rank` from now on; one that only changed its server is the same as before."""
        if self.lives.get(rank) != life:
            self._forget(rank)
            self.lives[rank] = life
        self._look()

    def lost(self, rank: int) -> None:
        """Record that the run continues without a rank."""
        self._forget(rank)
        self.lives.pop(rank, None)
        self._look()

    def on_message(self, rank: int, message: AboutViews) -> None:
        """Process a message from a rank."""
        match message:
            case Meet():
                self._met[rank] = message
                self.asking.pop(rank, None)
            case Ask(wish):
                self.asking[rank] = wish
                self._met.pop(rank, None)
            case Done(number):
                self._done = max(self._done, number)
            case Reborn(life):
                self._forget(rank)
                self.lives[rank] = life
            case Plan(number, members, plan):
                self._decide(rank, number, members, plan)
        self._look()

    def _forget(self, rank: int) -> None:
        """Forget the messages of a process that is gone; a decision that includes it is open again."""
        self.asking.pop(rank, None)
        self._met.pop(rank, None)
        if self._decides is not None and rank in self._decides[1]:
            self._decides = None

    def _tell_living(self) -> None:
        asking = [(rank, self.lives[rank], wish) for rank, wish in self.asking.items()]
        met = {rank: each.why for rank, each in self._met.items()}
        self._tell(self.lives, Living(self.lives, asking, met, self._done))

    def _look(self) -> None:
        """Send the state to all, and let the first decide once all are there."""
        self._tell_living()
        if self._decides is not None:
            return
        for why in sorted({each.why for each in self._met.values()}):
            there = self._expected(why)
            if there and all(rank in self._met and self._met[rank].why == why for rank in there):
                number = 1 + max(self._met[rank].view for rank in there)
                self._decides = number, there, why
                reports = [(rank, self.lives[rank], self._met[rank].report) for rank in there]
                self._tell([there[0]], Decide(number, reports))
                return

    def _expected(self, why: str) -> list[int]:
        """Return who has to meet: members of the newest view that any rank is in, or all that are not outside."""
        if why != AGAIN:
            outside = set() if why.startswith(BEGIN) else set(self.asking)
            return sorted(set(self.lives) - outside)
        met = {rank: each for rank, each in self._met.items() if each.why == why}
        newest = max(met.values(), key=lambda each: each.view)
        members = [rank for rank, life in newest.members if self.lives.get(rank) == life]
        return members + sorted(set(met) - set(members))

    def _decide(self, rank: int, number: int, members: list[tuple[int, int]], plan: bytes) -> None:
        if self._decides is None or self._decides[0] != number or self._decides[1][0] != rank:
            return
        (_, there, why), self._decides = self._decides, None
        if any(self.lives.get(each) != life for each, life in members):
            return  # one of them is gone meanwhile: all are asked again
        if why.startswith(BEGIN) and self._expected(why) != there:
            return  # one has returned meanwhile, and would wait outside of it for ever
        self.ended = why == END
        for each in {*there, *(each for each, _ in members)}:
            self._met.pop(each, None)
        for each, _ in members:
            self.asking.pop(each, None)
        self._tell_living()  # before the view: its members must not take the earlier meeting for another one
        self._tell({*there, *(each for each, _ in members)}, View(number, members, plan))
