"""Schedules: which rank works on which microbatch when, as plain data that is tested and drawn without a process.

A model is cut into stages, and stage s is on rank s % p. With one stage per rank, stage and rank are the same; with v
of them (chunks) every microbatch passes each rank v times. A rank's part of a schedule is an ordered list of actions.
Each action waits for one other action, whose result it needs (`producer_of`). Schedules do not say when messages are
sent.

A backward pass computes two things: the gradient of the stage's input, which the previous stage waits for, and the
gradients of its weights, which can wait. gpipe, 1f1b and interleaved do both together ("backward"), as their papers and
Megatron do. Those in the second half of this file compute the input's first, send it, and defer the weights' ("input",
"weight").

All of them interleave a list of forwards and a list of backwards and differ in how many forwards run ahead:

  one_microbatch  one rank works while all others wait                                       bubble (p-1)/p
  gpipe        all m run ahead (Huang et al. 2019, section 2.3)                              (p-1)/(m+p-1)
  1f1b         p-1-r run ahead, one per stage behind this one; only min(m, p-r) microbatches are kept for their
               backward pass (PipeDream-Flush: Narayanan et al. 2021, "Megatron-LM", section 2.2.1)
                                                                                             (p-1)/(m+p-1)
  interleaved  v chunks per rank, so that a microbatch is at the last rank v times as fast   (p-1)/(v·m+p-1)
               (section 2.2.2)
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from distlab.techniques.collectives.phases import Span

Kind = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """The pass of one microbatch through a stage: forward, backward, or one of the two parts of a backward."""

    kind: Kind
    stage: int
    microbatch: int


Schedule = list[list[Action]]  # the actions of each rank, in the order in which it does them


def one_microbatch(ranks: int) -> Schedule:
    """Return the schedule with the whole batch as one microbatch: the model is split, the work is not."""
    return gpipe(ranks, 1)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Return the schedule with all forwards first, then all backwards."""
    orders = (_orders(rank, ranks, [microbatches], 1) for rank in range(ranks))
    return [_alternate(forwards, backwards, ahead=microbatches) for forwards, backwards in orders]


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """Return 1f1b: backwards as early as possible; the last rank's first one follows its first forward."""
    orders = (_orders(rank, ranks, [microbatches], 1) for rank in range(ranks))
    return [
        _alternate(forwards, backwards, ahead=ranks - 1 - rank) for rank, (forwards, backwards) in enumerate(orders)
    ]


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Return 1f1b with `chunks` stages per rank; groups of microbatches pass all chunks one group after the other.

    Megatron's groups have p microbatches, so m must be a multiple of p. Here the groups share m as evenly as possible,
    with at least p each if there are as many, larger ones first: a larger group behind a smaller one would need a
    forward too early.
    """
    num_groups = max(1, microbatches // ranks)
    groups = [microbatches // num_groups + (group < microbatches % num_groups) for group in range(num_groups)]
    schedule = []
    for rank in range(ranks):
        forwards, backwards = _orders(rank, ranks, groups, chunks)
        # Forwards that the last rank needs before its first backward, and one forward and its backward per later rank.
        ahead = (chunks - 1) * groups[0] + 2 * (ranks - 1 - rank)
        schedule.append(_alternate(forwards, backwards, ahead))
    return schedule


def split_backwards(actions: list[Action]) -> list[Action]:
    """Split each backward into the gradient of its input and, directly after it, those of its weights."""
    parts = []
    for action in actions:
        split = action.kind == "backward"
        parts += [action._replace(kind="input"), action._replace(kind="weight")] if split else [action]
    return parts


def _orders(rank: int, ranks: int, groups: list[int], chunks: int) -> tuple[list[Action], list[Action]]:
    """Return this rank's forwards and backwards: a group passes all chunks, then the next; backwards from the last."""
    forwards, backwards, first = [], [], 0
    for size in groups:
        numbers = range(first, first + size)
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        forwards += [Action("forward", stage, number) for stage in stages for number in numbers]
        backwards += [Action("backward", stage, number) for stage in reversed(stages) for number in numbers]
        first += size
    return forwards, backwards


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Return `ahead` forwards, then one forward and one backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    turns = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return forwards[:ahead] + turns + backwards[len(forwards) - ahead :]


def owners(schedule: Schedule) -> list[int]:
    found = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
    return [found[stage] for stage in sorted(found)]


def stages_of(rank: int, owners: Sequence[int]) -> list[int]:
    return [stage for stage, owner in enumerate(owners) if owner == rank]


def producer_of(action: Action, num_stages: int) -> Action | None:
    """Return the action at the neighbouring stage whose result `action` needs; None at either end of the model, and for
    gradients of weights, which need no message."""
    return _neighbour(action, num_stages, -1)


def consumer_of(action: Action, num_stages: int) -> Action | None:
    """Return the action that needs the result of `action`; None if no other stage does."""
    return _neighbour(action, num_stages, 1)


def _neighbour(action: Action, num_stages: int, step: int) -> Action | None:
    """Return the same action at the next stage, or with `step` -1 at the previous one."""
    if action.kind == "weight":
        return None
    neighbour = action.stage + (step if action.kind == "forward" else -step)
    return action._replace(stage=neighbour) if 0 <= neighbour < num_stages else None


