"""Predict what each variant sends in a step, in how many calls, and what it holds between two steps."""

from distlab.contract import ruled_out, untrainable
from distlab.lab.config import Config
from distlab.lab.measure.prediction import PYTORCHS, Prediction, of_a_step
from distlab.lab.workload.data import shard_sizes
from distlab.lab.workload.user_model import is_own
from distlab.techniques.collectives.costs import Cost, total_cost
from distlab.techniques.context_parallel.costs import (
    gathered_bytes,
    gathered_calls,
    ring_rows,
    shift_rows,
    ulysses_bytes,
    ulysses_messages,
)
from distlab.techniques.context_parallel.strategy import Positions, contiguous, zigzag
from distlab.techniques.data_parallel.costs import gradients_cost
from distlab.techniques.sharded import costs as sharded_costs
from distlab.techniques.sharded.costs import whole_rest
from distlab.techniques.tensor_parallel.layers import partition_sizes

# Settings that context parallelism cannot run, or PyTorch's own cannot.

NO_PATH = (
    "PyTorch's context_parallel cannot run here: the CPU's flash attention does not have a sharding strategy"
    " registered, and a GPU's takes only 16 bits, too coarse for a proof"
)


def refuse(config: Config) -> list[str]:
    """Refuse models without a sequence to cut, and settings that make no batch; all ranks take the same samples."""
    if config.model != "gpt":
        if is_own(config.model):
            return [
                f"LAB_MODEL={config.model}: the lab has no rule for cutting this model, allowed: gpt; split its"
                " positions in your own strategy, and prove it with `distlab prove`"
            ]
        return [f"LAB_MODEL={config.model} has no sequence to split, allowed: gpt"]
    if config.gloo_on_gpus:
        return ["LAB_BACKEND=gloo cannot send keys from a GPU: set LAB_BACKEND=nccl, or leave LAB_DEVICE=cpu"]
    return untrainable(config, 1)


def cannot(config: Config) -> dict[str, str]:
    """Return the variants that cannot run with these settings, and why."""
    runs, torch_ring = 2 * config.world_size, ("torch_ring",)
    uneven = f"LAB_SEQ={config.seq} is not a multiple of {runs}: each rank needs two equal runs"
    return ruled_out(
        (("context_parallel",), True, NO_PATH),
        (torch_ring, config.device != "cpu", "it uses the CPU's flash attention; a GPU's takes only 16 bits"),
        (torch_ring, config.seq % runs, uneven),
        (
            ("plain",),
            config.seq < config.world_size,
            f"LAB_SEQ={config.seq}: the lesson needs a position on every rank",
        ),
    )


BY_HAND = ("gathered", "ring", "zigzag", "shift", "ulysses")
POSITION_BYTES = 8  # int64: the embedding keeps the positions of its rank
FORMULAS = {
    "gathered": "2(c-1)/c x KV per layer + gradients",
    "ring": "3(c-1)/c x KV per layer + gradients",
    "zigzag": "3(c-1)/c x KV per layer + gradients",
    "plain": "3(c-1)/c x KV per layer + gradients",
    "shift": "9(c-1)/4c x KV per layer on average + gradients",
    "ulysses": "4(c-1)/c² x KV per layer + gradients",
    "torch_ring": "K, V, dK and dV by all_gather and all_to_all",
}


def positions_of(variant: str, config: Config) -> Positions:
    """Return the positions of each rank in a variant."""
    folded = variant in ("zigzag", "shift", "torch_ring")
    return (zigzag if folded else contiguous)(config.seq, config.world_size)


def layer_cost(variant: str, config: Config, samples: int, rank: int) -> Cost:
    """Return the cost of one layer's attention, forward and backward, over so many samples."""
    rows = positions_of(variant, config).num_rows
    row_bytes = 2 * samples * config.width * config.itemsize  # of K and V
    if variant == "gathered":
        calls = gathered_calls(rows, rank, config.backend)
        messages = (config.world_size - 1) * (3 if len(set(rows)) == 1 else 2)
        return Cost(gathered_bytes(rows, row_bytes, rank), calls, messages)
    if variant == "ulysses":
        heads = partition_sizes(config.heads, config.world_size)
        sent = sum(pairs > 0 for pairs in ulysses_messages(rows, heads, rank))
        nbytes = ulysses_bytes(rows, heads, row_bytes // (2 * config.heads), rank)
        return Cost(nbytes, sent, 4 * (config.world_size - 1))
    passed_rows = shift_rows(visible_counts(variant, config), rank) if variant == "shift" else ring_rows(rows, rank)
    return Cost(sum(passed_rows) * row_bytes, sum(number > 0 for number in passed_rows), 3 * (config.world_size - 1))


def visible_counts(variant: str, config: Config) -> list[list[int]]:
    """Count the keys of each rank that each rank's rows see, [rank][other]."""
    positions, ranks = positions_of(variant, config), range(config.world_size)
    return [[positions.visible_keys(rank, other).num_keys for other in ranks] for rank in ranks]


def cost(variant: str, config: Config, rank: int) -> Cost:
    """Return the cost of a step: every layer of every microbatch, and the gradients once."""
    samples = shard_sizes(config.batch, config.num_microbatches)
    layers = [layer_cost(variant, config, each, rank) for each in samples for _ in range(config.depth)]
    return total_cost(gradients_cost(config), *layers)


def predict(config: Config) -> list[Prediction]:
    """Predict bytes and calls of one step of each variant that can run, and what it holds at rest, per rank."""
    predictions: list[Prediction] = []
    for variant in [name for name in FORMULAS if name not in cannot(config)]:
        costs = [cost(variant, config, rank) for rank in range(config.world_size)]
        shown, of_calls = ("", "messages and buckets") if variant != "torch_ring" else (PYTORCHS, "")
        predictions += of_a_step(variant, FORMULAS[variant], costs, shown, of_calls)
        predictions.append(at_rest(variant, config, shown))
    return predictions


def at_rest(variant: str, config: Config, shown: str) -> Prediction:
    """Predict the bytes at rest: weights, gradients, optimizer state, a rank's positions, and in gathered a mask."""
    (whole, each), itemsize, masked = whole_rest(config), config.itemsize, variant == "gathered"
    num_rows = positions_of(variant, config).num_rows
    value = [whole + rows * (POSITION_BYTES + masked * config.seq * itemsize) for rows in num_rows]
    formula = f"{each} x P + {POSITION_BYTES} x S/c" + f" + {itemsize} x S²/c" * masked
    return sharded_costs.at_rest(variant, config, formula, value, shown)


def summary(config: Config) -> str:
    both = 2 * config.batch * config.seq * config.width * config.itemsize / 1e6
    rows = sorted(set(contiguous(config.seq, config.world_size).num_rows), reverse=True)
    return (
        f"{' or '.join(map(str, rows))} of {config.seq} positions per rank; K and V of a layer are {both:.3g} MB, of"
        " which a rank sends 2(c-1)/c (gathered), 3(c-1)/c (ring, zigzag), about 9(c-1)/4c (shift) or 4(c-1)/c²"
        " (ulysses)"
    )
