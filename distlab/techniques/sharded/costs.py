"""ZeRO: what N ranks send for S bytes of parameters, and the memory between two steps (Rajbhandari et al. 2020).

The bytes of a step are from section 7, those of memory from section 3.1 and figure 1; P is the number of parameters.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from distlab.lab.config import Config
from distlab.lab.measure.prediction import Prediction
from distlab.techniques.collectives.costs import algorithmic_factor

if TYPE_CHECKING:
    import torch

# Adam in mixed precision, bytes per parameter; all in float32 except the first two. "Four times the half-precision
# weights", 56 GB for 7 billion, leaves out the optimizer's state.
MIXED_PRECISION = {"weights": 2, "gradients": 2, "master weights": 4, "first moments": 4, "second moments": 4}

# Layers in memory at once in zero3's backward pass: the weights of the layer that computes and of the one gathered
# ahead, the gradients that are summed, and what the other ranks send for that sum.
WHOLE_LAYERS = 4


def zero_bytes(stage: int, world_size: int, nbytes: float, microbatches: int = 1, gathers: int = 2) -> float:
    """Return what a rank sends in a step for parameters of `nbytes`: each sum and each gather of them is (N-1)/N·S.

    Stage 1 sums and gathers once. Stage 2 sums after each microbatch, since it keeps no gradients: (M+1)(N-1)/N·S.
    Stage 3 also gathers in each microbatch, `gathers` times: forward and backward, or once if the weights stay, so
    3M(N-1)/N·S or 2M(N-1)/N·S.
    """
    moves = {1: 2, 2: microbatches + 1, 3: microbatches * (gathers + 1)}[stage]
    return moves * algorithmic_factor("all_gather", world_size) * nbytes


def fully_shard_bytes(world_size: int, nbytes: float, microbatches: int, gathers: int, backend: str) -> float:
    """Return fully_shard's. gloo's reduce_scatter is an all_reduce: 4(N-1)/N·S, where NCCL sends 3(N-1)/N·S."""
    sums = 2 if backend == "gloo" else 1
    return microbatches * (gathers + sums) * algorithmic_factor("all_gather", world_size) * nbytes


def mixed_precision_bytes(num_parameters: float) -> float:
    """Return 2 + 2 + 4 + 4 + 4 = 16 bytes per parameter: 112 GB for 7 billion, before the first activation."""
    return sum(MIXED_PRECISION.values()) * num_parameters


def rest_bytes(
    stage: int, num_parameters: float, owned: float, *, itemsize: int = 4, moments: float = 2, masters: bool = False,
    num_tensors: int = 0, gradient_itemsize: int | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return bytes of weights, gradients and optimizer state on one rank, by class; it owns `owned` parameters, P/N if
    shards are even.

    stage 0 keeps all, 1 shards the optimizer's state, 2 the gradients too, 3 the weights too. In float32 with Adam's
    two `moments` 16P, (8+8/N)P, (4+12/N)P, 16P/N. With `masters` weights and gradients are of `itemsize` and the
    optimizer keeps the weights and its moments in float32: in half precision (4+12)P, (4+12/N)P, (2+14/N)P, 16P/N. SGD
    has no moments. torch's AdamW keeps a count of steps per tensor: 4 bytes for each of `num_tensors`.
    `gradient_itemsize` is set where gradients have another size than weights: Megatron-LM sums gradients of bf16
    weights in float32, 18 bytes per parameter, 6+12/N with its distributed optimizer (NVIDIA's documentation of it,
    table of memory).
    """
    weights, gradients, stepped = (owned if stage >= first else num_parameters for first in (3, 2, 1))
    optimizer_bytes = moments * (4 if masters else itemsize) + (4 if masters else 0)
    return {
        "parameters": itemsize * weights,
        "gradients": (gradient_itemsize or itemsize) * gradients,
        "optimizer": optimizer_bytes * stepped + 4 * num_tensors,
    }


def whole_rest_bytes(sizes: Sequence[int], config: Config) -> dict[str, float]:
    """Return the same for parameters of these sizes that a rank holds whole, and steps by LAB_OPTIMIZER."""
    adam, total = config.optimizer == "adamw", sum(sizes)
    tensors = adam * len(sizes)
    return rest_bytes(0, total, total, itemsize=config.itemsize, moments=2 * adam, num_tensors=tensors)


def whole_rest(config: Config, sizes: Sequence[int] | None = None) -> tuple[float, int]:
    """Return the sum of that, by default for the whole model, and the bytes per parameter."""
    from distlab.lab.workload.model import outline  # torch comes with it, and `distlab plan` answers without

    by_class = whole_rest_bytes(outline(config).sizes if sizes is None else sizes, config)
    return float(sum(by_class.values())), (4 if config.optimizer == "adamw" else 2) * config.itemsize


