"""Schedules: which rank works on which microbatch when, as plain data that can be proven and drawn without a process.

A model is cut into stages, and stage s lives on rank s % p: with one stage a rank stage and rank are the same, with v
of them (chunks) every rank comes by v times. A rank's part of a schedule is a list of actions, which it does in order.
Each waits for the one other action whose result it takes (`needs`), and that is all there is to know: no schedule says
when anything is sent.

All of them interleave a list of forwards and a list of backwards and differ in how many forwards run ahead:

  naive        one microbatch: a rank works while all others wait                            bubble (p-1)/p
  gpipe        all m ahead (Huang et al. 2019, section 2.3)                                  (p-1)/(m+p-1)
  1f1b         as few as the pipe is long behind this rank, p-1-r: the same bubble, and only min(m, p-r) microbatches
               are held for their backward pass (PipeDream-Flush: Narayanan et al. 2021, "Megatron-LM", section 2.2.1)
  interleaved  v chunks a rank, so that a microbatch reaches the last rank v times as fast   (p-1)/(v·m+p-1) (section
               2.2.2)
"""

from typing import Literal, NamedTuple

Kind = Literal["forward", "backward"]


class Action(NamedTuple):
    """A microbatch goes through a stage, one way or the other."""

    kind: Kind
    stage: int
    microbatch: int


Schedule = list[list[Action]]  # the actions of each rank, in the order in which it does them


def naive(ranks: int) -> Schedule:
    """The whole batch as one microbatch: the model is split, the work is not."""
    return gpipe(ranks, 1)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    orders = (_orders(rank, ranks, [microbatches], 1) for rank in range(ranks))
    return [_alternate(forwards, backwards, ahead=microbatches) for forwards, backwards in orders]


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """A backward as soon as there can be one: the last rank's first follows its first forward."""
    orders = (_orders(rank, ranks, [microbatches], 1) for rank in range(ranks))
    return [
        _alternate(forwards, backwards, ahead=ranks - 1 - rank) for rank, (forwards, backwards) in enumerate(orders)
    ]


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1f1b over `chunks` stages a rank, in groups of microbatches that go through all chunks one after the other.

    Megatron's groups are of p, so m must be a multiple of p. Here the groups share m as evenly as it goes, at least p
    in each where there are as many, the larger ones first: a larger one behind a smaller would need a forward before
    its turn.
    """
    num_groups = max(1, microbatches // ranks)
    groups = [microbatches // num_groups + (group < microbatches % num_groups) for group in range(num_groups)]
    schedule = []
    for rank in range(ranks):
        forwards, backwards = _orders(rank, ranks, groups, chunks)
        # What the last rank needs before its first backward, and a forward and its backward for each rank behind this
        # one.
        ahead = (chunks - 1) * groups[0] + 2 * (ranks - 1 - rank)
        schedule.append(_alternate(forwards, backwards, ahead))
    return schedule


def _orders(rank: int, ranks: int, groups: list[int], chunks: int) -> tuple[list[Action], list[Action]]:
    """This rank's forwards and its backwards: a group through all chunks, then the next group; backwards from the
    last."""
    forwards, backwards, first = [], [], 0
    for size in groups:
        numbers = range(first, first + size)
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        forwards += [Action("forward", stage, number) for stage in stages for number in numbers]
        backwards += [Action("backward", stage, number) for stage in reversed(stages) for number in numbers]
        first += size
    return forwards, backwards


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    turns = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return forwards[:ahead] + turns + backwards[len(forwards) - ahead :]


def needs(action: Action, num_stages: int) -> Action | None:
    """The action at the neighbouring stage whose result `action` takes; None at the end where there is none."""
    kind, stage, microbatch = action
    neighbour = stage - 1 if kind == "forward" else stage + 1
    return Action(kind, neighbour, microbatch) if 0 <= neighbour < num_stages else None


def gives(action: Action, num_stages: int) -> Action | None:
    """The action that takes the result of `action`; None if its result stays where it is."""
    kind, stage, microbatch = action
    neighbour = stage + 1 if kind == "forward" else stage - 1
    return Action(kind, neighbour, microbatch) if 0 <= neighbour < num_stages else None
