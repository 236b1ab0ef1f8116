"""The classic mistakes of communication, made on purpose by LAB_BUG: a round too few, a part left out, a chunk that
stays as it was, and a backward that fits another loss."""

from dataclasses import dataclass, replace

from torch import Tensor

from experiments.comm.gradients import loss_of_lesson
from workers.config import Config
from workers.contract import Instead, Mistake, Needs
from workers.parallel import direct, ring, tree
from workers.parallel.collectives import ALGORITHMS, Algorithm
from workers.parallel.peers import Peers, Steps, split


@dataclass(frozen=True)
class Like:
    """The three operations of `right`, for a mistake to replace one."""

    right: Algorithm

    def all_reduce(self, peers: Peers, tensor: Tensor) -> Steps:
        return self.right.all_reduce(peers, tensor)

    def reduce_scatter(self, peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
        return self.right.reduce_scatter(peers, tensor, output)

    def all_gather(self, peers: Peers, tensor: Tensor) -> Steps:
        return self.right.all_gather(peers, tensor)


class SkippedRound(Like):
    """A ring that ends a round too early: its last chunk is not passed on."""

    def all_reduce(self, peers: Peers, tensor: Tensor) -> Steps:
        steps, last = self.right.all_reduce(peers, tensor), peers.after(2)
        before = split(tensor, peers.world_size)[last].clone()
        yield from steps
        split(tensor, peers.world_size)[last].copy_(before)


class StaleChunk(Like):
    """An all_gather that leaves the next rank's chunk as it was."""

    def all_gather(self, peers: Peers, tensor: Tensor) -> Steps:
        stale = split(tensor, peers.world_size)[peers.after(1)]
        before = stale.clone()
        yield from self.right.all_gather(peers, tensor)
        stale.copy_(before)


class LostFold(Like):
    """A tree into which the ranks beyond P fold nothing."""

    def all_reduce(self, peers: Peers, tensor: Tensor) -> Steps:
        if peers.rank >= tree.core_size(peers.world_size):
            tensor.zero_()
        yield from self.right.all_reduce(peers, tensor)


class LostOwnPart(Like):
    """A reduce_scatter in which each rank sums the others' parts alone."""

    def reduce_scatter(self, peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
        split(tensor, peers.world_size)[peers.rank].zero_()
        yield from self.right.reduce_scatter(peers, tensor, output)


def no_fold(config: Config) -> str:
    """Why no rank folds."""
    ranks = config.world_size
    return f"WORLD_SIZE={ranks}: a power of two folds no rank" if ranks.bit_count() == 1 else ""


def instead(name: str, algorithm: Algorithm) -> Instead:
    """The run with another algorithm of this name."""
    return Instead(run={"algorithms": {**ALGORITHMS, name: algorithm}})


RING = Needs(proof=False, variants=("ring",))
MISTAKES = {
    "skipped_round": Mistake(
        "the ring leaves out its last round: each rank's last chunk keeps an unfinished sum",
        "ring",
        instead("ring", SkippedRound(ring)),
        RING,
    ),
    "stale_chunk": Mistake(
        "the direct all_gather leaves one chunk as it was before",
        "contents",
        instead("direct", StaleChunk(direct)),
        replace(RING, variants=("direct",)),
    ),
    "lost_fold": Mistake(
        "the tree leaves out the parts of the ranks beyond the largest power of two",
        "contents",
        instead("tree", LostFold(tree)),
        Needs(ranks=3, proof=False, variants=("tree",), unless=no_fold),
    ),
    "lost_own_part": Mistake(
        "the direct reduce_scatter leaves each rank's own part out of its sum",
        "contents",
        instead("direct", LostOwnPart(direct)),
        replace(RING, variants=("direct",)),
    ),
    "wrong_backward": Mistake(
        "each primitive keeps the backward that the lesson's table gives it, whatever the loss: all_gather's slice"
        " forgets the other ranks' losses, all_reduce's all_reduce counts a replicated loss N times",
        "gradients",
        Instead(run={"backward_of": loss_of_lesson}),
        Needs(proof=False),
    ),
}
