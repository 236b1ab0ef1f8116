"""The parameter server and its like: bytes a step, samples a second, and how stale an update may be.

S is the bytes of all weights, as of all gradients; H the local steps between two messages. Sources, by the names used
below:

  Li        Li et al.: Scaling Distributed Machine Learning with the Parameter Server (OSDI 2014)
  Levin     Levin, May: A note on difference-delay equations (Theoretical Population Biology 1976)
"""

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


def largest_stable_rate(staleness: int, curvature: float) -> float:
    """The learning rate up to which w <- w - lr·g(w of `staleness` steps ago) converges on a quadratic of this largest
    curvature.

    lr·curvature < 2·sin(pi / (2(2·staleness + 1))), which is 2 with fresh weights, 1 a step late, and about pi /
    (2·staleness + 1) from there. (Levin: x[t+1] = x[t] - a·x[t-k] is stable for 0 < a < 2·cos(k·pi / (2k+1)), the
    same.)
    """
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1))) / curvature
