"""Sharded data parallelism (ZeRO, FSDP): every rank trains the whole model, and keeps a part of it.

Data parallelism holds N copies of everything. In float32 with Adam a parameter costs 16 bytes on every rank: 4 its weight, 4 its
gradient, 8 the two moments; a model of 7 billion needs 112 GB (in mixed precision too: 2 + 2 + 4 + 4 + 4), before the first
activation. But a rank needs a weight only while its layer computes, a gradient only until it is summed, and the moments only to
step. So each rank owns an N-th of every layer, and the rest comes and goes.

  predicted   at rest, bytes a parameter: 16 in dp; zero1 8 + 8/N; zero2 4 + 12/N; zero3 16/N (Rajbhandari et al. 2020,
              "ZeRO", section 5). Sent, of S bytes of weights: zero1 and zero2 2(N-1)/N x S, what dp sends; zero3
              3(N-1)/N x S, since it gathers weights forward and backward; with LAB_RESHARD=0 2(N-1)/N x S again. zero2 and
              zero3 keep no gradients to add to, so each of M microbatches is summed: (M+1) and 3M in place of 2 and 3
  shapes      inputs [B/N, S] a rank; a layer's parameters one flat vector [N·c], c = ceil(P/N); the shards [c], the last one shorter

The variants give up one copy after the other:

  zero1       optimizer state for the rank's own shard; gradients summed to it, weights gathered from all after the step
  zero2       gradients too: summed layer by layer as the backward pass hands them over, and dropped
  zero3       weights too: a layer is gathered just before it computes, the next one meanwhile, and freed after
  zero3_kept  zero3 without recomputation, beside zero3 with it (LAB_RECOMPUTE=1)
  fsdp2       PyTorch's fully_shard, which does what zero3 does
"""

import torch.distributed as dist

from experiments.fsdp.claims import STAGES, at_rest, owned, predict, published, refuse, title
from experiments.fsdp.faults import BUGS
from experiments.fsdp.torchs import fsdp2
from workers.config import Config
from workers.lab import Lab, Strategy
from workers.strategies.sharded import Sharded
from workers.workload.model import Model, outline

VARIANTS = ("zero1", "zero2", "zero3", "zero3_kept", "fsdp2")
__all__ = ["BUGS", "VARIANTS", "predict", "refuse", "run", "title"]


def run(lab: Lab) -> None:
    """Predict, prove, measure."""
    config, predictions = lab.config, predict(lab.config)
    lab.say(summary(config), "predict")
    lab.say(holds(config, lab.rank), all_ranks=True)
    lab.table(*published())
    variants = [zero1, zero2, zero3, *([zero3_kept] if config.recompute else []), fsdp2]
    measured = lab.measure(*variants)
    lab.compare_traffic(predictions, measured)
    lab.compare_rest(predictions, measured)
    for prediction in predictions:
        name = prediction.variant
        if prediction.name == "wire bytes" and name in STAGES and name in measured:
            calls = measured[name].traffic.calls
            lab.compare("calls", prediction.calls, calls, "calls", variant=name, formula=prediction.formula)


def summary(config: Config) -> str:
    """One line of what is kept."""
    total, zero3 = outline(config).num_parameters(), at_rest(config, "zero3")
    everything = at_rest(config.model_copy(update={"world_size": 1}), "zero3").value[0]
    return (
        f"{total / 1e6:.3g}M parameters: dp would hold {everything / 1e6:.3g} MB on every rank at rest, zero3 holds "
        f"{zero3.formula} = {max(zero3.value) / 1e6:.3g} MB"
    )


def holds(config: Config, rank: int) -> str:
    """What a rank owns, for its own log."""
    return f"holds      {owned(config, rank)} of {outline(config).num_parameters()} parameters"


# --- the variants, in reading order ---


def zero1(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Optimizer state sharded."""
    return Sharded(model, group, config, stage=1)


def zero2(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """And gradients."""
    return Sharded(model, group, config, stage=2)


def zero3(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """And weights."""
    return Sharded(model, group, config, stage=3)


def zero3_kept(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """The same with all activations kept, to compare with."""
    model.recompute = False
    return Sharded(model, group, config, stage=3)
