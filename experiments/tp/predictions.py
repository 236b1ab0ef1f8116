"""Predict what each variant sends in a step, in how many calls, and the activations that `sequence` saves."""

from collections.abc import Callable

from torch import nn

from distlab.contract import untrainable
from distlab.lab.config import Config
from distlab.lab.measure.prediction import PYTORCHS, Prediction, of_a_step
from distlab.lab.workload.data import shard_sizes
from distlab.lab.workload.model import VOCABULARY, outline
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.costs import (
    Cost,
    all_reduce_cost,
    gloo_all_reduce_messages,
    norm_cost,
    total_cost,
)
from distlab.techniques.sharded.costs import KEPT_ON_GPU
from distlab.techniques.tensor_parallel.costs import (
    column_split_bytes,
    parallel_loss_bytes,
    sequence_parallel_bytes,
    sequence_parallel_calls,
    sequence_parallel_messages,
    sequence_saves_bytes,
    tensor_parallel_bytes,
)
from distlab.techniques.tensor_parallel.layers import partition_sizes

# Settings that tensor parallelism cannot run, or PyTorch's own cannot.


def parts(config: Config) -> dict[str, int]:
    """Return the numbers of units, such as heads, that are shared out among the ranks, each with its name."""
    hidden = {f"4 x LAB_WIDTH={config.width}": 4 * config.width}
    if config.model == "gpt":
        return {f"LAB_HEADS={config.heads}": config.heads} | hidden | {f"the vocabulary of {VOCABULARY}": VOCABULARY}
    return hidden


def refuse(config: Config) -> list[str]:
    """Refuse models with fewer units than ranks, and settings that make no batch."""
    if config.model == "line":
        return ["LAB_MODEL=line has no matrix to split, allowed: mlp, gpt"]
    if is_own(config.model):
        return [
            f"LAB_MODEL={config.model!r}: the lab has no rule for cutting this model, allowed: mlp, gpt; cut its layers"
            " in your own file, and prove it with `distlab prove FILE`"
        ]
    ranks = config.world_size
    small = [
        f"{name} cannot be split over WORLD_SIZE={ranks}: every rank needs a part, allowed: up to {count} ranks"
        for name, count in parts(config).items()
        if count < ranks
    ]
    return small + untrainable(config, 1)


def cannot(config: Config) -> dict[str, str]:
    """Return `dtensor` with the reason, where the ranks' slices are not equal."""
    ranks = config.world_size
    named = [name for name, count in parts(config).items() if count % ranks]
    return (
        {"dtensor": f"{named[0]} is not a multiple of WORLD_SIZE={ranks}, and its plan needs equal parts"}
        if named
        else {}
    )


SAVED = "activation bytes"


class Sizes:
    """The sizes that the formulas need."""

    def __init__(self, config: Config) -> None:
        self.config, self.ranks, self.is_gpt = config, config.world_size, config.model == "gpt"
        self.itemsize = config.itemsize
        self.microbatches = shard_sizes(config.batch, config.num_microbatches)  # samples of each
        self.num_slices = 2 * config.depth + 1 if self.is_gpt else config.depth  # each has a norm before it
        self.tokens = sum(self.microbatches) * (config.seq if self.is_gpt else 1)

    def rows(self) -> list[tuple[int, int]]:
        """Return (rows, numbers per row) of what `sequence` slices, for each microbatch."""
        seq, width = self.config.seq, self.config.width
        return [(seq, samples * width) if self.is_gpt else (samples, width) for samples in self.microbatches]

    def replicated_numel(self) -> int:
        """Count the parameters that every rank holds whole: of a slice its norm and bias, of gpt's ends positions and
        a norm."""
        ends = self.config.seq + 2 if self.is_gpt else 0
        return (3 * (self.num_slices - self.is_gpt) + ends) * self.config.width

    def slices(self, num_slices: int) -> Cost:
        """Return the cost of the all_reduces of so many slices, forward and backward."""
        nbytes = self.tokens * self.config.width * self.itemsize
        calls = 2 * num_slices * len(self.microbatches)
        messages = 2 * num_slices * self.all_reduced(self.config.width * self.itemsize)
        return Cost(tensor_parallel_bytes(self.ranks, num_slices, nbytes), calls, messages)

    def all_reduced(self, token_bytes: int) -> int:
        """Count the messages of one all_reduce of so many bytes per token in each microbatch."""
        seq = self.config.seq if self.is_gpt else 1
        return sum(gloo_all_reduce_messages(self.ranks, samples * seq * token_bytes) for samples in self.microbatches)

    def loss(self, calls: int = 2) -> Cost:
        """Return the cost of the loss over gpt's split scores, which is summed in float32 at least."""
        nbytes = parallel_loss_bytes(self.ranks, self.tokens, max(self.itemsize, 4))
        messages = calls * self.all_reduced(2 * max(self.itemsize, 4))
        return Cost(nbytes, calls * len(self.microbatches), messages) if self.is_gpt else Cost(0, 0, 0)

    def clip(self) -> Cost:
        return norm_cost(self.ranks, self.config.clip)


def untied_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that `gathered` splits, by name: all except one that shares the embedding's weight."""
    names = {name for name, _ in model.named_parameters()}  # a tied weight has its first name alone
    modules = dict(model.named_modules())
    return {
        name: module for name, module in modules.items() if isinstance(module, nn.Linear) and f"{name}.weight" in names
    }


