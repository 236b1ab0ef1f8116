"""Context parallelism: sequences too long for a rank, each rank with some positions of every sample.

Activations grow with the length of a sequence, and neither data nor pipeline parallelism cuts a sample: at some length
one sample no longer fits. Norms, MLPs and the loss work on each position by itself, so a rank computes them for its own
positions. Attention does not: a row needs the keys and values of all positions before it, most of which are on other
ranks.

  predicted   of the bytes of all K and V, per layer and rank, forward and backward: gathered 2(c-1)/c, ring and zigzag
              3(c-1)/c (Liu et al. 2023), shift 9(c-1)/4c on average, ulysses 4(c-1)/c² (Jacobs et al. 2023); and once
              a step 2(c-1)/c of the gradients. Activations: a c-th of one process's; gathered keeps all K and V
              besides. Causal work of the busiest rank over the mean: (2c-1)/c in contiguous parts, 1 folded
  shapes      tokens [B, S/c] of [B, S]; q, k, v [B, H, S/c, D/H], in ulysses inside of attention [B, H/c, S, D/H]; c is
              WORLD_SIZE, and neither S nor H need divide by it

The variants differ in how a row gets the keys of other ranks:

  gathered    every rank gathers all K and V, computes its rows with all of them, and discards what is masked
  ring        each rank's K and V go round; a rank merges its results by log-sum-exp, and no rank stores all keys
  zigzag      the same ring, each rank with an early and a late run of positions: all have the same work
  shift       zigzag's positions; K and V go directly to the ranks whose rows see them, and only those keys
  ulysses     an all-to-all before and after attention; inside of it each rank has all positions of some heads
  torch_ring  PyTorch's ring functions, called directly, and context_parallel around them, which no CPU can run

A wrong position, or parts that are merged wrongly, change no shape and raise no error: the model trains all the same
(LAB_BUG=local_positions, no_lse).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.contract import Mode, Strategy, Variant
from distlab.lab.checkpoint import bugs as checkpoints
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.model import Attend, Model, causal
from distlab.techniques.context_parallel.ring import FLASH, FLASH_BACKWARD, RingAttention, ShiftAttention
from distlab.techniques.context_parallel.strategy import ContextParallel, Positions, contiguous, parallelize, zigzag
from distlab.techniques.context_parallel.ulysses import UlyssesAttention
from distlab.techniques.data_parallel.buckets import GradientBuckets
from distlab.techniques.data_parallel.strategy import Replica
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.tensor_parallel.layers import SequenceParallelRegion

from . import lesson
from .bugs import mistake
from .checks import claims, compare_activations, compare_balance
from .options import Options
from .predictions import BY_HAND, cannot, predict, refuse, summary

Cut: TypeAlias = Callable[[int, int], Positions]  # of so many positions for so many ranks
Attention: TypeAlias = Callable[[dist.ProcessGroup, Positions], Attend]


def by_hand(model: Model, mesh: Mesh, config: Config, *, cut: Cut, attention: Attention) -> Strategy:
    """The whole model on some positions; only attention communicates."""
    group = mesh["cp"]
    positions = cut(config.seq, group.size())
    return ContextParallel(model, positions, attention(group, positions), group, config, rank=group.rank())


# --- gathered: all keys on every rank ---


class GatheredAttention:
    """Gathers all K and V on every rank, and masks the later ones."""

    def __init__(self, group: dist.ProcessGroup, positions: Positions) -> None:
        self.gather = SequenceParallelRegion(
            group
        )  # all_gather of rows forward, reduce_scatter of their gradients backward
        self.gather.num_rows = positions.length
        self.positions, self.rank = positions, group.rank()
        self.mask: Tensor | None = None  # [S/c, S]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.stack([k, v]).movedim(3, 0)  # [S/c, 2, B, H, D/H]
        keys, values = self.gather.enter(rows).movedim(0, 3)  # [B, H, S, D/H] each
        if self.mask is None:  # one for all layers
            later = (self.positions.of(self.rank)[:, None] < torch.arange(self.positions.length)).to(q.device)
            self.mask = q.new_zeros(later.shape).masked_fill(later, float("-inf"))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask)


# PyTorch's own context parallelism.
#
# `context_parallel` replaces scaled_dot_product_attention by a ring over the mesh, for a GPU's kernels only. The ring
# functions inside of it take any kernel. So `torch_ring` calls them with the CPU's: K and V by an all_gather, dK and dV
# by an all_to_all, positions as in `zigzag`, in equal runs only.

SEQUENCE_DIM = 2  # of [B, heads, rows, head_dim]


def by_context_parallel(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """PyTorch's context_parallel as its users write it: plain attention inside of its context."""
    from torch.distributed.device_mesh import DeviceMesh

    group = mesh["cp"]
    parallelize(model, zigzag(config.seq, group.size()), causal, group.rank())
    buckets = GradientBuckets(model.parameters(), group, config.bucket_mib * 2**20)
    return Replica(
        model, config, buckets, forward=ContextParallelModel(model, DeviceMesh.from_group(group, config.device))
    )


