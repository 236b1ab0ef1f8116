"""The classic mistakes of communication, made on purpose by LAB_BUG: a round too few, and a backward that fits another
loss."""

from experiments.comm.demo import Move, ring_rounds
from experiments.comm.gradients import loss_of_lesson
from workers.contract import Instead, Mistake, Needs


def all_but_the_last(world_size: int) -> list[tuple[str, list[Move]]]:
    """A ring that ends a round too early."""
    return ring_rounds(world_size)[:-1]


MISTAKES = {
    "skipped_round": Mistake(
        "the ring leaves out its last round: one rank's chunk keeps an unfinished sum on its neighbour",
        "ring",
        Instead(run={"rounds": all_but_the_last}),
        Needs(proof=False),
    ),
    "wrong_backward": Mistake(
        "each primitive keeps the backward that the lesson's table gives it, whatever the loss: all_gather's slice"
        " forgets the other ranks' losses, all_reduce's all_reduce counts a replicated loss N times",
        "gradients",
        Instead(run={"backward_of": loss_of_lesson}),
        Needs(proof=False),
    ),
}
