"""Tensor parallelism: every rank computes a slice of each layer, on the same samples.

A matrix product can be cut where nothing is lost: the rows of the weight give each rank some of the outputs, its columns a
part of the sum that all outputs are. The second takes what the first leaves. So a rank runs through a whole MLP, or through
its own attention heads, with a slice of the weights, and once at the end the ranks add up what they have.

  predicted   4 all_reduces of b·s·h a layer of gpt (2 forward, 2 backward; 2 a layer of mlp), each 2(t-1)/t of its bytes:
              8(t-1)/t x b·s·h elements a rank and layer (Shoeybi et al. 2019, "Megatron-LM", section 3). Embedding and
              output layer are 2 more; the loss over split scores sends 3·b·s, not the b·s·v scores. Unlike dp's it grows with the
              batch, and does not shrink with t
  shapes      inputs [B, S] on every rank; between blocks [B, S, D]; inside of them [B, S, D/t], [B, H/t, S, D/H], [B, S, 4D/t];
              scores [B, S, V/t]. `sequence`: between blocks [S/t, B, D] (mlp: [B/t, D]). t is WORLD_SIZE; heads stay whole

The variants differ in what lies between two slices:

  naive       every linear layer by itself: its outputs split, and gathered at once; 12 calls a layer of gpt
  megatron    by rows, then by columns: f before, g after; between the blocks everything on every rank
  sequence    a reduce_scatter and an all_gather for each all_reduce, the same bytes; between the blocks each rank has its rows
              alone, a t-th of the norms' and residuals' activations (Korthikanti et al. 2022, section 4.2.2)
  dtensor     PyTorch's parallelize_module

A loss that all ranks share counts once. That is where tensor parallelism goes wrong unseen: gradients that are N times too
large train as well, under Adam (LAB_BUG=double_reduce).
"""

import math

import torch
import torch.distributed as dist

from experiments.tp.claims import cannot, refuse, title
from experiments.tp.faults import BUGS, pack_qkv, row_of, whole_of
from experiments.tp.naive import split_every_linear
from experiments.tp.plan import rows_first, split
from experiments.tp.predictions import SAVED, Sizes, predict
from experiments.tp.torchs import dtensor
from workers.config import Config
from workers.lab import Lab, Measured, Strategy
from workers.measure.formulas import Prediction
from workers.parallel.cut import shares
from workers.parallel.sequence import Sequence
from workers.strategies.tensor import Shard, local
from workers.workload.model import VOCABULARY, Model

VARIANTS = ("naive", "megatron", "sequence", "dtensor")
__all__ = ["BUGS", "VARIANTS", "cannot", "predict", "refuse", "run", "title"]


def run(lab: Lab) -> None:
    """Predict, prove, measure."""
    predictions = predict(lab.config)
    lab.say(summary(lab.config), "predict")
    lab.say(holds(lab.config, lab.rank), all_ranks=True)
    measured = lab.measure(
        naive, megatron, sequence, dtensor,
        also=lambda name, strategy: check_replicas(lab, name, strategy), shards=1, cannot=cannot(lab.config),
    )  # fmt: skip
    lab.compare_traffic(predictions, measured)
    for prediction in predictions:
        if prediction.name != "wire bytes":
            compare(lab, prediction, measured)


def summary(config: Config) -> str:
    """One line of what is sent."""
    sizes = Sizes(config)
    whole, slices = sizes.tokens * config.width * sizes.itemsize, sizes.slices(sizes.num_slices)
    return (
        f"{slices.calls} all_reduces a step, each 2(t-1)/t x {whole / 1e6:.3g} MB: {slices.nbytes / 1e6:.3g} MB a rank, "
        f"and what the loss needs"
    )


def holds(config: Config, rank: int) -> str:
    """A rank's share of what megatron cuts, for its own log."""
    names = {"heads": config.heads, "hidden units": 4 * config.width, "vocabulary rows": VOCABULARY}
    if config.model == "mlp":
        names = {"hidden units": 4 * config.width}
    parts = [f"{shares(count, config.world_size)[rank]} of {count} {name}" for name, count in names.items()]
    return f"holds      {', '.join(parts)}"


def compare(lab: Lab, prediction: Prediction, measured: dict[str, Measured]) -> None:
    """Hold calls, or what `sequence` saves over `megatron`, against the prediction."""
    if not {prediction.variant, "megatron" if prediction.name == SAVED else prediction.variant} <= set(measured):
        return
    seen = float(measured[prediction.variant].traffic.calls)
    if prediction.name == SAVED:
        seen = measured["megatron"].activation_bytes - measured["sequence"].activation_bytes
    lab.compare(
        prediction.name, prediction.value[lab.rank], seen, prediction.unit, variant=prediction.variant,
        formula=prediction.formula, decides=prediction.decides,
    )  # fmt: skip


def check_replicas(lab: Lab, name: str, strategy: Strategy) -> None:
    """What every rank holds whole is the same on all ranks, to the bit."""
    assert isinstance(strategy, Shard)
    mine = torch.cat([local(parameter.detach()).flatten() for _, parameter in strategy.whole()])
    first = mine.clone()
    dist.broadcast(first, group=lab.group, group_src=0)
    differs = 0.0 if torch.equal(mine, first) else (mine - first).abs().nan_to_num(math.inf).max().item()
    lab.check("replicas", differs, 0.0, variant=name)


# --- the variants, in reading order ---


def naive(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """Every linear layer by itself: its outputs split, and gathered at once."""
    split_every_linear(model, group, whole_of(config)(group))
    return Shard(model, group, config)


def megatron(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """By rows, then by columns: f before, g after."""
    if config.bug == "packed_qkv":
        pack_qkv(model, group.size())
    split(model, group, whole_of(config)(group), row_of(config))
    return Shard(model, group, config)


def sequence(model: Model, group: dist.ProcessGroup, config: Config) -> Strategy:
    """The same with a part of the rows on each rank between the blocks."""
    if config.bug == "packed_qkv":
        pack_qkv(model, group.size())
    seams = Sequence(group)
    split(model, group, seams, row_of(config))
    rows_first(model, seams)
    return Shard(model, group, config, by_rows=True, own_loss=model.name == "mlp")
