"""Tensor parallelism: every rank computes a slice of each layer, on the same samples.

A matrix product can be cut in two ways. With some rows of the weight a rank computes some of the outputs; with some
columns it computes a part of the sum in every output. A cut by columns takes exactly what a cut by rows leaves on each
rank. So a rank computes a whole MLP, or its own attention heads, with a slice of the weights, and one sum over the
ranks at the end completes the result.

  predicted   4 all_reduces of b·s·h per layer of gpt (2 forward, 2 backward; 2 per layer of mlp), each 2(t-1)/t of its
              bytes: 8(t-1)/t x b·s·h elements per rank and layer (Shoeybi et al. 2019, "Megatron-LM", section 3).
              Embedding and output layer are 2 more; the loss over split scores sends 3·b·s, not the b·s·v scores.
              Unlike dp's, these bytes grow with the batch, and more ranks do not make them fewer
  shapes      inputs [B, S] on every rank; between blocks [B, S, D]; inside of them [B, S, D/t], [B, H/t, S, D/H],
              [B, S, 4D/t]; scores [B, S, V/t]. `sequence`: between blocks [S/t, B, D] (mlp: [B/t, D]). t is
              WORLD_SIZE; heads stay whole

The variants differ in what lies between two slices:

  gathered    every linear layer by itself: its outputs are split, and gathered at once; 12 calls per layer of gpt
  megatron    cut by rows, then by columns: f before, g after; between the blocks everything is on every rank
  sequence    a reduce_scatter and an all_gather for each all_reduce, the same bytes; between the blocks each rank has
              its rows alone, a t-th of the norms' and residuals' activations (Korthikanti et al. 2022, section 4.2.2)
  dtensor     PyTorch's parallelize_module

A loss that all ranks share counts once. A bug here is easy to miss: with Adam, gradients that are N times too large
train just as well (LAB_BUG=double_reduce).
"""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from distlab.contract import Measured, Mode, Strategy, Variant
from distlab.lab.checkpoint import bugs as checkpoints
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import Prediction
from distlab.lab.verify.proof import check_same
from distlab.lab.verify.run_all import measure
from distlab.lab.workload.data import Microbatch
from distlab.lab.workload.model import Model
from distlab.lab.workload.optimizer import local
from distlab.techniques.collectives.autograd import linear
from distlab.techniques.collectives.phases import phase
from distlab.techniques.mesh.grid import Mesh
from distlab.techniques.tensor_parallel.layers import (
    ColumnParallelLinear,
    Region,
    ReplicatedRegion,
    SequenceParallelRegion,
    Slice,
    partition_sizes,
    rows_first,
)
from distlab.techniques.tensor_parallel.strategy import (
    TensorParallel,
    plan,
    slice_by_lesson,
    slice_layers,
    tie,
)

from . import lesson
from .checks import check_order, claims, mistake
from .predictions import SAVED, cannot, predict, refuse, stored_units, summary, untied_linears

# --- gathered: each layer by itself, the simplest way ---


