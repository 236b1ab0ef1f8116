"""Training that survives: what a step of one member sends, and what it holds, in bytes of float64.

P is `parameters`, E the samples of an epoch, N the members; `own` of the P numbers are the member's own part, `kept`
those of which it has copies. Beside the gradients go E + 2 numbers: who saw which sample, the loss, and a wish.
"""

from workers.measure.formulas.messages import gloo_all_reduce_messages

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
