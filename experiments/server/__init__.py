"""The parameter server and its successors: weights on one rank, and workers that may run out of step.

Before the ring there was the parameter server (Dean et al. 2012; Li et al. 2014): workers send gradients, the server
steps, they fetch weights. With all workers in step it computes what one process does, limited by the server's link.
Asynchronously nobody waits: a slow or dead worker costs only its own steps. The price is stale gradients: other workers
have changed the weights meanwhile. Alternatively workers train independently for H steps, and then one all_reduce
averages their weights: a hundredth of the bytes.

  predicted   bytes sent per step: a worker S, rank 0 (N-1)·S, and it receives as much; an all_reduce 2(N-1)/N·S per
              rank; if only every H-th step sends: /H
  shapes      weights and gradients as one flat vector [P] each (`Vectors`), S = P x bytes; inputs [B/N, S] per worker

  dp          one all_reduce of gradients per step: the baseline
  sync        sums and counts to the server, which divides by the total count and steps; weights back (as in the
              first two lessons)
  local_sgd   LAB_LOCAL_STEPS local steps, then the mean of all weights, weighted by samples (Stich 2019)
  diloco      the same, with Nesterov momentum on the mean weight change (Douillard et al. 2023)
  downpour    asynchronous: LAB_LOCAL_STEPS local steps, push their sum, fetch weights (Dean et al. 2012). With
              LAB_STALENESS a worker is at most that many steps ahead of the slowest (Ho et al. 2013)

`dp` and `sync` are proven against one process, `local_sgd` and `diloco` against one process at H = 1 and against their
formula for all workers in one process at the given H, also in the timed pass. An asynchronous run is reproducible only
in a fixed order of events: it is proven in an order drawn by LAB_SEED, against one process that follows it. A real run,
in order of arrival, is informational (asynchronous.py). LAB_SLOW_RANK=2:0.5 makes a straggler.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.contract import Held, Mode, Strategy, Variant
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.verify.proof import check_replicas, check_samples
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.techniques.collectives.phases import phase
from distlab.techniques.collectives.point_to_point import Peers
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica, draw_and_broadcast
from distlab.techniques.data_parallel.vectors import Vectors
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.parameter_server.local_sgd import OuterStep
from distlab.techniques.parameter_server.server import ParameterServer, Worker

from . import asynchronous, lesson
from .bugs import mistake
from .checks import Rounds, check_timed, prove_rounds
from .options import Options
from .predictions import DOWNPOUR, cannot, claims, predict, refuse, show_bytes

SERVER = 0
AVERAGE, DILOCO = (1.0, 0.0), (0.7, 0.9)  # learning rate and momentum of the outer step; DiLoCo's own (section 3.1)


# --- synchronous variants ---


def dp(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """One all_reduce per bucket, and every rank takes the same step."""
    draw_and_broadcast(model, mesh.group, config)
    return Replica(model, config, GradientBuckets(model.parameters(), mesh.group, config.bucket_mib * 2**20))


def sync(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Sums and counts to rank 0, weights back."""
    draw_and_broadcast(model, mesh.group, config)
    return ServerReplica(model, mesh.group, config)


class LocalGradients:
    """`Gradients` that stay on this rank, in one flat vector."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors

    def zero(self) -> None:
        self.vectors.zero()

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002  nothing is sent
        return nullcontext()

    def finish(self) -> None:
        """Do nothing: gradients stay local."""


class ServerReplica(Replica):
    """A worker's replica, and on rank 0 also the server.

    It adds in rank order, not in order of arrival, since a sum of floats depends on the order.
    """

    def __init__(self, model: Model, group: dist.ProcessGroup, config: Config) -> None:
        self.vectors, self.peers = Vectors(model.parameters()), Peers(group)
        super().__init__(model, config, LocalGradients(self.vectors))

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Sum over this worker's samples; on rank 0 the gradient then is the mean over all."""
        total = super().backward([microbatch._replace(share=1.0) for microbatch in microbatches])
        count = torch.tensor([sum(part.targets.numel() for part in microbatches)], device=self.vectors.gradients.device)
        with phase("all_reduce"):
            self.send(count) if self.peers.rank else self.collect(count)
        return total * microbatches[0].share

    def send(self, count: Tensor) -> None:
        """Send this worker's number of terms and the sum of their gradients; means would overweight small shards."""
        _, sent = self.peers.post(self.peers.new_tag(), sends=[(SERVER, count), (SERVER, self.vectors.gradients)])
        for message in sent:
            message.wait()

    def collect(self, count: Tensor) -> None:
        """Add all sums and counts on the server, and divide once."""
        tag, gradients = self.peers.new_tag(), self.vectors.gradients
        received_count, received_gradients = torch.empty_like(count), torch.empty_like(gradients)
        for worker in range(1, self.peers.world_size):
            received, _ = self.peers.post(tag, receives=[(worker, received_count), (worker, received_gradients)])
            for message in received:
                message.wait()
            count += received_count
            gradients += received_gradients
        gradients /= count

    def update(self) -> None:
        """Step on the server; everyone gets its weights."""
        tag, weights = self.peers.new_tag(), self.vectors.weights
        if self.peers.rank == SERVER:
            super().update()
            _, messages = self.peers.post(tag, sends=[(worker, weights) for worker in range(1, self.peers.world_size)])
        else:
            messages, _ = self.peers.post(tag, receives=[(SERVER, weights)])
        with phase("wait"):
            for message in messages:
                message.wait()

    @property
    def steps(self) -> bool:
        """Return whether gradients are used after the sum: a worker has sent its own."""
        return self.peers.rank == SERVER

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights; only the server has the mean gradient."""
        return super().alike(kind) if kind == "weights" else iter(())


def plain(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """The lesson on one page: sync with blocking messages."""
    draw_and_broadcast(model, mesh.group, config)
    return LessonReplica(model, mesh.group, config)


class LessonReplica(ServerReplica):
    """The lesson's messages with the same passes."""

    def send(self, count: Tensor) -> None:
        lesson.push(count, self.vectors.gradients, self.peers.group)

    collect = send

    def update(self) -> None:
        if self.peers.rank == SERVER:
            Replica.update(self)
        lesson.fetch(self.vectors.weights, self.peers.group)


