"""Goodput: the share of the time that ends in steps that stand, where failures come at random and a checkpoint is all
that is left after one.

In seconds: T between two checkpoints, C to write one, R to begin again from it, M between failures in the mean, which
come independently (exponential times between them). Sources, by the names used below:

  Young     Young: A first order approximation to the optimum checkpoint interval (CACM 17(9), 1974)
  Daly      Daly: A higher order estimate of the optimum checkpoint interval for restart dumps (Future Generation
            Computer Systems 22(3), 2006)
"""

import math

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
