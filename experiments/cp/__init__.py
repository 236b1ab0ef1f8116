"""Context parallelism: sequences too long for a rank, each rank with some positions of every sample.

Activations grow with the length of a sequence, and neither data nor pipeline parallelism cuts a sample: at some length
one no longer fits. Norms, MLPs and the loss work on each position by itself, so a rank does them for its own. Attention
does not: a row looks at the keys and values of all positions before it, and those of most are elsewhere.

  predicted   of the bytes of all K and V, a layer and rank, forward and backward: gathered 2(c-1)/c, ring and zigzag
              3(c-1)/c (Liu et al. 2023), shift 9(c-1)/4c on average, ulysses 4(c-1)/c² (Jacobs et al. 2023); and once
              a step 2(c-1)/c of the gradients. Activations: a c-th of one process's; gathered keeps all K and V
              besides. Causal work of the busiest rank over the mean: (2c-1)/c in contiguous parts, 1 folded
  shapes      tokens [B, S/c] of [B, S]; q, k, v [B, H, S/c, D/H], in ulysses inside of attention [B, H/c, S, D/H]; c is
              WORLD_SIZE, and neither S nor H need divide by it

The variants differ in how a row gets to see the keys of other ranks:

  gathered    every rank gathers K and V whole, computes its rows with all of them, and throws away what is masked
  ring        each rank's K and V go round; a rank adds up what it has by log-sum-exp, and no one holds all
  zigzag      the same ring, each rank with an early and a late run of positions: all have the same work
  shift       zigzag's parts, whose K and V go straight to the ranks that look at them, and no more of them
  ulysses     an all-to-all before and behind attention: there each rank has all positions of some heads
  torch_ring  PyTorch's ring functions, called directly, and context_parallel around them, which no CPU can run

Nothing of a loss or a shape tells of a wrong position, a wrong mask or a gradient that stays where the keys were: each
trains (LAB_BUG=local_positions, local_mask, stray_gradients).
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from distlab.checkpoint import bugs as checkpoints
from distlab.config import Config
from distlab.context_parallel.positions import Positions, contiguous
from distlab.context_parallel.positions import zigzag as folded
from distlab.context_parallel.ring import RingAttention, ShiftAttention
from distlab.context_parallel.strategy import ContextParallel
from distlab.context_parallel.ulysses import UlyssesAttention
from distlab.contract import Mode, Strategy, Variant
from distlab.lab import Lab
from distlab.mesh.grid import Mesh
from distlab.tensor_parallel.layers import Sequence
from distlab.verify.run_all import measure
from distlab.workload.model import Attend, Model

from .bugs import mistake
from .checks import check_sums, claims, compare_balance, compare_kept, kept_by_length
from .options import Options
from .predictions import BY_HAND, cannot, predict, refuse, summary
from .pytorch import by_context_parallel, torch_ring

# Parts that a mistake replaces: who holds which positions, what attention is, and the step around it.
Cut: TypeAlias = Callable[[int, int], Positions]
Attention: TypeAlias = Callable[[dist.ProcessGroup, Positions], Attend]
Steps: TypeAlias = Callable[..., Strategy]


# --- naive: gather what is not there ---


class GatheredAttention:
    """All K and V on every rank, a mask for those that lie behind."""

    def __init__(self, group: dist.ProcessGroup, positions: Positions) -> None:
        self.gather = Sequence(group)  # all_gather of rows forward, reduce_scatter of their gradients backward
        self.gather.num_rows = positions.length
        self.positions, self.rank = positions, group.rank()
        self.mask: Tensor | None = None  # [S/c, S]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.stack([k, v]).movedim(3, 0)  # [S/c, 2, B, H, D/H]
        keys, values = self.gather.enter(rows).movedim(0, 3)  # [B, H, S, D/H] each
        if self.mask is None:  # one for all layers
            behind = (self.positions.of(self.rank)[:, None] < torch.arange(self.positions.length)).to(q.device)
            self.mask = q.new_zeros(behind.shape).masked_fill(behind, float("-inf"))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask)


def gathered(
    model: Model, mesh: Mesh, config: Config, cut: Cut = contiguous, attention: Attention = GatheredAttention,
    steps: Steps = ContextParallel,
) -> Strategy:  # fmt: skip
    """Gather K and V."""
    return by_hand(model, mesh, config, cut, attention, steps)


# --- keys and values that travel, and heads that do ---


def ring(
    model: Model, mesh: Mesh, config: Config, cut: Cut = contiguous, attention: Attention = RingAttention,
    steps: Steps = ContextParallel,
) -> Strategy:  # fmt: skip
    """Keys and values go round, in contiguous parts."""
    return by_hand(model, mesh, config, cut, attention, steps)


def zigzag(
    model: Model, mesh: Mesh, config: Config, cut: Cut = folded, attention: Attention = RingAttention,
    steps: Steps = ContextParallel,
) -> Strategy:  # fmt: skip
    """The same with an early and a late part on each rank."""
    return by_hand(model, mesh, config, cut, attention, steps)


def shift(
    model: Model, mesh: Mesh, config: Config, cut: Cut = folded, attention: Attention = ShiftAttention,
    steps: Steps = ContextParallel,
) -> Strategy:  # fmt: skip
    """Keys and values go where they are seen."""
    return by_hand(model, mesh, config, cut, attention, steps)


def ulysses(
    model: Model, mesh: Mesh, config: Config, cut: Cut = contiguous, attention: Attention = UlyssesAttention,
    steps: Steps = ContextParallel,
) -> Strategy:  # fmt: skip
    """All positions of some heads."""
    return by_hand(model, mesh, config, cut, attention, steps)


def by_hand(model: Model, mesh: Mesh, config: Config, cut: Cut, attention: Attention, steps: Steps) -> Strategy:
    """The whole model on some positions; attention alone knows of the other ranks."""
    group = mesh["cp"]
    positions = cut(config.seq, group.size())
    return steps(model, positions, attention(group, positions), group, config, rank=group.rank())


# --- the run ---


def run(lab: Lab) -> None:
    """Predict, prove, measure."""
    predictions = predict(lab.config)
    lab.say(summary(lab.config), "predict")
    measured = measure(lab, also=partial(check_sums, lab))
    lab.compare_traffic(predictions, measured)
    lab.compare_rest(predictions, measured)
    for prediction in predictions:
        name = prediction.variant
        if prediction.name == "calls" and name in measured:
            lab.compare_calls(name, prediction.value[lab.rank], measured[name].traffic, prediction.formula)
    chosen = [name for name in measured if name in BY_HAND]
    compare_kept(lab, {name: measured[name].activation_bytes for name in chosen})
    kept_by_length(lab, chosen)
    compare_balance(lab, list(measured))


MODE = Mode(
    variants=(
        Variant("gathered", gathered),
        Variant("ring", ring),
        Variant("zigzag", zigzag),
        Variant("shift", shift),
        Variant("ulysses", ulysses),
        Variant("torch_ring", torch_ring, by_torch=True),
        Variant("context_parallel", by_context_parallel, by_torch=True),
    ),
    run=run,
    claims=claims,
    options=Options,
    axes=lambda config: {"cp": config.world_size},
    predict=predict,
    refuse=refuse,
    cannot=cannot,
    mistakes=mistake | checkpoints.mistake,
    reading=(
        "experiments/cp/__init__.py: the variants, naive first, and what a run of them claims",
        "distlab/context_parallel/positions.py: which positions each rank has, and which keys they see",
        "distlab/context_parallel/ring.py: attention to some of the keys, and how two such results become one",
        "distlab/context_parallel/ulysses.py: the all-to-all from positions to heads, and back",
        "distlab/context_parallel/strategy.py: the training step that all variants share",
    ),
)
