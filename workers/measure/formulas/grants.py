"""Samples a second that the server's rules allow: one budget of steps for all workers, granted some at a time, where
messages take no time.

Workers that wait for nobody reach the sum of their rates only in the long run. A run ends with its last push, and a
straggler that was granted H steps just before the budget was spent is waited for: 4 workers, one at a tenth of their
speed, 20 steps each and H = 4, reach 800 samples a second where the sum of their rates is 1240.
"""

import heapq
from collections.abc import Sequence


def granted_rate(
    samples: Sequence[int], step_s: Sequence[float], budget: int, *, most: int = 1, staleness: int | None = None
) -> float:
    """Samples a second of `budget` steps, up to `most` granted at a time, by workers of `samples` and `step_s` a step.

    With a bound on staleness (Ho et al. 2013, section 2) who is further ahead waits for the slowest: a worker that is
    slow for a while holds up nobody, one that is always slow holds up all in the long run. None sets no bound.
    """
    clocks, done, now_s = [0] * len(step_s), 0, 0.0
    working: list[tuple[float, int, int]] = []  # when it pushes, who, and how many steps
    idle = list(range(len(step_s)))
    while True:
        waiting = []
        for worker in idle:
            if budget > 0 and (staleness is None or clocks[worker] - min(clocks) <= staleness):
                granted = min(most, budget)
                budget -= granted
                heapq.heappush(working, (now_s + granted * step_s[worker], worker, granted))
            else:
                waiting.append(worker)
        if not working:
            return done / now_s
        now_s, worker, granted = heapq.heappop(working)
        clocks[worker] += granted
        done += granted * samples[worker]
        idle = [*waiting, worker]