def gathered(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Every linear layer is split by itself, and all communication is inside the layers."""
    for name, dense in untied_linears(model).items():
        model.set_submodule(name, GatheredLinear(dense, mesh.group, ReplicatedRegion(mesh.group)))
    return TensorParallel(model, mesh.group, config)


class GatheredLinear(ColumnParallelLinear):
    """A linear layer [..., D] to [..., D_out] of which each rank computes some outputs, and gathers all of them."""

    def __init__(self, dense: nn.Linear, group: dist.ProcessGroup, region: Region) -> None:
        super().__init__(dense, partition_sizes(dense.out_features, group.size()), group.rank())
        self.group, self.region = group, region

    def forward(self, x: Tensor) -> Tensor:
        mine = super().forward(self.region.enter(x))  # f: each rank's outputs add a part to the gradient of x
        # `dist.all_gather` records nothing for autograd: layers before it would get no gradient.
        return linear(mine, self.gathered, self.own)

    def gathered(self, mine: Tensor) -> Tensor:
        sizes = self.slices["weight"].sizes
        padded = F.pad(mine, (0, max(sizes) - mine.shape[-1]))  # gloo gathers only tensors of equal size
        parts = [torch.empty_like(padded) for _ in sizes]
        with phase("all_gather"):
            dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def own(self, gradient: Tensor) -> Tensor:
        """Return this rank's slice of the gradient: after the gather all ranks compute the same loss."""
        mine: Tensor = gradient.split(self.slices["weight"].sizes, -1)[self.group.rank()]
        return mine


# --- megatron: a slice has two layers, with no message between them ---


def megatron(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """Cut by rows, then by columns: f before, g after."""
    slice_layers(model, mesh.group, ReplicatedRegion(mesh.group))
    return TensorParallel(model, mesh.group, config)


# --- sequence: the same slices, and between them a part of the rows on each rank ---


def sequence(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """all_gather in place of f, reduce_scatter in place of g; gradients of replicated parameters are summed."""
    region = SequenceParallelRegion(mesh.group)
    slice_layers(model, mesh.group, region)
    rows_first(model, region)
    return TensorParallel(model, mesh.group, config, sequence_parallel=True, loss_is_local=model.name == "mlp")


# --- plain: the lesson on one page ---


def plain(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """The lesson on one page: megatron, with the whole embedding and output layer on every rank."""
    slices = slice_by_lesson(model, mesh.group, lesson.slice_layers)
    return TensorParallel(model, mesh.group, config, slices)


# --- dtensor: PyTorch's `parallelize_module`, by the plan of its tutorial ---
#
# The plan also cuts the embedding by rows and computes the loss over sharded scores (`loss_parallel`), as `megatron`
# does. As in the tutorial, q, k and v each take the input separately, so its gradient is summed three times.


def dtensor(model: Model, mesh: Mesh, config: Config) -> Strategy:
    """PyTorch's parallelize_module, with ColwiseParallel and RowwiseParallel."""
    # Imported here: it takes 0.7 s, and no other variant needs it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    devices = DeviceMesh.from_group(mesh.group, "cuda" if config.device == "cuda" else "cpu")
    parallelize_module(model, devices, plan(model))
    if config.tie:
        tie(model)
    return DTensorParallel(model, mesh.group, config, slices_of(model, mesh.group.size()))


class DTensorParallel(TensorParallel):
    """A TensorParallel whose weights and scores are DTensors."""

    def backward(self, microbatches: list[Microbatch]) -> Tensor | None:
        """Run both passes inside `loss_parallel`."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel() if self.model.name == "gpt" else nullcontext():
            loss = super().backward(microbatches)
        for parameter in map(self.model.get_parameter, self.slices):
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):  # the embedding's is replicated
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        return loss


def slices_of(model: nn.Module, num_ranks: int) -> dict[str, Slice]:
    """Return the slice of each parameter that DTensor shards, by name; parts are equal, see `cannot`."""
    slices = {}
    for name, parameter in model.named_parameters():
        placement = getattr(parameter, "placements", [None])[0]
        if placement is not None and placement.is_shard():
            slices[name] = Slice(placement.dim, (parameter.shape[placement.dim] // num_ranks,) * num_ranks)
    return slices


# --- the run ---


def run(lab: Lab) -> None:
    predictions = predict(lab.config)
    lab.say(summary(lab.config), "predict")
    lab.note("holds", stored_units(lab.config, lab.rank))
    measured = measure(lab, also=partial(check_replicas, lab))
    lab.compare_predictions(predictions, measured)
    for name in [name for name in measured if name not in lab.mode.by_torch]:
        check_order(lab, name, measured[name].order)
    compare_saved(lab, predictions, measured)


def compare_saved(lab: Lab, predictions: list[Prediction], measured: Mapping[str, Measured]) -> None:
    """Compare the activation bytes that `sequence` saves over `megatron` with the prediction, where both ran."""
    for each in predictions:
        if each.name == SAVED and {"megatron", "sequence"} <= set(measured):
            lab.compare_prediction(each, measured["megatron"].activation_bytes - measured["sequence"].activation_bytes)


def check_replicas(lab: Lab, name: str, strategy: Strategy) -> None:
    """Check that parameters held whole by every rank are bitwise equal on all ranks."""
    assert isinstance(strategy, TensorParallel)
    check_same(lab, name, [local(parameter.detach()) for _, parameter in strategy.replicated()])


MODE = Mode(
    shards=True,
    variants=(
        Variant("gathered", gathered, formerly="naive"),
        Variant("megatron", megatron),
        Variant("sequence", sequence),
        Variant("dtensor", dtensor, by_torch=True),
        Variant("plain", plain, by_name=True, like="megatron"),
    ),
    headline=("megatron", "cut the first matrix by outputs, the second by inputs: one sum after both"),
    run=run,
    claims=claims,
    axes=lambda config: {"tp": config.world_size},
    predict=predict,
    refuse=refuse,
    cannot=cannot,
    mistakes=mistake | checkpoints.mistake,
    in_lesson={
        "double_reduce": ("return gradient, None", "return Copy.backward(ctx, gradient)"),
        "lost_f": ("Copy.apply(inputs[0], group)", "inputs[0]"),
        "bias_everywhere": ("layer.weight), group) + layer.bias", "layer.weight, layer.bias), group)"),
    },
    reading=(
        "experiments/tp/lesson.py: the idea on one page, which runs alone and as the variant `plain`",
        "experiments/tp/__init__.py: the variants, the simplest first, and what a run of them checks",
        "distlab/techniques/tensor_parallel/layers.py: f and g, the two linear layers of a slice, gpt's two ends, and"
        " sequence parallelism in place of f and g",
        "distlab/techniques/tensor_parallel/strategy.py: the training step, and where the slices are in the model's"
        " layers",
    ),
)