# --- variants in rounds ---


def local_sgd(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """H local steps, then the mean of the weights."""
    draw_and_broadcast(model, mesh.group, config)
    return RoundsWorker(model, config, partial(OuterStep, group=mesh.group, lr=AVERAGE[0], momentum=AVERAGE[1]))


def diloco(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """H local steps, then a momentum step along the workers' mean weight change."""
    draw_and_broadcast(model, mesh.group, config)
    return RoundsWorker(model, config, partial(OuterStep, group=mesh.group, lr=DILOCO[0], momentum=DILOCO[1]))


class RoundsWorker(Replica):
    """A worker with its own optimizer and gradients, which synchronises every H steps."""

    def __init__(self, model: Model, config: Config, outer: Callable[..., OuterStep]) -> None:
        self.vectors = Vectors(model.parameters())
        super().__init__(model, config, LocalGradients(self.vectors))
        self.repeats_after = config.own(Options).local_steps  # the last of so many steps makes a call
        self.outer = outer(self.vectors.weights, local_steps=self.repeats_after)
        self.share = 0.0

    def backward(self, microbatches: list[Microbatch]) -> Tensor:
        """Compute the gradient of the mean over this worker's own samples; return its share of the batch's loss."""
        self.share = sum(part.share * part.targets.numel() for part in microbatches)
        self.scale = 1 / self.share
        return super().backward(microbatches)

    def update(self) -> None:
        """Take a local step; every H-th time also the outer step."""
        super().update()
        self.outer.step(self.share)

    def alike(self, kind: str) -> Iterator[tuple[str, Tensor]]:  # noqa: ARG002
        """Yield nothing: within a round weights differ."""
        return iter(())


# --- the run ---


def run(lab: Lab, rules: type[ParameterServer] = ParameterServer, worker: type[Worker] = Worker) -> None:
    """Prove and measure the synchronous variants, then the asynchronous one, in which ranks may leave."""
    local_steps = lab.config.own(Options).local_steps
    predictions = lab.mode.predict(lab.config)
    show_bytes(lab)
    if lab.config.proof:
        check_samples(lab)
    rounds_by_name = {"local_sgd": Rounds(local_steps, *AVERAGE), "diloco": Rounds(local_steps, *DILOCO)}
    proofs = {name: partial(prove_rounds, lab, each) for name, each in rounds_by_name.items()}
    # In the middle of a round each worker has different weights; check_timed checks the losses.
    together = Held(why="compared with all workers in one process", replicas=lab.config.steps % local_steps == 0)
    measured = measure(
        lab,
        also=partial(check_replicas, lab),
        proofs=proofs,
        references=dict.fromkeys(rounds_by_name, together),
        timed=partial(check_timed, lab, rounds_by_name),
    )
    lab.compare_predictions(predictions, measured)
    asynchronous.run(lab, rules, worker)


MODE = Mode(
    variants=(
        Variant("dp", dp),
        Variant("sync", sync),
        Variant("local_sgd", local_sgd),
        Variant("diloco", diloco),
        Variant(DOWNPOUR),
        Variant("plain", plain, by_name=True, like="sync"),
    ),
    gone={"ssp": "LAB_VARIANT=downpour LAB_STALENESS=2 LAB_LOCAL_STEPS=1 is the same"},
    headline=("sync", "send my gradient to rank 0, and receive the new weights"),
    run=run,
    claims=claims,
    options=Options,
    predict=predict,
    refuse=refuse,
    cannot=cannot,
    mistakes=mistake,
    in_lesson={
        "one_shard": ("slice(group.rank(), None, group.size())", "slice(0, None, group.size())"),
        "pushed_n_times": ("(parameter.grad for", "(group.size() * parameter.grad for"),
        "never_fetched": ("dist.recv(weights,", "dist.recv(torch.empty_like(weights),"),
    },
    unsaved="makes none, since asynchronous workers have no common state at any step",
    reading=(
        "experiments/server/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/server/__init__.py: the synchronous variants, those in rounds, and what a run checks",
        "distlab/techniques/data_parallel/strategy.py: the loop that the variants in step and in rounds share",
        "distlab/techniques/parameter_server/local_sgd.py: the outer step of a round, local_sgd's and diloco's",
        "distlab/techniques/parameter_server/server.py: which worker may start its next step, and a worker of downpour",
        "experiments/server/checks.py: one process that computes the expected pushes and weights",
    ),
)
