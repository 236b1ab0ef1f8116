"""How ranks talk: every primitive forward and backward, and what an all_reduce costs, algorithm by algorithm.

A collective moves tensors between ranks as a function moves them within one; so it has a backward pass too, and which one
is right depends on whose the loss is. And it has a price: a latency for each round, and the bytes that pass the busiest
link. The algorithms of workers/parallel give the same sum to every rank and differ only in this price.

  predicted   S = bytes of the tensor, N = ranks; bytes sent by a rank in an all_reduce
              ring, direct   2(N-1)/N·S  under 2·S for every N, in 2(N-1) rounds (ring) or 2 (direct; 1 for N = 2)
              tree           2(N-1)/N·S  in 2·log2 N rounds; 2·S more beside it where N is no power of two
              server         (N-1)·S on rank 0, which grows with N: the wall of a parameter server
              gloo           2(N-1)/N·S, and for its reduce_scatter twice what is needed
  shapes      x [2], rows [N, 2] for the primitives; [S/4] float32 in the sweep

In this folder: primitives.py (who holds what), gradients.py (what comes back), demo.py (the lesson's broadcast, slice and
gather, and a ring chunk by chunk), sweep.py (latency, bandwidth and bytes from 1 KiB to 64 MiB).
"""

from experiments.comm import demo, gradients, primitives, sweep
from workers.config import Config
from workers.lab import Bug, Lab, no_checkpoints
from workers.measure.formulas import Prediction
from workers.measure.formulas.collectives import all_reduce_bytes

VARIANTS = sweep.VARIANTS
BUGS = {
    "skipped_round": Bug(
        "the ring leaves out its last round: one rank's chunk keeps an unfinished sum on its neighbour", "ring"
    ),
    "wrong_backward": Bug(
        "each primitive keeps the backward that the lesson's table gives it, whatever the loss: all_gather's slice forgets the "
        "other ranks' losses, all_reduce's all_reduce counts a replicated loss N times",
        "gradients",
    ),
}
PREDICTED_BYTES = 4 << 20


def title(config: Config) -> str:  # noqa: ARG001  nothing is trained here, whatever LAB_MODEL says
    """What is run, for headings."""
    return f"{len(primitives.PRIMITIVES)} primitives, {len(VARIANTS)} ways to all_reduce"


def refuse(config: Config) -> list[str]:
    """What this mode cannot run."""
    if config.bug in BUGS and config.world_size == 1:
        return [f"LAB_BUG={config.bug} cannot show with WORLD_SIZE=1: it takes two ranks"]
    return no_checkpoints(config, "trains nothing that could be saved")


def predict(config: Config) -> list[Prediction]:
    """Bytes of one all_reduce of 4 MiB, by each algorithm."""
    return [
        Prediction(
            name, "wire bytes all_reduce 4 MiB", "B", sweep.formula("all_reduce", name),
            tuple(all_reduce_bytes(name, config.world_size, PREDICTED_BYTES, rank) for rank in range(config.world_size)),
            1, decides=name != "gloo",
        )
        for name in VARIANTS
    ]  # fmt: skip


def run(lab: Lab) -> None:
    """The lesson, from one message to the price of the largest."""
    for prediction in predict(lab.config):
        lab.say(
            f"{prediction.variant}: {prediction.formula} = {max(prediction.value) / 1e6:.3g} MB for an all_reduce of 4 MiB",
            "predict",
        )
    primitives.forward(lab)
    gradients.backward(lab)
    demo.broadcast_slice_gather(lab)
    demo.ring(lab)
    sweep.run(lab)
