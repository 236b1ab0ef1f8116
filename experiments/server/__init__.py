"""The parameter server and what came of it: one place that holds the weights, and workers that need not keep step with it.

Before the ring there was the server (Dean et al. 2012; Li et al. 2014): workers send what they found, it steps, they fetch. In step
with all workers it computes what one process does, and its link is the wall. Out of step it need wait for nobody: a straggler costs
its own share alone, and a worker that dies no more than that. What that costs are gradients of weights that others have moved
meanwhile. Or workers train apart for H steps, and one all_reduce makes their weights one again: a hundredth of the bytes.

  predicted   bytes sent a step: a worker S, rank 0 (N-1)·S, and as much comes in there; an all_reduce 2(N-1)/N·S a rank; every H-th
              step alone: /H. Samples a second: in step sum n_i / max T_i, apart the sum of n_i / T_i in the long run, and less
              where the last steps of a straggler are waited for
              a gradient tau updates late is stable up to lr·curvature = 2 sin(pi / (2(2·tau + 1))) (Levin and May 1976)
  shapes      weights and gradients as one flat vector [P] each, S = P x bytes; inputs [B/N, S] a worker

  dp          one all_reduce of gradients a step: what the others are held against
  sync        sums and counts to the server, which divides by the count of all and steps; weights back (the first two lessons')
  local_sgd   LAB_LOCAL_STEPS steps apart, then the mean of all weights, weighted by samples (Stich 2019)
  diloco      the same, and the server's step on their mean difference has Nesterov momentum (Douillard et al. 2023)
  ssp         asynchronous, bounded: nobody starts a step more than LAB_STALENESS ahead of the slowest (Ho et al. 2013)
  downpour    asynchronous: LAB_LOCAL_STEPS steps on the way, their sum pushed, weights fetched, no bound (Dean et al. 2012)

`dp` and `sync` are proven against one process, `local_sgd` and `diloco` against one process at H = 1 and against their formula for all
workers in one process at the H given. What is asynchronous repeats only in an order of events that is given: it is proven in one
drawn by LAB_SEED, and a real run is held to its promises (asynchronous.py). LAB_SLOW_RANK=2:0.5 makes a straggler.
"""

from functools import partial

import torch.distributed as dist

from experiments.server import asynchronous, staleness
from experiments.server.claims import cannot, predict, refuse, show_bytes, title
from experiments.server.faults import BUGS
from experiments.server.pace import in_step
from experiments.server.rounds import Apart, prove_rounds
from experiments.server.synchronous import Served
from workers.config import Config
from workers.lab import Lab, Strategy
from workers.parallel.buckets import GradientBuckets
from workers.passes.replicas import check_replicas, check_samples
from workers.strategies.replica import Replica, begin_alike
from workers.workload.model import Model

VARIANTS = ("dp", "sync", "local_sgd", "diloco", *asynchronous.VARIANTS)
AVERAGE, DILOCO = (1.0, 0.0), (0.7, 0.9)  # learning rate and momentum of the outer step; DiLoCo's own (section 3.1)
__all__ = ["BUGS", "VARIANTS", "predict", "refuse", "run", "title"]


def run(lab: Lab) -> None:
    """What waits is proven and measured; then what does not, with which ranks may leave; last what staleness does."""
    predictions = predict(lab.config)
    show_bytes(lab)
    if lab.config.proof:
        check_samples(lab)
    measured = lab.measure(
        dp, sync, local_sgd, diloco, also=partial(check_replicas, lab), cannot=cannot(lab.config),
        proofs={"local_sgd": partial(prove_rounds, lab, "local_sgd", AVERAGE), "diloco": partial(prove_rounds, lab, "diloco", DILOCO)},
    )  # fmt: skip
    lab.compare_traffic(predictions, measured)
    rates = in_step(lab, [build for build in (dp, sync) if build.__name__ in measured])
    asynchronous.run(lab, rates)
    staleness.show(lab)


def dp(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """One all_reduce a bucket, and every rank takes the same step."""
    begin_alike(model, group, config)
    return Replica(model, config, GradientBuckets(model.parameters(), group, config.bucket_mib * 2**20))


def sync(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Sums and counts to rank 0, weights back."""
    begin_alike(model, group, config)
    return Served(model, group, config)


def local_sgd(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """H steps apart, then the mean of the weights."""
    begin_alike(model, group, config)
    return Apart(model, group, config, *AVERAGE)


def diloco(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """H steps apart, then a step with momentum along what the workers moved in the mean."""
    begin_alike(model, group, config)
    return Apart(model, group, config, *DILOCO)
