"""Schedules on paper: when each rank does what, if messages took no time. A formula's bubble is that of such a run."""

from collections.abc import Mapping

from workers.parallel.phases import Span
from workers.parallel.schedules import Action, Kind, Schedule, needs


def simulate(schedule: Schedule, durations_s: Mapping[Kind, float]) -> list[list[Span]]:
    """When each rank does what, if an action of a kind takes so long and a message no time: a span an action, in order.

    Raises ValueError naming a rank and what it waits for, if the schedule can never end.
    """
    num_stages = 1 + max(action.stage for actions in schedule for action in actions)
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    moved = True
    while moved:
        moved = False
        for actions, own in zip(schedule, spans, strict=True):
            for action in actions[len(own) :]:
                needed = needs(action, num_stages)
                if needed is not None and needed not in ended:
                    break
                start = max(own[-1].end_s if own else 0, 0 if needed is None else ended[needed])
                ended[action] = start + durations_s[action.kind]
                own.append(Span(action.kind, str(action.microbatch), start, ended[action]))
                moved = True
    for rank, (actions, own) in enumerate(zip(schedule, spans, strict=True)):
        if len(own) < len(actions):
            missing = needs(actions[len(own)], num_stages)
            raise ValueError(f"rank {rank} waits for ever, in {actions[len(own)]}, for {missing}")
    return spans