def at_rest(
    variant: str, config: Config, formula: str, value: Sequence[float], shown: str = "",
    dtype: "torch.dtype | None" = None,
) -> Prediction:  # fmt: skip
    """Predict what each rank holds between two steps, with one `value` where all hold the same, and the buffers of a
    user's model, in LAB_DTYPE or the variant's dtype."""
    import torch

    from distlab.lab.workload.model import buffer_bytes

    buffers = buffer_bytes(config, dtype or getattr(torch, config.dtype))
    values = tuple(each + buffers for each in value) * (config.world_size if len(value) == 1 else 1)
    return Prediction(variant, "rest bytes", "B", formula + " + buffers" * (buffers > 0), values, 0, shown)


# The peak of a step: what one process's passes hold by themselves, and what a strategy holds in addition.
#
#     peak = max over the moments of a step ( working + held )
#
# `working` is the batch, what autograd saves, what operations pass on, and a fresh gradient until it is handed over:
# recorded by one process that drops each gradient at once (distlab/lab/verify/counted.py). `held` are weights,
# gradients, optimizer state and messages of the strategy at that moment, by the rules of its paper: sums of sizes that
# change as layers begin and end and as gradients are computed. The update follows the passes, without activations.


class PassEvent(NamedTuple):
    """A moment in a pass of one process at which a strategy allocates or frees memory.

    batch: the samples are in memory; until then the last step's gradients are, too. layer: a layer's forward pass
    begins. layer_end: it ends. output: the gradient of its output is computed. gradient: a parameter's gradient is
    computed. delivered: autograd has handed that gradient over and frees it next. layer_gradients: all gradients of the
    layer are computed. microbatch_end: a microbatch is done.
    """

    kind: str
    layer: int = -1
    name: str = ""  # of a parameter, "<first layer that has it>.<name in it>"
    numel: int = 0
    highest: int = 0  # the most working bytes since the event before
    live: int = 0  # working bytes at this moment


class StrategyMemory(Protocol):
    """The bytes that a strategy stores in addition to one process's working memory."""

    def stored_bytes(self) -> float:
        """Return the bytes at this moment."""

    def after(self, event: PassEvent) -> Iterator[float]:
        """Allocate or free memory; yield the bytes at each moment in between."""


def pass_peak(passes: Iterable[PassEvent], memory: StrategyMemory) -> float:
    """Return the highest number of bytes at any moment of the passes."""
    most = 0.0
    for event in passes:
        most = max(most, event.highest + memory.stored_bytes())
        most = max([most, *(event.live + stored_bytes for stored_bytes in memory.after(event))])
    return most


def adamw_scratch_bytes(sizes: Sequence[int], itemsize: int) -> float:
    """Return the temporaries of torch's AdamW on the CPU, which steps parameters of these sizes one by one: the root of
    the second moment, the same with its bias correction, and the latter of the parameter before."""
    before = [0, *sizes]
    return float(max((last + 2 * size for last, size in zip(before, sizes, strict=False)), default=0) * itemsize)


class Replicated:
    """Data parallelism: weights, optimizer state, and gradients, in buckets that stay or in autograd's own tensors."""

    def __init__(self, constant: float, gradients: float, itemsize: int, *, in_buckets: bool) -> None:
        self.constant, self.gradients, self.itemsize = constant, gradients, itemsize
        self.in_buckets, self.delivered = in_buckets, gradients

    def stored_bytes(self) -> float:
        return self.constant + self.delivered

    def after(self, event: PassEvent) -> Iterator[float]:
        """Keep a gradient that has no bucket in autograd's tensor, to which later microbatches are added."""
        if event.kind == "batch" and not self.in_buckets:
            self.delivered = 0.0
        if event.kind == "delivered":
            self.delivered = min(self.gradients, self.delivered + event.numel * self.itemsize)
        yield self.stored_bytes()


def shown_on(device: str) -> str:
    """Say why the peak is only shown on a GPU; empty where it is checked."""
    return "on a GPU AdamW steps all tensors at once" if device == "cuda" else ""


FULLY_SHARD_CRASHES = "fully_shard over gloo crashes (SIGSEGV) where tensors are on a GPU: set LAB_BACKEND=nccl"
KEPT_ON_GPU = "a GPU's attention keeps other tensors than the CPU's"


# What a rank of ZeRO holds during its passes in addition: the rules of its stages, moment by moment.
#
# In numbers of a flat vector [N·c] or of a chunk [c]:
#
#     weights     stage 1 and 2 all; stage 3 the chunks, and whole the layer that computes and the next one
#     gradients   stage 1 all; stage 2 and 3 the shards of what was summed, and whole the unit collected or summed
#     scratch     (N-1)·c that the other ranks send for the sum under way, until the next unit's sum begins


