"""Numbered views of an elastic run: the members, decided once all living ranks have met.

    a member's group breaks, or a rank outside asks to join
      -> the member leaves the group and meets     Meet, with a report of its state
      -> all others learn that, and meet too       Living
      -> once all have, the first member decides   Decide, Plan: the members, and the state from which they continue
      -> the members form a group of the view      View; if that fails, or another rank dies, they meet again

Pure: the server passes in the messages, and `send` sends. A server that takes over knows only the living ranks:
those that wait for it repeat their last message.
"""

from collections.abc import Callable, Iterable

from distlab.lab.cluster.messages import AboutViews, Ask, Decide, Done, Living, Meet, Plan, Reborn, View
from distlab.techniques.transport.store_server import Message

BEGIN = "begin"  # prefix of a meeting's reason: all ranks meet, for something new
END = f"{BEGIN} the end"  # of the training: later ranks cannot rejoin
AGAIN = "meet"  # why members meet: one was lost, or one asks to join
Send = Callable[[Iterable[int], Message], None]


class Views:
    """The living ranks, and their progress towards the next view."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.lives: dict[int, int] = {}
        self.requests: dict[int, bytes] = {}
        self._met: dict[int, Meet] = {}
        self._done = 0
        self._deciding: tuple[int, list[int], str] | None = None  # the number of the view, its ranks, and why
        self.ended = False  # the view of the end is decided

    def joined(self, rank: int, life: int) -> None:
        """Record that a process is rank `rank` from now on; one that only changed its server is the same as before."""
        if self.lives.get(rank) != life:
            self._forget(rank)
            self.lives[rank] = life
        self._update()

    def lost(self, rank: int) -> None:
        """Record that the run continues without a rank."""
        self._forget(rank)
        self.lives.pop(rank, None)
        self._update()

    def on_message(self, rank: int, message: AboutViews) -> None:
        """Process a message from a rank."""
        match message:
            case Meet():
                self._met[rank] = message
                self.requests.pop(rank, None)
            case Ask(request):
                self.requests[rank] = request
                self._met.pop(rank, None)
            case Done(number):
                self._done = max(self._done, number)
            case Reborn(life):
                self._forget(rank)
                self.lives[rank] = life
            case Plan(number, members, plan):
                self._decide(rank, number, members, plan)
        self._update()

    def _forget(self, rank: int) -> None:
        """Forget the messages of a lost process; a decision that includes it is open again."""
        self.requests.pop(rank, None)
        self._met.pop(rank, None)
        if self._deciding is not None and rank in self._deciding[1]:
            self._deciding = None

    def _send_living(self) -> None:
        requests = [(rank, self.lives[rank], request) for rank, request in self.requests.items()]
        met = {rank: each.why for rank, each in self._met.items()}
        self._send(self.lives, Living(self.lives, requests, met, self._done))

    def _update(self) -> None:
        """Send the state to all, and let the first decide once all are there."""
        self._send_living()
        if self._deciding is not None:
            return
        for why in sorted({each.why for each in self._met.values()}):
            present = self._expected(why)
            if present and all(rank in self._met and self._met[rank].why == why for rank in present):
                number = 1 + max(self._met[rank].view for rank in present)
                self._deciding = number, present, why
                reports = [(rank, self.lives[rank], self._met[rank].report) for rank in present]
                self._send([present[0]], Decide(number, reports))
                return

    def _expected(self, why: str) -> list[int]:
        """Return which ranks have to meet: the members of the newest view, or all that are not outside."""
        if why != AGAIN:
            outside = set() if why.startswith(BEGIN) else set(self.requests)
            return sorted(set(self.lives) - outside)
        met = {rank: each for rank, each in self._met.items() if each.why == why}
        newest = max(met.values(), key=lambda each: each.view)
        members = [rank for rank, life in newest.members if self.lives.get(rank) == life]
        return members + sorted(set(met) - set(members))

    def _decide(self, rank: int, number: int, members: list[tuple[int, int]], plan: bytes) -> None:
        if self._deciding is None or self._deciding[0] != number or self._deciding[1][0] != rank:
            return
        (_, present, why), self._deciding = self._deciding, None
        if any(self.lives.get(each) != life for each, life in members):
            return  # one of them was lost meanwhile: they decide again
        if why.startswith(BEGIN) and self._expected(why) != present:
            return  # one has returned meanwhile, and would wait outside for ever
        self.ended = why == END
        for each in {*present, *(each for each, _ in members)}:
            self._met.pop(each, None)
        for each, _ in members:
            self.requests.pop(each, None)
        self._send_living()  # before the view: its members must not take the earlier meeting for another one
        self._send({*present, *(each for each, _ in members)}, View(number, members, plan))
