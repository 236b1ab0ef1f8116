"""Classic bugs of communication, injected by LAB_BUG: a missing round, a missing part, and a backward for another
loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from distlab.contract import Mistakes, Needs
from distlab.techniques.collectives import direct, ring
from distlab.techniques.collectives.autograd import Loss
from distlab.techniques.collectives.by_hand import ALGORITHMS, Algorithm
from distlab.techniques.collectives.point_to_point import Peers, Steps, split

from .primitives import Primitive, loss_of_lesson

mistake = Mistakes()
RING = Needs(proof=False, variants=("ring",))
DIRECT = Needs(proof=False, variants=("direct",))


@dataclass(frozen=True)
class Wrapper:
    """The three operations of `correct`; a bug overrides one."""

    correct: Algorithm

    def all_reduce(self, peers: Peers, tensor: Tensor) -> Steps:
        return self.correct.all_reduce(peers, tensor)

    def reduce_scatter(self, peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
        return self.correct.reduce_scatter(peers, tensor, output)

    def all_gather(self, peers: Peers, tensor: Tensor) -> Steps:
        return self.correct.all_gather(peers, tensor)


def replacing(name: str, correct: Algorithm) -> Callable[[type[Wrapper]], Mapping[str, Algorithm]]:
    """Return a decorator that replaces one algorithm by a class based on `correct`."""
    return lambda wrong: {**ALGORITHMS, name: wrong(correct)}


@mistake("skipped_round", check="ring", part="algorithms", needs=RING, put=replacing("ring", ring))
class SkippedRound(Wrapper):
    """The ring skips its last round: each rank's last chunk has an incomplete sum."""

    def all_reduce(self, peers: Peers, tensor: Tensor) -> Steps:
        steps, last = self.correct.all_reduce(peers, tensor), peers.after(2)
        before = split(tensor, peers.world_size)[last].clone()
        yield from steps
        split(tensor, peers.world_size)[last].copy_(before)


@mistake("lost_own_part", check="contents", part="algorithms", needs=DIRECT, put=replacing("direct", direct))
class LostOwnPart(Wrapper):
    """The direct reduce_scatter leaves each rank's own part out of its sum."""

    def reduce_scatter(self, peers: Peers, tensor: Tensor, output: Tensor) -> Steps:
        split(tensor, peers.world_size)[peers.rank].zero_()
        yield from self.correct.reduce_scatter(peers, tensor, output)


@mistake("wrong_backward", check="gradients", part="backward_of", needs=Needs(proof=False))
def lessons_backward(primitive: Primitive, loss: Loss) -> Loss:
    """Each primitive has the backward of the lesson's table, for any loss: all_gather's slice ignores the other ranks'
    losses, and all_reduce's all_reduce counts a replicated loss N times."""
    return loss_of_lesson(primitive, loss)