class Units(NamedTuple):
    """The flat units of a model."""

    numels: list[int]  # parameters of each unit, without padding
    of_layer: dict[int, int]  # the unit of each layer, in the order in which they run
    of_name: dict[str, int]  # the unit of each parameter, "<first layer that has it>.<name in it>"

    def chunks(self, ranks: int) -> list[int]:
        """Return the size of each unit's chunk, with padding."""
        return [-(-numel // ranks) for numel in self.numels]

    def own(self, rank: int, ranks: int) -> list[int]:
        """Return the number of each unit's parameters that `rank` owns."""
        return [
            max(0, min(chunk, numel - rank * chunk))
            for numel, chunk in zip(self.numels, self.chunks(ranks), strict=True)
        ]


class Sharding:
    """What rank `rank` of `ranks` holds of `units`: `constant` bytes that stay, and weights and gradients that do not;
    from stage 2 on no gradients are in `constant`."""

    def __init__(
        self, stage: int, units: Units, rank: int, ranks: int, itemsize: int, constant: float, *, microbatches: int,
        reshard: bool = True,
    ) -> None:  # fmt: skip
        self.stage, self.reshard, self.ranks, self.itemsize = stage, reshard, ranks, itemsize
        self.chunks, self.own = units.chunks(ranks), units.own(rank, ranks)
        self.unit_of, self.names, self.constant = units.of_layer, units.of_name, constant
        spans = list(self.unit_of.values())
        self.spanning = {unit for unit in spans if spans.count(unit) > 1}  # whole from the first use to the last
        self.number, self.microbatches = 0, microbatches
        self.whole: set[int] = set()  # units whose weights are whole, in stage 3
        self.collected: set[int] = set()  # units whose gradients are, from stage 2 on
        self.under_way: int | None = None  # the unit that is summed
        # Units whose shard has its gradient, from stage 2 on: those of the step before until the next one begins.
        self.summed = set(range(len(self.chunks))) if stage > 1 else set[int]()
        self.backward = False
        self.missing = set(self.names)

    def stored_bytes(self) -> float:
        flats = [self.chunks[unit] * self.ranks for unit in self.whole]
        flats += [self.chunks[unit] * self.ranks for unit in self.collected]
        if self.under_way is not None:
            whole = self.ranks if self.stage > 1 else 0
            flats.append(self.chunks[self.under_way] * (whole + self.ranks - 1))
        numbers: int = sum(flats) + sum(self.own[unit] for unit in self.summed)
        return self.constant + numbers * self.itemsize

    def after(self, event: PassEvent) -> Iterator[float]:
        """Take and free memory by the rules of the stage."""
        kind, layer, name = event.kind, event.layer, event.name
        if kind == "batch":
            self.summed = set()
        elif kind == "microbatch_end":
            self.number, self.backward, self.missing = self.number + 1, False, set(self.names)
        elif kind in ("layer", "output"):
            self.backward |= kind == "output"
            self._gather(layer, ahead=kind == "output" or not self.backward)
        elif (
            kind == "layer_end" and not self.backward and self.reshard and self.unit_of.get(layer) not in self.spanning
        ):
            self.whole.discard(self.unit_of.get(layer, -1))
        elif kind == "gradient" and self.stage > 1 and name in self.names:
            yield from self._allocate_gradients(self.names[name])
        elif kind == "delivered" and name in self.names:
            yield from self._on_delivered(event)
        yield self.stored_bytes()

    def _gather(self, layer: int, *, ahead: bool) -> None:
        if self.stage == 3:
            following = layer + (-1 if self.backward else 1)
            self.whole |= {self.unit_of[each] for each in (layer, following)[: 1 + ahead] if each in self.unit_of}

    def _allocate_gradients(self, unit: int) -> Iterator[float]:
        """Allocate the flat gradient of a unit with its first gradient."""
        if unit not in self.collected:
            yield from self._finish()
            self.collected.add(unit)

    def _on_delivered(self, event: PassEvent) -> Iterator[float]:
        """Begin the sum of a unit with its last gradient, and end the sum before."""
        unit = self.names[event.name]
        if self.stage == 1 and self.number:  # the sum with that of an earlier microbatch, beside both
            yield self.stored_bytes() + event.numel * self.itemsize
        self.missing.discard(event.name)
        complete = not any(self.names[other] == unit for other in self.missing)
        if complete and (self.stage > 1 or self.number == self.microbatches - 1):
            yield from self._finish()
            self.collected.discard(unit)
            self.under_way = unit
            yield self.stored_bytes()
            self.whole.discard(unit)

    def _finish(self) -> Iterator[float]:
        """End the sum under way: copy the shard's gradient, then free the vector."""
        if self.under_way is not None:
            if self.stage > 1:
                self.summed.add(self.under_way)
            yield self.stored_bytes()
            self.under_way = None
