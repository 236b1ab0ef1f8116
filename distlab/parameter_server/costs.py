"""The parameter server and its like: bytes a step, samples a second, and how stale an update may be.

S is the bytes of all weights, as of all gradients; H the local steps between two messages. Sources, by the names used
below:

  Li        Li et al.: Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014)
  Levin     Levin, May: A note on difference-delay equations (Theoretical Population Biology 1976)
"""

import heapq
import math
from collections.abc import Sequence


def server_bytes(world_size: int, nbytes: int, rank: int, local_steps: int = 1) -> float:
    """Bytes that `rank` sends a step: a worker its update, rank 0, server and worker at once, weights to all others.

    What rank 0 receives is (N-1)·S too: in and out 2(N-1)·S pass one link (a server that is no worker: 2N·S), where a
    ring's links each carry 2(N-1)/N·S.
    """
    return (nbytes if rank else (world_size - 1) * nbytes) / local_steps


def averaging_bytes(world_size: int, nbytes: int, local_steps: int) -> float:
    """Bytes that a rank sends a step when weights are averaged by an all_reduce every H steps: 2(N-1)/N·S / H."""
    return 2 * (world_size - 1) / world_size * nbytes / local_steps


def in_step_rate(samples: Sequence[int], step_s: Sequence[float]) -> float:
    """Samples a second of workers that wait for each other each step: T = max T_i, whoever could be faster."""
    return sum(samples) / max(step_s)


def apart_rate(samples: Sequence[int], step_s: Sequence[float]) -> float:
    """Samples a second of workers that wait for nobody: the sum of their rates, n_i / T_i."""
    return sum(number / seconds for number, seconds in zip(samples, step_s, strict=True))


# Samples a second that the server's rules allow: one budget of steps for all workers, granted some at a time, where
# messages take no time.
#
# Workers that wait for nobody reach the sum of their rates only in the long run. A run ends with its last push, and a
# straggler that was granted H steps just before the budget was spent is waited for: 4 workers, one at a tenth of
# their speed, 20 steps each and H = 4, reach 800 samples a second where the sum of their rates is 1240.


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


def largest_stable_rate(staleness: int, curvature: float) -> float:
    """The learning rate up to which w <- w - lr·g(w of `staleness` steps ago) converges on a quadratic of this largest
    curvature.

    lr·curvature < 2·sin(pi / (2(2·staleness + 1))), which is 2 with fresh weights, 1 a step late, and about pi /
    (2·staleness + 1) from there. (Levin: x[t+1] = x[t] - a·x[t-k] is stable for 0 < a < 2·cos(k·pi / (2k+1)), the
    same.)
    """
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1))) / curvature
