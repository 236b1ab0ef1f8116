"""Training that survives: what a step of one member sends, and what it holds, in bytes of float64.

P is `parameters`, E the samples of an epoch, N the members; `own` of the P numbers are the member's own part, `kept`
those of which it has copies. Beside the gradients go E + 2 numbers: who saw which sample, the loss, and a wish.
"""

import math

from distlab.collectives.costs import gloo_all_reduce_messages

BYTES = 8  # of a float64
STEP = {
    "replica": "2(N-1)/N x 8 B x (P + E + 2)",
    "sharded": "8 B x (P - own) + 2(N-1)/N x 8 B x (E + 3) + (N-1) x 8 B x c",
    "copied": "8 B x (P - own) + 2(N-1)/N x 8 B x (E + 3) + (N-1) x 8 B x c + 16 B x own",
}


def replica_step_bytes(size: int, parameters: int, samples: int) -> float:
    """All gradients and what goes with them, in one all_reduce."""
    return 2 * (size - 1) / size * BYTES * (parameters + samples + 2)


def sharded_step_bytes(size: int, parameters: int, samples: int, own: int) -> float:
    """A reduce-scatter of gradients, a small all_reduce, in which the norm goes too, and an all-gather of weights in
    parts of c = P/N rounded up."""
    beside = 2 * (size - 1) / size * BYTES * (samples + 3)
    return BYTES * (parameters - own) + beside + (size - 1) * BYTES * -(-parameters // size)


def copy_bytes(own: int, rows: int) -> int:
    """What copies add to a step: a member's moments, of `rows` numbers each, go to the one that keeps them."""
    return BYTES * rows * own


def held_bytes(own: int, kept: int, rows: int) -> int:
    """The moments that a member has between two steps."""
    return BYTES * rows * (own + kept)


def step_messages(size: int, parameters: int, samples: int, *, sharded: bool, copies: bool) -> int:
    """What a member sends in a step, or receives where that is more."""
    if not sharded:
        return gloo_all_reduce_messages(size, BYTES * (parameters + samples + 2))
    return 3 * (size - 1) + gloo_all_reduce_messages(size, BYTES * (samples + 3)) + 2 * copies


# Goodput: the share of the time that ends in steps that stand, where failures come at random and a checkpoint is all
# that is left after one.
#
# In seconds: T between two checkpoints, C to write one, R to begin again from it, M between failures in the mean,
# which come independently (exponential times between them). Sources, by the names used below:
#
#   Young     Young: A first order approximation to the optimum checkpoint interval (CACM 17(9), 1974)
#   Daly      Daly: A higher order estimate of the optimum checkpoint interval for restart dumps (Future Generation
#             Computer Systems 22(3), 2006)

MOST = 700.0  # times M: exp of more is no number, and nothing stands


def goodput(interval_s: float, checkpoint_s: float, restart_s: float, between_s: float) -> float:
    """T·exp(-R/M) / (M·(exp((T+C)/M) - 1)): what Daly's equation 20 takes for a solution time of 1, turned over.

    A segment of T and its checkpoint count only if nothing fails in them; after a failure the restart may fail too.
    """
    segment = (interval_s + checkpoint_s) / between_s
    if segment > MOST:
        return 0.0
    return interval_s * math.exp(-restart_s / between_s) / (between_s * math.expm1(segment))


def young_s(checkpoint_s: float, between_s: float) -> float:
    """The interval with the least loss, to first order: sqrt(2·C·M). Young: C a segment, and half a segment a
    failure."""
    return math.sqrt(2 * checkpoint_s * between_s)


def daly_s(checkpoint_s: float, between_s: float) -> float:
    """The interval with the least loss, to higher order: sqrt(2CM)·(1 + sqrt(C/2M)/3 + (C/2M)/9) - C, and M from C = 2M
    on (Daly, equation 37). It does not depend on R."""
    share = checkpoint_s / (2 * between_s)
    if share >= 1:
        return between_s
    return young_s(checkpoint_s, between_s) * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint_s
