"""Schedules that put off the gradients of weights, to do them where a rank would wait (Qi et al. 2023, "Zero Bubble
Pipeline Parallelism").

In units of a third of a microbatch's work (F forward, I the gradient of the input, W those of the weights, all alike) a
step of m microbatches is 3m of work on each of p ranks, and the last microbatch's way back is what is waited for.

  zb_h1      1f1b whose rank r does the weights r microbatches late. As much is held as on the first rank of 1f1b,
             min(m, p), now on every rank. Idle: max(p-1, 2(p-1)-(m-1)); (p-1)(F+B-2W) in the paper, whose B is I+W
  zbv        two chunks a rank that lie like a V: stage r, and 2p-1-r on the way back. The last rank gets its second
             chunk from itself, and the loss is on the first. 2p halves are held. Idle: max(p-1, 4(p-1)-2(m-1)) halves
             (Qi et al. 2023, section 6)
  dualpipev  the same V; forwards of one chunk and backwards of the other in turn, so that on an accelerator the one's
             messages hide behind the other's work (the half of DeepSeek's DualPipe, 2024). From m = 2p on; 2p+1 halves
             are held. Idle: p-1 halves; (p-1)(F&B+B-3W) in its README, where nothing overlaps F&B is F+B

What is predicted holds for F = I = W. The optimizer's step waits for nobody's bubble either: a rank updates when its
own last weights are done, and checks afterwards (section 4).
"""

from collections.abc import Iterator

from workers.parallel.schedules import Action, Kind, Schedule


def folded(ranks: int) -> list[int]:
    """The rank of each of 2p stages that lie like a V: down the ranks, and up again."""
    return [*range(ranks), *reversed(range(ranks))]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1f1b, whose rank r does the gradients of weights r microbatches late."""
    schedule = []
    for rank in range(ranks):
        forwards, inputs, weights = (
            [Action(kind, rank, number) for number in range(microbatches)] for kind in ("forward", "input", "weight")
        )
        ahead = min(microbatches, ranks - rank)
        actions = forwards[:ahead]
        for number, given in enumerate(inputs):
            late = weights[number - rank : number - rank + 1] if number >= rank else []
            actions += [given, *late, *forwards[ahead + number : ahead + number + 1]]
        schedule.append(actions + weights[max(0, microbatches - rank) :])
    return schedule


class Chunks:
    """The actions of one rank's two chunks, each of which takes its microbatches in order."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.stages = rank, 2 * ranks - 1 - rank
        self.actions: list[Action] = []
        self._numbers: dict[tuple[Kind, int], int] = {}
        self._late: list[int] = []  # chunks whose weights were put off, in their order

    def do(self, kind: Kind, chunk: int) -> None:
        """The next microbatch of `chunk`."""
        number = self._numbers.get((kind, chunk), 0)
        self._numbers[kind, chunk] = number + 1
        self.actions.append(Action(kind, self.stages[chunk], number))

    def back(self, chunk: int, *, late: bool = False) -> None:
        """Input and weights; where `late` the weights are put off."""
        self.do("input", chunk)
        if late:
            self._late.append(chunk)
        else:
            self.do("weight", chunk)

    def catch_up(self) -> None:
        """The weights that were put off first."""
        self.do("weight", self._late.pop(0))

    def count(self, kind: Kind, chunk: int) -> int:
        """How many microbatches of `chunk` are through."""
        return self._numbers.get((kind, chunk), 0)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """The V of zero bubble, whose peak is 1f1b's.

    It is made for 2p-1 microbatches and more; of fewer the actions of those that are missing are left out.
    """
    made_for = max(microbatches, 2 * ranks - 1)
    return [
        [action for action in _v_of(ranks, rank, made_for).actions if action.microbatch < microbatches]
        for rank in range(ranks)
    ]


def _v_of(ranks: int, rank: int, microbatches: int) -> Chunks:
    down, up = 0, 1
    chunks = Chunks(ranks, rank)
    for _ in range(2 * (ranks - rank) - 1):
        chunks.do("forward", down)
    for _ in range(rank):
        chunks.do("forward", up)
        chunks.do("forward", down)
    for _ in range(ranks - rank):
        chunks.do("forward", up)
        chunks.back(up)
    while chunks.count("forward", up) < microbatches:
        if chunks.count("forward", down) < microbatches:
            chunks.do("forward", down)
        chunks.back(down)
        chunks.do("forward", up)
        chunks.back(up)
    for _ in range(rank):
        chunks.do("input", down)
        chunks.do("input", up)
    for _ in range(ranks - rank):
        chunks.back(down)
    for chunk in (up, down):
        while chunks.count("weight", chunk) < microbatches:
            chunks.do("weight", chunk)
    return chunks


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Both directions in turn, on one V; raises ValueError for fewer than 2p microbatches."""
    if microbatches < 2 * ranks:
        raise ValueError(f"dualpipev takes at least 2p = {2 * ranks} microbatches, not {microbatches}")
    return [list(_dual_of(ranks, rank, microbatches)) for rank in range(ranks)]


def _dual_of(ranks: int, rank: int, microbatches: int) -> Iterator[Action]:
    down, up = 0, 1
    behind, chunks = ranks - 1 - rank, Chunks(ranks, rank)
    for _ in range(2 * behind):  # fill the way down
        chunks.do("forward", down)
    for _ in range(rank + 1):  # and up
        chunks.do("forward", down)
        chunks.do("forward", up)
    for _ in range(behind):  # the first backwards, each with its weights before the next forward
        chunks.back(up)
        chunks.do("forward", up)
    for _ in range(microbatches - 2 * ranks + rank + 1):  # all four in turn
        chunks.do("forward", down)
        chunks.back(up)
        chunks.do("forward", up)
        chunks.back(down)
    for _ in range(behind):  # no forward is left on the way down
        chunks.back(up)
        chunks.do("forward", up)
        chunks.back(down)
    for turn in range(2 * (rank + 1)):  # nor up: the second half puts its weights off
        chunks.back(up if turn % 2 == 0 else down, late=turn > rank)
    for _ in range(behind):
        chunks.catch_up()
        chunks.back(down, late=True)
    for _ in range(rank + 1):
        chunks.catch_up()
    yield from chunks.actions
