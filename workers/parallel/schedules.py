"""Schedules: which rank works on which microbatch when, as plain data that can be proven and drawn without a process.

A model is cut into stages, and stage s lives on rank s % p: with one stage a rank stage and rank are the same, with v
of them (chunks) every rank comes by v times. A rank's part of a schedule is a list of actions, which it does in order.
Each waits for the one other action whose result it takes (`needs`), and that is all there is to know: no schedule says
when anything is sent.

A backward pass is two products: the gradient of the stage's input, which the stage before waits for, and the gradients
of its weights, for which nobody does. gpipe does both in one ("backward"), as Megatron does. 1f1b and interleaved do
the input's first, send it on, and then the weights' ("input", "weight"): with thirds of equal length that alone
shortens the bubble by a third, 0.200 where p=4 and m=8 had 0.273. Who puts off the weights further is in
zero_bubble.py.

All of them interleave a list of forwards and a list of backwards and differ in how many forwards run ahead:

  naive        one microbatch: a rank works while all others wait                            bubble (p-1)/p
  gpipe        all m ahead (Huang et al. 2019, section 2.3)                                  (p-1)/(m+p-1)
  1f1b         as few as the pipe is long behind this rank, p-1-r, and only min(m, p-r) microbatches are held for their
               backward pass (PipeDream-Flush: Narayanan et al. 2021, "Megatron-LM", section 2.2.1; the split of a
               backward pass: Qi et al. 2023, "Zero Bubble", section 2)                      2(p-1)/(3m+2(p-1))
  interleaved  v chunks a rank, so that a microbatch reaches the last rank v times as fast   2(p-1)/(3v·m+2(p-1))
               (section 2.2.2)
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """A microbatch goes through a stage, one way or the other; back as a whole, or in two parts."""

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
        in_two(_alternate(forwards, backwards, ahead=ranks - 1 - rank))
        for rank, (forwards, backwards) in enumerate(orders)
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
        schedule.append(in_two(_alternate(forwards, backwards, ahead)))
    return schedule


def in_two(actions: list[Action]) -> list[Action]:
    """Each backward as the gradient of its input and, right behind, those of its weights."""
    found = []
    for action in actions:
        split = action.kind == "backward"
        found += [action._replace(kind="input"), action._replace(kind="weight")] if split else [action]
    return found


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


def in_one(schedule: Schedule) -> Schedule:
    """The same with each backward pass in one, as the first papers have it: the bubble of gpipe, a v-th with chunks."""
    return [
        [each._replace(kind="backward") if each.kind == "input" else each for each in actions if each.kind != "weight"]
        for actions in schedule
    ]


def owners(schedule: Schedule) -> list[int]:
    """The rank of each stage."""
    found = {action.stage: rank for rank, actions in enumerate(schedule) for action in actions}
    return [found[stage] for stage in sorted(found)]


def stages_of(rank: int, owners: Sequence[int]) -> list[int]:
    """The stages of one rank, by the rank of each stage."""
    return [stage for stage, owner in enumerate(owners) if owner == rank]


def needs(action: Action, num_stages: int) -> Action | None:
    """The action at the neighbouring stage whose result `action` takes; None at the end where there is none, and for
    gradients of weights, which take what is here."""
    return _beside(action, num_stages, -1)


def gives(action: Action, num_stages: int) -> Action | None:
    """The action that takes the result of `action`; None if its result stays where it is."""
    return _beside(action, num_stages, 1)


def _beside(action: Action, num_stages: int, way: int) -> Action | None:
    """The action on the same way at the next stage, or with `way` -1 at the one before."""
    if action.kind == "weight":
        return None
    neighbour = action.stage + (way if action.kind == "forward" else -way)
    return action._replace(stage=neighbour) if 0 <= neighbour < num_stages else None