def gathered(sizes: Sizes, rank: int) -> Cost:  # noqa: ARG001  every rank sends the same
    """Return the cost of an all_gather and an all_reduce for every linear layer."""
    linears = untied_linears(outline(sizes.config)).values()
    nbytes = sum(
        column_split_bytes(sizes.ranks, sizes.tokens, linear.in_features, linear.out_features, sizes.itemsize)
        for linear in linears
    )
    gathers = len(linears) * len(sizes.microbatches)
    messages = 2 * (sizes.ranks - 1) * gathers
    messages += sum(sizes.all_reduced(linear.in_features * sizes.itemsize) for linear in linears)
    return total_cost(Cost(nbytes, 2 * gathers, messages), sizes.clip())


def megatron(sizes: Sizes, rank: int) -> Cost:  # noqa: ARG001
    """Return the cost of two slices per layer of gpt, one of mlp, and one more for gpt's ends."""
    return total_cost(sizes.slices(sizes.num_slices), sizes.loss(), sizes.clip())


def plain(sizes: Sizes, rank: int) -> Cost:  # noqa: ARG001
    """Return the cost of the layers' slices only."""
    return total_cost(sizes.slices(sizes.num_slices - sizes.is_gpt), sizes.clip())


def sequence(sizes: Sizes, rank: int) -> Cost:
    """Return the cost of chunks of rows, each sent by itself, and of summing what every rank holds whole."""
    nbytes, calls, messages = all_reduce_cost(sizes.ranks, sizes.replicated_numel() * sizes.itemsize)
    for num_rows, numel in sizes.rows():
        nbytes += sequence_parallel_bytes(sizes.ranks, sizes.num_slices, num_rows, numel * sizes.itemsize, rank)
        calls += sequence_parallel_calls(sizes.ranks, sizes.num_slices, num_rows, rank, sizes.config.backend)
        messages += sequence_parallel_messages(sizes.ranks, sizes.num_slices, num_rows)
    return total_cost(Cost(nbytes, calls, messages), sizes.loss(), sizes.clip())


def dtensor(sizes: Sizes, rank: int) -> Cost:  # noqa: ARG001
    """Return the cost where q, k and v each sum the gradient of their input, and the loss makes three calls."""
    num_all_reduces = 6 * sizes.config.depth + 2 if sizes.is_gpt else 2 * sizes.config.depth
    return total_cost(sizes.slices(num_all_reduces // 2), sizes.loss(3), sizes.clip())


def predict(config: Config) -> list[Prediction]:
    """Predict bytes and calls of one step of each variant that can run, and what `sequence` saves, per rank."""
    sizes, predictions = Sizes(config), list[Prediction]()
    layers = "8(t-1)/t x b·s·h x (L+1/2) + loss" if sizes.is_gpt else "4(t-1)/t x b·h x L"
    formulas: list[tuple[str, Callable[[Sizes, int], Cost], str, str]] = [
        ("gathered", gathered, "(t-1)/t x b·s x (out + 2·in) per linear layer", "2 per linear layer"),
        ("megatron", megatron, layers, "2 per slice, 2 for the loss"),
        ("plain", plain, "8(t-1)/t x b·s·h x L" if sizes.is_gpt else layers, "2 per slice"),
        ("sequence", sequence, f"{layers} + norms", "sends of rows, or all_gathers of equal rows"),
        ("dtensor", dtensor, "12(t-1)/t x b·s·h x (L+1/3) + loss" if sizes.is_gpt else layers, ""),
    ]
    for variant, cost_of, formula, formula_of_calls in formulas:
        costs = [cost_of(sizes, rank) for rank in range(sizes.ranks)]
        shown = PYTORCHS if variant == "dtensor" else ""
        predictions += of_a_step(variant, formula, costs, shown, formula_of_calls)
    return [prediction for prediction in (*predictions, saved(sizes)) if prediction.variant not in cannot(config)]


def saved(sizes: Sizes) -> Prediction:
    """Predict the activation bytes that `sequence` saves over `megatron`, in the largest microbatch."""
    num_rows, numel = max(sizes.rows())
    values = tuple(
        float(
            sequence_saves_bytes(
                sizes.ranks, sizes.num_slices, num_rows, numel, sizes.config.width, sizes.itemsize, rank
            )
        )
        for rank in range(sizes.ranks)
    )
    formula = "(1-1/t)(b·s·h + 2·b·s) per norm, less than megatron"
    shown = "mlp keeps 16-bit outputs in float32 for its loss" if sizes.config.dtype == "bfloat16" else ""
    shown = KEPT_ON_GPU if sizes.config.device == "cuda" else shown
    return Prediction("sequence", SAVED, "B", formula, values, 0, shown)


# --- in words ---


def summary(config: Config) -> str:
    sizes = Sizes(config)
    nbytes, slices = sizes.tokens * config.width * sizes.itemsize, sizes.slices(sizes.num_slices)
    return (
        f"{slices.calls} all_reduces per step, each 2(t-1)/t x {nbytes / 1e6:.3g} MB: "
        f"{slices.nbytes / 1e6:.3g} MB per rank, plus the loss"
    )


def stored_units(config: Config, rank: int) -> str:
    """Describe which part of the sliced units a rank stores in megatron, for its own log."""
    names = {"heads": config.heads, "hidden units": 4 * config.width, "vocabulary rows": VOCABULARY}
    if config.model == "mlp":
        names = {"hidden units": 4 * config.width}
    parts = [f"{partition_sizes(count, config.world_size)[rank]} of {count} {name}" for name, count in names.items()]
    return ", ".join(parts)