class TorchRing:
    """Attention by PyTorch's ring functions; q, k, v and the result are [B, heads, rows, head_dim]."""

    def __init__(self, group: dist.ProcessGroup, _positions: Positions) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dense = (each.contiguous() for each in (q, k, v))
        return TemplatedRing.apply(*dense, self.group)  # type: ignore[no-any-return, no-untyped-call]


class TemplatedRing(torch.autograd.Function):
    """PyTorch's ring functions, forward and backward, each with the CPU's kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        # Imported here: it takes a second, and no other variant needs it.
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring_functions

        ring_functions._cp_options.convert_to_f32 = q.dtype != torch.float64
        found = ring_functions._templated_ring_attention(
            group, SEQUENCE_DIM, FLASH, q, k, v, is_causal=True, dropout_p=0.0
        )  # fmt: skip
        ctx.group = group
        ctx.save_for_backward(q, k, v, *found[:2])
        out: Tensor = found[0]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring_functions

        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v, *_ = ring_functions._templated_ring_attention_backward(
            ctx.group, SEQUENCE_DIM, kernel, gradients[0], "grad_out", q, k, v, out, lse, True
        )
        return grad_q, grad_k, grad_v, None


def kernel(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    """Call the backward of the CPU's flash attention with PyTorch's keyword arguments."""
    dense = [each.contiguous() for each in (arguments["grad_out"], query, key, value, arguments["out"])]
    found: tuple[Tensor, ...] = FLASH_BACKWARD(*dense, arguments["logsumexp"], 0.0, arguments["is_causal"])
    return found


class ContextParallelModel(nn.Module):
    """`model` inside of `context_parallel`, which cuts the samples in place."""

    def __init__(self, model: Model, devices: Any) -> None:
        super().__init__()
        self.model, self.devices = model, devices

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental import context_parallel

        cut = [inputs.clone(), targets.clone()]
        with context_parallel(self.devices, buffers=cut, buffer_seq_dims=[1, 1]):
            loss: Tensor = self.model(*cut)
        return loss


# --- the lesson on one page ---


def lesson_ring(group: dist.ProcessGroup, positions: Positions) -> Attend:
    """The lesson's ring, over contiguous parts."""
    rows = list(positions.num_rows)
    return lambda q, k, v: lesson.RingAttention.apply(q, k, v, rows, group)  # type: ignore[no-untyped-call]


# --- the run ---


def run(lab: Lab) -> None:
    predictions = predict(lab.config)
    lab.say(summary(lab.config), "predict")
    note_positions(lab)
    measured = measure(lab)
    note_keys(lab)
    lab.compare_predictions(predictions, measured)
    chosen = [name for name in measured if name in BY_HAND]
    compare_activations(lab, {name: measured[name].activation_bytes for name in chosen})
    compare_balance(lab, [name for name in measured if name != "plain"])


