"""What data parallelism predicts before it runs: bytes sent and held, and calls."""

from collections.abc import Mapping

from distlab.contract import Measured
from distlab.lab.config import Config
from distlab.lab.lab import Lab
from distlab.lab.measure.prediction import PYTORCHS, Prediction, of_a_step
from distlab.lab.verify.counted import check_recomputed, checks_recomputed, most_of_a_layer, outlined
from distlab.lab.workload.model import outline
from distlab.techniques.collectives.costs import (
    Cost,
    all_reduce_bytes,
    all_reduce_cost,
    all_reduce_messages,
    total_cost,
)
from distlab.techniques.data_parallel.buckets import layout, swaps_buckets
from distlab.techniques.sharded.costs import (
    Happening,
    Replicated,
    adamw_scratch_bytes,
    pass_peak,
    shown_on,
    whole_rest_bytes,
)


def gradient_bytes(config: Config) -> int:
    """S: the bytes of all gradients."""
    return outline(config).num_parameters() * config.itemsize


def in_unit(nbytes: int) -> tuple[float, str]:
    """Bytes as a number and a unit that a sentence can go on with."""
    return (nbytes / 1e6, "MB") if nbytes >= 1e5 else (nbytes, "B")


def bucket_sizes(config: Config) -> list[int]:
    """Numbers in each bucket."""
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    nbytes = [size * config.itemsize for size in sizes]
    return [sum(sizes[index] for index in bucket) for bucket in layout(nbytes, config.bucket_mib * 2**20)]


def predict(config: Config) -> list[Prediction]:
    """Bytes and calls of one step of each variant, and what stands in memory between two steps, a value a rank."""
    ranks, itemsize, formula = config.world_size, config.itemsize, "2(N-1)/N x S"
    sizes = [parameter.numel() * itemsize for parameter in outline(config).parameters()]
    buckets = [size * itemsize for size in bucket_sizes(config)]
    passed_on = sum(all_reduce_messages("ring", ranks, size, itemsize=itemsize) for size in buckets)
    own = [sum(all_reduce_bytes("ring", ranks, size, rank, itemsize) for size in buckets) for rank in range(ranks)]
    total = (all_reduce_bytes("gloo", ranks, sum(sizes)),) * ranks

    def summed(variant: str, tensors: list[int]) -> Prediction:
        cost = total_cost(*(all_reduce_cost(ranks, size) for size in tensors))
        return Prediction(variant, "wire bytes", "B", formula, total, cost.calls, messages=(cost.messages,) * ranks)

    return [
        summed("per_parameter", sizes),
        summed("flat", [sum(sizes)]),
        summed("bucketed", buckets),
        *of_a_step("ring", formula, [Cost(each, 2 * (ranks - 1) * len(buckets), passed_on) for each in own]),
        Prediction(
            "ddp", "wire bytes", "B", formula, total, len(buckets) + 1, PYTORCHS
        ),  # its first bucket is of 1 MiB
        *at_rest(config),
    ]


def at_rest(config: Config) -> list[Prediction]:
    """Weights, gradients and optimizer state: all of them on every rank."""
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    formula = f"{(4 if config.optimizer == 'adamw' else 2) * config.itemsize} x P"
    value = (float(sum(whole_rest_bytes(sizes, config).values())),) * config.world_size
    return [
        Prediction(name, "rest bytes", "B", formula, value, 0, shown=PYTORCHS if name == "ddp" else "")
        for name in ("per_parameter", "flat", "bucketed", "ring", "ddp")
    ]


# The most that a replica holds in a step, predicted: all of the model, its gradients, and one process's passes.


def peak_bytes(name: str, config: Config, passes: list[Happening], *, swapped: bool = False) -> float:
    """What variant `name` keeps and the highest of the passes; or, if it holds more, the update."""
    sizes = [parameter.numel() for parameter in outline(config).parameters()]
    held, adam = whole_rest_bytes(sizes, config), config.optimizer == "adamw"
    constant = held["parameters"] + held["optimizer"] + message_bytes(name, config, swapped=swapped)
    holding = Replicated(constant, held["gradients"], config.itemsize, in_buckets=name != "per_parameter")
    update = constant + held["gradients"] + adam * adamw_scratch_bytes(sizes, config.itemsize)
    return max(pass_peak(passes, holding), update)


def message_bytes(name: str, config: Config, *, swapped: bool) -> float:
    """What comes from other ranks: of a ring two chunks for each bucket, since all buckets are under way at once; of a
    swap the bucket; the backend's own all_reduce keeps what it needs to itself."""
    sizes, ranks = bucket_sizes(config), config.world_size
    if name == "ring" and ranks > 1:
        return float(sum(2 * -(-size // ranks) for size in sizes) * config.itemsize)
    return float(sum(sizes) * config.itemsize) if name == "bucketed" and swapped else 0.0


def compare_peak(lab: Lab, measured: Mapping[str, Measured]) -> None:
    """Hold the most that each variant of ours held against the formula, within 5 %."""
    passes, recomputes = outlined(lab), checks_recomputed(lab)
    again = outlined(lab, again=True, recompute=False) if recomputes else []
    layer_bytes = most_of_a_layer(lab) if recomputes else 0
    for name in [name for name in measured if name not in lab.mode.by_torch]:
        swapped, held = swaps_buckets(lab.group, lab.config), sum(measured[name].peak.values())
        predicted = peak_bytes(name, lab.config, passes, swapped=swapped)
        gradients = "gradients as they come" if name == "per_parameter" else "gradients"
        lab.compare(
            "peak bytes", predicted, held, tolerance=0.05 * predicted, variant=name,
            formula=f"weights + optimizer + {gradients} + one process's passes", shown=shown_on(lab.config.device),
            control="tests/experiments/test_orders.py::test_dp_graphs_that_are_kept_show_in_the_peak",
        )  # fmt: skip
        if recomputes:
            check_recomputed(lab, name, held, peak_bytes(name, lab.config, again, swapped=swapped), layer_bytes)