# Schedules that defer the gradients of weights, to compute them where a rank would wait (Qi et al. 2023, "Zero Bubble
# Pipeline Parallelism").
#
# In units of a third of a microbatch's work (F forward, I the gradient of the input, W those of the weights, all equal)
# a step of m microbatches is 3m of work on each of p ranks; the idle time comes from the last microbatch's way back.
#
#   zb_h1      1f1b with rank r's weights deferred by r microbatches. Every rank stores as much as rank 0 of 1f1b,
#              min(m, p). Idle: max(p-1, 2(p-1)-(m-1)); (p-1)(F+B-2W) in the paper, whose B is I+W
#   zbv        two chunks per rank, arranged like a V: stage r, and 2p-1-r on the way back. The last rank's second chunk
#              follows its first, and rank 0 has the loss. 2p halves are stored. Idle: max(p-1, 4(p-1)-2(m-1)) halves
#              (Qi et al. 2023, section 6)
#   dualpipev  the same V; forwards of one chunk and backwards of the other alternate, so that on an accelerator one's
#              messages overlap the other's work (half of DeepSeek's DualPipe, 2024). Needs m >= 2p; 2p+1 halves are
#              stored. Idle: p-1 halves; (p-1)(F&B+B-3W) in its README, where F&B is F+B without overlap
#
# The predictions assume F = I = W. The optimizer's step does not wait for the bubble either: a rank updates when its
# own last weights are done, and checks afterwards (section 4).


def folded(ranks: int) -> list[int]:
    """Return the rank of each of 2p stages arranged like a V: down the ranks, and up again."""
    return [*range(ranks), *reversed(range(ranks))]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Return 1f1b with rank r's gradients of weights deferred by r microbatches."""
    schedule = []
    for rank in range(ranks):
        forwards, inputs, weights = (
            [Action(kind, rank, number) for number in range(microbatches)] for kind in ("forward", "input", "weight")
        )
        ahead = min(microbatches, ranks - rank)
        actions = forwards[:ahead]
        for number, action in enumerate(inputs):
            late = weights[number - rank : number - rank + 1] if number >= rank else []
            actions += [action, *late, *forwards[ahead + number : ahead + number + 1]]
        schedule.append(actions + weights[max(0, microbatches - rank) :])
    return schedule


class Chunks:
    """The actions of one rank's two chunks, each of which processes its microbatches in order."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.stages = rank, 2 * ranks - 1 - rank
        self.actions: list[Action] = []
        self._numbers: dict[tuple[Kind, int], int] = {}
        self._late: list[int] = []  # chunks whose weights were deferred, in order

    def do(self, kind: Kind, chunk: int) -> None:
        """Process the next microbatch of `chunk`."""
        number = self._numbers.get((kind, chunk), 0)
        self._numbers[kind, chunk] = number + 1
        self.actions.append(Action(kind, self.stages[chunk], number))

    def back(self, chunk: int, *, late: bool = False) -> None:
        """Compute the gradients of input and weights; with `late` defer the weights."""
        self.do("input", chunk)
        if late:
            self._late.append(chunk)
        else:
            self.do("weight", chunk)

    def catch_up(self) -> None:
        """Compute the weights that were deferred first."""
        self.do("weight", self._late.pop(0))

    def count(self, kind: Kind, chunk: int) -> int:
        """Return how many microbatches of `chunk` are done."""
        return self._numbers.get((kind, chunk), 0)


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Return the zero-bubble V, whose peak memory is 1f1b's.

    It is built for at least 2p-1 microbatches; for fewer, the actions of the missing ones are dropped.
    """
    built_for = max(microbatches, 2 * ranks - 1)
    return [
        [action for action in _v_of(ranks, rank, built_for).actions if action.microbatch < microbatches]
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
    """Return the schedule with both directions in turn, on one V; raises ValueError for fewer than 2p microbatches."""
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
    for turn in range(2 * (rank + 1)):  # nor up: the second half defers its weights
        chunks.back(up if turn % 2 == 0 else down, late=turn > rank)
    for _ in range(behind):
        chunks.catch_up()
        chunks.back(down, late=True)
    for _ in range(rank + 1):
        chunks.catch_up()
    yield from chunks.actions


# Simulated schedules: when each rank does what, if messages take no time. The bubble formulas describe such a run.


def simulate(schedule: Schedule, durations_s: Mapping[Kind, float]) -> list[list[Span]]:
    """Return each rank's actions as spans in order, if an action takes `durations_s[kind]` and a message no time.

    Raises ValueError with the rank and the missing action if the schedule can never end.
    """
    num_stages = 1 + max(action.stage for actions in schedule for action in actions)
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for actions, own in zip(schedule, spans, strict=True):
            for action in actions[len(own) :]:
                needed = producer_of(action, num_stages)
                if needed is not None and needed not in ended:
                    break
                start = max(own[-1].end_s if own else 0, 0 if needed is None else ended[needed])
                ended[action] = start + durations_s[action.kind]
                own.append(Span(action.kind, str(action.microbatch), start, ended[action]))
                moved = True
    for rank, (actions, own) in enumerate(zip(schedule, spans, strict=True)):
        if len(own) < len(actions):
            missing = producer_of(actions[len(own)], num_stages)
            raise ValueError(f"rank {rank} waits for ever, in {actions[len(own)]}, for {missing}")
    return spans