def note_positions(lab: Lab) -> None:
    """Log which positions of each sample this rank computes."""
    positions_in = {}
    for name, cut in {"ring": contiguous, "zigzag": zigzag}.items():
        runs = [run for run in cut(lab.config.seq, lab.world_size).runs[lab.rank] if run]
        positions_in[name] = " and ".join(f"{run.start}-{run.stop - 1}" for run in runs) or "none"
    parts = "; ".join(f"in {name} {positions}" for name, positions in positions_in.items())
    lab.note("positions", f"I compute, of the {lab.config.seq} of each sample, {parts}")


def note_keys(lab: Lab) -> None:
    """Log when the keys and values of each rank arrived, in the first layer of the first step."""
    sources = [(lab.rank - distance) % lab.world_size for distance in range(1, lab.world_size)]
    name = lab.mode.headline[0]
    received = [call for call in lab.first_calls().get(name, []) if call[0] == "recv"][: len(sources)]
    if received:
        arrivals = ", ".join(
            f"rank {rank} at {1000 * call[6]:.3g}" for rank, call in zip(sources, received, strict=True)
        )
        lab.note("keys", f"and values of block 1 arrived from {arrivals} ms")


def variant(name: str, sentence: str, cut: Cut, attention: Attention, *, by_torch: bool = False) -> Variant:
    """Return a variant by each rank's positions, and by how attention gets the other ranks' keys."""
    return Variant(name, partial(by_hand, cut=cut, attention=attention), by_torch, sentence=sentence)


MODE = Mode(
    variants=(
        variant("gathered", "Gather all K and V on every rank.", contiguous, GatheredAttention),
        variant(
            "ring", "Keys and values go round the ranks; each rank has contiguous positions.", contiguous, RingAttention
        ),
        variant("zigzag", "The same ring; each rank has an early and a late run of positions.", zigzag, RingAttention),
        variant("shift", "Keys and values go directly to the ranks whose rows see them.", zigzag, ShiftAttention),
        variant("ulysses", "Inside attention each rank has all positions of some heads.", contiguous, UlyssesAttention),
        variant("torch_ring", "PyTorch's ring functions, called directly.", zigzag, TorchRing, by_torch=True),
        Variant("context_parallel", by_context_parallel, by_torch=True),
        Variant(
            "plain",
            partial(by_hand, cut=contiguous, attention=lesson_ring),
            sentence="The lesson on one page: ring, with attention as formulas.",
            by_name=True,
        ),
    ),
    headline=("ring", "keep my queries; keys and values travel round the ranks"),
    run=run,
    claims=claims,
    options=Options,
    axes=lambda config: {"cp": config.world_size},
    predict=predict,
    refuse=refuse,
    cannot=cannot,
    mistakes=mistake | checkpoints.mistake,
    gone={
        "local_mask": "LAB_BUG=local_positions confuses local and global positions too",
        "shifted_after_cut": "LAB_BUG=local_positions confuses local and global positions too",
        "stray_gradients": "LAB_BUG=loss_times_cp fails the same check",
        "by_arrival": "LAB_BUG=local_positions in ulysses fails the same check",
    },
    in_lesson={"no_lse": ("total = torch.logaddexp(lse, their_scores.logsumexp(-1, keepdim=True))", "total = lse")},
    reading=(
        "experiments/cp/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/cp/__init__.py: the variants, the simplest first, and what a run of them checks",
        "distlab/techniques/context_parallel/ring.py: the ring of keys, and how attention to parts of them is merged",
        "distlab/techniques/context_parallel/ulysses.py: the all-to-all from positions to heads, and back",
        "distlab/techniques/context_parallel/strategy.py: the step, each rank's positions, and which keys they see",
    ),
)
