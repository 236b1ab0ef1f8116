"""The first lesson: y = wx + b, 32 points of y = 2x + 1 in shards of 8, 6, 9 and 9, on N ranks and in one process.

Its table says whether N ranks do what one process does: the losses agree at every step, or the averaging is wrong. They
agree if ranks ship sums (`flat` and the other variants). `means` ships the mean of each shard, and drifts: a point of
the shard of 6 counts 8/6 as much as one of the shard of 8. `coordinator` is the lesson's own protocol, a parameter
server with ranks in place of Process and Queue: weights out; id, sums and count back; STOP; join.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.collectives.point_to_point import Peers
from distlab.config import Config
from distlab.contract import Build, Strategy
from distlab.data_parallel.buckets import GradientBuckets
from distlab.data_parallel.strategy import Replica
from distlab.lab import Lab
from distlab.mesh.grid import Mesh
from distlab.verify.proof import summed_losses
from distlab.workload.data import Batches, Microbatch
from distlab.workload.model import Model
from distlab.workload.reference import train

SHOWN_STEPS = (0, 10, 25, 50, 100, 200)
STEPS = SHOWN_STEPS[-1] + 1
CONTROL = "tests/experiments/test_dp.py::test_a_table_of_means_is_refused"
TOLERANCE = 1e-12
GO, STOP = 0.0, 1.0


def lesson(lab: Lab, sums: Build) -> None:
    """The lesson's table: one process, N ranks that ship sums, N ranks that ship means, and the coordinator."""
    batches = lab.batches(torch.float64, proof=True)
    config = lab.config.model_copy(update={"optimizer": "sgd", "clip": None})
    alone = [snapshot.loss for snapshot in train(lab.model(torch.float64), batches, config, STEPS)]
    columns = {f"{lab.world_size} ranks": losses(lab, sums, batches, config)}
    if lab.rank == 0 and lab.config.proof:  # what a variant is proven by is its first three steps
        detail = f"of the sums of all shards beside one process, the worst of {STEPS} steps"
        worst = apart(alone, *columns.values())
        lab.check("losses to step 200", worst, TOLERANCE, detail=detail, control=CONTROL)
    if lab.wants("means"):
        columns["means"] = losses(lab, means, batches, config)
    if lab.wants("coordinator"):
        columns["coordinator"] = coordinator(lab, batches, config)
        if lab.rank == 0 and lab.config.proof:
            lab.check("losses", apart(alone, columns["coordinator"]), TOLERANCE, variant="coordinator")
    if lab.rank == 0:
        head = ["step", "1 process", *(cell for name in columns for cell in (name, "difference"))]
        lab.table(
            "The same line in one process and on all ranks: loss",
            head,
            [_row(step, alone, columns) for step in SHOWN_STEPS],
        )


def apart(alone: list[float], others: list[float]) -> float:
    """The largest difference of two trainings' losses at any step."""
    return max(abs(one - other) for one, other in zip(alone, others, strict=True))


def _row(step: int, alone: list[float], columns: dict[str, list[float]]) -> list[object]:
    cells: list[object] = [step, f"{alone[step]:.6f}"]
    for values in columns.values():
        cells += [f"{values[step]:.6f}", f"{abs(values[step] - alone[step]):.1e}"]
    return cells


def losses(lab: Lab, build: Build, batches: Batches, config: Config) -> list[float]:
    """The loss of the global batch at each step on rank 0, summed over ranks; empty elsewhere."""
    strategy = build(lab.model(torch.float64), lab.mesh, config)
    shares: list[float | None] = []
    for step in range(STEPS):
        share = strategy.backward(batches.dealt(step, lab.rank, lab.world_size))
        assert share is not None
        shares.append(share.item())
        strategy.update()
    return summed_losses(lab, shares)


def means(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Each rank ships the mean over its own points, and the means are averaged: wrong where shards differ in size."""
    return MeanOfMeans(model, mesh.group, config)


class MeanOfMeans(Replica):
    """A Replica whose points weigh one over the points of their own shard, not of all."""

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config) -> None:
        super().__init__(model, config, GradientBuckets(model.parameters(), group, float("inf"), overlap=False))
        self.num_shards = group.size()

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        points = sum(microbatch.targets.numel() for microbatch in microbatches)
        share = 1 / (points * self.num_shards)
        return super().backward([microbatch._replace(share=share) for microbatch in microbatches])


# --- the lesson's protocol ---


def coordinator(lab: Lab, batches: Batches, config: Config) -> list[float]:
    """Rank 0 coordinates and is worker 0 as well; returns the loss of each step there, nothing elsewhere."""
    peers = Peers(lab.group)
    shard = batches.dealt(0, lab.rank, lab.world_size)
    if lab.rank > 0:
        work(peers, shard)
        return []
    return coordinate(peers, shard, STEPS, config.learning_rate)


def coordinate(peers: Peers, shard: list[Microbatch], steps: int, learning_rate: float) -> list[float]:
    """Weights out, sums and counts back, one step of SGD, over again; then STOP, and wait for everyone's last word."""
    like = shard[0].inputs
    w, b, history = like.new_zeros(()), like.new_zeros(()), []
    for _ in range(steps):
        tell(peers, torch.stack([like.new_tensor(GO), w, b]))
        # In the order of workers, not of arrival: a sum of floats depends on it, and would not repeat.
        answers = [torch.cat([like.new_zeros(1), sums(w, b, shard)]), *hear(peers, like)]
        assert [int(answer[0]) for answer in answers] == list(range(peers.world_size)), "a worker answered for another"
        total = torch.stack(answers).sum(dim=0)[1:]
        grad_w, grad_b, loss = total[:3] / total[3]
        w, b = w - learning_rate * grad_w, b - learning_rate * grad_b
        history.append(loss.item())
    tell(peers, torch.stack([like.new_tensor(STOP), w, b]))
    hear(peers, like)
    return history


def work(peers: Peers, shard: list[Microbatch]) -> None:
    """Answer each message from rank 0 with this shard's sums, until STOP."""
    message = shard[0].inputs.new_zeros(3)
    answer = message.new_zeros(5)
    answer[0] = peers.rank
    while True:
        received, _ = peers.post(0, receives=[(0, message)])
        received[0].wait()
        what, w, b = message
        if what != STOP:
            answer[1:] = sums(w, b, shard)
        _, sent = peers.post(0, sends=[(0, answer)])
        sent[0].wait()
        if what == STOP:
            return


def tell(peers: Peers, message: Tensor) -> None:
    """Send one message to every worker; each wait is bounded by LAB_COLLECTIVE_TIMEOUT_S, and names the worker."""
    _, sent = peers.post(0, sends=[(worker, message) for worker in range(1, peers.world_size)])
    for letter in sent:
        letter.wait()


def hear(peers: Peers, like: Tensor) -> list[Tensor]:
    """One answer of every worker, in their order: [id, sum of gradients w, of gradients b, of losses, count]."""
    answers = [like.new_empty(5) for _ in range(1, peers.world_size)]
    received, _ = peers.post(0, receives=list(enumerate(answers, 1)))
    for letter in received:
        letter.wait()
    return answers


def sums(w: Tensor, b: Tensor, shard: list[Microbatch]) -> Tensor:
    """The shard's sums: gradients 2·error·x and 2·error, loss error², and the count, which is never divided by here."""
    x, y = torch.cat([part.inputs.flatten() for part in shard]), torch.cat([part.targets.flatten() for part in shard])
    error = w * x + b - y
    return torch.stack([(2 * error * x).sum(), (2 * error).sum(), error.square().sum(), error.new_tensor(len(error))])
