"""The parameter server and its like: bytes a step.

S is the bytes of all weights, as of all gradients; H the local steps between two messages.
"""


def server_bytes(world_size: int, nbytes: int, rank: int, local_steps: int = 1) -> float:
    """Bytes that `rank` sends a step: a worker its update, rank 0, server and worker at once, weights to all others.

    What rank 0 receives is (N-1)·S too: in and out 2(N-1)·S pass one link (a server that is no worker: 2N·S), where a
    ring's links each carry 2(N-1)/N·S (Li et al.: Scaling Distributed Machine Learning with the Parameter Server, OSDI
    2014).
    """
    return (nbytes if rank else (world_size - 1) * nbytes) / local_steps


def averaging_bytes(world_size: int, nbytes: int, local_steps: int) -> float:
    """Bytes that a rank sends a step when weights are averaged by an all_reduce every H steps: 2(N-1)/N·S / H."""
    return 2 * (world_size - 1) / world_size * nbytes / local_steps
